"""What the host reads of a round: one packed tensor, copied while the device goes on.

``pack`` and :class:`Launched` belong together: what one writes side by side, the other takes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from repairzoo.decode import RoundOutput


def pack(out: RoundOutput) -> Tensor:
    """All that the host reads of a round in one tensor ``[B, 4 + (D+1) + 2(M-1) + D]`` int64."""
    columns = torch.stack([out.count, out.accepted, out.drafted, out.added], 1)
    return torch.cat([columns, out.emitted, out.repaired.long(), out.branches.long(), out.path], 1)


@dataclass(slots=True)
class Launched:
    """A round on its way.

    Attributes:
        rows: the request's row of every leading row of the result; rows behind them are padding.
        width: tokens that a row may emit, ``D + 1``. nodes: draft nodes, ``M - 1``.
        read: waits for the result and gives it as lists.
    """

    rows: list[int]
    width: int
    nodes: int
    read: Callable[[], list[list[int]]]

    def __iter__(self) -> Iterator[Row]:
        width, nodes = self.width, self.nodes
        for index, (count, accepted, drafted, added, *rest) in zip(self.rows, self.read(), strict=False):
            marks = rest[width:]
            yield Row(
                index, count, accepted, drafted, added, rest[:width], marks[:nodes], marks[nodes:][:nodes],
                marks[2 * nodes :],
            )  # fmt: skip


class Row(NamedTuple):
    """What a round did to one row of the request; see ``RoundOutput``."""

    row: int
    committed: int
    accepted: int
    drafted: int
    added: int
    emitted: list[int]
    repaired: list[int]
    branches: list[int]
    path: list[int]


def read_later(packed: Tensor, pinned: Tensor | None = None) -> Callable[[], list[list[int]]]:
    """Start the copy of ``packed`` to the host; the result waits for it."""
    if packed.device.type != "cuda":
        return packed.tolist
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True) if pinned is None else pinned
    with torch.cuda.device(packed.device):
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

    def read() -> list[list[int]]:
        event.synchronize()
        return host.tolist()

    return read
