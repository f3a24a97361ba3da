"""What verifying more rows costs here: the target's pass over 1, 2, ... N new tokens, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from repairzoo.bench.clock import synchronise
from repairzoo.errors import InvalidInput
from repairzoo.target import Target


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a verify pass by rows.

    Attributes:
        widths: rows (anchor included), increasing. seconds: median time of a pass over so many rows.
        context: positions before them. batch: rows of the batch.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int
    batch: int = 1

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or len(self.widths) != len(self.seconds) or not rising or self.widths[0] < 1:
            raise InvalidInput("a cost curve needs as many times as widths, and widths that rise from at least 1")
        if not all(s > 0 for s in self.seconds):
            raise InvalidInput("a cost curve needs times above 0")

    def at(self, rows: float) -> float:
        """Seconds for so many rows: between measured widths on the line, beyond the last along the last slope."""
        points = list(zip(self.widths, self.seconds, strict=True))
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        left, right = points[-2], points[-1]
        for a, b in pairwise(points):
            if a[0] <= rows <= b[0]:
                left, right = a, b
                break
        slope = (right[1] - left[1]) / (right[0] - left[0])
        return max(left[1] + slope * (rows - left[0]), min(self.seconds))

    def mean(self, other: CostCurve) -> CostCurve:
        """Of two measurements of one thing."""
        seconds = tuple((a + b) / 2 for a, b in zip(self.seconds, other.seconds, strict=True))
        return CostCurve(self.widths, seconds, self.context, self.batch)

    def table(self, rows: int) -> tuple[float, ...]:
        """Seconds for 1 .. ``rows`` rows: what ``CURE(cost=...)`` takes."""
        return tuple(self.at(r) for r in range(1, rows + 1))

    def as_dict(self) -> dict[str, Any]:
        return {
            "widths": list(self.widths),
            "seconds": list(self.seconds),
            "context": self.context,
            "batch": self.batch,
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> CostCurve:
        try:
            return cls(tuple(given["widths"]), tuple(given["seconds"]), given["context"], given["batch"])
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"not a cost curve: {error!r}") from error


@torch.no_grad()
def measure_cost_curve(
    target: Target,
    widths: Sequence[int],
    *,
    context: int = 256,
    batch: int = 1,
    taps: tuple[int, ...] = (),
    repeats: int = 7,
) -> CostCurve:
    """Time the target's pass (logits and taps included) at each width, interleaved, so that a slow moment of the
    machine meets all of them alike.

    Args:
        widths: rows a pass. context: positions that are in the cache before. taps: layers that a backbone reads.
        repeats: passes of each width; the median counts.
    """
    widths = sorted(set(widths))
    if not widths or widths[0] < 1 or repeats < 1 or batch < 1:
        raise InvalidInput("widths, batch and repeats are at least 1")
    context = max(1, min(context, target.max_context - widths[-1]))
    capacity = -(-(context + widths[-1]) // 64) * 64  # the loop's masks are rounded up too
    cache = target.new_cache(batch, capacity)
    device = target.device
    columns = torch.arange(capacity, device=device)
    ids = torch.randint(
        target.vocab_size, (batch, widths[-1]), generator=torch.Generator().manual_seed(0), dtype=torch.int64
    ).to(device)

    def once(width: int) -> float:
        places = (context + torch.arange(width, device=device)).expand(batch, -1)
        mask = (columns <= places[..., None]).expand(batch, width, capacity)
        synchronise(device)
        start = time.perf_counter()
        hidden, _ = target.forward(ids[:, :width], places, places, mask, cache, taps)
        target.logits(hidden)
        synchronise(device)
        return time.perf_counter() - start

    for width in widths:
        once(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats):
        for width in widths if repeat % 2 == 0 else reversed(widths):
            times[width].append(once(width))
    return CostCurve(tuple(widths), tuple(statistics.median(times[w]) for w in widths), context, batch)


@torch.no_grad()
def measure_draft(target: Target, backbone: Any, *, context: int = 256, batch: int = 1, repeats: int = 5) -> float:
    """Median seconds of one draft behind ``context`` positions; 0 for a backbone that is no model."""
    if not hasattr(backbone, "parameters"):
        return 0.0
    context = max(1, min(context, target.max_context - backbone.slots - 2))
    capacity, device = -(-(context + backbone.slots + 2) // 64) * 64, target.device
    cache = backbone.new_cache(batch, capacity, target.dtype, device)
    anchor = torch.zeros(batch, dtype=torch.int64, device=device)
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = time.perf_counter()
        backbone.draft(cache, anchor, torch.full_like(anchor, context), capacity)
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


_measured: WeakKeyDictionary[Any, dict[Any, tuple[CostCurve, float]]] = WeakKeyDictionary()


def round_costs(target: Target, backbone: Any, rows: int) -> tuple[CostCurve, float]:
    """Cost of verifying up to ``rows`` rows, and of a draft, in seconds; measured once a process, in a second or two.

    Widths between the chain's and ``rows`` are measured at a few places: what lies between is on the line.
    """
    chain = 1 + backbone.slots
    key = (rows, chain, backbone.tapped_layers, type(backbone), torch.get_num_threads())
    known = _measured.setdefault(target.model, {})
    if key not in known:
        steps = min(4, rows - chain)
        widths = {1, chain, *(chain + (rows - chain) * i // max(steps, 1) for i in range(steps + 1))}
        curve = measure_cost_curve(target, sorted(widths), taps=backbone.tapped_layers, repeats=3)
        known[key] = curve, measure_draft(target, backbone, repeats=3)
    return known[key]
