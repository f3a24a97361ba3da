"""Static buffers whose addresses never change, and the rounds that were captured in them.

``decode.round`` stays the only mathematics: an :class:`Arena` captures it once per :class:`Key`. :class:`Graphs` keeps
the arenas of one ``Zoo`` and leases them to its runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repairzoo import capacity
from repairzoo.capacity import leaves, position_bucket, position_buckets, rebuild, replace_each, row_bucket
from repairzoo.capture import Backend
from repairzoo.decode import Engine, State, new_state, round
from repairzoo.launched import pack, read_later
from repairzoo.row_law import RowLaw, filters_of
from repairzoo.sampling import Law, at_least_float32

_AHEAD = 1024  # new tokens that a run's buffers hold at first; they grow by buckets when an answer gets longer
_EOS = 8  # end-of-text ids that the buffers hold at first


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

    @torch.inference_mode(False)  # buffers that are made inside it could not be written outside
    def __init__(self, owner: Graphs, engine: Engine, rows: int, positions: int) -> None:
        capacity.require(capacity.plan(engine, rows, positions), engine.target.device)
        self.owner, self.backend, self.rows, self.positions = owner, owner.backend, rows, positions
        self.base = engine
        self.state = new_state(engine, rows, positions)
        list(leaves(self.state))  # refuses a cache whose tensors are not known
        self.state.length.fill_(1)  # a capture without a run behind it still needs an anchor
        self.law = row_law(engine, rows)
        self.eos = torch.full((_EOS,), -1, dtype=torch.int64, device=engine.target.device)
        self.graphs: dict[Key, Graph] = {}
        self.views: dict[int, State] = {}
        self.made_of = self._made_of(engine)
        self.pool = self.backend.new_pool()
        self.sound = True  # False while its buffers are of two sizes

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in leaves(self.state))

    @torch.inference_mode(False)
    def set(self, engine: Engine, law: Law) -> None:
        """Make the buffers say what a request asks for."""
        made_of = self._made_of(engine)
        if made_of != self.made_of or len(engine.eos) > len(self.eos):
            self._forget()
            self.made_of = made_of
            self.eos = self.eos.new_empty(max(len(self.eos), row_bucket(len(engine.eos))))
        self.base = engine
        for buffer in leaves(self.state):
            buffer.zero_()  # a run whose numbers overflowed leaves NaN, and a mask doesn't hide that
        self.state.length.fill_(1)
        self.law.set(law, engine.target.output_weight.shape[0])
        self.eos.fill_(-1)
        self.eos[: len(engine.eos)].copy_(engine.eos)

    def _made_of(self, engine: Engine) -> tuple[Any, ...]:
        """Changes when what was captured is stale: a weight was replaced or trained, or rounds have another form."""
        form = (self.owner.sampled, engine.nodes, engine.pool, engine.kernels, engine.backbone.slots, engine.heads)
        return (*form, *_weights(engine))

    def _forget(self) -> None:
        self.pool = self.backend.new_pool(self.pool)
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

    @torch.inference_mode(False)
    def grow(self, engine: Engine, rows: int, positions: int) -> None:
        """Larger buffers with the same contents; rounds are captured anew. One tensor at a time."""
        rows, positions = max(rows, self.rows), max(positions, self.positions)
        capacity.require(capacity.plan(engine, rows, positions), engine.target.device, held=self.nbytes)
        self._forget()
        self.sound = False
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
            law = row_law(engine, rows)
            for old, new in zip(self.law.tensors, law.tensors, strict=True):
                assert old is not None and new is not None
                new[: self.rows].copy_(old)
            self.law = law
        self.rows, self.positions, self.sound = rows, positions, True

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
        except BaseException:
            self.pool = self.backend.new_pool(self.pool)  # torch may believe that it is still being captured into
            raise
        finally:
            state.done.copy_(done)
        return Graph(replay, packed, shape[0], shape[1])


def _weights(engine: Engine) -> tuple[tuple[int, int], ...]:
    modules = [m for m in (engine.target.model, engine.backbone, *engine.heads) if isinstance(m, torch.nn.Module)]
    tensors = [p for m in modules for p in m.parameters()]
    tensors += [x for m in modules for x in vars(m).values() if isinstance(x, Tensor)]  # a backbone's calibration
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
            except BaseException:
                self.release(found)
                raise
        return found

    def release(self, arena: Arena) -> None:
        """Take buffers back; those that were left between two sizes are dropped."""
        if arena.sound:
            with self._lock:
                self.free.append(arena)

    def warm_up(self, engine: Engine, rows: int, positions: int) -> None:
        """Capture every bucket up to ``rows`` rows and ``positions`` positions, the largest first."""
        assert isinstance(engine.law, Law)
        rows, positions = row_bucket(rows), position_bucket(positions + engine.slack, self.smallest)
        buckets = position_buckets(1 + engine.slack, positions, self.smallest)
        with capacity.fits():
            arena = self.lease(engine, rows, positions)
            try:
                arena.set(engine, engine.law)
                width = rows
                while width:
                    arena.capture(width, buckets, filters_of(engine.law))
                    width //= 2
            finally:
                self.release(arena)


def row_law(engine: Engine, rows: int, law: Law | None = None) -> RowLaw:
    """The tensors of a law for an engine's scores: greedy with every filter, or those that ``law`` needs, set to it."""
    target = engine.target
    dtype = at_least_float32(torch.empty(0, dtype=target.dtype)).dtype
    tensors = RowLaw.empty(rows, target.output_weight.shape[0], dtype, target.device)
    if law is not None:
        tensors = tensors.only(filters_of(law))
        tensors.set(law, target.output_weight.shape[0])
    return tensors
