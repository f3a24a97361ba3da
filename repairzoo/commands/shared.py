"""What the commands share: options, errors without tracebacks, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any

import typer

from repairzoo.errors import RepairZooError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text; errors too.")]


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Proposal(str, Enum):
    argmax = "argmax"
    sampled = "sampled"


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """One clear message and exit code 2 for every error that is raised on purpose; others keep their traceback."""
    try:
        yield
    except RepairZooError as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        else:
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))
