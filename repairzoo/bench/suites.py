"""Prompts to measure on: the packaged suites, a JSONL file, or a data set of the ``datasets`` library."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from repairzoo.errors import InvalidInput
from repairzoo.prompt_file import read_prompts
from repairzoo.registry import unknown

SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "aime25", "livecodebench", "mt-bench")
DATASETS = "datasets:"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn of a suite."""

    suite: str
    id: str
    text: str


def load_suite(source: str, count: int | None = None) -> list[Prompt]:
    """Prompts of one suite.

    Args:
        source: the name of a packaged suite; a ``.jsonl`` file whose lines have ``prompt`` and optionally ``id``; or
            ``datasets:NAME[:CONFIG]#SPLIT/COLUMN`` for the ``datasets`` library (``datasets:openai/gsm8k:main#test/
            question``).
        count: at most so many, from the first.

    Raises:
        UnknownName: no such packaged suite.
        InvalidInput: a file or data set without the prompts that were asked for, or without any.
    """
    if count is not None and count < 1:
        raise InvalidInput(f"count={count}: give at least 1 prompt a suite")
    if source.startswith(DATASETS):
        prompts = _from_datasets(source, count)
    elif source.endswith(".jsonl"):
        prompts = _from_lines(Path(source).expanduser(), Path(source).stem)
    elif source in SUITES:
        prompts = _from_lines(Path(str(files("repairzoo.bench") / "prompts" / f"{source}.jsonl")), source)
    else:
        raise unknown("suite", source, [*SUITES, "FILE.jsonl", f"{DATASETS}NAME#SPLIT/COLUMN"])
    if not prompts:
        raise InvalidInput(f"suite {source!r} holds no prompts")
    if len({p.id for p in prompts}) != len(prompts):
        raise InvalidInput(f"suite {source!r}: two prompts have the same id")
    return prompts[:count]


def _from_lines(path: Path, name: str) -> list[Prompt]:
    return [Prompt(name, str(row.get("id", row["line"])), row["prompt"]) for row in read_prompts(path)]


def _from_datasets(source: str, count: int | None) -> list[Prompt]:
    where, _, column = source.removeprefix(DATASETS).rpartition("/")
    where, _, split = where.partition("#")
    if not (where and split and column):
        raise InvalidInput(f"suite {source!r}: write {DATASETS}NAME[:CONFIG]#SPLIT/COLUMN")
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInput(f"suite {source!r} needs the package datasets: pip install 'repairzoo[datasets]'") from error
    name, _, config = where.partition(":")
    path = Path(name)
    given: dict[str, Any] = (
        {"path": "json", "data_files": name} if path.suffix in (".json", ".jsonl") else {"path": name}
    )
    if config:
        given["name"] = config
    rows = load_dataset(**given, split=split)
    if column not in rows.column_names:
        raise InvalidInput(f"suite {source!r}: no column {column!r}; there are {', '.join(rows.column_names)}")
    rows = rows if count is None else rows.select(range(min(count, len(rows))))
    return [Prompt(f"{path.stem}-{split}", str(i), str(text)) for i, text in enumerate(rows[column])]
