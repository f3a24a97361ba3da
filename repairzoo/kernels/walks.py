"""Whole chains of LiLiCorr and of DRelay, a kernel each: one program walks one row from slot to slot."""

# A kernel is not Python, whatever it looks like.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _argmax(x, k, KP: tl.constexpr):
    """The first of the best."""
    return tl.min(tl.where(x == tl.max(x), k, KP))


@triton.jit
def _lilicorr(
    start, pair, base, log_probs, gamma, ranks, scores, S, K, T, IDENTITY: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    inside, served = k < K, k < T
    rank = 0
    for slot in range(S):
        at = (row * S + slot) * K + k
        known = tl.load(base + at, mask=inside, other=float("-inf"))
        from_rank = tl.where(rank < T, rank, 0)  # the anchor, or a rank that has no scores of its own
        if slot == 0:
            psi = tl.load(start + row * T + k, mask=served, other=0.0)
        else:
            psi = tl.load(pair + ((row * (S - 1) + slot - 1) * T + from_rank) * T + k, mask=served, other=0.0)
        if IDENTITY:
            centred = psi - tl.sum(tl.where(served, psi, 0.0)) / T
            new = tl.where(served, known + tl.load(gamma + slot) * centred, known)
        else:
            own = tl.load(log_probs + at, mask=inside, other=0.0)
            excluded = own == float("-inf")
            new = psi + (known - tl.where(excluded, 0.0, own))
            new = tl.where(served & (excluded == 0), new, float("-inf"))
        new = tl.where(new == known, known, new)
        rank = _argmax(tl.where(inside, new, float("-inf")), k, KP)
        tl.store(scores + at, new, mask=inside)
        tl.store(ranks + row * S + slot, rank.to(tl.int64))


def lilicorr_walk(
    start: Tensor, pair: Tensor, base: Tensor, log_probs: Tensor, gamma: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The greedy walk through LiLiCorr's tables.

    Args:
        start: ``[B, T]``. pair: ``[B, S-1, T, T]`` (earlier -> later). base: ``[B, S, K]`` incoming scores, K >= T.
        log_probs: ``[B, S, K]`` of the pool. gamma: ``[S]`` of the identity-safe variant, or None. All float32.

    Returns:
        ranks ``[B, S]`` int64 and scores ``[B, S, K]``.
    """
    B, S, K = base.shape
    ranks = torch.empty(B, S, dtype=torch.int64, device=base.device)
    scores = torch.empty_like(base, memory_format=torch.contiguous_format)
    start, pair, base, log_probs = (x.contiguous() for x in (start, pair, base, log_probs))
    _lilicorr[(B,)](
        start, pair, base, log_probs, base if gamma is None else gamma.contiguous(), ranks, scores, S, K,
        start.shape[1], IDENTITY=gamma is not None, KP=triton.next_power_of_2(K),
    )  # fmt: skip
    return ranks, scores


@triton.jit
def _lse(x):
    top = tl.max(x)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.exp(x - shift)))


@triton.jit
def _bounded(x):
    """As ``gate_stats`` ends: what is not a number is the lowest, all else lies within 30 of 0."""
    return tl.minimum(tl.maximum(tl.where(x != x, -30.0, x), -30.0), 30.0)


@triton.jit
def _drelay(
    static, query, last, last_anchor, entry_token, entry_slot, entry_anchor, through, gate, w_native, w_best, w_stats,
    w_out, b_out, base, reads, ranks, scores, scale, S, K, W, G, H, e,
    KP: tl.constexpr, MP: tl.constexpr, EP: tl.constexpr, BG: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, m, c = tl.arange(0, KP), tl.arange(0, MP), tl.arange(0, EP)
    g, w = tl.arange(0, BG), tl.arange(0, BW)
    inside = k < K
    chosen = m * 0  # chosen[m]: rank at slot m - 1
    rank = 0
    reads += row * K * W
    for slot in range(S):
        at = row * S + slot
        change = tl.load(static + at * K + k, mask=inside, other=0.0).to(tl.float32)
        seen = m <= slot
        for h in range(H):
            column = h * e + c
            real = c < e
            grid = inside[:, None] & real[None, :]
            q = tl.load(query + (at * K + k[:, None]) * W + column[None, :], mask=grid, other=0.0).to(tl.float32)
            if slot == 0:
                q += tl.load(last_anchor + row * W + column, mask=real, other=0.0).to(tl.float32)[None, :]
            else:
                before = ((at - 1) * K + rank) * W
                q += tl.load(last + before + column, mask=real, other=0.0).to(tl.float32)[None, :]
            q = tl.where(grid, q, 0.0)
            entry = row * S + m - 1  # m = 0 is the anchor
            grid = (seen & (m > 0))[:, None] & real[None, :]
            by_token = entry_token + (entry * K + chosen)[:, None] * (2 * W) + column[None, :]
            by_slot = entry_slot + entry[:, None] * (2 * W) + column[None, :]
            anchor = entry_anchor + row * (2 * W) + column
            first = (m == 0)[:, None]
            key = tl.load(by_token, mask=grid, other=0.0).to(tl.float32)
            key += tl.load(by_slot, mask=grid, other=0.0).to(tl.float32)
            key += tl.where(first, tl.load(anchor, mask=real, other=0.0).to(tl.float32)[None, :], 0.0)
            value = tl.load(by_token + W, mask=grid, other=0.0).to(tl.float32)
            value += tl.load(by_slot + W, mask=grid, other=0.0).to(tl.float32)
            value += tl.where(first, tl.load(anchor + W, mask=real, other=0.0).to(tl.float32)[None, :], 0.0)
            logits = tl.dot(q, tl.trans(key), input_precision="ieee") * scale  # [KP, MP]
            logits = tl.where(seen[None, :], logits, float("-inf"))
            weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
            weight = weight / tl.sum(weight, axis=1)[:, None]
            read = tl.dot(weight, value, input_precision="ieee")  # [KP, EP]
            grid = inside[:, None] & real[None, :]
            cells = k[:, None] * W + column[None, :]
            direction = tl.load(through + at * K * W + cells, mask=grid, other=0.0).to(tl.float32)
            change += tl.sum(read * direction, axis=1)
            tl.store(reads + cells, read, mask=grid)

        known = tl.load(base + at * K + k, mask=inside, other=float("-inf"))
        native = _argmax(known, k, KP)
        kept = (k == native) | (k >= K)
        rest = tl.where(kept, float("-inf"), known)
        moved = tl.where(kept, float("-inf"), known + change)
        best = _argmax(moved, k, KP)
        is_native, is_best = k == native, k == best
        own = tl.sum(tl.where(is_native, known, 0.0))
        rival = tl.sum(tl.where(is_best, known, 0.0))
        odds_lse, moved_lse = _lse(rest), _lse(moved)
        whole = _lse(known)
        odds = odds_lse - own
        r = moved - moved_lse
        r_best = tl.sum(tl.where(is_best, r, 0.0))
        apart = tl.sum(tl.where(is_best, change, 0.0)) - tl.sum(tl.where(is_native, change, 0.0))
        entropy = -tl.sum(tl.exp(r) * tl.maximum(r, -30.0))
        favourite = tl.where(rival == tl.max(rest), 1.0, 0.0)

        tl.debug_barrier()  # the reads of all heads are written
        delta = tl.load(b_out).to(tl.float32)
        for begin in range(0, G, BG):
            o = begin + g
            fits = o < G
            inner = tl.load(gate + at * G + o, mask=fits, other=0.0).to(tl.float32)
            for part in range(0, W, BW):
                d = part + w
                wide = d < W
                grid = fits[:, None] & wide[None, :]
                cells = o[:, None] * W + d[None, :]
                of_native = tl.load(reads + native * W + d, mask=wide, other=0.0)
                of_best = tl.load(reads + best * W + d, mask=wide, other=0.0)
                inner += tl.sum(tl.load(w_native + cells, mask=grid, other=0.0) * of_native[None, :], axis=1)
                inner += tl.sum(tl.load(w_best + cells, mask=grid, other=0.0) * of_best[None, :], axis=1)
            stats = w_stats + o * 8
            inner += tl.load(stats, mask=fits, other=0.0) * _bounded(odds)
            inner += tl.load(stats + 1, mask=fits, other=0.0) * _bounded(r_best)
            inner += tl.load(stats + 2, mask=fits, other=0.0) * _bounded(odds + r_best)
            inner += tl.load(stats + 3, mask=fits, other=0.0) * _bounded(tl.exp(own - whole))
            inner += tl.load(stats + 4, mask=fits, other=0.0) * _bounded(tl.exp(rival - whole))
            inner += tl.load(stats + 5, mask=fits, other=0.0) * _bounded(apart)
            inner += tl.load(stats + 6, mask=fits, other=0.0) * _bounded(entropy)
            inner += tl.load(stats + 7, mask=fits, other=0.0) * favourite
            outer = tl.load(w_out + o, mask=fits, other=0.0).to(tl.float32)
            delta += tl.sum(inner / (1 + tl.exp(-inner)) * outer)
        tl.debug_barrier()  # the next slot writes them again

        lift = tl.where(odds_lse == float("-inf"), 0.0, odds_lse - moved_lse)
        new = tl.where(is_native, known, known + (change + (delta + lift)))
        new = tl.where(new == known, known, new)
        rank = _argmax(tl.where(inside, new, float("-inf")), k, KP)
        chosen = tl.where(m == slot + 1, rank, chosen)
        tl.store(scores + at * K + k, new, mask=inside)
        tl.store(ranks + at, rank.to(tl.int64))


def drelay_walk(
    prepared: tuple[Tensor, ...], weights: tuple[Tensor, ...], base: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """The greedy walk of DRelay.

    Args:
        prepared: ``static [B, S, K], query, last [B, S, K, d], last_anchor [B, d], entry_token [B, S, K, 2d],
            entry_slot [B, S, 2d], entry_anchor [B, 2d], through [B, S, K, d], gate [B, S, G]``, any floating dtype.
        weights: float32, of the gate: on the read of the native candidate and of the best other ``[G, d]`` (their
            output projection multiplied in), on the statistics ``[G, 8]``, outwards ``[G]``, and the bias ``[1]``.
        base: ``[B, S, K]`` float32 incoming scores.

    Returns:
        ranks ``[B, S]`` int64 and scores ``[B, S, K]``.
    """
    B, S, K = base.shape
    W, G = prepared[1].shape[-1], prepared[-1].shape[-1]
    ranks = torch.empty(B, S, dtype=torch.int64, device=base.device)
    scores = torch.empty_like(base, memory_format=torch.contiguous_format)
    reads = torch.empty(B, K, W, dtype=torch.float32, device=base.device)

    def at_least_16(n: int) -> int:
        return max(1 << (n - 1).bit_length(), 16)  # what a matrix unit takes

    _drelay[(B,)](
        *(x.contiguous() for x in prepared), *(x.contiguous() for x in weights), base.contiguous(), reads, ranks,
        scores, (W // heads) ** -0.5, S, K, W, G, heads, W // heads,
        KP=at_least_16(K), MP=at_least_16(S + 1), EP=at_least_16(W // heads),
        BG=min(at_least_16(G), 64), BW=min(at_least_16(W), 64),
    )  # fmt: skip
    return ranks, scores
