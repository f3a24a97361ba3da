"""Memory that a run will hold, known before any of it is allocated; and the sizes that captured rounds come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from repairzoo.errors import DoesNotFit, InvalidInput

if TYPE_CHECKING:
    from repairzoo.decode import Engine

_SMALLEST = 256  # positions of the smallest bucket
_MARGIN = 0.05  # share of the free memory that is left alone: fragments, library workspaces


# --- buckets ----------------------------------------------------------------------------------------------------------
def position_bucket(positions: int, smallest: int = _SMALLEST) -> int:
    """The least bucket that holds ``positions``: two sizes an octave (256, 384, 512, 768, ...), so that at most a third
    of what attention reads is padding."""
    size = smallest
    while size < positions:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def position_buckets(least: int, most: int, smallest: int = _SMALLEST) -> list[int]:
    """All buckets from that of ``least`` to that of ``most`` positions, largest first."""
    sizes = [position_bucket(least, smallest)]
    while sizes[-1] < most:
        sizes.append(position_bucket(sizes[-1] + 1, smallest))
    return sizes[::-1]


def row_bucket(rows: int) -> int:
    """The least power of two that holds ``rows``."""
    return 1 << (rows - 1).bit_length()


# --- caches as trees of tensors ---------------------------------------------------------------------------------------
def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of a cache: a tensor, None, a list, tuple, dict or dataclass of those.

    Raises:
        InvalidInput: something else; static buffers need to know every tensor.
    """
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for _, item in _items(value):
            yield from leaves(item)


def rebuild(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A cache of the same shape with every tensor changed."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else change(value)
    new = {key: rebuild(item, change) for key, item in _items(value)}
    if isinstance(value, dict):
        return new
    if dataclasses.is_dataclass(value):
        return type(value)(**new)
    if hasattr(value, "_fields"):
        return type(value)(*new.values())
    return type(value)(new.values())


def replace_each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``rebuild`` in place where the container can be written, so that no two whole caches are held at once."""
    if value is None or isinstance(value, (Tensor, tuple)):
        return rebuild(value, change)
    for key in [key for key, _ in _items(value)]:
        if isinstance(value, (list, dict)):
            value[key] = replace_each(value[key], change)
        else:
            setattr(value, key, replace_each(getattr(value, key), change))
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(value):
        return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return iter(value.items())
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value))
    raise InvalidInput(
        f"a cache holds a {type(value).__name__}; its tensors lie in lists, tuples, dicts or dataclasses, or its rows "
        "cannot be moved and its rounds not captured"
    )


# --- the plan ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of ``rows`` rows with room for ``positions`` positions holds beside the weights, in bytes.

    Attributes:
        target_cache, draft_cache: keys, values and features. tokens: ids and counters.
        scratch: estimate of what a round needs while it runs: scores over the vocabulary and their laws.
    """

    rows: int
    positions: int
    target_cache: int
    draft_cache: int
    tokens: int
    scratch: int

    @property
    def total(self) -> int:
        return self.target_cache + self.draft_cache + self.tokens + self.scratch

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}

    def __str__(self) -> str:
        return (
            f"{self.rows} rows x {self.positions} positions: {_size(self.total)} ({_size(self.target_cache)} keys and "
            f"values of the target, {_size(self.draft_cache)} of the draft, {_size(self.scratch)} scratch)"
        )


def plan(engine: Engine, rows: int, positions: int) -> Plan:
    """The plan of a run; nothing is allocated."""
    target, meta = engine.target, torch.device("meta")
    drafted = engine.backbone.new_cache(rows, positions, target.dtype, meta)
    nodes, wide = 1 + engine.budget, 8 if target.dtype == torch.float64 else 4
    verified = nodes * (target.dtype.itemsize + wide)  # bytes of a score, by vocabulary entry
    if not engine.law.greedy:
        verified += nodes * (2 * wide + 2 * 8)  # processed scores, law; the draw accumulates in float64
        if engine.sampled:
            verified += (nodes - 1) * 2 * wide
    vocabulary = target.output_weight.shape[0]
    return Plan(
        rows=rows,
        positions=positions,
        target_cache=sum(x.nbytes for x in leaves(target.new_cache(rows, positions, meta))),
        draft_cache=sum(x.nbytes for x in leaves(drafted)),
        tokens=rows * (8 * positions + 8 * 4),
        scratch=rows * vocabulary * (verified + 2 * wide * engine.backbone.slots),
    )


def require(plan: Plan, device: torch.device, free: int | None = None, held: int = 0) -> None:
    """Raise ``DoesNotFit`` when a plan exceeds what is free, before anything is allocated.

    Args:
        free: bytes; None asks the device (and passes where it cannot say).
        held: bytes that the run already holds and will give back.
    """
    free = available(device) if free is None else free
    if free is None:
        return
    free = int((free + held) * (1 - _MARGIN))
    if plan.total > free:
        raise DoesNotFit(
            f"{plan}; {_size(free)} are free on {device}. Generate fewer rows at once, shorten the prompts, or lower "
            "max_new_tokens"
        )


@contextmanager
def fits() -> Iterator[None]:
    """Raise ``DoesNotFit`` where the device itself refuses memory: a plan only estimates what comes and goes, and a
    prompt is read in larger pieces than a round."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"{str(error).partition('. ')[0]}. Generate fewer rows at once, shorten the prompts, or lower "
            "max_new_tokens"
        ) from error


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated, or None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
