"""Every backbone and head in a tiny random size, for tests that take all pairs."""

from __future__ import annotations

from typing import Any

import torch
from conftest import Scripted, dels, dflash, generator
from torch import Tensor

from repairzoo.target import Target

BACKBONES = ["dflash", "domino", "dspark"]
HEADS = ["none", "drelay", "lilicorr", "dels", "cure", "dels+cure", "lilicorr+drelay"]
_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}


def backbone_for(kind: str, target: Target, seed: int = 0, block_size: int = 4) -> Any:
    """A random backbone of a kind in the target's dtype, without packed weights."""
    trunk = dflash(target, seed, block_size, target_layer_ids=sorted({0, target.num_layers - 1}))
    if kind == "domino":
        from repairzoo.backbones.domino import Domino, new_config

        trunk = Domino(new_config(trunk.config, emb_dim=3, gru_hidden_dim=5), seed=seed)
    elif kind == "dspark":
        from repairzoo.backbones.dspark import DSpark, new_config

        trunk = DSpark(new_config(trunk.config, markov_rank=3, markov_head_type="rnn"), seed=seed)
    trunk.pack = False
    return loud(trunk, seed, 0.6).to(target.dtype)


def head_for(kind: str, target: Target, seed: int = 0, slots: int = 4) -> Any:
    """Random heads that change choices; ``kind`` is a registry name, or names joined by ``+``."""
    if kind == "none":
        return None
    if "+" in kind:
        return [head_for(part, target, seed + at, slots) for at, part in enumerate(kind.split("+"))]
    if kind == "cure":
        from repairzoo.heads.cure import CURE

        return CURE(threshold=9.0, scale=9.0, b_max=3, nodes=slots + 4)
    if kind == "dels":
        return dels(target, seed).to(target.dtype)
    shape: dict[str, Any] = {
        "block_size": slots + 1, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        "padded_vocab_size": target.vocab_size, "target_id": "toy", "dtype": _NAMES[target.dtype], "pool_size": 3,
    }  # fmt: skip
    if kind == "drelay":
        from repairzoo.heads.drelay import DRelay, DRelayConfig

        widths = {"width": 8, "heads": 2, "ffn": 6, "residual": 5, "rank": 3, "gate": 7, "history": 8}
        return loud(DRelay(DRelayConfig(**shape, **widths)), seed, 0.5)
    from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig

    widths = {"candidates": 4, "width": 6, "num_heads": 2, "factor_dim": 3, "num_layers": 1}
    return loud(LiLiCorr(LiLiCorrConfig(**shape, **widths)), seed, 0.7)


def loud(module: Any, seed: int, scale: float) -> Any:
    """No weight stays at zero."""
    g = generator(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.copy_(scale * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return module.requires_grad_(False).eval()


class Knowing(Scripted):
    """A backbone that knows the texts whatever row they are in, and errs at stated positions.

    It finds its place by position and anchor, so that rows may be moved, and padded with others.
    """

    kind = "knowing"

    def __init__(self, rows: list[list[int]], slots: int, vocab: int, wrong: set[int] | None = None) -> None:
        super().__init__(slots, self.known)
        self.vocab = vocab
        width = max(map(len, rows)) + 2 * slots + 2
        self.next = torch.zeros(width, vocab, slots, dtype=torch.int64)
        for row in rows:
            for at in range(len(row)):
                for slot, token in enumerate(row[at + 1 :][:slots]):
                    miss = wrong is not None and at + 1 + slot in wrong
                    self.next[at, row[at], slot] = (token + miss) % vocab

    def known(self, ids: Tensor, positions: Tensor) -> Tensor:
        tokens = self.next[positions.clamp_max(len(self.next) - 1), ids]  # [B, S]
        logits = self.embedding.new_zeros(*tokens.shape, self.vocab)
        return logits.scatter(-1, tokens[..., None], 8.0)  # one_hot looks at the ids
