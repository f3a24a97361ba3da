"""Tables from raw measurements: the same bytes for the same file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from repairzoo.bench.measure import BASELINE
from repairzoo.errors import InvalidInput

Row = dict[str, Any]


def read_raw(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Manifest and rows of a raw file; ``tau * rounds == committed tokens`` is checked for every row."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not lines or "manifest" not in lines[0]:
        raise InvalidInput(f"{path}: the first line must be the manifest of a measurement")
    for row in lines[1:]:
        if sum(row["accepted"]) + 1 != len(row["tokens"]):
            raise InvalidInput(f"{path}: {row['suite']}/{row['id']}/{row['cell']}: rounds and tokens do not add up")
    return lines[0]["manifest"], lines[1:]


def pooled_tau(rows: Iterable[Row]) -> float:
    """Committed tokens per round over all rows together."""
    rows = list(rows)
    rounds = sum(len(r["accepted"]) for r in rows)
    return sum(sum(r["accepted"]) for r in rows) / rounds if rounds else 0.0


def decode_seconds(row: Row) -> float:
    return sum(value for stage, value in row["seconds"].items() if stage != "prefill")


def ratios(rows: Sequence[Row], cell: str) -> list[float]:
    """Plain decoding's time per token over the cell's, for every prompt and repeat that has both."""
    base = {(r["suite"], r["id"], r["repeat"]): r for r in rows if r["cell"] == BASELINE}
    out = []
    for row in rows:
        other = base.get((row["suite"], row["id"], row["repeat"]))
        if row["cell"] == cell and other is not None and len(row["tokens"]) > 1 and len(other["tokens"]) > 1:
            plain = decode_seconds(other) / (len(other["tokens"]) - 1)
            out.append(plain / (decode_seconds(row) / (len(row["tokens"]) - 1)))
    return out


def same_tokens(rows: Sequence[Row], cell: str) -> tuple[int, int]:
    """Prompts where the cell gave plain decoding's tokens, of how many."""
    base = {(r["suite"], r["id"], r["repeat"]): r["tokens"] for r in rows if r["cell"] == BASELINE}
    pairs = [(r["tokens"], base.get((r["suite"], r["id"], r["repeat"]))) for r in rows if r["cell"] == cell]
    pairs = [(a, b) for a, b in pairs if b is not None]
    return sum(a == b for a, b in pairs), len(pairs)


def table(rows: Sequence[Row], cells: Sequence[str], suites: Sequence[str], of: Callable[[list[Row], str], str]) -> str:
    """A Markdown table: suites down, cells across, and a last row over all suites."""
    lines = ["| suite | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for suite in [*suites, "all"]:
        chosen = [r for r in rows if suite in ("all", r["suite"])]
        lines.append(f"| {suite} | " + " | ".join(of(chosen, cell) for cell in cells) + " |")
    return "\n".join(lines)


def markdown(path: Path) -> str:
    """The tables of one raw file."""
    manifest, rows = read_raw(path)
    cells = [c for c in manifest["cells"] if c != BASELINE]
    suites = sorted({r["suite"] for r in rows})

    def tau(chosen: list[Row], cell: str) -> str:
        mine = [r for r in chosen if r["cell"] == cell]
        return f"{pooled_tau(mine):.2f}" if mine else "–"

    def speed(chosen: list[Row], cell: str) -> str:
        values = sorted(ratios(chosen, cell))
        if not values:
            return "–"
        low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
        return f"{statistics.median(values):.2f} ({low:.2f}–{high:.2f})"

    parts = ["Tokens per round τ (pooled):", "", table(rows, cells, suites, tau)]
    if any(r["cell"] == BASELINE for r in rows):
        parts += [
            "",
            "Decode speed against plain decoding (median of per-prompt ratios, quartiles):",
            "",
            table(rows, cells, suites, speed),
            "",
        ]
        parts += [
            f"`{c}`: same tokens as plain decoding on {a} of {b} prompts."
            for c in cells
            for a, b in [same_tokens(rows, c)]
        ]
    return "\n".join(parts) + "\n"
