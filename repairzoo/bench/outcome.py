"""What one run of one cell gave, whoever ran it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Every list has one entry a row.

    Attributes:
        tokens: new token ids. finish: ``"stop"`` or ``"length"``.
        accepted: committed tokens of every round, bonus included, after truncation.
        first: tokens that reading the prompt committed, before any round: 1 in our loops.
        seconds: by stage, for the whole batch; ``prefill`` apart. wall: everything after it, measured from outside.
        rounds: seconds by stage and round, for the whole batch; empty where a loop does not tell.
    """

    tokens: list[list[int]]
    finish: list[str]
    accepted: list[list[int]]
    first: list[int]
    seconds: dict[str, float]
    wall: float
    rounds: dict[str, list[float]] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    repaired: list[int] = field(default_factory=list)
    repairs_accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for tokens, accepted, first in zip(self.tokens, self.accepted, self.first, strict=True):
            if first + sum(accepted) != len(tokens):
                raise AssertionError(f"{len(tokens)} tokens, but {first} + {sum(accepted)} were committed")
