"""Rounds that are launched and read apart: one by one, or captured into graphs on static buffers.

``decode.round`` stays the only mathematics. An :class:`Eager` runner calls it. A :class:`Static` runner leases an
:class:`Arena`, buffers whose addresses never change, in which the round was captured once per :class:`Key`; it replays
the captured round and reads its result one round late, so that the device never waits for the host. What captures is
exchangeable: :class:`CudaGraphs`, or :class:`Recorder`, which traces the round on tensors without values and replays
the trace on a CPU. All that a CUDA graph would freeze, the recorder freezes as well.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repairzoo import capacity
from repairzoo.capacity import leaves, position_bucket, position_buckets, rebuild, replace_each, row_bucket
from repairzoo.decode import Engine, Mark, RoundOutput, State, new_state, round, start
from repairzoo.errors import CaptureFailed, InvalidInput
from repairzoo.row_law import RowLaw, filters_of
from repairzoo.sampling import Law, at_least_float32

_BOUND_STEP = 64  # eager: cache columns that take part are rounded up to this, so that shapes seldom change
_AHEAD = 1024  # new tokens that a run's buffers hold at first; they grow by buckets when an answer gets longer
_EOS = 8  # end-of-text ids that the buffers hold at first
_WARM_UPS = 2  # calls before a capture: libraries take their workspaces, heads their tables


# --- one read a round -------------------------------------------------------------------------------------------------
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


# --- runners ----------------------------------------------------------------------------------------------------------
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
    """Rounds launched operation by operation, on buffers of their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lag = 1 if engine.target.device.type == "cuda" else 0
        self.rows: list[int] = []
        self.limits: list[int] = []
        self.bound = 0

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], seeds: Sequence[int]) -> list[int]:
        engine = self.engine
        device = engine.target.device
        room = max(map(len, prompts)) + max(budgets) + engine.slack
        capacity.require(capacity.plan(engine, len(prompts), room), device)
        if device.type == "cuda" and isinstance(engine.law, Law):
            # dividing by a number rounds otherwise than dividing by a tensor there, and graphs need tensors
            engine = self.engine = replace(engine, law=_row_law(engine, 1, engine.law))
        self.rows = list(range(len(prompts)))
        self.limits = [len(p) + b for p, b in zip(prompts, budgets, strict=True)]
        self.state = start(engine, prompts, budgets, seeds, room)
        return _first(self.state)

    def end(self, ended: Sequence[bool]) -> None:
        self.state.done |= torch.tensor([ended[row] for row in self.rows], device=self.state.done.device)

    def launch(self, lengths: Sequence[int], ended: Sequence[bool], ahead: int, mark: Mark) -> Launched:
        engine = self.engine
        bound = self._bound(lengths, ahead)
        if bound != self.bound and any(ended[row] for row in self.rows) and self._movable():
            kept = [at for at, row in enumerate(self.rows) if not ended[row]]
            index = torch.tensor(kept, device=self.state.done.device)
            replace_each(self.state, lambda x: x[index])
            self.rows = [self.rows[at] for at in kept]
            bound = self._bound(lengths, ahead)
        self.bound = bound
        out = round(engine, self.state, bound, mark)
        return Launched(self.rows, out.emitted.shape[1], out.repaired.shape[1], read_later(pack(out)))

    def _bound(self, lengths: Sequence[int], ahead: int) -> int:
        longest = max(min(lengths[row] + ahead * self.engine.slack, self.limits[row]) for row in self.rows)
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
        self.arena.view(self.width).done.logical_or_(
            self._to_device([ended[row] for row in self.rows] + [True] * padding)
        )

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
        return Launched(list(self.rows), graph.width, graph.nodes, graph.read())

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
            index = self._to_device(at + at[:1] * padding)
            done = self._to_device([False] * len(keep) + [True] * padding)
            for buffer in leaves(self.arena.view(self.width)):
                buffer[:width].copy_(buffer.index_select(0, index))
            self.arena.view(width).done.logical_or_(done)
        self.rows, self.width = keep, width

    def _to_device(self, values: list[Any]) -> Tensor:
        tensor, device = torch.tensor(values), self.engine.target.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def close(self) -> None:
        if self.arena is not None:
            self.graphs.release(self.arena)
            self.arena = None


def _first(state: State) -> list[int]:
    return state.ids.gather(1, (state.length - 1)[:, None])[:, 0].tolist()


def _row_law(engine: Engine, rows: int, law: Law | None = None) -> RowLaw:
    target = engine.target
    dtype = at_least_float32(torch.empty(0, dtype=target.dtype)).dtype
    tensors = RowLaw.empty(rows, target.output_weight.shape[0], dtype, target.device)
    if law is not None:
        tensors = tensors.only(filters_of(law))
        tensors.set(law, target.output_weight.shape[0])
    return tensors


# --- static buffers ---------------------------------------------------------------------------------------------------
class Key(NamedTuple):
    """What a captured round is made for; everything else is read from the buffers."""

    rows: int
    bound: int
    filters: tuple[bool, bool, bool]
    confidence: float


@dataclass(slots=True)
class Graph:
    """A captured round. ``packed`` is written by every replay; see ``pack``."""

    replay: Callable[[], None]
    packed: Tensor
    width: int = 0
    nodes: int = 0
    pinned: list[Tensor] = field(default_factory=list)

    def read(self) -> Callable[[], list[list[int]]]:
        """Start the copy of the latest result to the host."""
        if self.packed.device.type != "cuda":
            return self.packed.clone().tolist  # what the next replay overwrites is still to be read
        if not self.pinned:
            self.pinned = [torch.empty(self.packed.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self.pinned.reverse()  # the other one may still be on its way
        return read_later(self.packed, self.pinned[0])


class Arena:
    """Buffers of ``rows`` rows with room for ``positions`` positions, and the rounds that were captured in them.

    Fewer rows use the leading ones, so that one set of buffers serves every batch size; a smaller bound reads fewer
    columns of the same caches.
    """

    def __init__(self, owner: Graphs, engine: Engine, rows: int, positions: int) -> None:
        capacity.require(capacity.plan(engine, rows, positions), engine.target.device)
        self.owner, self.backend, self.rows, self.positions = owner, owner.backend, rows, positions
        self.base = engine
        self.state = new_state(engine, rows, positions)
        list(leaves(self.state))  # refuses a cache whose tensors are not known
        self.state.length.fill_(1)  # a capture without a run behind it still needs an anchor
        self.law = _row_law(engine, rows)
        self.eos = torch.full((_EOS,), -1, dtype=torch.int64, device=engine.target.device)
        self.graphs: dict[Key, Graph] = {}
        self.views: dict[int, State] = {}
        self.weights = _weights(engine)
        self.pool = self.backend.new_pool()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in leaves(self.state))

    def set(self, engine: Engine, law: Law) -> None:
        """Make the buffers say what a request asks for."""
        weights = _weights(engine)
        if weights != self.weights or len(engine.eos) > len(self.eos):
            self._forget()
            self.weights = weights
            self.eos = self.eos.new_empty(max(len(self.eos), row_bucket(len(engine.eos))))
        self.base = engine
        self.state.length.fill_(1)  # nothing that lies behind a bound is left from the run before
        self.law.set(law, engine.target.output_weight.shape[0])
        self.eos.fill_(-1)
        self.eos[: len(engine.eos)].copy_(engine.eos)

    def _forget(self) -> None:
        self.pool = self.backend.new_pool()
        self.graphs.clear()
        self.views.clear()

    def view(self, rows: int) -> State:
        """The state of the leading rows."""
        if rows not in self.views:
            self.views[rows] = rebuild(self.state, lambda x: x[:rows])
        return self.views[rows]

    def engine(self, rows: int, filters: Sequence[bool]) -> Engine:
        """The engine that reads its law and its end-of-text ids from the buffers."""
        law = self.law.only(filters).leading(rows)
        return replace(self.base, law=law, eos=self.eos, sampled=self.owner.sampled, trim=False)

    def grow(self, engine: Engine, rows: int, positions: int) -> None:
        """Larger buffers with the same contents; rounds are captured anew. One tensor at a time."""
        rows, positions = max(rows, self.rows), max(positions, self.positions)
        capacity.require(capacity.plan(engine, rows, positions), engine.target.device, held=self.nbytes)
        self._forget()
        target, meta = engine.target, torch.device("meta")
        shapes = [
            *leaves(target.new_cache(rows, positions, meta)),
            *leaves(engine.backbone.new_cache(rows, positions, target.dtype, meta)),
        ]
        state = self.state
        sizes = iter([(rows, positions), (rows,), (rows,), (rows,), (rows,), *(x.shape for x in shapes)])

        def larger(old: Tensor) -> Tensor:
            new = torch.zeros(next(sizes), dtype=old.dtype, device=old.device)
            new[tuple(slice(0, n) for n in old.shape)].copy_(old)
            return new

        state.ids, state.length, state.limit, state.done, state.seed = (
            larger(x) for x in (state.ids, state.length, state.limit, state.done, state.seed)
        )
        replace_each(state.kv, larger)
        state.context = replace_each(state.context, larger)
        if rows > self.rows:
            state.length[self.rows :] = 1
            law = _row_law(engine, rows)
            for old, new in zip(self.law.tensors, law.tensors, strict=True):
                assert old is not None and new is not None
                new[: self.rows].copy_(old)
            self.law = law
        self.rows, self.positions = rows, positions

    def capture(self, rows: int, bounds: Sequence[int], filters: tuple[bool, bool, bool]) -> None:
        """Capture what is missing, the largest first: the smaller ones live in its memory."""
        for bound in sorted(bounds, reverse=True):
            self.graph(rows, bound, filters)

    def graph(self, rows: int, bound: int, filters: tuple[bool, bool, bool]) -> Graph:
        """The round of this bucket, captured if it has not been.

        Raises:
            CaptureFailed: naming the operation.
        """
        key = Key(rows, bound, filters, self.base.confidence)
        if key not in self.graphs:
            self.graphs[key] = self._capture(key)
        return self.graphs[key]

    def _capture(self, key: Key) -> Graph:
        engine, state = self.engine(key.rows, key.filters), self.view(key.rows)
        shape = [0, 0]
        law: Any = engine.law
        static = (state, law, engine.eos)

        def make(tensors: Sequence[Tensor]) -> Tensor:
            these = iter(tensors)
            state_, law_, eos_ = rebuild(static, lambda _: next(these))
            out = round(replace(engine, law=law_, eos=eos_), state_, key.bound)
            shape[:] = out.emitted.shape[1], out.repaired.shape[1]
            return pack(out)

        done = state.done.clone()
        state.done.fill_(True)  # warm-ups run, and must commit nothing
        try:
            replay, packed = self.backend.capture(make, list(leaves(static)), self.pool, str(key))
        finally:
            state.done.copy_(done)
        return Graph(replay, packed, shape[0], shape[1])


def _weights(engine: Engine) -> tuple[tuple[int, int], ...]:
    """Changes when a weight is replaced or trained: what was captured of it is then stale."""
    modules = [engine.target.model, engine.backbone, *engine.heads]
    tensors = [p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()]
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in tensors)


class Graphs:
    """The buffers of one ``Zoo``, kept between its runs.

    A run leases buffers and has them alone; runs at the same time get buffers of their own.

    Args:
        backend: what captures. smallest: positions of the smallest bucket, a power of two.
        ahead: new tokens that are planned for at first. required: refuse what cannot be captured.

    Attributes:
        sampled: chains are drawn from their law, also where a row's is all mass on one token.
    """

    def __init__(self, backend: Backend, smallest: int = 256, ahead: int = _AHEAD, required: bool = False) -> None:
        self.backend, self.smallest, self.ahead, self.required = backend, smallest, ahead, required
        self.sampled = False
        self.free: list[Arena] = []
        self._lock = threading.Lock()

    def lease(self, engine: Engine, rows: int, positions: int) -> Arena:
        """Buffers for a run: some that fit, or some that are grown, or new ones.

        Raises:
            DoesNotFit: before anything is allocated.
        """
        with self._lock:
            fitting = [a for a in self.free if a.rows >= rows and a.positions >= positions]
            found = min(fitting or self.free, key=lambda a: a.nbytes, default=None)
            if found is not None:
                self.free.remove(found)
        if found is None:
            return Arena(self, engine, rows, positions)
        if found.rows < rows or found.positions < positions:
            try:
                found.grow(engine, rows, positions)
            except Exception:
                self.release(found)
                raise
        return found

    def release(self, arena: Arena) -> None:
        with self._lock:
            self.free.append(arena)

    def warm_up(self, engine: Engine, rows: int, positions: int) -> None:
        """Capture every bucket up to ``rows`` rows and ``positions`` positions, the largest first."""
        assert isinstance(engine.law, Law)
        rows, positions = row_bucket(rows), position_bucket(positions + engine.slack, self.smallest)
        arena = self.lease(engine, rows, positions)
        try:
            arena.set(engine, engine.law)
            width = rows
            while width:
                arena.capture(width, position_buckets(1, positions, self.smallest), filters_of(engine.law))
                width //= 2
        finally:
            self.release(arena)


# --- what captures ----------------------------------------------------------------------------------------------------
Make = Callable[[Sequence[Tensor]], Tensor]


class Backend(Protocol):
    def new_pool(self) -> Any: ...

    def capture(self, make: Make, static: list[Tensor], pool: Any, what: str) -> tuple[Callable[[], None], Tensor]:
        """Capture ``make(static)``, which works in place; gives its replay, and the tensor that every replay fills.

        Raises:
            CaptureFailed: naming the operation.
        """
        ...


class _Watch(TorchDispatchMode):
    """Remembers the operation that runs."""

    name = "before the first operation"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def _naming(watch: _Watch, what: str) -> Iterator[None]:
    """Turn any failure into ``CaptureFailed`` with the operation and the line of this package that called it."""
    try:
        with watch:
            yield
    except Exception as error:
        parts = ("/repairzoo/", "/heads/", "/backbones/")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if any(p in f.filename for p in parts)]
        frames = [f for f in frames if not f.filename.endswith("/graph.py")]
        where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
        raise CaptureFailed(
            f"the round cannot be captured for {what}: {watch.name}{where} needs a value on the host or cannot run "
            f"in a graph: {error}. Make the part that calls it a pure tensor function, or build with cuda_graphs=False"
        ) from error


class _Slot(NamedTuple):
    """A tensor of the recorded round, by number."""

    number: int


_HOST = {
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default", "nonzero.default", "masked_select.default", "equal.default", "_unique2.default",
        "lift_fresh.default",
    )
}  # fmt: skip


def _indices(func: Any, args: Any) -> list[Any]:
    """What an indexing operation indexes by; a mask there is a hidden ``nonzero``."""
    return list(args[1]) if str(func).startswith(("aten.index.", "aten.index_put")) else []


class _Tape(_Watch):
    """Writes down every operation on tensors without values, so that it can be done again on others."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[tuple[int, int | None]]]] = []
        self.kept = list(inputs)  # alive, so that no other tensor gets the identity of one
        self.slots = {id(x): at for at, x in enumerate(self.kept)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        if self.name in _HOST or any(getattr(x, "dtype", None) is torch.bool for x in _indices(func, args)):
            raise RuntimeError("values move between host and device, or decide about a shape")
        out = func(*args, **(kwargs or {}))
        written = []
        for at, item in enumerate(out) if isinstance(out, (tuple, list)) else [(None, out)]:
            if isinstance(item, Tensor):
                written.append((self._slot(item), at))
        if written:
            self.steps.append((func, self._numbers(args), self._numbers(kwargs or {}), written))
        return out

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.kept)
            self.kept.append(tensor)
        return self.slots[id(tensor)]

    def _numbers(self, value: Any) -> Any:
        """Recorded tensors become slots; all others, the weights, stay what they are."""
        if isinstance(value, Tensor):
            return _Slot(self.slots[id(value)]) if id(value) in self.slots else value
        if isinstance(value, dict):
            return {key: self._numbers(item) for key, item in value.items()}
        return type(value)(map(self._numbers, value)) if type(value) in (list, tuple) else value

    def player(self, result: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        """What does it again on the tensors given, in place; it keeps no tensor of the recording."""
        steps, last, count = self.steps, self.slots[id(result)], len(self.kept)

        def fill(value: Any, found: list[Tensor]) -> Any:
            if type(value) is _Slot:
                return found[value.number]
            if type(value) is dict:
                return {key: fill(item, found) for key, item in value.items()}
            return type(value)([fill(item, found) for item in value]) if type(value) in (list, tuple) else value

        def play(tensors: Sequence[Tensor]) -> Tensor:
            found: list[Any] = [*tensors, *[None] * (count - len(tensors))]
            for func, args, kwargs, written in steps:
                out = func(*fill(args, found), **fill(kwargs, found))
                for slot, at in written:
                    found[slot] = out if at is None else out[at]
            return found[last]

        return play


class Recorder:
    """Captures by writing down what the round does, and replays it; for a CPU.

    Weights must not be packed (``pack=False``) where ``blank``: packed ones are opaque.

    Args:
        blank: record on tensors that have shapes and no values, so that no look at one can even be recorded (slow);
            otherwise on the buffers themselves, which disturbs them as much as a warm-up does.
    """

    def __init__(self, blank: bool = True) -> None:
        self.blank = blank

    def new_pool(self) -> None:
        return None

    def capture(self, make: Make, static: list[Tensor], pool: None, what: str) -> tuple[Callable[[], None], Tensor]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None)
        tensors = [mode.from_tensor(x) for x in static] if self.blank else static
        tape = _Tape(tensors)
        with mode if self.blank else nullcontext(), _naming(tape, what):
            result = make(tensors)
        play, packed = tape.player(result), torch.zeros(result.shape, dtype=torch.int64)

        @torch.no_grad()
        def replay() -> None:
            packed.copy_(play(static))

        return replay, packed


class CudaGraphs:
    """Captures CUDA graphs; all of one arena share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None

    def new_pool(self) -> Any:
        torch.cuda.synchronize(self.device)  # graphs that are dropped for it may still run
        return torch.cuda.graph_pool_handle()

    def capture(self, make: Make, static: list[Tensor], pool: Any, what: str) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self.device):
            self.stream = self.stream or torch.cuda.Stream()
            current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            with _naming(_Watch(), what):
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(_WARM_UPS):
                        make(static)
                current.wait_stream(self.stream)
                with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                    packed = make(static)

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay, packed


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
