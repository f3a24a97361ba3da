"""A slow oracle for DeLS: float64, one row, one prefix at a time, every state recomputed from its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .head import DeLSConfig


def local_logits(
    config: DeLSConfig, tensors: Mapping[str, Tensor], embedding: Tensor, output_weight: Tensor, consumed: Sequence[int]
) -> Tensor:
    """Local logits ``[V]`` float64 after the tokens ``consumed`` (the anchor first, unless it is left out)."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def enter(token: int) -> Tensor:
        if config.input_table == "vocabulary":
            return t["table"][token]
        vector = embedding[token].double()
        return t["down"] @ vector if config.input_table == "factored" else vector

    if config.variant == "markov":
        rank = enter(consumed[-1])
    else:
        width = config.hidden or 0
        state = torch.zeros(width, dtype=torch.float64)
        for token in consumed:
            x = enter(token)
            reset, update, new = torch.zeros(3, width, dtype=torch.float64)
            for j in range(width):
                row_r, row_z, row_n = j, width + j, 2 * width + j
                reset[j] = torch.sigmoid(t["gru_input"][row_r] @ x + t["gru_hidden"][row_r] @ state)
                update[j] = torch.sigmoid(t["gru_input"][row_z] @ x + t["gru_hidden"][row_z] @ state)
                new[j] = torch.tanh(t["gru_input"][row_n] @ x + reset[j] * (t["gru_hidden"][row_n] @ state))
            state = (1 - update) * new + update * state
        rank = t["rank_proj"] @ state
        if config.activation == "silu":
            rank = rank * torch.sigmoid(rank)
    if config.output_table == "vocabulary":
        return t["readout"] @ rank
    return output_weight[: config.vocab_size].double() @ (t["up"] @ rank)


def fused(
    config: DeLSConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    output_weight: Tensor,
    anchor: int,
    chosen: Sequence[int],
    base: Tensor,
) -> Tensor:
    """Scores ``[V]`` float64 of slot ``len(chosen)`` from its base scores ``[V]`` and the tokens of earlier slots."""
    slot = len(chosen)
    base = base.double()
    if slot < config.pure_draft_prefix_len:
        return base
    consumed = [anchor, *chosen] if config.anchor_input else list(chosen)
    local = local_logits(config, tensors, embedding, output_weight, consumed)
    return base + config.alpha * local - config.beta * tensors["log_prior"].double()


def loss(
    config: DeLSConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    output_weight: Tensor,
    windows: Sequence[Sequence[int]],
    mask: Sequence[Sequence[float]],
    gamma: float | None,
) -> float:
    """The training loss, label by label."""
    total = weight_sum = 0.0
    for window, row in zip(windows, mask, strict=True):
        for k in range(len(window) - 1):
            weight = row[k] * (math.exp(-k / gamma) if gamma else 1.0)
            logits = local_logits(config, tensors, embedding, output_weight, window[: k + 1])
            total += weight * float(logits.logsumexp(0) - logits[window[k + 1]])
            weight_sum += weight
    return total / (weight_sum + 1e-6)
