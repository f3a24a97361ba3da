"""What a backbone hands to a head: one drafted block, its candidate pools, and the corrector protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from repairzoo.sampling import shortlist

HISTORY = 64  # verified feature rows that a block carries (DRelay, section 4.3)


@dataclass(slots=True)
class DraftBlock:
    """One drafted block of ``S`` slots for ``B`` rows.

    Slot ``i`` (0-based) always predicts the token at ``anchor position + 1 + i``.

    Attributes:
        hidden: ``[B, S, D]`` backbone output after its final norm.
        logits: ``[B, S, V]`` float32 base logits over the real vocabulary.
        anchor_ids: ``[B]`` int64, the last committed token of each row.
        anchor_positions: ``[B]`` int64, its absolute position.
        context: ``[B, D]`` fused feature row at ``anchor position - 1`` (zeros when there is none).
        history: ``[B, 64, D]`` fused features of the last verified positions, oldest first.
        history_mask: ``[B, 64]`` bool, False where a row has no such position yet.
        embedding: ``[V, D]`` the target's frozen input embedding.
        output_weight: ``[V, D]`` the target's frozen output head.
        native: the backbone's own causal corrector, or None.
        redraft: drafts the block again with some of its tokens known, ``[B, S]`` int64 with -1 where none is, for
            backbones that can (``suffix="redraft"`` of CURE); None for those that cannot.
    """

    hidden: Tensor
    logits: Tensor
    anchor_ids: Tensor
    anchor_positions: Tensor
    context: Tensor
    history: Tensor
    history_mask: Tensor
    embedding: Tensor
    output_weight: Tensor
    native: Corrector | None = None
    redraft: Callable[[Tensor], DraftBlock] | None = None

    @property
    def slots(self) -> int:
        return self.logits.shape[1]


@dataclass(slots=True)
class Pool:
    """The top-K candidates of every slot.

    Attributes:
        ids: ``[B, S, K]`` int64; ``ids[..., 0]`` is the argmax of the logits, ties to the lowest id.
        log_probs: ``[B, S, K]`` float32, normalised over the whole vocabulary.
    """

    ids: Tensor
    log_probs: Tensor


def make_pool(logits: Tensor, size: int) -> Pool:
    """Top-``size`` candidates of ``logits [B, S, V]``; candidate 0 is forced to be ``argmax``.

    ``topk`` leaves the order of ties open (and with it, which token is candidate 0); the argmax does not.
    """
    logits = logits.float()
    near = shortlist(logits.detach(), size)  # [B, S, M]
    few = logits.detach() if near is None else logits.detach().gather(-1, near)
    top = few.argmax(-1, keepdim=True)  # [B, S, 1], first of equals
    others = few.clamp_min(torch.finfo(few.dtype).min)  # else candidate 0 ties with excluded ones
    rest = others.scatter(-1, top, float("-inf")).topk(size - 1, dim=-1).indices  # [B, S, K-1]
    ids = torch.cat([top, rest], -1)
    ids = ids if near is None else near.gather(-1, ids)
    return Pool(ids, logits.log_softmax(-1).gather(-1, ids))


@runtime_checkable
class Corrector(Protocol):
    """The sequential part of a backbone or a head: it turns scores into scores, slot by slot.

    All large products belong in ``prepare``, which runs once a block; ``step`` does only what depends on the tokens
    chosen so far. A walk keeps ``W`` prefixes of every row at once (one for a chain, more for a tree), so that it can
    be forked at any slot: fork = gather ``carry`` along its second axis.
    """

    def prepare(self, block: DraftBlock, pool: Pool | None) -> Any:
        """Everything that does not depend on chosen tokens: a pytree of tensors with leading dimension ``B``."""

    def start(self, block: DraftBlock) -> Any:
        """The carry before slot 0: a pytree (tuple, list, dict or a tensor) of tensors ``[B, 1, ...]``."""

    def step(self, prepared: Any, carry: Any, slot: int, previous: Tensor, scores: Tensor) -> tuple[Tensor, Any]:
        """Scores of one slot for every prefix.

        Args:
            prepared: what ``prepare`` returned.
            carry: pytree of tensors ``[B, W, ...]``.
            slot: index of the slot.
            previous: ``[B, W]`` int64, the token chosen at the slot before (the anchor at slot 0).
            scores: ``[B, W, K]`` on the rows of the pool, or ``[B, W, V]`` when there is no pool; float32.

        Returns:
            new scores of the same shape, and the carry after ``previous`` was consumed.
        """
        ...
