"""The target law, and random numbers that depend on nothing but their own row.

Everything here is a pure tensor function with static shapes, so that it can run inside a captured round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .errors import InvalidInput

_MASK64 = (1 << 64) - 1
_LOWEST_TEMPERATURE = 1e-30  # logits / temperature must stay finite in float32
_BLOCK = 64  # entries of a vocabulary that are looked at together
_BLOCKS = 4  # how many times as many of those as are looked for make it pay


class Stream(IntEnum):
    """Independent streams of random numbers.

    A number that chose a draft must never judge it or replace it: shared noise biases the output (vllm#54282).
    """

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    VERIFY = 3  # the target's own draws at the nodes of a tree


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLY = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shift_right(word: Tensor, bits: int) -> Tensor:
    # ``>>`` on int64 copies the sign bit down; a hash needs zeros there
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words (Steele, Lea and Flood, 2014)."""
    word = (word ^ _shift_right(word, 30)) * _MULTIPLY[0]
    word = (word ^ _shift_right(word, 27)) * _MULTIPLY[1]
    return word ^ _shift_right(word, 31)


def uniform(seed: Tensor, counter: Tensor, stream: int) -> Tensor:
    """Counter-based uniform numbers: a hash of (seed, counter, stream), with no state.

    A row's numbers do not depend on the other rows, on the batch size, or on how many numbers were drawn before.

    Args:
        seed: ``[B]`` int64, one per row.
        counter: ``[B, ...]`` int64, such as the absolute position that the number decides.
        stream: a ``Stream``; different streams are independent.

    Returns:
        ``[B, ...]`` float64 in ``[0, 1)`` with 53 random bits.
    """
    key = _mix(_mix(seed + _GAMMA) + int(stream) * _MULTIPLY[0] % (1 << 62))  # [B]
    key = key.reshape(-1, *[1] * (counter.dim() - 1))
    word = _mix(_mix(key + counter * _GAMMA) ^ key)
    return _shift_right(word, 11).double() * 2.0**-53


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw in float64: the first token whose cumulative probability exceeds ``u``.

    A token without mass is never returned, not even at ``u == 0`` or where rounding leaves ``u`` above every cumulative
    sum (then: the last token with mass).

    Args:
        probs: ``[..., V]`` non-negative weights with a positive sum; they need not be normalised.
        u: ``[...]`` in ``[0, 1)``.

    Returns:
        ``[...]`` int64.
    """
    has_mass = probs > 0
    cumulative = probs.double().cumsum(-1)
    # a parallel scan may round a token without mass above its neighbour, hence the mask
    reached = has_mass & (cumulative > u.double().unsqueeze(-1) * cumulative[..., -1:])
    first = reached.to(torch.uint8).argmax(-1)
    last = probs.shape[-1] - 1 - has_mass.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(reached.any(-1), first, last)


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is in float64: scores and ratios are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def shortlist(x: Tensor, count: int) -> Tensor | None:
    """Indices among which ``count`` of the largest of ``x [..., V]`` are, and the first of all that equal the maximum.

    A CPU finds the largest value of a block many entries at a time, and places one by one. The ``count`` blocks with
    the largest values suffice: what lies outside is no larger than any of those.

    Returns:
        ``[..., M]`` int64, ascending; or None where looking at everything is as fast.
    """
    whole = x.shape[-1] // _BLOCK
    if x.device.type != "cpu" or whole < _BLOCKS * count:
        return None
    best = x[..., : whole * _BLOCK].view(*x.shape[:-1], whole, _BLOCK).amax(-1)  # [..., whole]
    first = best.argmax(-1, keepdim=True)
    # topk leaves open which of equal blocks it takes; the first of the largest must be there, and once
    others = best.clamp_min(torch.finfo(x.dtype).min).scatter(-1, first, -math.inf)
    blocks = torch.cat([first, others.topk(count - 1, dim=-1).indices], -1).sort(-1).values
    near = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device=x.device)).flatten(-2)
    if whole * _BLOCK < x.shape[-1]:
        rest = torch.arange(whole * _BLOCK, x.shape[-1], device=x.device)
        near = torch.cat([near, rest.expand(*near.shape[:-1], -1)], -1)
    return near


@dataclass(frozen=True, slots=True)
class Law:
    """How logits become the law that tokens are drawn from: temperature, then top-k, top-p and min-p.

    Order and keep rules are those of Hugging Face transformers' ``generate``. ``None`` turns a filter off.

    Attributes:
        temperature: 0 means greedy (all mass on the argmax, first of equals; filters then change nothing); otherwise at
            least 1e-30.
        top_k: keep the ``top_k`` likeliest tokens and those equal to the last of them; at least 1.
        top_p: drop the likeliest-last tail whose mass is at most ``1 - top_p``; in ``(0, 1]``.
        min_p: drop tokens less likely than ``min_p`` times the likeliest; in ``[0, 1]``.

    Raises:
        InvalidInput: an argument is out of range; the message names it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        t = _number("temperature", self.temperature)
        if not (t == 0 or _LOWEST_TEMPERATURE <= t < math.inf):
            raise InvalidInput(
                f"temperature={self.temperature!r}: give 0 (greedy) or a number from 1e-30 to infinity, exclusive"
            )
        k = self.top_k
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise InvalidInput(f"top_k={k!r}: give an integer of at least 1, or None to keep every token")
        if self.top_p is not None and not 0 < _number("top_p", self.top_p) <= 1:
            raise InvalidInput(f"top_p={self.top_p!r}: give a number above 0 and at most 1, or None")
        if self.min_p is not None and not 0 <= _number("min_p", self.min_p) <= 1:
            raise InvalidInput(f"min_p={self.min_p!r}: give a number from 0 to 1, or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """The processed law of ``logits [..., V]``: float32 (float64 for float64 logits), same shape.

        Filtered tokens are exactly 0 and every row sums to 1. A row needs at least one finite logit and no ``+inf``.
        """
        logits = at_least_float32(logits)
        if self.greedy:
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        scores = logits / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last = scores.topk(self.top_k, -1).values[..., -1:]
            scores = scores.masked_fill(scores < last, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = scores.sort(dim=-1, stable=True)
            drop = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop = torch.cat([drop[..., :-1], torch.zeros_like(drop[..., -1:])], -1)  # the likeliest always stays
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
        if self.min_p is not None and self.min_p > 0:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -math.inf)
        return scores.softmax(-1)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidInput(f"{name}={value!r}: give a number")
    return float(value)
