"""One self-contained HTML page of a raw file: tables, and plots by matplotlib as inline SVG.

The plots use placeholder colours that become CSS variables, so that one picture is readable on light and on dark. Equal
input gives equal bytes: no dates, and ids that depend on the plot alone.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repairzoo.bench import report
from repairzoo.bench.measure import BASELINE
from repairzoo.bench.others import WHAT
from repairzoo.bench.report import Row
from repairzoo.errors import InvalidInput

_INK, _FAINT = "#010203", "#040506"  # text and axes; grid
_STAGES = ("draft", "head", "verify", "accept", "commit", "host", "step", "decode")
# light and dark: Okabe and Ito's colours, which differ for the colour-blind too, shifted to keep contrast on the ground
_LIGHT = ("#0072b2", "#c2570c", "#007a5a", "#a8437f", "#8a6d00", "#7a4fb0", "#555555", "#2f7fb8")
_DARK = ("#6cb8ee", "#f0924d", "#4cc9a0", "#e58fc2", "#e0c04a", "#b898ea", "#bbbbbb", "#9fd3f5")
_SERIES = tuple(f"#0a0b{16 + i:02x}" for i in range(len(_LIGHT)))

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --ground: #ffffff; --faint: #dddddd; --soft: #f4f4f2; %s }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --ground: #17181a; --faint: #3a3c40; --soft: #202225; %s }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { margin-top: 2.5rem; font-size: 1.3rem; }
h3 { margin: 1.75rem 0 .25rem; font-size: 1.05rem; }
p { max-width: 48rem; margin: .5rem 0; }
code { font-size: .92em; }
figure { margin: .5rem 0 1rem; overflow-x: auto; } figure svg { max-width: 100%%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .words { text-align: left !important; white-space: normal; }
thead th { background: var(--soft); vertical-align: bottom; }
table.wide th { white-space: normal; } table.wide td.words { min-width: 14rem; }
summary { cursor: pointer; margin: .5rem 0; }
"""


def page(path: Path) -> str:
    """The page.

    Raises:
        InvalidInput: matplotlib is not installed, or see ``read_raw``.
    """
    manifest, rows = report.read_raw(path)
    pyplot = _pyplot()
    body = [f"<h1>{html.escape(path.stem)}</h1>", f"<p>{html.escape(report.overall(path))}</p>", _GUIDE]
    for number, setting in enumerate(report.settings_of(rows)):
        chosen = report.in_setting(rows, setting)
        body.append(f"<h2>{html.escape(report.describe(setting).capitalize())}</h2>")
        if setting[0] > 0:
            body.append(f"<p>{html.escape(report.SAMPLED_NOTE)}</p>")
        for part in _setting(manifest, chosen, f"{number}", pyplot):
            body.append(part)
    if manifest.get("overhead"):
        body.append("<h2>What a round costs beside its models</h2>" + _beside(manifest["overhead"]))
    if manifest.get("left_out"):
        body.append("<h2>Left out</h2><ul>")
        body += [f"<li>{html.escape(str(why))}</li>" for why in manifest["left_out"]]
        body.append("</ul>")
    light = " ".join(f"--s{i}: {c};" for i, c in enumerate(_LIGHT))
    dark = " ".join(f"--s{i}: {c};" for i, c in enumerate(_DARK))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(path.stem)}: RepairZoo benchmark</title>\n<style>{_STYLE % (light, dark)}</style>\n"
        "</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


_GUIDE = (
    "<p>τ is committed tokens per round, counted after end-of-text and budget. Speed is the time per token of plain "
    "decoding over a cell's, prompt by prompt in the same run: its median, with a bootstrap 95 % interval over "
    "prompts. No speed is shown over a wrong answer.</p>"
)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidInput("plots need the package matplotlib: pip install 'repairzoo[report]'") from error
    matplotlib.use("agg", force=False)
    from matplotlib import pyplot

    return pyplot


def _setting(manifest: dict[str, Any], rows: list[Row], key: str, plt: Any) -> Iterator[str]:
    cells = [c for c in report.drafters(manifest) if report.of_cell(rows, c)]
    others = [c for c in manifest["cells"] if c in WHAT and report.of_cell(rows, c)]
    measured = [*cells, *others]
    yield _table(rows, cells)
    if others:
        yield _others(rows, cells, others)
    speeds = [(c, report.speed_of(rows, c)) for c in measured]
    if any(s is not None for _, s in speeds):
        known = [(c, s) for c, s in speeds if s is not None]
        yield _figure(
            "Decode speed against plain decoding",
            "Line: 1, plain decoding. Bars: 95 % interval.",
            _svg(plt, f"{key}-speed", lambda: _intervals(plt, known, "times plain decoding", 1.0)),
        )
    if cells:
        taus = [(c, report.tau_of(report.of_cell(rows, c))) for c in cells]
        yield _figure(
            "Committed tokens per round τ",
            "Pooled over prompts; bars: 95 % interval.",
            _svg(plt, f"{key}-tau", lambda: _intervals(plt, taus, "τ", None)),
        )
        yield _figure(
            "Acceptance by slot",
            "Share of rounds that accept a slot among those that reach it; dashed: the backbone's own chain.",
            _svg(plt, f"{key}-slots", lambda: _slots(plt, rows, cells)),
        )
        yield _figure(
            "Accepted lengths",
            "Share of rounds by committed tokens, bonus included.",
            _svg(plt, f"{key}-lengths", lambda: _lengths(plt, rows, cells)),
        )
    staged = [c for c in [*cells, BASELINE] if report.stage_shares(report.of_cell(rows, c))]
    if staged:
        yield _figure(
            "Where a round's time goes",
            "Milliseconds a round by stage; plain decoding: one token a round.",
            _svg(plt, f"{key}-stages", lambda: _stages(plt, rows, staged)),
        )
    seen = [(c, p) for c in cells if (p := report.prefixes(report.of_cell(rows, c))) is not None]
    if seen:
        pool = f"{seen[0][1]['pool']:g} candidates"
        text = f"Slots that agree with the answer before the first that does not; oracle: the best of {pool}."
        yield _figure(
            "Native, selected and oracle prefix", text, _svg(plt, f"{key}-prefix", lambda: _prefix(plt, seen))
        )
    if manifest.get("rates") and manifest.get("cost") and rows and rows[0]["batch"] == 1:
        points = list(_roofline_points(manifest, rows, staged))
        if points:
            text = (
                "Each stage of a round: operations per byte, and operations per second reached. The lines are this "
                f"machine's measured bandwidth and rate; counted at {manifest['cost_context']} positions of context."
            )
            yield _figure("Roofline", text, _svg(plt, f"{key}-roof", lambda: _roofline(plt, manifest["rates"], points)))
            yield _floors(manifest, points)


# --- tables -----------------------------------------------------------------------------------------------------------
def _table(rows: list[Row], cells: Sequence[str]) -> str:
    lines = []
    for cell in cells:
        mine = report.of_cell(rows, cell)
        tau, speed = report.tau_of(mine), report.speed_of(rows, cell)
        same, of = report.same_tokens(rows, cell)
        entries = [f"<code>{html.escape(cell)}</code>"]
        entries += [f"{tau[0]:.2f}", f"{tau[1]:.2f}–{tau[2]:.2f}"] if tau[0] else ["–", "–"]
        if report.wrong(rows, cell):
            entries += ["wrong answer", "–"]
        elif speed is None:
            entries += ["–", "–"]
        else:
            entries += [f"{speed[0]:.2f}", f"{speed[1]:.2f}–{speed[2]:.2f}"]
        lines.append([*entries, report._same(rows, cell, same, of), str(len({(r["suite"], r["id"]) for r in mine}))])
    return _grid_of(("cell", "τ", "95 %", "speed", "95 %", "same tokens", "prompts"), lines)


def _others(rows: list[Row], cells: Sequence[str], others: Sequence[str]) -> str:
    lines = []
    for cell, entries in zip(others, report.others_entries(rows, cells, others), strict=True):
        lines.append([f"<code>{html.escape(cell)}</code>", _code(WHAT[cell]), *map(html.escape, entries)])
    heads = ["", "what", *map(_code, report.others_columns(cells))]
    note = f"<h3>Against others</h3><p>{html.escape(report.OTHERS_NOTE)}</p>"
    return note + _grid_of(heads, lines, words=(1,))


def _code(text: str) -> str:
    """Markdown's backticks as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _grid_of(heads: Sequence[str], lines: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A table of HTML texts; ``words``: columns of running text."""
    wide = ' class="wide"' if words else ""
    out = [f'<div class="scroll"><table{wide}><thead><tr>']
    out += [f"<th{_words(column in words)}>{name}</th>" for column, name in enumerate(heads)]
    out.append("</tr></thead><tbody>")
    for entries in lines:
        cells = (f"<td{_words(column in words)}>{entry}</td>" for column, entry in enumerate(entries))
        out.append("<tr>" + "".join(cells) + "</tr>")
    return "".join([*out, "</tbody></table></div>"])


def _words(words: bool) -> str:
    return ' class="words"' if words else ""


def _beside(measured: dict[str, Any]) -> str:
    names = ("round", "target", "backbone", "head")
    note = "<p>Milliseconds; target, backbone and head were measured alone, on the round's own tensors.</p>"
    lines = []
    for cell, o in measured.items():
        entries = [f"<code>{html.escape(cell)}</code>", *(f"{1e3 * o[name]:.1f}" for name in names)]
        lines.append([*entries, *(f"{100 * share:.1f} %" for share in (o["head"] / o["round"], o["share"]))])
    return note + _grid_of(("cell", *names, "head's share", "left"), lines)


def _floors(manifest: dict[str, Any], points: list[tuple[str, str, list[float], float]]) -> str:
    from repairzoo.bench.roofline import floor

    lines = []
    for cell, stage, cost, seconds in points:
        least = floor(cost, manifest["rates"])
        entries = [f"<code>{html.escape(cell)}</code> {stage}", f"{cost[0] / 1e6:.1f}", f"{cost[1] / 1e6:.0f}"]
        lines.append([*entries, f"{1e3 * least:.2f}", f"{1e3 * seconds:.2f}", f"{100 * least / seconds:.0f} %"])
    heads = ("cell, stage", "MB", "million operations", "floor, ms", "measured, ms", "of the floor")
    table = _grid_of(heads, lines)
    return f"<details><summary>Floors by cell and stage</summary>{table}</details>" if len(lines) > 20 else table


# --- plots ------------------------------------------------------------------------------------------------------------
def _figure(title: str, text: str, svg: str) -> str:
    return f"<h3>{html.escape(title)}</h3><p>{html.escape(text)}</p><figure>{svg}</figure>"


def _svg(plt: Any, key: str, draw: Callable[[], Any]) -> str:
    with _style(plt, key):
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
        plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<style type="text/css">.*?</style>', "", text, flags=re.DOTALL)  # it would restyle other plots
    text = re.sub(r'\bid="([^"]+)"', rf'id="p{key}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1p{key}-", text)
    for i, colour in enumerate(_SERIES):
        text = text.replace(colour, f"var(--s{i})")
    text = text.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    title = html.escape(key)
    return text.replace("<svg ", f'<svg role="img" aria-label="plot {title}" ', 1).strip()


@contextmanager
def _style(plt: Any, key: str) -> Iterator[None]:
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": key,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _FAINT,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
    }
    with plt.rc_context(style):
        yield


def _colour(index: int) -> str:
    return _SERIES[index % len(_SERIES)]


def _intervals(plt: Any, cells: Sequence[tuple[str, tuple[float, float, float]]], label: str, one: float | None) -> Any:
    figure, axes = plt.subplots(figsize=(8.5, 0.9 + 0.3 * len(cells)))
    for place, (_, (value, low, high)) in enumerate(cells):
        axes.plot([low, high], [place, place], color=_colour(0), solid_capstyle="round", linewidth=3, alpha=0.45)
        axes.plot([value], [place], "o", color=_colour(0), markersize=6)
        axes.annotate(f"{value:.2f}", (high, place), xytext=(6, 0), textcoords="offset points", va="center", color=_INK)
    axes.set_yticks(range(len(cells)), [name for name, _ in cells])
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if one is not None:
        axes.axvline(one, color=_INK, linewidth=1, linestyle="--")
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    return figure


def _grid(plt: Any, cells: Sequence[str], height: float = 2.1) -> tuple[Any, list[Any]]:
    """One small plot a cell, on shared axes: many lines in one would not be told apart."""
    across = min(4 if len(cells) <= 8 else 6, len(cells))
    width, height = (2.6, height) if across <= 4 else (1.8, 0.75 * height)
    down = -(-len(cells) // across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(width * across + 0.4, height * down + 0.3),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    flat = list(axes.flat)
    for spare in flat[len(cells) :]:
        spare.set_visible(False)
    for axis, cell in zip(flat, cells, strict=False):
        axis.set_title(cell, fontsize=9)
    return figure, flat


def _backbone(cell: str) -> str:
    """The cell of its backbone alone."""
    from repairzoo.bench.matrix import CellSpec

    return CellSpec.parse(cell).backbone


def _slots(plt: Any, rows: list[Row], cells: Sequence[str]) -> Any:
    figure, axes = _grid(plt, cells)
    for axis, cell in zip(axes, cells, strict=False):
        curve = report.slot_acceptance(report.of_cell(rows, cell))
        alone = report.slot_acceptance(report.of_cell(rows, _backbone(cell)))
        if alone and cell != _backbone(cell):
            axis.plot(range(1, len(alone) + 1), [s for s, _ in alone], "--", color=_INK, linewidth=1, alpha=0.6)
        axis.plot(range(1, len(curve) + 1), [share for share, _ in curve], "o-", color=_colour(0), markersize=4)
        axis.set_ylim(0, 1)
        axis.xaxis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])
    figure.supxlabel("slot", fontsize=10, color=_INK)
    figure.supylabel("accepted", fontsize=10, color=_INK)
    return figure


def _lengths(plt: Any, rows: list[Row], cells: Sequence[str]) -> Any:
    figure, axes = _grid(plt, cells)
    for axis, cell in zip(axes, cells, strict=False):
        counts = report.histogram(report.of_cell(rows, cell))
        total = sum(counts.values())
        axis.bar(list(counts), [n / total for n in counts.values()], color=_colour(0), width=0.8)
        axis.grid(axis="x", visible=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("committed tokens", fontsize=10, color=_INK)
    figure.supylabel("rounds", fontsize=10, color=_INK)
    return figure


def _stages(plt: Any, rows: list[Row], cells: Sequence[str]) -> Any:
    figure, axes = plt.subplots(figsize=(8.5, 1.3 + 0.3 * len(cells)))
    shares = [report.stage_shares(report.of_cell(rows, c)) for c in cells]
    names = [s for s in _STAGES if any(s in share for share in shares)]
    names += sorted({s for share in shares for s in share} - set(names))
    left = [0.0] * len(cells)
    for index, name in enumerate(names):
        widths = [1e3 * share.get(name, 0.0) for share in shares]
        axes.barh(range(len(cells)), widths, left=left, color=_colour(index), label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(cells)), cells)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds a round")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3)
    return figure


def _prefix(plt: Any, seen: Sequence[tuple[str, dict[str, float]]]) -> Any:
    figure, axes = plt.subplots(figsize=(8.5, 1.3 + 0.32 * len(seen)))
    for index, (name, marker, size) in enumerate((("native", "s", 9), ("selected", "o", 6), ("oracle", "D", 5))):
        axes.plot(
            [p[name] for _, p in seen], range(len(seen)), marker, color=_colour(index), label=name, markersize=size
        )
    for place, (_, p) in enumerate(seen):
        axes.plot([p["native"], p["oracle"]], [place, place], color=_FAINT, zorder=0)
    axes.set_yticks(range(len(seen)), [name for name, _ in seen])
    axes.set_ylim(len(seen) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("slots a round")
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3)
    return figure


def _roofline_points(
    manifest: dict[str, Any], rows: list[Row], cells: Sequence[str]
) -> Iterator[tuple[str, str, list[float], float]]:
    for cell in cells:
        shares = report.stage_shares(report.of_cell(rows, cell))
        for stage, cost in manifest["cost"].get(cell, {}).items():
            if shares.get(stage, 0) > 0 and cost[0] > 0:
                yield cell, stage, cost, shares[stage]


def _roofline(plt: Any, rates: dict[str, float], points: Sequence[tuple[str, str, list[float], float]]) -> Any:
    figure, axes = plt.subplots(figsize=(8.5, 4.2))
    bandwidth, rate = rates["bytes_per_second"], rates["operations_per_second"]
    intensities = [cost[1] / cost[0] for _, _, cost, _ in points]
    ridge = rate / bandwidth
    low, high = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2
    axes.plot([low, ridge, high], [low * bandwidth / 1e9, rate / 1e9, rate / 1e9], color=_INK, linewidth=1.2)
    stages = [s for s in _STAGES if any(s == stage for _, stage, _, _ in points)]
    for index, name in enumerate(stages):
        chosen = [(cost[1] / cost[0], cost[1] / seconds / 1e9) for _, stage, cost, seconds in points if stage == name]
        axes.plot(
            [x for x, _ in chosen],
            [y for _, y in chosen],
            "o^sDv"[index % 5],
            color=_colour(index),
            label=name,
            markersize=6,
            alpha=0.85,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("billion operations per second")
    axes.legend(loc="lower right")
    return figure
