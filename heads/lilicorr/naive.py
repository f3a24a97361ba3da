"""A slow oracle for LiLiCorr: float64, one block, one candidate and one attention head at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .head import LiLiCorrConfig


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).sum() / len(x) + eps)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def tables(
    config: LiLiCorrConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    ids: Sequence[Sequence[int]],
    log_probs: Tensor,
    hidden: Tensor,
    context: Tensor,
    valid: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Start scores ``[K]`` and the ``S - 1`` pair tables ``[K, K]`` of one block (README, equations 1 to 7)."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    slots, k = len(ids), len(ids[0])

    def affine(name: str, x: Tensor) -> Tensor:
        return t[f"{name}.weight"] @ x + t[f"{name}.bias"]

    nodes: dict[tuple[int, int], Tensor] = {}
    for s in range(slots):
        for r in range(k):
            token = embedding[ids[s][r]].double()
            x = affine("token_proj", token) if "token_proj.weight" in t else token
            x = x + affine("pass_hidden_proj", hidden[s].double())
            lp = float(log_probs[s, r])
            rank = r / (k - 1) if k > 1 else 0.0
            f = torch.tensor(
                [lp, math.exp(lp), lp - float(log_probs[s].max()), rank, float(r == 0)], dtype=torch.float64
            )
            f = (f - f.mean()) / torch.sqrt(((f - f.mean()) ** 2).mean() + 1e-5)
            f = f * t["feature_mlp.0.weight"] + t["feature_mlp.0.bias"]
            x = x + affine("feature_mlp.3", _silu(affine("feature_mlp.1", f)))
            nodes[s, r] = x + t["slot_embedding"][0, 0, s, 0] + t["rank_embedding"][0, 0, 0, r]

    heads, size = config.num_heads, config.width // config.num_heads
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        projected = {}
        for node, x in nodes.items():
            y = _rms(x, t[f"{name}.attn_norm.weight"], config.rms_norm_eps)
            projected[node] = t[f"{name}.attn.in_proj_weight"] @ y + t[f"{name}.attn.in_proj_bias"]
        mixed = {}
        for node in nodes:
            parts = []
            for h in range(heads):
                part = slice(h * size, (h + 1) * size)
                q = projected[node][: config.width][part]
                logits, values = [], []
                for other in nodes:
                    key = projected[other][config.width : 2 * config.width][part]
                    apart = node[0] - other[0]
                    bias = t["relative_slot_bias"][h, apart + config.block_size - 1]
                    bias = bias + (t["same_slot_bias"][h] if apart == 0 else 0.0)
                    logits.append(q @ key / math.sqrt(size) + bias)
                    values.append(projected[other][2 * config.width :][part])
                weights = torch.stack(logits).softmax(0)
                parts.append((weights[:, None] * torch.stack(values)).sum(0))
            mixed[node] = affine(f"{name}.attn.out_proj", torch.cat(parts))
        for node in nodes:
            x = nodes[node] + mixed[node]
            y = _rms(x, t[f"{name}.mlp_norm.weight"], config.rms_norm_eps)
            nodes[node] = x + affine(f"{name}.mlp.2", _silu(affine(f"{name}.mlp.0", y)))

    def unit(x: Tensor) -> Tensor:
        return x / max(float(x.norm()), config.vector_eps)

    anchor = affine("context_proj", context.double()) * float(valid)
    anchor = _rms(anchor, t["anchor_norm.weight"], config.rms_norm_eps)
    out, inward = {}, {}
    for node, x in nodes.items():
        x = _rms(x, t["output_norm.weight"], config.rms_norm_eps)
        f = _silu(affine("factor_input_proj", torch.cat((x, anchor, x * anchor))))
        out[node], inward[node] = unit(affine("out_head", f)), unit(affine("in_head", f))
    first, scale = unit(affine("anchor_out_head", anchor)), config.logit_scale
    start = torch.stack([scale * (first @ inward[0, r]) for r in range(k)])
    pairs = [
        torch.stack([torch.stack([scale * (out[s, i] @ inward[s + 1, j]) for j in range(k)]) for i in range(k)])
        for s in range(slots - 1)
    ]
    return start, pairs


def greedy(start: Tensor, pairs: Sequence[Tensor]) -> list[int]:
    """The walk: best start, then the best successor of each choice; ties to the lowest rank."""
    path = [int(start.argmax())]
    for table in pairs:
        path.append(int(table[path[-1]].argmax()))
    return path


def loss(
    start: Tensor,
    pairs: Sequence[Tensor],
    ids: Sequence[Sequence[int]],
    labels: Sequence[int],
    mask: Sequence[bool],
    teacher: Tensor,
    margin: float = 2.0,
) -> tuple[float, float, float, int]:
    """Sums of cross entropy, hinge and penalty over the supervised slots of one block, and their number.

    ``teacher [S, V]`` are the target's logits.
    """
    sums, count, before = [0.0, 0.0, 0.0], 0, -1
    if not all(mask):
        return 0.0, 0.0, 0.0, 0
    for s, label in enumerate(labels):
        if label not in ids[s]:
            break
        right = list(ids[s]).index(label)
        z = (start if s == 0 else pairs[s - 1][before]).double()
        others = [float(z[k]) for k in range(len(z)) if k != right]
        p = z.softmax(0)
        sums[0] -= float(z.log_softmax(0)[right])
        sums[1] += max(0.0, margin - (float(z[right]) - max(others))) if others else 0.0
        sums[2] += sum(
            float(p[k]) * max(0.0, float(teacher[s, label]) - float(teacher[s, ids[s][k]])) for k in range(len(z))
        )
        count, before = count + 1, right
    return sums[0], sums[1], sums[2], count
