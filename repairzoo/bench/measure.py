"""Measure: every cell on every prompt, interleaved in one process, one raw JSON line each.

The first line of a raw file is its manifest. A run that was interrupted continues where it stopped. Speed is only
recorded beside the plain decoding of the same prompt, and whether the tokens are the same is recorded with it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from repairzoo.errors import InvalidInput
from repairzoo.results import Generation
from repairzoo.target import Target
from repairzoo.zoo import Zoo, autoregressive

BASELINE = "autoregressive"


@dataclass(slots=True)
class Cell:
    """One way to decode: a name and what runs it (None: plain decoding)."""

    name: str
    zoo: Zoo | None


def run_cell(cell: Cell, target: Target, prompt: str, options: dict[str, Any]) -> Generation:
    if cell.zoo is None:
        return autoregressive(target, prompt, **options)
    return cell.zoo.generate(prompt, **options)


def measure(
    target: Target,
    cells: Sequence[Cell],
    prompts: Sequence[dict[str, str]],
    path: Path,
    *,
    options: dict[str, Any],
    manifest: dict[str, Any] | None = None,
    repeats: int = 1,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Append one line for every (prompt, cell, repeat) that ``path`` doesn't hold yet.

    Args:
        prompts: rows with ``suite``, ``id`` and ``prompt``.
        options: of ``generate``; the same for all cells.
        manifest: further entries of the first line.
    """
    if len({cell.name for cell in cells}) != len(cells):
        raise InvalidInput("cells need different names")
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "manifest": {
            **machine(),
            "target": {"id": target.name, "revision": target.revision, "source": target.source},
            "dtype": str(target.dtype).removeprefix("torch."),
            "options": options,
            "repeats": repeats,
            "cells": [cell.name for cell in cells],
            **(manifest or {}),
        }
    }
    done = _read_done(path)
    if not path.exists() or path.stat().st_size == 0:
        _append(path, head)
    for cell in cells:  # warm-up, the same for all and not recorded
        run_cell(cell, target, prompts[0]["prompt"], {**options, "max_new_tokens": 16})
    work = [(repeat, number) for repeat in range(repeats) for number in range(len(prompts))]
    for repeat, number in tqdm(work, desc=path.name, unit="prompt"):
        row = prompts[number]
        shift = (number + repeat) % len(cells)  # no cell always follows the same other
        for cell in [*cells[shift:], *cells[:shift]]:
            key = (row["suite"], row["id"], cell.name, repeat)
            if key in done:
                continue
            out = run_cell(cell, target, row["prompt"], options)
            _append(path, {"suite": row["suite"], "id": row["id"], "cell": cell.name, "repeat": repeat, **record(out)})


def record(out: Generation) -> dict[str, Any]:
    stats = out.stats
    return {
        "tokens": out.token_ids[0],
        "finish": out.finish_reason[0],
        "accepted": stats.accepted[0],
        "drafted": stats.drafted[0],
        "agreed": stats.agreed[0],
        "repaired": stats.repaired[0],
        "repairs_accepted": stats.repairs_accepted[0],
        "seconds": {stage: round(value, 5) for stage, value in stats.seconds.items()},
    }


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    packages = {name: version(name) for name in ("torch", "transformers", "safetensors", "repairzoo")}
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": packages,
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _read_done(path: Path) -> set[tuple[str, str, str, int]]:
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # the run was killed inside its last line: that cell is measured again
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    return {(r["suite"], r["id"], r["cell"], r["repeat"]) for r in rows if "cell" in r}


def _append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
