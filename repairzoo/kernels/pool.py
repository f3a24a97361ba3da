"""The candidates of every slot and the normaliser of the whole vocabulary, in one pass over the logits."""

# A kernel is not Python, whatever it looks like.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from repairzoo.block import Pool

_BLOCK = 4096


@triton.jit
def _pool(logits, ids, log_probs, V, K, LOWEST, BLOCK: tl.constexpr, KP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * V
    k = tl.arange(0, KP)
    far = 2147000000  # no id; empty places have different ones, so that one is filled at a time
    best = tl.where(k < K, float("-inf"), float("inf"))
    at = far + k
    highest = tl.full((), float("-inf"), tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    for begin in range(0, V, BLOCK):
        o = begin + tl.arange(0, BLOCK)
        inside = o < V
        x = tl.load(here + o, mask=inside, other=float("-inf"))
        top = tl.max(x)
        new = tl.maximum(highest, top)
        shift = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift))
        highest = new
        # an excluded token is a candidate like any other, after all others
        y = tl.where(inside, tl.maximum(x, LOWEST), float("-inf"))
        top = tl.max(y)
        worst = tl.min(best)
        while top > worst:
            found = tl.min(tl.where(y == top, o, far))  # equals: the lowest id
            victim = tl.max(tl.where(best == worst, at, -1))
            hit = (best == worst) & (at == victim)
            best = tl.where(hit, top, best)
            at = tl.where(hit, found, at)
            y = tl.where(o == found, float("-inf"), y)
            top = tl.max(y)
            worst = tl.min(best)
    best = tl.where(k < K, best, float("-inf"))
    left, left_at = tl.expand_dims(best, 1), tl.expand_dims(at, 1)
    right, right_at = tl.expand_dims(best, 0), tl.expand_dims(at, 0)
    before = (right > left) | ((right == left) & (right_at < left_at))
    place = tl.sum(before.to(tl.int32), axis=1)
    value = tl.load(here + at, mask=k < K, other=0.0)  # as it was, not raised to the lowest
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(ids + row * K + place, at.to(tl.int64), mask=k < K)
    tl.store(log_probs + row * K + place, value - (shift + tl.log(mass)), mask=k < K)


def pool(logits: Tensor, size: int) -> Pool:
    """``block.make_pool`` in one kernel; candidates with equal logits come by id.

    Args:
        logits: ``[B, S, V]``; size: at most V.
    """
    B, S, V = logits.shape
    logits = logits.float().contiguous()
    ids = torch.empty(B, S, size, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(B, S, size, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, max(triton.next_power_of_2(V), 16))
    lowest = torch.finfo(torch.float32).min
    _pool[(B * S,)](logits, ids, log_probs, V, size, lowest, BLOCK=block, KP=triton.next_power_of_2(size))
    return Pool(ids, log_probs)
