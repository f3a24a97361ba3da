"""A watched run: the tokens of an ordinary one, told apart by where they came from, in colours and as a page."""

from __future__ import annotations

import html.parser
import io
import re

import pytest
import torch
from conftest import causal_lm, knowing, letters, prompts, toy
from test_cure import unsure
from test_stacks import backbone, trained

import repairzoo
from repairzoo.errors import InvalidInput
from repairzoo.heads.cure import CURE
from repairzoo.show import KINDS, Piece, Round, legend, line, page, wants_colour, watch
from repairzoo.target import Target

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def speaking() -> Target:
    return Target(causal_lm("llama", 0, 32), letters(), name="toy")


def plain(stats) -> dict:
    return {k: v for k, v in stats.as_dict().items() if k != "seconds"}


@pytest.mark.parametrize(
    ("kind", "heads", "options"),
    [
        ("dflash", ["drelay"], {}),
        ("dspark", ["dels", "cure"], {}),
        ("domino", ["lilicorr"], {"tree": 6}),
        ("dflash", ["dels"], {"proposal": "sampled"}),
    ],
)
def test_watching_changes_nothing(kind, heads, options):
    """Same tokens, same counters as an unwatched run; the pieces are the text; the numbers agree."""
    drafter, target = backbone(kind, 1), speaking()
    made = [
        CURE(threshold=9.0, scale=9.0, repairs=2, cost="free") if n == "cure" else trained(n, drafter.slots)
        for n in heads
    ]
    zoo = repairzoo.build(drafter, made, target, **options)
    run = {"max_new_tokens": 24, "seed": 4, "temperature": 0.8 if "proposal" in options else 0.0}
    out = zoo.generate("hello", **run)
    rounds = list(watch(zoo, "hello", **run))
    assert zoo.last is not None and zoo.last.token_ids == out.token_ids and out.text is not None
    assert plain(zoo.last.stats) == plain(out.stats)
    pieces = [p for r in rounds for p in r.pieces]
    assert "".join(p.text for p in pieces if p.kind != "rejected") == out.text[0]
    assert [r.committed for r in rounds] == [1, *out.stats.accepted[0]]
    assert {p.kind for p in pieces} <= set(KINDS)
    if "tree" not in options:
        assert sum(p.kind == "repaired" for p in pieces) == out.stats.repairs_accepted[0]
    assert sum(len(r.nodes) for r in rounds) == out.stats.drafted[0]
    assert all(len(r.slots) == drafter.slots for r in rounds[1:])


def test_every_kind_is_told_apart():
    """A scripted draft that is right, barely wrong and mended by a branch, or wrong for good."""
    target = speaking()
    prompt = prompts(5, [5])[0]
    expected = repairzoo.autoregressive(target, prompt, max_new_tokens=17).token_ids[0]
    zoo = repairzoo.build(unsure(prompt + expected, 4, every=3), CURE(cost="free"), target)
    rounds = list(watch(zoo, torch.tensor(prompt), max_new_tokens=17))
    found = {p.kind for r in rounds for p in r.pieces}
    assert found == {"first", "drafted", "branch", "bonus", "rejected"}
    mended = next(r for r in rounds if any(p.kind == "branch" for p in r.pieces))
    slot = next(s for s in mended.slots if s.target not in (None, s.chosen))
    assert [c.token for c in slot.candidates[:2]] == [slot.chosen, slot.target]
    assert slot.candidates[0].draft > slot.candidates[1].draft > 0.3

    wrong = repairzoo.build(knowing([prompt + expected], 4, wrong=0.5, seed=1), None, target)
    rounds = list(watch(wrong, torch.tensor(prompt), max_new_tokens=17))
    for r in rounds[1:-1]:
        kinds = [p.kind for p in r.pieces]
        assert kinds == ["drafted"] * (r.committed - 1) + ["rejected"] * (r.committed < 5) + ["bonus"]


def test_colours_are_closed_and_can_be_left_out(monkeypatch):
    """https://no-color.org, pipes and dumb terminals: signs instead of escapes. A colour never spans lines."""
    target = speaking()
    prompt = prompts(5, [5])[0]
    expected = repairzoo.autoregressive(target, prompt, max_new_tokens=17).token_ids[0]
    zoo = repairzoo.build(unsure(prompt + expected, 4, every=3), CURE(cost="free"), target)
    rounds = list(watch(zoo, torch.tensor(prompt), max_new_tokens=17))
    painted = "".join(line(r, True) for r in rounds)
    signed = "".join(line(r, False) for r in rounds)
    assert "\x1b[" in painted and "\x1b" not in signed
    assert len(ESCAPES.findall(painted)) == 2 * painted.count("\x1b[0m")
    assert "[-" in signed and "<" in signed and "|" in signed
    assert all(words in legend(rounds, False) for words in (KINDS["branch"], KINDS["bonus"]))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(Terminal()) and not wants_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_control_characters_are_shown_and_not_sent():
    """A token that holds an escape sequence must not steer the terminal, nor break the page."""
    rounds = [Round(0, "", [Piece("a\x1b[2J\x07\n", "first")]), Round(1, "\x9b", [Piece("\x00", "rejected")])]
    assert line(rounds[0], False) == "a␛[2J␇\n"
    assert ESCAPES.sub("", line(rounds[0], True)) == "a␛[2J␇\n"
    text = page(rounds, "\x1b")
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text)


class Tags(html.parser.HTMLParser):
    """Checks that elements are closed in order, and keeps text and attributes."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_whole_and_holds_what_was_decoded():
    """Self-contained, well-formed, escaped; each round with its slots, pools and scores; light and dark."""
    drafter, target = backbone("domino", 1), speaking()
    cure = CURE(threshold=9.0, scale=9.0, cost="free", repairs=2)
    zoo = repairzoo.build(drafter, [trained("dels", drafter.slots), cure], target)
    rounds = list(watch(zoo, "hello", max_new_tokens=12))
    text = page(rounds, "<script>alert('&')</script>", ["τ 1.0 & more"])
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import", text)  # nothing is fetched
    assert "prefers-color-scheme: dark" in text
    names = [tag for tag, _ in tags.seen]
    assert names.count("details") == len(rounds) - 1
    cells = sum(len(s.candidates) for r in rounds for s in r.slots)
    assert sum("%" in t for t in tags.text) >= cells
    marks = [attrs.get("class") or "" for tag, attrs in tags.seen if tag == "td"]
    assert sum("chosen" in m for m in marks) == sum(len(r.slots) for r in rounds)
    wanted = sum(s.target is not None and s.target in [c.token for c in s.candidates] for r in rounds for s in r.slots)
    assert sum("target" in m for m in marks) == wanted > 0
    assert names.count("ul") > 1  # trees


def test_one_prompt_at_a_time():
    zoo = repairzoo.build(backbone("dflash"), None, toy())
    with pytest.raises(InvalidInput, match="not 2"):
        next(watch(zoo, [[1, 2], [3]]))
    rounds = list(watch(zoo, [1, 2, 3], max_new_tokens=5))  # without a tokenizer: numbers
    tokens = repairzoo.autoregressive(toy(), [1, 2, 3], max_new_tokens=5).token_ids[0]
    assert "".join(p.text for r in rounds for p in r.pieces if p.kind != "rejected") == "".join(f" {t}" for t in tokens)
    assert next(watch(zoo, [1, 2, 3], max_new_tokens=0)).pieces == []
