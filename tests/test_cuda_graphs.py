"""``CudaGraphs`` on a stand-in for torch's own graphs: what is captured is done again on the very same tensors.

The stand-in keeps the manners of the original that matter: a look at a value fails inside a capture, ending a capture
that failed fails again and leaves its stream the current one, and a pool that a capture failed in is lost.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import VOCAB, Bigram, noisy, prompts
from round_toys import Knowing, backbone_for, head_for
from test_graph import S, eager, recorded, same, target_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from repairzoo import capacity
from repairzoo.capture import _ALONE, CudaGraphs
from repairzoo.errors import CaptureFailed, DoesNotFit
from repairzoo.graph import Graphs

CPU = torch.device("cpu")


class Stream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_local_scalar" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """Writes to the addresses that the capture wrote to."""

    def replay(self) -> None:
        for func, args, kwargs, out in self.tape.steps:
            new = func(*args, **kwargs)
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


class Device:
    """What ``capture`` asks of ``torch.cuda``."""

    def __init__(self) -> None:
        self.main = self.current = Stream()
        self.lost: set[Any] = set()
        self.pools = 0
        self.seen: list[tuple[Any, Any]] = []  # pool and stream of every capture
        self.synchronised = 0

    def synchronize(self, *_: Any) -> None:
        self.synchronised += 1

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def device(self, _: Any):
        yield

    @contextmanager
    def stream(self, stream: Any):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str):
        assert capture_error_mode == "thread_local" and pool not in self.lost
        with ended(can_begin) as free:
            assert not free  # another thread has to wait
        self.seen.append((pool, stream))
        before, self.current, graph.tape = self.current, stream, Tape()
        try:
            with graph.tape:
                yield
        except BaseException:
            self.lost.add(pool)
            raise RuntimeError("operation failed due to a previous error during capture") from None
        self.current = before


@contextmanager
def ended(call: Any):
    """The result of a call in another thread."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    thread.join()
    yield out[0]


def can_begin() -> bool:
    """Whether a capture could begin now."""
    if free := _ALONE.acquire(blocking=False):
        _ALONE.release()
    return free


@pytest.fixture
def cuda(monkeypatch) -> Device:
    device = Device()
    for name in ("synchronize", "graph_pool_handle", "device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return device


def captured(backbone: Any, head: Any = None, **options: Any) -> Any:
    zoo = recorded(backbone, head, **options)
    zoo.graphs = Graphs(CudaGraphs(CPU), 64, 16)
    return zoo


def test_replays_give_the_eager_tokens(cuda):
    """Rows that end at different times, and growth, on addresses that never change."""
    target = target_of()
    zoo = captured(backbone_for("dflash", target, 2), head_for("dels", target), tree=3)
    zoo.graphs = Graphs(zoo.graphs.backend, 16, 4)
    same(zoo, prompts(3, [10, 2]), max_new_tokens=14, temperature=0.9, seed=7)
    (arena,) = zoo.graphs.free
    assert arena.positions == 32 and len({stream for _, stream in cuda.seen}) == 1
    assert len({pool for pool, _ in cuda.seen}) == 2  # another one behind the growth


def test_graphs_hold_what_they_read_and_none_of_what_they_make(cuda):
    """A table that a head makes anew (its cost is counted, say) is read by the graph as before."""
    target = target_of()
    zoo = captured(backbone_for("dflash", target, 2), head_for("dels", target))
    zoo.generate(prompts(1, [5]), max_new_tokens=4)
    (arena,) = zoo.graphs.free
    (graph,) = arena.graphs.values()
    held = {storage(x) for x in graph.replay.held}
    table = zoo.heads[0]._bound.readout
    expected = [table, *zoo.backbone.parameters(), *capacity.leaves(arena.state), arena.eos, arena.law.chosen]
    assert {storage(x) for x in expected} <= held
    touched = {storage(x) for _, args, _, out in graph.replay.graph.tape.steps for x in tensors((args, out))}
    assert len(held) < len(touched) / 2 and storage(graph.packed) not in held


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


class Peeking(Bigram):
    peek = True

    def step(self, prepared, carry, slot, previous, scores):
        return scores * scores.max().item() if self.peek else scores, carry


def test_a_capture_that_fails_names_operation_and_line_and_leaves_everything_usable(cuda):
    head = Peeking(0)
    zoo = captured(noisy(1, S), head)
    with pytest.raises(CaptureFailed, match=r"torch\.Tensor\.item \(\w+\.py:\d+\).*not permitted") as error:
        zoo.generate(prompts(1, [4]), max_new_tokens=9)
    assert "bound=64" in str(error.value) and "previous error" not in str(error.value)
    assert cuda.current is cuda.main
    with ended(can_begin) as free:
        assert free
    head.peek = False
    same(zoo, prompts(1, [4]), max_new_tokens=9)  # in a pool that nothing failed in
    assert len(cuda.seen) == 2 and cuda.seen[0][0] in cuda.lost


def test_arenas_capture_on_streams_of_their_own(cuda):
    """The workspaces of matrix products are the stream's, and two arenas' graphs may run side by side."""
    zoo = captured(noisy(1, S))
    runs = [zoo.stream(prompts(at, [4])[0], max_new_tokens=8) for at in (1, 2)]
    for run in runs:
        next(run)
    assert len({stream for _, stream in cuda.seen}) == len({pool for pool, _ in cuda.seen}) == 2


def test_a_device_without_memory_says_so(cuda, monkeypatch):
    class Greedy(Knowing):
        def draft(self, *rest, **more):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. See docs")

    zoo = captured(Greedy([[1, 2]], S, VOCAB))
    for loop in (zoo, eager(zoo)):
        with pytest.raises(DoesNotFit, match=r"^CUDA out of memory\. Generate fewer"):
            loop.generate(prompts(1, [4]), max_new_tokens=9)
    with pytest.raises(DoesNotFit):
        zoo.warm_up(1, 20)
