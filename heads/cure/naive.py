"""A slow oracle for CURE: one row, lists of floats, every branch walked again from the anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .head import CURE

Scores = Callable[[list[int]], Sequence[float]]


def margin(scores: Sequence[float]) -> float:
    """Best minus second best; infinite where there is no second."""
    best = sorted(scores, reverse=True)
    return math.inf if len(best) < 2 or best[1] == -math.inf else best[0] - best[1]


def branches(m: float, scale: float, b_min: int, b_max: int) -> int:
    u = min(max(1 - m / scale, 0.0), 1.0)
    return min(max(round(b_min + u * (b_max - b_min)), b_min), b_max)


def ranked(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda k: -scores[k])  # stable: first of equals


def tree(
    head: CURE,
    slots: int,
    scores: Scores,
    candidates: Sequence[Sequence[int]],
    mass: Sequence[float],
    kept: int | None = None,
) -> dict[tuple[int, ...], float]:
    """The tree's prefixes in its order, each with its estimate of acceptance.

    Args:
        head: its options. slots: S. kept: slots that are proposed; None for all.
        scores: of slot ``len(prefix)`` after the tokens ``prefix``, one a candidate.
        candidates: token ids of every slot's candidates. mass: what the backbone gives them together.
    """
    kept = slots if kept is None else kept

    def law(prefix: list[int]) -> list[float]:
        row = scores(prefix)
        top = max(row)
        weight = [math.exp(s - top) for s in row]
        return [mass[len(prefix)] * w / sum(weight) for w in weight]

    def best(prefix: list[int]) -> int:
        return ranked(scores(prefix))[0]

    chain: list[int] = []
    own: list[float] = []
    for slot in range(slots):
        k = best(chain)
        own.append(law(chain)[k])
        chain.append(candidates[slot][k])
    nodes = {tuple(chain[: i + 1]): math.prod(own[: i + 1]) for i in range(kept)}

    # where to fork, and to what
    choices: list[tuple[float, int, list[int]]] = []
    for slot in range(kept):
        row, q = scores(chain[:slot]), law(chain[:slot])
        m = margin(row)
        tried = ranked(row)[1 : branches(m, head.scale, head.b_min, head.b_max)] if m < head.threshold else []
        tried = [k for k in tried if row[k] > -math.inf]
        if tried:
            after = 1 + sum(math.prod(own[slot + 1 : t + 1]) for t in range(slot + 1, slots))
            gain = math.prod(own[:slot]) * sum(q[k] for k in tried) * after
            choices.append((m if head.order == "margin" else -gain, slot, tried))
    choices.sort(key=lambda c: c[:2])

    extras: list[tuple[float, tuple[int, ...]]] = []
    for _, slot, tried in choices[: head.repairs]:
        for k in tried:
            prefix = [*chain[:slot], candidates[slot][k]]
            value = math.prod(own[:slot]) * law(chain[:slot])[k]
            extras.append((value, tuple(prefix)))
            for later in range(slot + 1, slots):
                if head.suffix == "reuse":
                    value, token = value * own[later], chain[later]
                else:
                    choice = best(prefix)
                    value, token = value * law(prefix)[choice], candidates[later][choice]
                prefix.append(token)
                extras.append((value, tuple(prefix)))
    if head.order == "gain":
        extras.sort(key=lambda e: (-e[0], len(e[1])))
    extras = extras[: head.budget(slots) - slots]

    if head.cost != "free":

        def price(rows: int) -> float:
            return head.fixed_cost(slots) + (rows if isinstance(head.cost, str) else head.cost[rows - 1])

        expected = 1 + sum(nodes.values())
        rates = [(expected + sum(v for v, _ in extras[:n])) / price(1 + kept + n) for n in range(len(extras) + 1)]
        extras = extras[: rates.index(max(rates))]
    return nodes | {prefix: value for value, prefix in extras}
