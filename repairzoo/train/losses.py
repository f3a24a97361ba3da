"""Losses of block drafts. Every term is a numerator and a denominator: denominators are summed over processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from repairzoo.errors import InvalidInput


def decay_weights(slots: int, gamma: float | None, device: torch.device | None = None) -> Tensor:
    """``[S]`` weights ``exp(-i / gamma)`` of slot ``i``, the first that predicts being 0 (DFlash, section 4.2).

    Raises:
        InvalidInput: a negative ``gamma``, by which the last slots would weigh most.
    """
    if gamma is not None and gamma < 0:
        raise InvalidInput(f"gamma={gamma}: give a number of slots above 0, or null for no decay")
    steps = torch.arange(slots, device=device, dtype=torch.float32)
    return torch.ones(slots, device=device) if not gamma else torch.exp(-steps / gamma)


def dpace_weights(p: Tensor, mask: Tensor, alpha: float = 0.5, part: str = "dpace") -> Tensor:
    """Detached weights ``w_j = sum_{m>=j} prod_{i<=m} ((1-alpha) p_i + alpha)`` (D-PACE, arXiv 2605.18810).

    A slot that is not supervised neither ends the product nor adds to the sum.

    Args:
        p: ``[..., S]`` probability of each label. mask: ``[..., S]`` bool.
        part: ``"dpace"``, or one of its two factors: ``"confidence"`` (the product up to j) or ``"continuation"`` (the
            sum of the products from j + 1 on).
    """
    survival = ((1 - alpha) * p.detach() + alpha).masked_fill(~mask, 1.0).cumprod(-1)
    if part == "confidence":
        return survival
    weights = (survival * mask).flip(-1).cumsum(-1).flip(-1)
    return weights / survival if part == "continuation" else weights


def place_in(columns: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Index of every label within sorted ``columns [C]``, and whether it is there."""
    place = torch.searchsorted(columns, labels.contiguous()).clamp_max(len(columns) - 1)
    return place, columns[place] == labels


def block_cross_entropy(
    hidden: Tensor,
    output_weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    gamma: float | None = None,
    columns: Tensor | None = None,
    dpace: str | None = None,
    scale: float = 1.0,
    true: Tensor | None = None,
    distill: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of slot rows: numerator ``sum(w * ce)`` and denominator ``sum(w)``.

    Args:
        hidden: ``[B, N, S, D]``. output_weight: ``[V, D]``. labels, mask: ``[B, N, S]``.
        gamma: slot decay; None for none.
        columns: sorted ids that the softmax runs over (None: all). Labels outside carry no weight; the gradient is
            exact only as far as the other tokens' probabilities are negligible.
        dpace: weigh by this ``part`` of :func:`dpace_weights` instead of the decay; the denominator is then the number
            of texts ``B``.
        scale: multiplies the logits (``output_multiplier``).
        true: ``[B, N, S, D]`` the target's own states before each label, for ``distill``.
        distill: share of the target's law in what is learned; the rest is its token.
    """
    if columns is not None:
        output_weight = output_weight[columns]
        labels, known = place_in(columns, labels)
        mask = mask & known
    rows = mask.nonzero(as_tuple=True)
    logits = F.linear(hidden[rows].to(output_weight.dtype), output_weight).float() * scale
    entropy = F.cross_entropy(logits, labels[rows], reduction="none")
    learned = entropy
    if true is not None and distill > 0:
        with torch.no_grad():
            law = F.linear(true[rows].to(output_weight.dtype), output_weight).float().softmax(-1)
        learned = torch.lerp(entropy, -(law * logits.log_softmax(-1)).sum(-1), distill)
    if dpace:
        p = torch.zeros(labels.shape, device=hidden.device).index_put(rows, (-entropy).exp())
        weights = dpace_weights(p, mask, part=dpace)[rows]
        return (learned * weights).sum(), torch.tensor(float(labels.shape[0]), device=hidden.device)
    weights = decay_weights(labels.shape[-1], gamma, hidden.device)[rows[-1]]
    return (learned * weights).sum(), weights.sum()
