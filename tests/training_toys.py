"""A tiny target that can be asked, its tokenizer, a corpus of its answers: what the training tests share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import causal_lm

from repairzoo.backbones.dflash import DFlash, new_config
from repairzoo.backbones.dflash.train import DFlashObjective
from repairzoo.target import Target
from repairzoo.train.corpus import CorpusPlan, write_corpus
from repairzoo.train.data import Corpus

LETTERS = "abcdefghijklmnopqrstuvwxyz .?!\n\u2028"
SPECIAL = ("<user>", "<end>", "<open>")
VOCAB = len(LETTERS) + len(SPECIAL)
END, MASK = len(LETTERS) + 1, len(LETTERS) + 2
TAPS = (0, 2, 1)


@cache
def tokenizer() -> Any:
    """One character a token, and a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*LETTERS, *SPECIAL])}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"
    return fast


@cache
def target() -> Target:
    model = causal_lm("llama", 3, VOCAB, torch.float32, eos_token_id=END, pad_token_id=END)
    return Target(model, tokenizer(), name="toy/target", revision="r1")


def prompts(count: int = 120) -> list[dict[str, str]]:
    g = torch.Generator().manual_seed(5)
    rows = []
    for i in range(count):
        ids = torch.randint(len(LETTERS), (int(torch.randint(3, 12, (1,), generator=g)),), generator=g).tolist()
        rows.append({"prompt": "x" + "".join(LETTERS[j] for j in ids), "source": "ab"[i % 2]})
    return rows


def plan(**changes: Any) -> CorpusPlan:
    return CorpusPlan(**{"taps": (0, 1, 2), "max_new_tokens": 12, "max_prompt_tokens": 40, "batch": 48} | changes)


def make_corpus(folder: Path, count: int = 120, **changes: Any) -> Path:
    write_corpus(target(), prompts(count), folder, plan(**changes))
    return folder


def read(folder: Path, **changes: Any) -> Corpus:
    return Corpus([folder], TAPS, target().hidden_size, **({"held_out": 4} | changes))


def draft(seed: int = 0, block_size: int = 4) -> DFlash:
    config = new_config(
        block_size=block_size,
        mask_token_id=MASK,
        num_target_layers=3,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rope_theta=10000.0,
        target_layer_ids=TAPS,
    )
    model = DFlash(config, seed=seed)
    return model.bind(target().embedding, target().output_weight, num_layers=3)


def objective(seed: int = 0, **changes: Any) -> DFlashObjective:
    return DFlashObjective(draft(seed), target().output_weight, **changes)


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path
