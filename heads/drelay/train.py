"""The training loss of DRelay: credit-weighted selection (arXiv 2610.01439, section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def credit(p_label: Tensor, covered: Tensor) -> Tensor:
    """Raw credit ``v_i`` of every slot (Eq. 5), detached.

    With ``s_i = c_i (1 + p_i) / 2``: ``v_i = c_i * prod_{j<i} s_j * (1 + sum_{t>i} prod_{i<j<=t} s_j)``, the derivative
    of the expected accepted length by ``s_i`` where the slot is covered. A slot whose label is not in the pool has
    none, and neither has anything after it.

    Args:
        p_label: ``[..., S]`` probability ``p_act`` of each label. covered: ``[..., S]``, whether it is in the pool.
    """
    covered = covered.to(p_label.dtype)
    survive = covered * (1 + p_label.detach()) / 2
    before = torch.cat((torch.ones_like(survive[..., :1]), survive[..., :-1].cumprod(-1)), -1)
    ahead = torch.ones_like(survive[..., 0])
    after = [ahead]
    for i in range(survive.shape[-1] - 1, 0, -1):
        ahead = 1 + survive[..., i] * ahead
        after.append(ahead)
    return covered * before * torch.stack(after[::-1], -1)


def credit_weights(value: Tensor, mask: Tensor, floor: float = 0.25, cap: float = 4.0) -> Tensor:
    """Weights ``[..., S]`` of mean 1 and at most ``cap`` over the slots of ``mask``; 0 elsewhere.

    ``floor + (1 - floor) * min(v / mean(v), cap)``, then scaled to mean 1, with what the cap cuts off given to the
    others. A block without credit gets uniform weights.
    """
    mask = mask.to(value.dtype)
    count = mask.sum(-1, keepdim=True)
    value = value * mask
    mean = value.sum(-1, keepdim=True) / count.clamp_min(1)
    weight = (floor + (1 - floor) * (value / mean.clamp_min(1e-12)).clamp_max(cap)) * mask
    weight = torch.where(mean > 0, weight, mask)
    total = count
    capped = torch.zeros_like(weight, dtype=torch.bool)
    scale = total / weight.sum(-1, keepdim=True).clamp_min(1e-12)
    for _ in range(value.shape[-1] // int(max(cap, 1)) + 1):  # at most count / cap slots can ever reach the cap
        capped = capped | (weight * scale > cap)
        free = (weight * ~capped).sum(-1, keepdim=True)
        scale = (total - cap * capped.sum(-1, keepdim=True)) / free.clamp_min(1e-12)
    return torch.where(capped, cap, weight * scale) * mask


def selection(scores: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the decision, whether the label is in the pool, and ``p_act`` of it; each ``[..., S]``.

    ``BCE(g, 0)`` where the label is candidate 0, ``BCE(g, 1) - log r_k`` where it is candidate k, 0 where it is none:
    the negative log-likelihood under ``p_act``, which is the softmax of the scores that the head returns.
    """
    found = ids == labels[..., None]
    covered = found.any(-1)
    log_p = scores.log_softmax(-1).gather(-1, found.to(torch.uint8).argmax(-1, keepdim=True))[..., 0]
    log_p = torch.where(covered, log_p, 0.0)
    return -log_p, covered, torch.where(covered, log_p.exp(), 0.0)


def loss_terms(
    scores: Tensor,
    ids: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    alpha: float = 1.0,
    mix: float = 1.0,
    floor: float = 0.25,
    cap: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """``alpha * sum(m w l_sel)`` and ``sum(m)``, the denominator that it shares with the draft's cross entropy.

    Args:
        scores: ``[N, S, K]`` of the head, teacher-forced. ids: ``[N, S, K]``. labels, mask: ``[N, S]``.
        alpha: weight of the selection. mix: share of the credit weights; 0 is uniform.
    """
    loss, covered, p = selection(scores, ids, labels)
    weight = credit_weights(credit(p, covered & mask.bool()), mask, floor, cap)
    m = mask.to(loss.dtype)
    weight = (1 - mix) * m + mix * weight
    return alpha * (weight.detach() * loss).sum(), m.sum()


def ramp(progress: float, first: float, last: float, until: float = 0.3) -> float:
    """Linear from ``first`` to ``last`` over the first ``until`` of the training."""
    return first + (last - first) * (min(1.0, progress / until) if until > 0 else 1.0)


def plan(*args: Any, **options: Any) -> Any:
    """See :func:`.objective.plan`; imported when called, since decoding needs none of it."""
    from .objective import plan as make

    return make(*args, **options)
