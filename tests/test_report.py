"""Tables and the page with plots: figures by hand, equal bytes, nothing from outside, readable in light and dark."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from repairzoo.bench import report
from repairzoo.errors import InvalidInput

ROOT = Path(__file__).resolve().parent.parent


def row(cell: str, accepted: list[int], ms: float, *, number: int = 0, **more) -> dict:
    seconds = {"prefill": 9.0, "draft": 0.2 * ms / 1e3, "verify": 0.8 * ms / 1e3}
    rounds = {name: [round(1e6 * value)] for name, value in seconds.items() if name != "prefill"}
    rounds = {name: values + [0] * (len(accepted) - 1) for name, values in rounds.items()}
    return {
        "suite": "s", "id": str(number), "cell": cell, "repeat": 0, "temperature": 0.0, "batch": 1, "row": 0,
        "tokens": list(range(sum(accepted) + 1)), "finish": "length", "first": 1, "accepted": accepted,
        "seconds": seconds, "wall": ms / 1e3, "decoded": sum(accepted), "rounds": rounds, **more,
    }  # fmt: skip


def write(path: Path, rows: list[dict], **manifest) -> Path:
    head = {
        "schema": 2, "date": "2026-12-01", "packages": {"torch": "2.13.0"}, "cpu": "a <cpu> & more",
        "capability": "AVX2",
        "threads": 1, "gpu": None, "commit": "abc", "dtype": "float32", "repeats": 1,
        "target": {"id": "toy", "revision": None, "source": "made up"}, "options": {"max_new_tokens": 8, "seed": 0},
        "cells": list(dict.fromkeys(r["cell"] for r in rows)), "cost_context": 256,
        "rates": {"bytes_per_second": 1e10, "operations_per_second": 1e11},
        "overhead": {"dflash": {"round": 0.01, "target": 0.008, "backbone": 0.0015, "head": 0.0003, "share": 0.02}},
        "cost": {"dflash": {"draft": [1e6, 2e6], "verify": [1e8, 1e9]}, "autoregressive": {"step": [1e8, 2e8]}},
        **manifest,
    }  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"manifest": head}, *rows]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    chance = random.Random(1)
    rows = []
    for number in range(6):
        rows.append(row("autoregressive", [1] * 12, 60 + number, number=number))
        accepted = [chance.randint(1, 4) for _ in range(3)]
        prefix = {"slots": 5, "pool": 16, "native": [0, 1, 1], "selected": [1, 1, 2], "oracle": [2, 3, 5], "fixed": 2,
                  "broken": 1}  # fmt: skip
        tokens = list(range(sum(accepted) + 1))
        rows[-1]["tokens"] = list(range(13))
        rows.append(row("dflash", accepted, 30, number=number, prefix=prefix, differs={"at": len(tokens), "tie": True}))
        rows.append(row("hf-lookup", [1] * 12, 90, number=number))
    return write(tmp_path_factory.mktemp("report") / "run.jsonl", rows)


@pytest.fixture(scope="module")
def text(raw) -> str:
    pytest.importorskip("matplotlib")
    from repairzoo.bench.page import page

    return page(raw)


def test_figures_by_hand():
    rows = [row("autoregressive", [1] * 6, 30.0), row("dflash", [4, 2], 15.0), row("hf-greedy", [1] * 6, 60.0)]
    assert report.ratios(rows, "dflash") == pytest.approx([2.0])
    assert report.ratios(rows, "dflash", "hf-greedy") == pytest.approx([4.0])
    assert report.histogram(report.of_cell(rows, "dflash")) == {2: 1, 4: 1}
    # the last round is cut by the budget: only the first one tells, three drafts accepted and no fourth seen
    assert report.slot_acceptance(report.of_cell(rows, "dflash")) == [(1.0, 1), (1.0, 1), (1.0, 1)]
    shares = report.stage_shares(report.of_cell(rows, "dflash"))
    assert shares == pytest.approx({"draft": 0.0015, "verify": 0.006})
    assert report.speed_of(rows, "dflash", "hf-greedy") == pytest.approx((4.0, 4.0, 4.0))


def test_slot_acceptance_is_conditional():
    rows = [row("dflash", [1, 3, 2, 1, 1], 10.0)]  # accepted drafts: 0, 2, 1, 0 and a cut round
    assert report.slot_acceptance(rows) == [(0.5, 4), (0.5, 2)]


def test_intervals_hold_the_figure_and_depend_on_nothing_else():
    chance = random.Random(0)
    values = [chance.gauss(1.3, 0.2) for _ in range(40)]
    low, high = report.interval(values, statistics.median)
    assert low < statistics.median(values) < high
    assert high - low < 0.4
    assert report.interval(values, statistics.median) == (low, high)
    wide = report.interval(values[:6], statistics.median)
    assert wide[1] - wide[0] > high - low
    assert report.interval([2.0], statistics.median) == (2.0, 2.0)


def test_a_batch_counts_once():
    first = row("dflash", [2, 2], 10.0, batch=2, decoded=8)
    second = {**row("dflash", [2, 2], 10.0, number=1, batch=2), "row": 1}
    for key in ("seconds", "wall", "decoded", "rounds"):
        del second[key]
    plain = [{**row("autoregressive", [1] * 4, 40.0, batch=2), "decoded": 8}]
    assert report.ratios([*plain, first, second], "dflash") == pytest.approx([4.0])
    assert report.pooled_tau([first, second]) == 2.0


def test_markdown_names_ratios_with_intervals(raw):
    text = report.markdown(raw)
    assert "95 % bootstrap interval" in text
    assert "`dflash` is … times as fast" in text
    assert "| `dflash` | 0.67 | 1.33 | 3.33 | 0.67 | 0.33 |" in text
    spread = r"\d\.\d\d \(\d\.\d\d–\d\.\d\d\)"
    assert re.search(rf"\| `hf-lookup` .* \| {spread} \| 1\.4\d \(\S+ \| {spread} \| {spread} \| 6 of 6 \|", text)
    assert text == report.markdown(raw)


def test_tables_of_many_cells():
    """Cells down; a slot that no round of a cell reached, and a suite that it did not see, are dashes."""
    rows = [
        {
            "suite": suite,
            "id": "0",
            "repeat": 0,
            "cell": cell,
            "tokens": [1] * 9,
            "accepted": accepted,
            "temperature": 0.0,
        }
        for suite, cell, accepted in (("a", "x", [3, 1, 2]), ("a", "y", [1, 1, 1]), ("b", "x", [2, 2, 2]))
    ]
    assert report.suite_table(rows, ["x", "y"], ["a", "b"]).splitlines()[2:] == [
        "| `x` | 2.00 | 2.00 |",
        "| `y` | 1.00 | – |",
    ]
    # of x, the rounds 3 1 and 2 2: three of four accept the first slot, one of those the second
    assert report.slot_table(rows, ["x", "y"])[2:] == ["| `x` | 0.75 | 0.33 |", "| `y` | – | – |"]


def test_others_are_held_against_the_draft_that_they_load(tmp_path):
    """Plain decoding, and DFlash without a head wherever it stands; with the prompt's reading apart and included."""
    assert report.beside_others(["domino", "dflash+dels", "dflash"]) == "dflash"
    assert report.beside_others(["drafts/mine", "domino"]) == "drafts/mine"
    assert report.beside_others([]) == "autoregressive"
    rows = [row("autoregressive", [1] * 6, 60.0), row("dflash", [4, 2], 30.0), row("hf-greedy", [1] * 6, 90.0)]
    rows[1]["seconds"]["prefill"], rows[2]["seconds"]["prefill"] = 0.04, 0.05
    (entries,) = report.others_entries(rows, ["dflash"], ["hf-greedy"])
    assert entries == ["1.00 (1.00–1.00)", "1.50 (1.50–1.50)", "3.00 (3.00–3.00)", "2.00 (2.00–2.00)", "1 of 1"]
    rows[2]["tokens"] = [9] * 7
    (entries,) = report.others_entries(rows, ["dflash"], ["hf-greedy"])
    assert entries[1:4] == ["wrong answer"] * 3


@pytest.mark.parametrize("cell", ["dflash", "sampled/dflash", "dflash+dels@tree"])
def test_only_sampled_proposals_are_not_compared(cell):
    """A folder's name says nothing; at temperature 0 a sampled proposal is compared too."""
    assert report.compared(cell, 1.0) and report.compared(f"{cell}@sampled", 0.0)
    assert not report.compared(f"{cell}@sampled", 1.0)


def test_more_than_one_setting_is_told_apart(tmp_path):
    rows = [
        row(c, [1] * 4, ms, temperature=t) for c, ms in (("autoregressive", 20), ("dflash", 10)) for t in (0.0, 1.0)
    ]
    text = report.markdown(write(tmp_path / "two.jsonl", rows))
    assert "**Temperature 0, batch 1**" in text and "**Temperature 1, batch 1**" in text
    assert text.count(report.SAMPLED_NOTE) == 1
    assert text.count("2.00 (2.00–2.00)") == 4


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in ("meta", "br", "link", "path", "use", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in ("path", "use", "line"):
            return
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


def test_page_is_self_contained_and_has_every_plot(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.unbalanced and not reader.open
    assert len(reader.ids) == len(set(reader.ids))
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert not re.search(r"https?://(?!www\.w3\.org)", text) and "@import" not in text and "<script" not in text
    titles = [
        "Decode speed",
        "round τ",
        "Acceptance by slot",
        "Accepted lengths",
        "time goes",
        "oracle prefix",
        "Roofline",
    ]
    for title in titles:
        assert re.search(rf"<h3>[^<]*({title})[^<]*</h3><p>[^<]*</p><figure><svg", text), title
    assert "<td>3.0 %</td><td>2.0 %</td>" in text  # the head's share, and what is left
    assert "<h3>Against others</h3>" in text and "<code>dflash</code> is … times as fast" in text
    assert re.search(r"<code>hf-lookup</code></td><td class=\"words\">[^\n]*<td>1\.4\d \(", text)
    assert "a &lt;cpu&gt; &amp; more" in text and "<cpu>" not in text


def test_page_has_no_fixed_ink(text):
    """Every colour of a plot is a variable that the dark scheme sets anew; black text would vanish there."""
    style, plots = text.split("</style>", 1)
    assert "prefers-color-scheme: dark" in style
    used = set(re.findall(r"var\((--\w+)\)", plots))
    light, dark = style.split("@media", 1)
    assert used <= set(re.findall(r"(--\w+):", light)) & set(re.findall(r"(--\w+):", dark))
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", plots)


def test_a_page_of_another_process_has_the_same_bytes(raw, text):
    code = (
        "import sys; from repairzoo.commands.report import report; from pathlib import Path; report(Path(sys.argv[1]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(raw)], capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert out.returncode == 0, out.stderr
    assert raw.with_suffix(".html").read_text(encoding="utf-8") == text
    assert report.markdown(raw) in out.stdout


def test_without_matplotlib_the_error_names_the_extra(raw, monkeypatch):
    from repairzoo.bench.page import page

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInput, match=r"repairzoo\[report\]"):
        page(raw)
