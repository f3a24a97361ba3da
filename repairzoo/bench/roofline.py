"""Bytes and operations of a round, counted from the loaded tensors, and the least time that a machine needs for them.

Weights count once a round, keys and values once for each row of the batch; activations are left out. A stage cannot be
faster than the larger of its bytes over the bandwidth and its operations over the rate.
"""

from __future__ import annotations

from typing import Any

import torch

from repairzoo.linear import Int8Linear
from repairzoo.target import Target
from repairzoo.zoo import Zoo

Cost = dict[str, list[float]]  # stage -> [bytes, operations]


def target_cost(target: Target, rows: int, context: int, batch: int = 1) -> list[float]:
    """``[bytes, operations]`` of one target pass over ``batch * rows`` tokens after ``context`` positions."""
    matrices = [
        w
        for layer in target._layers
        for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for w in part.weights
    ] + list(target.output.weights)
    size = target.embedding.element_size()
    weights = sum(w.numel() for w in matrices)
    layers, kv = target.num_layers, target._kv_heads * target._head_dim
    queries = target._layers[0].qkv.sizes[0]
    seen = batch * layers * 2 * context * kv * size
    attention = batch * rows * layers * 4.0 * context * queries
    return [float(weights * size + seen), 2.0 * weights * rows * batch + attention]


def draft_cost(backbone: Any, batch: int = 1) -> list[float]:
    """``[bytes, operations]`` of one drafted block: the backbone's matrices and the output head."""
    if not isinstance(backbone, torch.nn.Module):
        return [0.0, 0.0]
    trunk = [p for p in backbone.parameters() if p.dim() > 1]
    borrowed = getattr(backbone, "_target", None)
    int8 = isinstance(getattr(borrowed, "output", None), Int8Linear)
    output = borrowed.output_weight if borrowed is not None else None
    numbers = sum(p.numel() for p in trunk) + (0 if output is None else output.numel())
    size = 1 if int8 or not trunk else trunk[0].element_size()
    slots: Any = backbone.slots
    return [float(numbers * size), 2.0 * numbers * slots * batch]


def head_cost(heads: tuple[Any, ...], slots: int, batch: int = 1) -> list[float]:
    """``[bytes, operations]`` of the heads: every matrix once a slot. An upper estimate: pools read fewer rows."""
    matrices = [p for h in heads if isinstance(h, torch.nn.Module) for p in h.parameters() if p.dim() > 1]
    numbers = sum(p.numel() for p in matrices)
    size = matrices[0].element_size() if matrices else 0
    return [float(numbers * size), 2.0 * numbers * slots * batch]


def round_cost(zoo: Zoo | None, target: Target, context: int, batch: int = 1) -> Cost:
    """By stage; for plain decoding the one step."""
    if zoo is None:
        return {"step": target_cost(target, 1, context, batch)}
    nodes = zoo.expander.budget(zoo.backbone.slots) if zoo.expander is not None else (zoo.nodes or zoo.backbone.slots)
    return {
        "draft": draft_cost(zoo.backbone, batch),
        "head": head_cost(zoo.heads, zoo.backbone.slots, batch),
        "verify": target_cost(target, 1 + nodes, context, batch),
    }


def floor(cost: list[float], rates: dict[str, float]) -> float:
    """Seconds that ``[bytes, operations]`` take at least."""
    return max(cost[0] / rates["bytes_per_second"], cost[1] / rates["operations_per_second"])
