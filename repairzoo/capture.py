"""What captures a round and replays it: CUDA graphs, or a recorder that stands in for them on a CPU.

:class:`Recorder` traces the round on tensors without values, or on the buffers themselves, and replays the trace. All
that a CUDA graph would freeze, it freezes as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repairzoo.errors import CaptureFailed

_WARM_UPS = 2  # calls before a capture: libraries take their workspaces, heads their tables

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
        frames = [f for f in frames if not f.filename.endswith(("/capture.py", "/graph.py"))]
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
