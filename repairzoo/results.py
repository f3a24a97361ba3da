"""What a run returns: tokens, text, why each row ended, and the accounting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Accounting of a run; every list has one entry a row.

    Attributes:
        accepted: committed tokens of each round, bonus included, after end-of-text, stop strings and budget. The
            first token of a row comes from reading the prompt and belongs to no round.
        drafted: draft tokens that the target verified. agreed: those it accepted, before truncation.
        repaired: chain slots where the heads chose another token than the backbone.
        repairs_accepted: repaired tokens that were committed.
        branches: branches of the trees that were proposed (CURE's, or of a best-first tree): nodes with an elder
            sibling. branches_accepted: those whose first token was committed, which a chain would not have had.
        branch_nodes: draft nodes that were verified beside the first path (branch 0).
        surplus: tokens that a round committed behind the row's end and that were never given out: the host finds stop
            strings and criteria after the fact, on a GPU one round later.
        idle_rounds: rounds that were launched before it was known that every row had ended.
        seconds: wall time by stage (``prefill``, ``draft``, ``head``, ``verify``, ``accept``, ``commit``, ``host``; of
            captured rounds ``prefill``, ``launch``, ``wait``, ``host``).
    """

    accepted: list[list[int]]
    drafted: list[int]
    agreed: list[int]
    repaired: list[int]
    repairs_accepted: list[int]
    seconds: dict[str, float] = field(default_factory=dict)
    branches: list[int] = field(default_factory=list)
    branches_accepted: list[int] = field(default_factory=list)
    branch_nodes: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    idle_rounds: int = 0

    @property
    def rounds(self) -> int:
        return sum(len(row) for row in self.accepted)

    @property
    def rounds_per_row(self) -> list[int]:
        return [len(row) for row in self.accepted]

    @property
    def tau(self) -> float:
        """Committed tokens per round, pooled over rows; 0.0 when no round ran."""
        return sum(map(sum, self.accepted)) / self.rounds if self.rounds else 0.0

    @property
    def tau_per_row(self) -> list[float]:
        return [sum(row) / len(row) if row else 0.0 for row in self.accepted]

    @property
    def decode_seconds(self) -> float:
        """Everything after the prompt was read."""
        return sum(value for stage, value in self.seconds.items() if stage != "prefill")

    def as_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "tau_per_row": self.tau_per_row,
            "rounds": self.rounds,
            "rounds_per_row": self.rounds_per_row,
            "accepted": self.accepted,
            "drafted": self.drafted,
            "agreed": self.agreed,
            "repaired": self.repaired,
            "repairs_accepted": self.repairs_accepted,
            "branches": self.branches,
            "branches_accepted": self.branches_accepted,
            "branch_nodes": self.branch_nodes,
            "surplus": self.surplus,
            "idle_rounds": self.idle_rounds,
            "seconds": dict(self.seconds),
        }


@dataclass(slots=True)
class Generation:
    """The result of a run; a single input still gives lists of length one.

    Attributes:
        token_ids: new tokens of each row. text: the same, decoded (None without a tokenizer).
        finish_reason: ``"stop"`` (end-of-text, stop string or a stopping criterion) or ``"length"``.
    """

    token_ids: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    stats: Stats
