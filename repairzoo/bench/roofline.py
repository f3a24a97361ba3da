"""The least time that a machine needs for the stages of a round, by what ``costs`` counts of them.

A stage cannot be faster than the larger of its least bytes over the bandwidth and its operations over the rate.
"""

from __future__ import annotations

from repairzoo.costs import costs, plain_cost
from repairzoo.target import Target
from repairzoo.zoo import Zoo

Stages = dict[str, list[float]]  # stage -> [bytes, operations]


def round_cost(zoo: Zoo | None, target: Target, context: int) -> Stages:
    """By stage, of one row; for plain decoding (None) the one step.

    Raises:
        InvalidInput: no room for a round after so much context.
    """
    table = [plain_cost(target, context=context)] if zoo is None else costs(zoo, context=context)[:-1]
    return {cost.part: [float(cost.least), float(cost.operations)] for cost in table}


def floor(cost: list[float], rates: dict[str, float]) -> float:
    """Seconds that ``[bytes, operations]`` take at least."""
    return max(cost[0] / rates["bytes_per_second"], cost[1] / rates["operations_per_second"])
