"""Toys that the loop's tests share: tiny random targets, scripted backbones and heads, little tokenizers."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined

from repairzoo.block import HISTORY, DraftBlock
from repairzoo.target import Target

F64 = torch.float64
VOCAB = 32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- targets ---------------------------------------------------------------------------------------------------------
def causal_lm(
    kind: str = "llama",
    seed: int = 0,
    vocab: int = VOCAB,
    dtype: torch.dtype = F64,
    scale: float = 0.35,
    **changes: Any,
) -> Any:
    """A random ``transformers`` causal LM of any kind, weights wide enough that its text is not one repeated token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)), dtype=dtype)
    g = generator(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g, dtype=F64).to(dtype)
            p.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)
    return model.eval().requires_grad_(False)


@cache
def toy(kind: str = "llama", seed: int = 0, vocab: int = VOCAB, dtype: torch.dtype = F64) -> Target:
    return Target(causal_lm(kind, seed, vocab, dtype), None, name="toy")


@torch.no_grad()
def greedy(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    """New tokens of ``model.generate``, an implementation that is not ours; ends after the first stop."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, max_new_tokens=new, **settings)[0, len(prompt) :].tolist()


def prompts(seed: int, lengths: list[int], vocab: int = VOCAB) -> list[list[int]]:
    g = generator(seed)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


# --- backbones -------------------------------------------------------------------------------------------------------
class Scripted:
    """A backbone whose logits are a function ``(anchor_ids [B], anchor_positions [B]) -> [B, S, V]``."""

    kind = "scripted"

    def __init__(self, slots: int, logits: Any, tapped_layers: tuple[int, ...] = (0,)) -> None:
        self.slots, self.logits, self.tapped_layers = slots, logits, tapped_layers

    def bind(self, embedding: Tensor, output_weight: Tensor, **_: Any) -> None:
        self.embedding, self.output_weight = embedding, output_weight

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def extend(self, cache: None, features: Tensor, positions: Tensor) -> None:
        return None

    def draft(self, cache: None, anchor_ids: Tensor, anchor_positions: Tensor, bound: int | None = None) -> DraftBlock:
        B, D = anchor_ids.shape[0], self.embedding.shape[1]
        row = self.embedding.new_zeros(B, D)
        return DraftBlock(
            hidden=row[:, None].expand(B, self.slots, D),
            logits=self.logits(anchor_ids, anchor_positions),
            anchor_ids=anchor_ids,
            anchor_positions=anchor_positions,
            context=row,
            history=row[:, None].expand(B, HISTORY, D),
            history_mask=torch.zeros(B, HISTORY, dtype=torch.bool),
            embedding=self.embedding,
            output_weight=self.output_weight,
        )


def noisy(seed: int, slots: int, vocab: int = VOCAB) -> Scripted:
    """Random logits that depend on the anchor, whatever row it is in."""
    table = 2 * torch.randn(vocab, slots, vocab, generator=generator(seed), dtype=F64)
    return Scripted(slots, lambda ids, positions: table[ids])


def knowing(rows: list[list[int]], slots: int, vocab: int = VOCAB, wrong: float = 0.0, seed: int = 0) -> Scripted:
    """A backbone that knows each row's whole text (prompt and answer), and errs at a share of the positions."""
    width = max(map(len, rows)) + 2 * slots + 2
    text = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        text[i, : len(row)] = torch.tensor(row)
    miss = torch.rand(width, generator=generator(seed)) < wrong
    text = torch.where(miss, (text + 1) % vocab, text)
    steps = torch.arange(1, slots + 1)

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        tokens = text.gather(1, positions[:, None] + steps)
        return 8 * torch.nn.functional.one_hot(tokens, vocab).to(F64)

    return Scripted(slots, logits)


def dflash(target: Target, seed: int = 0, block_size: int = 4, **changes: Any) -> Any:
    """A random DFlash in the target's dtype."""
    from repairzoo.backbones.dflash import DFlash, new_config

    config = new_config(
        **{
            "block_size": block_size,
            "mask_token_id": target.vocab_size - 1,
            "num_target_layers": target.num_layers,
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_theta": 10000.0,
            "target_layer_ids": [0, target.num_layers - 1],
        }
        | changes
    )
    backbone = DFlash(config, seed=seed)
    with torch.no_grad():
        for p in backbone.parameters():
            if p.dim() > 1:
                p.mul_(15)  # 0.02 would draft one token everywhere
    return backbone.to(target.dtype).requires_grad_(False).eval()


# --- heads -----------------------------------------------------------------------------------------------------------
class Bigram:
    """A random corrector that carries the sum of all tokens chosen so far."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        self.table = 2 * torch.randn(vocab, vocab, generator=generator(seed), dtype=F64)

    def prepare(self, block: DraftBlock, pool: Any) -> Tensor:
        B, S, V = block.logits.shape
        return torch.arange(V).expand(B, S, V) if pool is None else pool.ids

    def start(self, block: DraftBlock) -> Tensor:
        return torch.zeros_like(block.anchor_ids)[:, None]

    def step(self, prepared: Tensor, carry: Tensor, slot: int, previous: Tensor, scores: Tensor) -> Any:
        carry = (carry + previous) % self.table.shape[0]
        ids = prepared[:, slot, None].expand(-1, previous.shape[1], -1)
        return scores + self.table[carry].gather(2, ids).to(scores.dtype), carry


class PooledBigram(Bigram):
    pool_size = 3


def dels(target: Target, seed: int = 0, variant: str = "gru") -> Any:
    """A random DeLS, strong enough to change choices."""
    from repairzoo.heads.dels import DeLS, DeLSConfig

    config = DeLSConfig(
        variant=variant,
        rank=4,
        hidden=6 if variant == "gru" else None,
        input_rank=4,
        activation="silu" if variant == "gru" else "identity",
        block_size=4,
        vocab_size=target.vocab_size,
        padded_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_id="toy",
    )
    head = DeLS(config, generator(seed))
    with torch.no_grad():
        head.up.normal_(0, 4, generator=generator(seed + 1))
    head.pack = False  # packed weights are opaque to a tracer; test_dels.py takes them
    return head.requires_grad_(False).eval()


def heads_for(target: Target, kind: str, seed: int = 0) -> Any:
    """``kind`` is none, dels, markov, bigram, pooled or stack."""
    return {
        "none": lambda: None,
        "dels": lambda: dels(target, seed),
        "markov": lambda: dels(target, seed, "markov"),
        "bigram": lambda: Bigram(seed, target.vocab_size),
        "pooled": lambda: PooledBigram(seed, target.vocab_size),
        "stack": lambda: [dels(target, seed), Bigram(seed + 1, target.vocab_size)],
    }[kind]()


# --- tokenizers ------------------------------------------------------------------------------------------------------
@cache
def letters() -> Any:
    """One character a token: ids 0..31 are ``a``..``z`` and six signs; no special token is in the way."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz .,!?;")}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=";"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def utf8_bytes() -> Any:
    """Bytes as tokens, so that a character may need two of them: a b é ü and whatever broken text their bytes give."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate("abÃ©¼")}  # printable names of 61 62 C3 A9 BC
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
