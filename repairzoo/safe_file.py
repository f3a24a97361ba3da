"""Safetensors files and JSON, read strictly and written whole or not at all.

The library that reads safetensors is careful, but its messages name neither the file nor the fix, and it does not look
for non-finite values. Everything here is checked before a byte reaches a tensor: a drafter that loads damaged weights
raises nothing later, it only drafts badly.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from repairzoo.errors import InvalidArtifact

# Parsed JSON takes up to 30 times its text. A header of a file's sixteenth keeps that below twice the file; a real one
# has about 100 bytes a tensor.
SMALL_HEADER, HEADER_PART = 1 << 16, 16
MAX_DIMENSION = 1 << 40
MAX_JSON = 1 << 18  # bytes of a config, an index or a card; real ones have a few thousand
PIECE = 1 << 18  # values looked at together
MAX_DEPTH = 32
FETCH = "fetch or write the file again"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the header describes it; ``begin`` and ``end`` are byte offsets after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated safetensors header: the tensors by name, and the string metadata."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


def parse_json(text: str | bytes, where: str) -> Any:
    """``json.loads`` that refuses duplicate keys, NaN, infinities (``1e999`` too) and nesting beyond ``MAX_DEPTH``.

    Raises:
        InvalidArtifact: with ``where`` (a file name, say) and what is wrong.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise InvalidArtifact(f"{where}: the key {key!r} appears twice; keep one of them")
            out[key] = value
        return out

    def constant(name: str) -> float:
        raise InvalidArtifact(f"{where}: {name} is no JSON number; write a finite value")

    def real(digits: str) -> float:
        value = float(digits)
        return value if isfinite(value) else constant(digits)

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=real)
    except InvalidArtifact:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidArtifact(f"{where}: not valid JSON ({error}); {FETCH}") from error
    # whoever prints or hashes a value walks down it, and the interpreter's own limit is a crash there
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for inner in level if isinstance(inner, (dict, list)) for item in _items(inner)]
        if not level:
            return value
    raise InvalidArtifact(f"{where}: nested more than {MAX_DEPTH} levels deep, so not valid JSON for this; {FETCH}")


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def read_json(path: str | Path) -> Any:
    """The value of a JSON file of ours, strictly parsed: also no integer beyond 64 bits and no broken Unicode.

    Raises:
        InvalidArtifact: no regular file, too large, or see :func:`parse_json`.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidArtifact(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}; {FETCH}")
    try:
        if path.stat().st_size > MAX_JSON:
            raise InvalidArtifact(f"{path}: more than {MAX_JSON} bytes, so no config or index; {FETCH}")
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidArtifact(f"{path}: cannot be read: {error}") from error
    value = parse_json(raw, str(path))
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list):
            rest += item
        elif isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
            raise InvalidArtifact(f"{path}: the text {item!r} holds half a character (a lone surrogate); {FETCH}")
        elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 63:
            raise InvalidArtifact(f"{path}: an integer of more than 64 bits; {FETCH}")
    return value


def read_header(path: str | Path) -> Header:
    """Read and validate the header of a safetensors file against the file's own size; no tensor is read.

    Raises:
        InvalidArtifact: the path is no regular file; the header is truncated, absurdly long or no valid JSON; a key is
            duplicated; a dtype is unknown; a shape disagrees with its offsets; offsets overlap, leave holes or do not
            end with the file.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise InvalidArtifact(f"{path}: {what}; give the path of a safetensors file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise InvalidArtifact(f"{path}: {size} bytes cannot hold a safetensors header; {FETCH}")
            (length,) = struct.unpack("<Q", prefix)
            if length > max(SMALL_HEADER, size // HEADER_PART) or 8 + length > size:
                raise InvalidArtifact(
                    f"{path}: the header claims {length} bytes in a file of {size}; "
                    f"it is truncated or no safetensors file; {FETCH}"
                )
            raw = file.read(length)
    except OSError as error:
        raise InvalidArtifact(f"{path}: cannot be read: {error}") from error
    if len(raw) != length or not raw.startswith(b"{"):
        raise InvalidArtifact(f"{path}: the header does not start with '{{'; it is no safetensors file; {FETCH}")
    table = parse_json(raw, f"{path} (header)")
    if not isinstance(table, dict):
        raise InvalidArtifact(f"{path}: the header is no JSON object; {FETCH}")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidArtifact(f"{path}: key '__metadata__' must map strings to strings; {FETCH}")
    tensors = {name: _entry(path, name, value) for name, value in table.items()}
    _check_cover(path, tensors, size - 8 - length)
    return Header(tensors, metadata)


def _entry(path: Path, name: str, value: object) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise InvalidArtifact(f"{where} must have exactly dtype, shape and data_offsets; {FETCH}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidArtifact(f"{where} has dtype {dtype!r}; supported are {', '.join(DTYPES)}; convert the file")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in shape):
        raise InvalidArtifact(f"{where} has the impossible shape {shape!r}; {FETCH}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise InvalidArtifact(f"{where} has the impossible data_offsets {offsets!r}; {FETCH}")
    begin, end = offsets
    needed = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise InvalidArtifact(
            f"{where} needs {needed} bytes for {dtype} {shape}, its data_offsets {offsets} hold {end - begin}; {FETCH}"
        )
    return Entry(DTYPES[dtype], tuple(shape), begin, end)


def _check_cover(path: Path, tensors: dict[str, Entry], available: int) -> None:
    """The tensors must tile the rest of the file: no overlap, no hole, nothing left over."""
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            problem = "overlaps the tensor before it" if entry.begin < at else f"leaves {entry.begin - at} unused bytes"
            raise InvalidArtifact(f"{path}: tensor {name!r} at byte {entry.begin} {problem}; {FETCH}")
        at = entry.end
    if at > available:
        raise InvalidArtifact(f"{path}: truncated: its tensors need {at} bytes and {available} are there; {FETCH}")
    if at < available:
        raise InvalidArtifact(f"{path}: {available - at} bytes follow the last tensor; {FETCH}")


def read_safetensors(path: str | Path, *, finite: bool = True) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file onto the CPU, in the dtype of the file.

    Args:
        path: the file.
        finite: refuse NaN and infinities.

    Raises:
        InvalidArtifact: see :func:`read_header`; and a non-finite value, with the tensor's name.
    """
    path = Path(path)
    header = read_header(path)
    try:
        tensors = load_file(path, device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidArtifact(f"{path}: {error}; {FETCH}") from error
    for name, entry in header.tensors.items():
        found = tensors.get(name)
        if found is None or tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
            raise InvalidArtifact(f"{path}: tensor {name!r} does not read back as its header says; {FETCH}")
    if finite:
        require_finite(tensors, path)
    return tensors


def require_finite(tensors: Mapping[str, Tensor], where: str | Path) -> None:
    """Raise :class:`InvalidArtifact` naming every tensor that holds NaN or an infinity."""
    counts = {name: _non_finite(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    bad = [f"{name!r} ({count} of {tensors[name].numel()})" for name, count in counts.items() if count]
    if bad:
        raise InvalidArtifact(f"{where}: non-finite weights in {', '.join(bad)}; train or export the weights again")


def _non_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite; piece by piece, since the comparison takes more room than the values."""
    return sum(int((~torch.isfinite(piece)).sum()) for piece in tensor.detach().reshape(-1).split(PIECE))


def require_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str | Path) -> None:
    """Compare names and shapes with what a module has, and list every difference at once.

    Raises:
        InvalidArtifact: tensors missing, unknown, or of another shape.
    """
    problems = [f"missing {name!r} {tuple(shape)}" for name, shape in expected.items() if name not in tensors]
    problems += [f"unknown {name!r} {tuple(t.shape)}" for name, t in tensors.items() if name not in expected]
    problems += [
        f"{name!r} is {tuple(tensors[name].shape)}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    if problems:
        raise InvalidArtifact(
            f"{where}: the tensors do not match the config: {'; '.join(problems)}; "
            "use the config and the weights of the same release"
        )


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of ``path`` when the block ends well, and vanishes when it does not."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def canonical_json(value: object) -> str:
    """One text for one value: sorted keys, two spaces, a final newline, no NaN."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file by a temporary name; equal input gives equal bytes.

    The library writes metadata in the order of a hash map, which differs from run to run. Here the keys are sorted, and
    tensors lie as the library lays them: widest dtype first, then by name.

    Raises:
        InvalidArtifact: a dtype that :func:`read_safetensors` would refuse, or a non-finite value.
    """
    path = Path(path)
    require_finite(tensors, path)
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise InvalidArtifact(
                f"{path}: tensor {name!r} has dtype {tensor.dtype}; supported are {', '.join(DTYPES)}"
            )
    order = sorted(tensors, key=lambda name: (-_rank(tensors[name].dtype), name))
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.dtype.itemsize
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header += b" " * (-len(header) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def _rank(dtype: torch.dtype) -> int:
    """Place of a dtype in the library's own order, from the narrowest to the widest."""
    order = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
    return order.index(_NAMES[dtype])
