"""What captures a round and replays it: CUDA graphs, or a recorder that stands in for them on a CPU.

:class:`Recorder` traces the round on tensors without values, or on the buffers themselves, and replays the trace. All
that a CUDA graph would freeze, it freezes as well.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from repairzoo.errors import CaptureFailed

_WARM_UPS = 2  # calls before a capture: libraries take their workspaces, heads their tables

Make = Callable[[Sequence[Tensor]], Tensor]


class Backend(Protocol):
    def new_pool(self, old: Any = None) -> Any:
        """Memory for the temporaries of rounds that never run side by side; ``old``: the pool that it replaces."""
        ...

    def capture(self, make: Make, static: list[Tensor], pool: Any, what: str) -> tuple[Callable[[], None], Tensor]:
        """Capture ``make(static)``, which works in place; gives its replay, and the tensor that every replay fills.

        Raises:
            CaptureFailed: naming the operation.
        """
        ...


class _Watch(TorchFunctionMode):
    """Remembers the operation that runs, and every tensor that was there before: a graph knows it by its address.

    A mode of functions, not of dispatch: under one of dispatch torch takes apart what it fuses otherwise, so that a
    graph would hold other kernels than the eager round runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: CaptureFailed | None = None
        self.held: dict[int, Tensor] = {}  # by storage
        self._function: Any = None
        self._made: set[int] = set()

    @property
    def name(self) -> str:
        function = self._function
        if function is None:
            return "before the first operation"
        return resolve_name(function) or getattr(function, "__qualname__", str(function))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch._C._set_grad_enabled:  # runs on the way out of what failed, too
            self._function = func
        for x in _tensors((args, kwargs)):
            if (storage := _storage(x)) not in self._made:
                self.held.setdefault(storage, x)
        out = func(*args, **kwargs)
        self._made.update(storage for x in _tensors(out) if (storage := _storage(x)) not in self.held)
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _naming(watch: _Watch | _Tape, what: str) -> Iterator[None]:
    """Turn any failure into ``CaptureFailed`` with the operation and the line of this package that called it. A lack of
    memory passes."""
    try:
        with watch:
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if watch.failed is not None:  # ending a capture that failed fails once more
            raise watch.failed  # noqa: B904
        parts = ("/repairzoo/", "/heads/", "/backbones/")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if any(p in f.filename for p in parts)]
        frames = [f for f in frames if not f.filename.endswith(("/capture.py", "/graph.py"))]
        where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
        watch.failed = CaptureFailed(
            f"the round cannot be captured for {what}: {watch.name}{where} needs a value on the host or cannot run "
            f"in a graph: {error}. Make the part that calls it a pure tensor function, or build with cuda_graphs=False"
        )
        raise watch.failed from error


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


class _Tape(TorchDispatchMode):
    """Writes down every operation on tensors without values, so that it can be done again on others."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = "before the first operation"
        self.failed: CaptureFailed | None = None
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

    def new_pool(self, old: None = None) -> None:
        return None

    def capture(self, make: Make, static: list[Tensor], pool: None, what: str) -> tuple[Callable[[], None], Tensor]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None)
        tensors = [mode.from_tensor(x) for x in static] if self.blank else static
        tape = _Tape(tensors)
        # inside it operations are not taken apart, and what is made there cannot be written outside
        with torch.inference_mode(False), torch.no_grad():
            with mode if self.blank else nullcontext(), _naming(tape, what):
                result = make(tensors)
            play, packed = tape.player(result), torch.zeros(result.shape, dtype=torch.int64)

        @torch.inference_mode(False)
        @torch.no_grad()
        def replay() -> None:
            packed.copy_(play(static))

        return replay, packed


# torch captures one graph at a time in a process, and nothing may wait for a whole device meanwhile
_ALONE = threading.RLock()


class _Pool(NamedTuple):
    """Libraries' workspaces belong to the stream: arenas, whose graphs may run side by side, capture on their own."""

    handle: Any
    stream: torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    device: torch.device
    held: list[Tensor]  # what the graph reads by address lives as long as it does, whoever makes a new one meanwhile

    def __call__(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


class CudaGraphs:
    """Captures CUDA graphs; all of one arena share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_pool(self, old: _Pool | None = None) -> _Pool:
        with _ALONE, torch.cuda.device(self.device):
            torch.cuda.synchronize()  # graphs that are dropped for it may still run
            return _Pool(torch.cuda.graph_pool_handle(), torch.cuda.Stream() if old is None else old.stream)

    def capture(self, make: Make, static: list[Tensor], pool: _Pool, what: str) -> tuple[Callable[[], None], Tensor]:
        watch, graph = _Watch(), torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            pool.stream.wait_stream(current)
            with torch.cuda.stream(pool.stream), _naming(_Watch(), what):
                for _ in range(_WARM_UPS):
                    make(static)
            current.wait_stream(pool.stream)
            # other threads go on meanwhile; a capture that fails leaves its stream the current one
            with _ALONE, torch.cuda.stream(current), _naming(watch, what):  # noqa: SIM117 - what ends it may fail, too
                with (
                    torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"),
                    _naming(watch, what),
                ):
                    packed = make(static)
        return _Replay(graph, self.device, list(watch.held.values())), packed
