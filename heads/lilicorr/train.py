"""The training loss of LiLiCorr: forced prefixes, a margin, and a penalty anchored in the target (arXiv 2608.20530)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from repairzoo.errors import InvalidInput

Terms = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of cross entropy, margin and penalty. The public recipe's; ``MARGIN`` is its other variant."""

    ce: float = 0.25
    margin: float = 0.0
    penalty: float = 0.25
    gap: float = 2.0  # margin that the hinge asks for

    def __post_init__(self) -> None:
        if min(self.ce, self.margin, self.penalty, self.gap) < 0:
            raise InvalidInput(f"weights of a loss must not be negative: {self}")


BASE = Weights()
MARGIN = Weights(0.125, 0.125, 0.25)


def supervision(ids: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots are trained, and the label's rank.

    A slot counts where its label and those of all earlier slots are in the pool (the head cannot reach what comes after
    a miss), and only in blocks whose every slot is valid.

    Args:
        ids: ``[N, S, K]``. labels, mask: ``[N, S]``.

    Returns:
        supervised ``[N, S]`` bool and rank ``[N, S]`` int64 (0 where absent).
    """
    found = ids == labels[..., None]  # [N, S, K]
    forced = found.any(-1).long().cumprod(-1).bool()
    return forced & mask.bool().all(-1, keepdim=True), found.to(torch.uint8).argmax(-1)


def rows_after(start: Tensor, pair: Tensor, rank: Tensor) -> Tensor:
    """Scores ``[N, S, K]`` of every slot after the true candidate of the slot before.

    Args:
        start: ``[N, K]``. pair: ``[N, S-1, K, K]``. rank: ``[N, S]``, see :func:`supervision`.
    """
    n, s = rank.shape
    before = rank[:, :-1, None, None].expand(n, s - 1, 1, start.shape[1])
    return torch.cat((start[:, None], pair.gather(2, before)[:, :, 0]), 1)


def terms(z: Tensor, rank: Tensor, supervised: Tensor, teacher: Tensor | None = None, weights: Weights = BASE) -> Terms:
    """Loss terms as (numerator, denominator): means over the supervised slots, times their weights.

    Args:
        z: ``[N, S, K]`` decision scores after the true predecessor, see :func:`rows_after`.
        rank, supervised: ``[N, S]``, see :func:`supervision`.
        teacher: ``[N, S, K]`` target logits of the candidates; needed for the penalty.

    Raises:
        InvalidInput: a penalty without target logits.
    """
    if weights.penalty and teacher is None:
        raise InvalidInput("lilicorr: the penalty needs the target's logits; give them, or set its weight to 0")
    right, here = rank[..., None], supervised.to(z.dtype)
    count = here.sum()
    log_p = z.log_softmax(-1)
    parts = {"ce": -log_p.gather(-1, right)[..., 0]}
    if weights.margin and z.shape[-1] > 1:
        others = z.scatter(-1, right, float("-inf")).amax(-1)
        parts["margin"] = F.relu(weights.gap - (z.gather(-1, right)[..., 0] - others))
    if weights.penalty and teacher is not None:
        teacher = teacher.detach().to(z.dtype)
        worse = F.relu(teacher.gather(-1, right) - teacher)  # how much rarer than the label the target finds each
        parts["penalty"] = (log_p.exp() * worse).sum(-1)
    return {name: (getattr(weights, name) * (part * here).sum(), count) for name, part in parts.items()}


def plan(*args: Any, **options: Any) -> Any:
    """See :func:`.objective.plan`; imported when called, since decoding needs none of it."""
    from .objective import plan as make

    return make(*args, **options)
