"""Figures and Markdown tables from a raw file: the same bytes for the same file."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from repairzoo.bench.measure import BASELINE, read_lines
from repairzoo.bench.others import WHAT
from repairzoo.errors import InvalidInput

Row = dict[str, Any]
RESAMPLES = 1000


def read_raw(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Manifest and rows of a raw file, defaults filled in.

    Checked for every row: the tokens are those of the rounds and the first one(s), exactly. For every timed row: its
    stages sum to the time that was measured around them within 5 %, and its rounds to its stages.

    Raises:
        InvalidInput: no raw file of a measurement, or a row that does not add up.
    """
    manifest, rows = read_lines(path)
    if manifest is None:
        raise InvalidInput(f"{path} is empty: the first line must be the manifest of a measurement (repairzoo bench)")
    if not isinstance(manifest.get("cells"), list):
        raise InvalidInput(f"{path}: its manifest does not say 'cells'; measure again with this version")
    temperature = manifest.get("options", {}).get("temperature", 0.0)
    rows = [{"temperature": temperature, "batch": 1, "row": 0, "first": 1, **row} for row in rows]
    for row in rows:
        where = f"{path}: {row['suite']}/{row['id']}/{row['cell']}"
        if sum(row["accepted"]) + row["first"] != len(row["tokens"]):
            raise InvalidInput(f"{where}: rounds and tokens do not add up")
        stages = decode_seconds(row)
        if "wall" in row and abs(stages - row["wall"]) > 0.05 * row["wall"] + 1e-3:
            raise InvalidInput(f"{where}: stages take {stages:.3f} s, the run around them {row['wall']:.3f} s")
        for stage, values in row.get("rounds", {}).items():
            if abs(sum(values) / 1e6 - row["seconds"].get(stage, 0.0)) > 1e-5 + 1e-6 * len(values):
                raise InvalidInput(f"{where}: the rounds of stage {stage} do not sum to it")
    return manifest, rows


# --- selections -------------------------------------------------------------------------------------------------------
def settings_of(rows: Iterable[Row]) -> list[tuple[float, int]]:
    return sorted({(row["temperature"], row["batch"]) for row in rows})


def in_setting(rows: Iterable[Row], setting: tuple[float, int]) -> list[Row]:
    return [row for row in rows if (row["temperature"], row["batch"]) == setting]


def of_cell(rows: Iterable[Row], cell: str) -> list[Row]:
    return [row for row in rows if row["cell"] == cell]


def _key(row: Row) -> tuple[Any, ...]:
    return row["suite"], row["id"], row["repeat"], row.get("temperature", 0.0), row.get("batch", 1)


# --- figures ----------------------------------------------------------------------------------------------------------
def pooled_tau(rows: Iterable[Row]) -> float:
    """Committed tokens per round over all rows together."""
    rows = list(rows)
    rounds = sum(len(r["accepted"]) for r in rows)
    return sum(sum(r["accepted"]) for r in rows) / rounds if rounds else 0.0


def decode_seconds(row: Row) -> float:
    """Everything after the prompt was read; 0 for a row whose batch's times stand in another row."""
    return sum(value for stage, value in row.get("seconds", {}).items() if stage != "prefill")


def whole_seconds(row: Row) -> float:
    """``decode_seconds`` and the reading of the prompt."""
    return sum(row.get("seconds", {}).values())


def decoded(row: Row) -> int:
    """Tokens that ``decode_seconds`` gave, over the whole batch."""
    return row.get("decoded", len(row["tokens"]) - row.get("first", 1))


def ratios(rows: Sequence[Row], cell: str, against: str = BASELINE, whole: bool = False) -> list[float]:
    """Time per token of plain decoding (or another cell) over the cell's, for every prompt (batch) and repeat that has
    both. ``whole``: with the reading of the prompt, which some loops share out differently."""

    def per_token(row: Row) -> float:
        if whole:
            return whole_seconds(row) / (decoded(row) + row.get("first", 1) * row.get("batch", 1))
        return decode_seconds(row) / decoded(row)

    base = {_key(r): r for r in rows if r["cell"] == against and r.get("seconds")}
    out = []
    for row in rows:
        other = base.get(_key(row))
        if row["cell"] == cell and row.get("seconds") and other is not None and decoded(row) and decoded(other):
            out.append(per_token(other) / per_token(row))
    return out


def same_tokens(rows: Sequence[Row], cell: str) -> tuple[int, int]:
    """Prompts where the cell gave plain decoding's tokens, of how many."""
    base = {_key(r): r["tokens"] for r in rows if r["cell"] == BASELINE}
    pairs = [(r["tokens"], base.get(_key(r))) for r in rows if r["cell"] == cell]
    pairs = [(a, b) for a, b in pairs if b is not None]
    return sum(a == b for a, b in pairs), len(pairs)


def compared(cell: str, temperature: float) -> bool:
    """Whether a cell's tokens can be held against plain decoding's: all but sampled proposals draw by position."""
    return temperature == 0 or "sampled" not in cell.split("@")[1:]


def wrong(rows: Sequence[Row], cell: str) -> int:
    """Answers that differ from plain decoding's where the target was decided: they forbid a speed.

    A sampled proposal draws otherwise (its rows say nothing); a difference in a file that does not judge it counts.
    """
    base = {_key(r): r["tokens"] for r in rows if r["cell"] == BASELINE}
    count = 0
    for row in of_cell(rows, cell):
        expected = base.get(_key(row))
        if expected is None or row["tokens"] == expected or not compared(cell, row.get("temperature", 0.0)):
            continue
        count += not row.get("differs", {}).get("tie", False)
    return count


def interval(values: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
    """Bootstrap 95 % interval over resampled prompts; the same for the same values, in any process."""
    chance = random.Random(0)
    found = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[RESAMPLES - 1 - RESAMPLES // 40]


def tau_of(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Pooled τ with its interval."""
    pairs = [(sum(r["accepted"]), len(r["accepted"])) for r in rows if r["accepted"]]

    def pooled(some: Sequence[tuple[int, int]]) -> float:
        return sum(a for a, _ in some) / sum(b for _, b in some)

    return (pooled(pairs), *interval(pairs, pooled)) if pairs else (0.0, 0.0, 0.0)


def speed_of(
    rows: Sequence[Row], cell: str, against: str = BASELINE, whole: bool = False
) -> tuple[float, float, float] | None:
    """Median ratio to plain decoding (or another cell) with its interval; None without one, or over wrong answers."""
    values = ratios(rows, cell, against, whole)
    if not values or wrong(rows, cell) or wrong(rows, against):
        return None
    return (statistics.median(values), *interval(values, statistics.median))


def slot_acceptance(rows: Iterable[Row]) -> list[tuple[float, int]]:
    """Per slot: the share of rounds that accepted it among those that accepted all slots before, and their number.

    The last round of an answer is cut by the budget or by end-of-text, so it says nothing and is left out.
    """
    counts = [n - 1 for r in rows for n in r["accepted"][:-1]]
    out = []
    for slot in range(max(counts, default=0)):
        reached = sum(c >= slot for c in counts)
        out.append((sum(c > slot for c in counts) / reached, reached))
    return out


def histogram(rows: Iterable[Row]) -> dict[int, int]:
    """Rounds by committed tokens; their sum is the number of rounds."""
    counts: dict[int, int] = {}
    for row in rows:
        for n in row["accepted"]:
            counts[n] = counts.get(n, 0) + 1
    return dict(sorted(counts.items()))


def stage_shares(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds a round by stage, over all rows together."""
    rows = [r for r in rows if r.get("seconds") and r["accepted"]]
    rounds = sum(max(len(r["accepted"]), len(next(iter(r.get("rounds", {}).values()), []))) for r in rows)
    sums: dict[str, float] = {}
    for row in rows:
        for stage, value in row["seconds"].items():
            if stage != "prefill":
                sums[stage] = sums.get(stage, 0.0) + value
    return {stage: value / rounds for stage, value in sums.items()} if rounds else {}


def prefixes(rows: Iterable[Row]) -> dict[str, float] | None:
    """Mean native, selected and oracle prefix (slots a round) and slots fixed and broken a round; None without any."""
    seen = [row["prefix"] for row in rows if "prefix" in row]
    rounds = sum(len(p["native"]) for p in seen)
    if not rounds:
        return None
    means = {name: sum(sum(p[name]) for p in seen) / rounds for name in ("native", "selected", "oracle")}
    return {
        **means,
        "fixed": sum(p["fixed"] for p in seen) / rounds,
        "broken": sum(p["broken"] for p in seen) / rounds,
        "pool": seen[0]["pool"],
        "rounds": rounds,
    }


# --- Markdown ---------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Row], cells: Sequence[str], suites: Sequence[str], of: Callable[[list[Row], str], str]) -> str:
    """A Markdown table: suites down, cells across, and a last row over all suites."""
    lines = ["| suite | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for suite in [*suites, "all"]:
        chosen = [r for r in rows if suite in ("all", r["suite"])]
        lines.append(f"| {suite} | " + " | ".join(of(chosen, cell) for cell in cells) + " |")
    return "\n".join(lines)


def cell_table(rows: Sequence[Row], cells: Sequence[str], tau: bool = True) -> str:
    """A Markdown table: cells down, over all suites."""
    lines = ["| cell | τ (95 %) | speed (95 %) | same tokens |" if tau else "| cell | speed (95 %) | same tokens |"]
    lines.append("|---" * lines[0].count(" | ") + "|---|")
    for cell in cells:
        mine = of_cell(rows, cell)
        same, of = same_tokens(rows, cell)
        cells_ = [
            f"`{cell}`",
            *([_spread(tau_of(mine))] if tau else []),
            _speed(rows, cell),
            _same(rows, cell, same, of),
        ]
        lines.append("| " + " | ".join(cells_) + " |")
    return "\n".join(lines)


def suite_table(rows: Sequence[Row], cells: Sequence[str], suites: Sequence[str]) -> str:
    """A Markdown table of τ: cells down, suites across."""
    lines = ["| cell | " + " | ".join(suites) + " |", "|---" * (len(suites) + 1) + "|"]
    for cell in cells:
        entries = [_tau_entry([r for r in rows if r["suite"] == suite], cell) for suite in suites]
        lines.append(f"| `{cell}` | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def slot_table(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    """Acceptance by slot, cells down."""
    curves = {cell: slot_acceptance(of_cell(rows, cell)) for cell in cells}
    slots = max(map(len, curves.values()), default=0)
    lines = ["| cell | " + " | ".join(map(str, range(1, slots + 1))) + " |", "|---" * (slots + 1) + "|"]
    for cell, curve in curves.items():
        entries = [f"{share:.2f}" for share, _ in curve] + ["–"] * (slots - len(curve))
        lines.append(f"| `{cell}` | " + " | ".join(entries) + " |")
    return lines


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """A table that a reader opens: a page with twenty cells is long."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _spread(value: tuple[float, float, float] | None) -> str:
    return "–" if value is None else f"{value[0]:.2f} ({value[1]:.2f}–{value[2]:.2f})"


def _speed(rows: Sequence[Row], cell: str) -> str:
    return "wrong answer" if wrong(rows, cell) else _spread(speed_of(rows, cell))


def _same(rows: Sequence[Row], cell: str, same: int, of: int) -> str:
    if not of or not compared(cell, rows[0]["temperature"]):
        return "–"
    ties = of - same - wrong(rows, cell)
    return f"{same} of {of}" + (f", {ties} at ties" if ties else "")


def describe(setting: tuple[float, int]) -> str:
    temperature, batch = setting
    return f"temperature {temperature:g}, batch {batch}"


SAMPLED_NOTE = (
    "Answers are drawn: plain decoding and every deterministic proposal take the random number of a position from the "
    "same seed, so that their answers can be compared token by token here too."
)


def drafters(manifest: dict[str, Any]) -> list[str]:
    return [c for c in manifest["cells"] if c != BASELINE and c not in WHAT]


def markdown(path: Path) -> str:
    """The tables of one raw file."""
    manifest, rows = read_raw(path)
    settings = settings_of(rows)
    parts: list[str] = []
    for setting in settings:
        chosen = in_setting(rows, setting)
        if len(settings) > 1:
            parts += [f"**{describe(setting)[0].upper()}{describe(setting)[1:]}**", ""]
        if setting[0] > 0:
            parts += [SAMPLED_NOTE, ""]
        cells = [c for c in drafters(manifest) if of_cell(chosen, c)]
        others = [c for c in manifest["cells"] if c in WHAT and of_cell(chosen, c)]
        parts += _setting_tables(chosen, cells, others)
    parts += _overhead_table(manifest)
    return "\n".join(parts).rstrip("\n") + "\n"


def _setting_tables(rows: Sequence[Row], cells: Sequence[str], others: Sequence[str]) -> list[str]:
    parts: list[str] = []
    suites = sorted({r["suite"] for r in rows})
    with_plain = any(r["cell"] == BASELINE for r in rows)
    if len(cells) > 6:  # a column a cell would not fit
        parts += [
            "Tokens per round τ and decode speed against plain decoding, all suites:",
            "",
            cell_table(rows, cells),
            "",
            *folded("Tokens per round τ by suite", suite_table(rows, cells, suites).splitlines()),
        ]
    elif cells:
        parts += ["Tokens per round τ (pooled):", "", table(rows, cells, suites, _tau_entry), ""]
        if with_plain:
            title = "Decode speed against plain decoding (median of per-prompt ratios, 95 % bootstrap interval):"
            parts += [title, "", table(rows, cells, suites, _speed), ""]
            for cell in cells:
                same, of = same_tokens(rows, cell)
                parts += [f"`{cell}`: same tokens as plain decoding on {_same(rows, cell, same, of)} prompts."]
            parts += [""]
    if len(cells) > 6:
        parts += folded(
            "Share of rounds that accept a slot, of those that accepted all before it", slot_table(rows, cells)
        )
    seen = [(cell, prefixes(of_cell(rows, cell))) for cell in cells]
    if any(p is not None for _, p in seen):
        pool = next(p["pool"] for _, p in seen if p is not None)
        names = ("native", "selected", "oracle", "fixed", "broken")
        lines = ["| cell | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for cell, p in seen:
            if p is not None:
                lines.append(f"| `{cell}` | " + " | ".join(f"{p[n]:.2f}" for n in names) + " |")
        title = (
            "Drafted slots that agree with the answer before the first that does not, a round: of the backbone alone "
            f"(native), with its heads (selected), and the best choice among {pool:g} candidates (oracle)"
        )
        parts += folded(title, lines) if len(cells) > 6 else [f"{title}:", "", *lines, ""]
    if others:
        parts += _others_table(rows, cells, others)
    return parts


OTHERS_NOTE = (
    "Others on the same model and prompts, in the same run. Ratios are their time per token over ours, after the "
    "prompt was read; in the last of them with its reading, since loops differ in what they leave for later."
)


def beside_others(cells: Sequence[str]) -> str:
    """The cell that others are held against: the draft that they load, without a head, where it was measured."""
    return next((c for c in cells if c == "dflash"), cells[0] if cells else BASELINE)


def others_entries(rows: Sequence[Row], cells: Sequence[str], others: Sequence[str]) -> list[list[str]]:
    """One list of texts for each of ``others``: τ, the ratios to plain decoding and to our drafts, same tokens."""
    ours = beside_others(cells)
    out = []
    for cell in others:
        columns = ((BASELINE, False), (ours, False), (ours, True))
        faster = [_spread(speed_of(rows, our, cell, whole)) for our, whole in columns]
        if wrong(rows, cell):
            faster = ["wrong answer"] * len(faster)
        tau = tau_of(of_cell(rows, cell))
        out.append([_spread(tau) if tau[0] else "–", *faster, _same(rows, cell, *same_tokens(rows, cell))])
    return out


def others_columns(cells: Sequence[str]) -> list[str]:
    ours = beside_others(cells)
    return [
        "τ (95 %)",
        "our plain decoding is … times as fast",
        f"`{ours}` is … times as fast",
        f"`{ours}`, the prompt's reading included",
        "same tokens",
    ]


def _others_table(rows: Sequence[Row], cells: Sequence[str], others: Sequence[str]) -> list[str]:
    columns = others_columns(cells)
    lines = [f"| | what | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for cell, entries in zip(others, others_entries(rows, cells, others), strict=True):
        lines.append(f"| `{cell}` | {WHAT[cell]} | {' | '.join(entries)} |")
    return [OTHERS_NOTE, "", *lines, ""]


def _overhead_table(manifest: dict[str, Any]) -> list[str]:
    measured = manifest.get("overhead") or {}
    if not measured:
        return []
    title = "One round, in milliseconds, and what is left of it beside its models, each measured alone"
    lines = ["| cell | round | target | backbone | head (share) | left |", "|---|---|---|---|---|---|"]
    for cell, o in measured.items():
        parts = [f"{1e3 * o[name]:.1f}" for name in ("round", "target", "backbone", "head")]
        parts[-1] += f" ({100 * o['head'] / o['round']:.1f} %)" if o["round"] else ""
        lines.append(f"| `{cell}` | " + " | ".join(parts) + f" | {100 * o['share']:.1f} % |")
    return folded(title, lines) if len(measured) > 6 else [f"{title}:", "", *lines, ""]


def _tau_entry(rows: list[Row], cell: str) -> str:
    mine = of_cell(rows, cell)
    return f"{pooled_tau(mine):.2f}" if mine else "–"


def overall(path: Path) -> str:
    """What was measured, on what: a line for people, from the manifest."""
    manifest, rows = read_raw(path)
    try:
        return _overall(manifest, rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{path}: its manifest does not say {error}; measure again with this version") from error


def _overall(manifest: dict[str, Any], rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in manifest["packages"].items())
    place = manifest.get("gpu") or f"{manifest['cpu']}, {manifest['capability']}, {manifest['threads']} thread(s)"
    prompts = len({(r["suite"], r["id"]) for r in rows})
    target = manifest["target"]
    commits = dict.fromkeys(str(c) for c in (manifest.get("commit"), *(r.get("commit") for r in rows)) if c)
    return (
        f"{target['id']} ({target['source']}), {manifest['dtype']}, on {place}; {prompts} prompts, up to "
        f"{manifest['options']['max_new_tokens']} new tokens, {manifest['repeats']} repeat(s); {manifest['date']}; "
        f"{versions}; commit {', then '.join(commits) or 'not recorded'}"
    )
