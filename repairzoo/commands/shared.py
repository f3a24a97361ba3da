"""What the commands share: options, errors without tracebacks, JSON."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.errors import InvalidInput, RepairZooError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text; errors too.")]


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Proposal(str, Enum):
    argmax = "argmax"
    sampled = "sampled"


TargetName = Annotated[
    str | None, typer.Option(help="Target: a registry name, a folder or a Hub id.", show_default="smollm2-135m")
]
TargetDtype = Annotated[Dtype | None, typer.Option(help="Number format of the target.", show_default="chosen")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...", show_default="chosen")]
Threads = Annotated[int | None, typer.Option(help="Threads on a CPU.", show_default="torch's")]
HeadName = Annotated[str, typer.Option(help="Head: a name, names joined by +, a folder, none.")]
Suites = Annotated[
    str, typer.Option(help="Packaged suites, .jsonl files, datasets:NAME#SPLIT/COLUMN, comma-separated; all.")
]


@contextmanager
def reporting(as_json: bool, interrupted: str = "interrupted") -> Iterator[None]:
    """One clear message and exit code 2 for what a user or the system did wrong, 130 after Ctrl-C (with the line
    ``interrupted``). What is left is a fault of this package, and keeps its traceback."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has gone; typer ends without a word
        raise
    except (RepairZooError, OSError) as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": _words(error)}})
        else:
            sys.stdout.flush()
            print(f"error: {_words(error)}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"\n{interrupted}", file=sys.stderr)
        raise typer.Exit(130) from None


def _words(error: Exception) -> str:
    """The message; of an error of the system, with the file and what to look at."""
    if isinstance(error, RepairZooError) or not isinstance(error, OSError) or not error.strerror:
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename2, error.filename) if isinstance(name, (str, bytes))]
    where = re.sub(r"\.([^/]+)\.[0-9a-f]{12}\.tmp", r"\1", f"{names[0]}: ") if names else ""  # a name of a while
    return f"{where}{error.strerror}; look at the path, its permissions and the room on its disk"


def may_write(option: str, path: Path) -> None:
    """Raise now what writing ``path``, folders that lack included, would raise after the work was done.

    Raises:
        InvalidInput: a folder, or a place where this user may not write.
    """
    if path.is_dir():
        raise InvalidInput(f"{option} {path} is a folder: name a file in it")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InvalidInput(f"{option} {path}: {folder} is a file, not a folder; name another place")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InvalidInput(f"{option} {path}: you may not write there; name another place")


def listed(text: str) -> list[str]:
    """``"a, b"`` -> ``["a", "b"]``, each once, in their order."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def whole(option: str, text: str, least: int = 1, also: str = "") -> int:
    """The whole number that an option holds. Raises ``InvalidInput``; ``also``: what else it may hold."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if number < least:
        raise InvalidInput(f"{option} {text!r}: give a whole number of at least {least}{also and f', or {also}'}")
    return number


def use_threads(threads: int | None) -> None:
    """Threads of products on a CPU; None leaves torch's choice. Raises ``InvalidInput``."""
    if threads is None:
        return
    if threads < 1:
        raise InvalidInput(f"--threads {threads}: give at least 1")
    import torch

    torch.set_num_threads(threads)


def print_json(value: Any) -> None:
    """One object on one line; JSON has no NaN and no infinity, so they are null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
