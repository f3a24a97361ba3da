"""Times of every stage of every round, without a host read inside the round."""

from __future__ import annotations

import time
from typing import Any

import torch

from repairzoo.generation import Clock


class RoundClock(Clock):
    """Takes the place of a session's clock once the prompt has been read.

    On CUDA it records events on the stream, so that a stage is the time that the device spent; elsewhere the host's
    monotonic clock. ``end_round`` separates the rounds.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[str | None, Any]] = [(None, self._stamp())]

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self, stage: str) -> None:
        self._stamps.append((stage, self._stamp()))

    def end_round(self) -> None:
        self._stamps.append((None, None))

    def rounds(self) -> dict[str, list[float]]:
        """Seconds by stage, one entry a round in every list; waits for the device. Sets ``seconds`` to the sums."""
        synchronise(self._device)
        table: list[dict[str, float]] = []
        current: dict[str, float] = {}
        before = self._stamps[0][1]
        for stage, stamp in self._stamps[1:]:
            if stage is None:
                table.append(current)
                current = {}
                continue
            elapsed = before.elapsed_time(stamp) / 1e3 if self._cuda else stamp - before
            current[stage] = current.get(stage, 0.0) + elapsed
            before = stamp
        if table:  # what came after the last round was read belongs to it
            for stage, value in current.items():
                table[-1][stage] = table[-1].get(stage, 0.0) + value
        names = list(dict.fromkeys(name for row in table for name in row))
        columns = {name: [row.get(name, 0.0) for row in table] for name in names}
        self.seconds = {name: sum(values) for name, values in columns.items()}
        return columns


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
