"""The target law with its options as tensors, one a row: one captured round then serves greedy and sampled rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from repairzoo.sampling import Law, at_least_float32


@dataclass(frozen=True, slots=True)
class RowLaw:
    """``Law`` for rows that may differ; equal to it bit for bit on a CPU.

    Which filters exist is fixed (sorting a vocabulary costs what a captured greedy round must not pay); all their
    values, and whether a row is greedy at all, are read from the tensors.

    Attributes:
        chosen: ``[B]`` bool, rows whose law is all mass on the argmax, first of equals.
        temperature: ``[B]`` in the dtype of the scores (1 where a row is greedy).
        top_k: ``[B]`` int64, or None without that filter (the vocabulary size where a row has none).
        tail: ``[B]`` float, ``1 - top_p`` (-1 where a row has none), or None.
        min_p: ``[B]`` float (0 where a row has none), or None.
    """

    greedy: ClassVar[bool] = False  # not known before the tensors are

    chosen: Tensor
    temperature: Tensor
    top_k: Tensor | None = None
    tail: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def filters(self) -> tuple[bool, bool, bool]:
        """Which of top-k, top-p and min-p exist."""
        return self.top_k is not None, self.tail is not None, self.min_p is not None

    @classmethod
    def empty(cls, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> RowLaw:
        """Greedy rows with every filter present and off; ``dtype`` is that of the scores (float32 or float64)."""

        def full(value: float, kind: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=kind, device=device)

        chosen = torch.ones(rows, dtype=torch.bool, device=device)
        return cls(chosen, full(1, dtype), full(vocabulary, torch.int64), full(-1, dtype), full(0, dtype))

    def only(self, filters: Sequence[bool]) -> RowLaw:
        """The same tensors, without the filters that are not asked for."""
        top_k, tail, min_p = (x if on else None for x, on in zip(self.filter_tensors, filters, strict=True))
        return RowLaw(self.chosen, self.temperature, top_k, tail, min_p)

    def leading(self, rows: int) -> RowLaw:
        """Views of the first rows."""
        return RowLaw(*(None if x is None else x[:rows] for x in self.tensors))  # type: ignore[arg-type]

    @property
    def filter_tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.top_k, self.tail, self.min_p

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.chosen, self.temperature, *self.filter_tensors)

    def set(self, law: Law, vocabulary: int) -> None:
        """Every row follows ``law`` from now on; nothing is read from the device."""
        self.chosen.fill_(law.greedy)
        self.temperature.fill_(1.0 if law.greedy else law.temperature)
        values = (
            vocabulary if law.top_k is None else min(law.top_k, vocabulary),
            -1.0 if law.top_p is None or law.top_p >= 1 else 1 - law.top_p,
            law.min_p or 0.0,
        )
        for tensor, value in zip(self.filter_tensors, values, strict=True):
            if tensor is not None:
                tensor.fill_(value)

    def probs(self, logits: Tensor) -> Tensor:
        """As ``Law.probs``, for ``logits [B, ..., V]``."""
        logits = at_least_float32(logits)
        shape = (-1, *[1] * (logits.dim() - 1))
        scores = logits / self.temperature.view(shape)
        if self.top_k is not None:
            # a pool has fewer entries than the vocabulary, and then the filter may be off
            place = (self.top_k - 1).clamp_max(scores.shape[-1] - 1).view(shape).expand(*scores.shape[:-1], 1)
            last = scores.sort(dim=-1, descending=True).values.gather(-1, place)
            scores = scores.masked_fill(scores < last, -math.inf)
        if self.tail is not None:
            ascending, order = scores.sort(dim=-1, stable=True)
            drop = ascending.softmax(-1).cumsum(-1) <= self.tail.view(shape)
            drop = torch.cat([drop[..., :-1], torch.zeros_like(drop[..., -1:])], -1)  # the likeliest always stays
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
        if self.min_p is not None:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p < self.min_p.view(shape) * p.amax(-1, keepdim=True), -math.inf)
        best = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.chosen.view(shape), best, scores.softmax(-1))


def filters_of(law: Law) -> tuple[bool, bool, bool]:
    """Which of top-k, top-p and min-p a law needs."""
    if law.greedy:
        return False, False, False
    return law.top_k is not None, law.top_p is not None and law.top_p < 1, bool(law.min_p)
