"""Runners: what launches the rounds of a request, one by one or captured.

An :class:`Eager` runner calls ``decode.round``, operation by operation. A :class:`Static` runner leases an arena
(:mod:`repairzoo.graph`), replays the round that was captured in it and reads its result one round late, so that the
device never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from repairzoo import capacity
from repairzoo.capacity import leaves, position_bucket, position_buckets, replace_each, row_bucket
from repairzoo.decode import Engine, Mark, State, round, start
from repairzoo.errors import InvalidInput
from repairzoo.graph import Arena, Graphs, row_law
from repairzoo.launched import Launched, pack, read_later
from repairzoo.row_law import filters_of
from repairzoo.sampling import Law

_BOUND_STEP = 64  # eager: cache columns that take part are rounded up to this, so that shapes seldom change


class Runner(Protocol):
    """Runs the rounds of one request.

    Attributes:
        lag: rounds that may be launched before the oldest is read.
    """

    lag: int

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], seeds: Sequence[int]) -> list[int]:
        """Read the prompts; gives each row's first token."""
        ...

    def end(self, ended: Sequence[bool]) -> None:
        """Rows of the request that ended for a reason the device doesn't know."""
        ...

    def launch(self, lengths: Sequence[int], ended: Sequence[bool], ahead: int, mark: Mark) -> Launched:
        """Launch a round.

        Args:
            lengths: committed tokens of every row of the request, prompt included, as far as they were read.
            ended: rows that have ended as far as was read. ahead: rounds that were launched and not read.
        """
        ...

    def close(self) -> None: ...


class Eager:
    """Rounds launched operation by operation, on buffers of their own.

    Args:
        smallest: take the bounds of captured rounds, buckets of this size and more, so that every product has the shape
            that it has there and rounds alike; None: bounds as tight as pays.
    """

    def __init__(self, engine: Engine, smallest: int | None = None) -> None:
        self.engine, self.smallest = engine, smallest
        self.lag = 1 if engine.target.device.type == "cuda" else 0
        self.rows: list[int] = []
        self.limits: list[int] = []
        self.bound = 0

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], seeds: Sequence[int]) -> list[int]:
        engine = self.engine
        device = engine.target.device
        room = max(map(len, prompts)) + max(budgets) + engine.slack
        room = room if self.smallest is None else position_bucket(room, self.smallest)
        capacity.require(capacity.plan(engine, len(prompts), room), device)
        if device.type == "cuda" and isinstance(engine.law, Law):
            # dividing by a number rounds otherwise than dividing by a tensor there, and graphs need tensors
            engine = self.engine = replace(engine, law=row_law(engine, 1, engine.law))
        self.rows = list(range(len(prompts)))
        self.limits = [len(p) + b for p, b in zip(prompts, budgets, strict=True)]
        self.state = start(engine, prompts, budgets, seeds, room)
        return _first(self.state)

    def end(self, ended: Sequence[bool]) -> None:
        self.state.done |= _to_device([ended[row] for row in self.rows], self.state.done.device)

    def launch(self, lengths: Sequence[int], ended: Sequence[bool], ahead: int, mark: Mark) -> Launched:
        engine = self.engine
        bound = self._bound(lengths, ahead)
        if bound != self.bound and any(ended[row] for row in self.rows) and self._movable():
            kept = [at for at, row in enumerate(self.rows) if not ended[row]]
            index = _to_device(kept, self.state.done.device)
            replace_each(self.state, lambda x: x[index])
            self.rows = [self.rows[at] for at in kept]
            bound = self._bound(lengths, ahead)
        self.bound = bound
        with _on(self.state.done.device):
            out = round(engine, self.state, bound, mark)
        return Launched(self.rows, out.emitted.shape[1], out.repaired.shape[1], read_later(pack(out)))

    def _bound(self, lengths: Sequence[int], ahead: int) -> int:
        longest = max(min(lengths[row] + ahead * self.engine.slack, self.limits[row]) for row in self.rows)
        if self.smallest is not None:
            return position_bucket(longest + self.engine.slack, self.smallest)
        return min(-(-(longest + self.engine.slack) // _BOUND_STEP) * _BOUND_STEP, self.state.ids.shape[1])

    def _movable(self) -> bool:
        """Rows may change places: no processor knows them by number, and every tensor is known."""
        if self.engine.processor is not None:
            return False
        try:
            return all(x.shape[0] == len(self.rows) for x in leaves(self.state.context))
        except InvalidInput:
            return False

    def close(self) -> None:
        return None


class Static:
    """Captured rounds, replayed on leased buffers; results are read one round late."""

    lag = 1

    def __init__(self, graphs: Graphs, engine: Engine) -> None:
        self.graphs, self.engine = graphs, engine
        self.arena: Arena | None = None
        self.rows: list[int] = []
        self.limits: list[int] = []
        self.width = self.bound = 0
        self.latest: Callable[[], Any] | None = None

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], seeds: Sequence[int]) -> list[int]:
        engine = self.engine
        assert isinstance(engine.law, Law)
        count, self.width = len(prompts), row_bucket(len(prompts))
        self.rows = list(range(count))
        self.limits = [len(p) + b for p, b in zip(prompts, budgets, strict=True)]
        longest = max(map(len, prompts)) + 1
        room = min(max(self.limits), longest + self.graphs.ahead) + engine.slack
        self.arena = arena = self.graphs.lease(engine, self.width, self._bucket(room))
        self.filters = filters_of(engine.law)
        arena.set(engine, engine.law)
        missing = self.width - count  # rows of padding have one token and are done at once
        view = arena.engine(self.width, self.filters)
        state = start(
            view,
            [*prompts, *[prompts[0][:1]] * missing],
            [*budgets, *[1] * missing],
            [*seeds, *[0] * missing],
            into=arena.view(self.width),
        )
        first = _first(state)[:count]
        if any(b > 1 for b in budgets):
            arena.capture(self.width, self._range(longest, min(room, arena.positions)), self.filters)
        return first

    def _bucket(self, positions: int) -> int:
        return position_bucket(positions, self.graphs.smallest)

    def _range(self, least: int, most: int) -> list[int]:
        return position_buckets(least + self.engine.slack, most, self.graphs.smallest)

    def end(self, ended: Sequence[bool]) -> None:
        assert self.arena is not None
        padding = self.width - len(self.rows)
        done = self.arena.view(self.width).done
        done.logical_or_(_to_device([ended[row] for row in self.rows] + [True] * padding, done.device))

    def launch(self, lengths: Sequence[int], ended: Sequence[bool], ahead: int, mark: Mark) -> Launched:
        arena, open_rows = self.arena, [row for row in self.rows if not ended[row]]
        assert arena is not None
        bound = self._bound(lengths, ahead)
        changes = bound != self.bound or row_bucket(max(len(open_rows), 1)) < self.width
        if changes and 0 < len(open_rows) < len(self.rows):
            self._compact(open_rows)
            bound = self._bound(lengths, ahead)
        if bound > arena.positions:
            most = min(max(self.limits), 2 * arena.positions) + self.engine.slack
            arena.grow(self.engine, arena.rows, self._bucket(max(most, bound)))
            arena.capture(self.width, [b for b in self._range(1, arena.positions) if b >= bound], self.filters)
        self.bound = bound
        graph = arena.graph(self.width, bound, self.filters)
        graph.replay()
        mark("launch")
        self.latest = graph.read()
        return Launched(list(self.rows), graph.width, graph.nodes, self.latest)

    def _bound(self, lengths: Sequence[int], ahead: int) -> int:
        slack = self.engine.slack
        return self._bucket(max(min(lengths[row] + ahead * slack, self.limits[row]) for row in self.rows) + slack)

    def _compact(self, keep: list[int]) -> None:
        """Move the rows that go on to the front; those that have ended cost no further work."""
        assert self.arena is not None
        at = [self.rows.index(row) for row in keep]
        width = row_bucket(len(keep))
        padding = width - len(keep)
        if at == list(range(len(keep))):  # they are at the front; what is behind them has ended
            # far behind the bound, a window would leave a row nothing to look at, and its NaN would outlive it
            self.arena.view(width).length[len(keep) :].fill_(1)
        else:
            device = self.engine.target.device
            index = _to_device(at + at[:1] * padding, device)
            done = _to_device([False] * len(keep) + [True] * padding, device)
            for buffer in leaves(self.arena.view(self.width)):
                buffer[:width].copy_(buffer.index_select(0, index))
            self.arena.view(width).done.logical_or_(done)
        self.rows, self.width = keep, width

    def close(self) -> None:
        if self.arena is None:
            return
        arena, self.arena = self.arena, None
        try:
            if self.latest is not None:
                self.latest()  # a run that is given up has a round on its way, and the next may use another stream
        finally:
            self.graphs.release(arena)


def _to_device(values: list[Any], device: torch.device) -> Tensor:
    """Without a wait for the device."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Fused kernels run on the current device, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _first(state: State) -> list[int]:
    return state.ids.gather(1, (state.length - 1)[:, None])[:, 0].tolist()


def runner(engine: Engine, graphs: Graphs | None) -> Runner:
    """What runs a request: captured rounds where there are graphs, unless its processors need the host.

    Raises:
        InvalidInput: they do, and graphs are required.
    """
    if graphs is None or (engine.processor is not None and not graphs.required):
        return Eager(engine)
    if engine.processor is not None:
        raise InvalidInput("logits_processor runs on the host and cannot be captured: build with cuda_graphs='auto'")
    return Static(graphs, engine)
