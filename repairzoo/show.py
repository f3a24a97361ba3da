"""What heads did, made visible: every round's slots, pools and scores, in the terminal's colours or as a page.

A watched run decodes as any other. Before each round its draft is made a second time, and what the round looked at is
copied from it, so the round itself stays as it is; a watched run is slower and its times mean nothing.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from repairzoo.block import DraftBlock, make_pool
from repairzoo.decode import Engine, Mark, propose, shorten, split_heads
from repairzoo.errors import InvalidInput
from repairzoo.generation import Session, speculate
from repairzoo.inputs import prompt_ids
from repairzoo.launched import Launched
from repairzoo.runner import Eager
from repairzoo.sampling import Stream, uniform
from repairzoo.walk import walk
from repairzoo.zoo import Zoo

KINDS = {
    "first": "read from the prompt",
    "drafted": "drafted and accepted",
    "repaired": "repaired by a head and accepted",
    "branch": "accepted on a branch",
    "rejected": "rejected by the target",
    "bonus": "the target's own token",
}
_COLOURS = {"first": "2", "drafted": "32", "repaired": "1;36", "branch": "1;35", "rejected": "9;31", "bonus": "33"}
# a token may hold control characters; shown, they must not reach the terminal, and a page may not have them
_CONTROLS = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(128, 160), "�")
)
_SIGNS = {"repaired": "{%s}", "branch": "<%s>", "rejected": "[-%s-]", "bonus": "|%s|"}  # where there is no colour


@dataclass(slots=True)
class Candidate:
    """A candidate of a slot: its probability in the draft, and in the law that the walk chose from."""

    token: int
    text: str
    draft: float
    walked: float


@dataclass(slots=True)
class Slot:
    """One slot of the walked chain.

    Attributes:
        candidates: best of the draft first. native, chosen: tokens without and with the heads.
        target: what the target wanted here, or None where the run never learnt it.
    """

    candidates: list[Candidate]
    native: int
    chosen: int
    target: int | None = None


@dataclass(slots=True)
class Node:
    """A node that was verified; ``kind`` is one of ``KINDS``."""

    token: int
    text: str
    parent: int
    depth: int
    kind: str


@dataclass(slots=True)
class Piece:
    """A token of the output, or one that was proposed and refused."""

    text: str
    kind: str


@dataclass(slots=True)
class Round:
    """A round of a watched run. Round 0 is the reading of the prompt, which gives one token.

    Attributes:
        anchor: text of the token that it went on from. pieces: what it gave, the first refused token before the bonus.
        nodes: what was verified; node 1 is the first, and a parent of 0 is the anchor.
    """

    number: int
    anchor: str
    pieces: list[Piece]
    slots: list[Slot] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def committed(self) -> int:
        return sum(piece.kind != "rejected" for piece in self.pieces)


@dataclass(slots=True)
class _Scores:
    """A corrector that changes nothing and keeps the scores that pass it."""

    seen: list[Tensor] = field(default_factory=list)

    def prepare(self, block: DraftBlock, pool: Any) -> None:
        return None

    def start(self, block: DraftBlock) -> None:
        return None

    def step(self, prepared: None, carry: None, slot: int, previous: Tensor, scores: Tensor) -> tuple[Tensor, None]:
        self.seen.append(scores[:, 0])
        return scores, None


class _Watched(Eager):
    """Rounds that are looked at before they run; each is read before the next is launched."""

    def __init__(self, engine: Engine, candidates: int) -> None:
        super().__init__(engine)
        self.lag, self.candidates = 0, candidates
        self.anchor = 0
        self.slots: list[Slot] = []
        self.tree: list[tuple[int, int, int]] = []  # token, parent, depth of every verified node
        self.last: Launched | None = None

    def launch(self, lengths: Sequence[int], ended: Sequence[bool], ahead: int, mark: Mark) -> Launched:
        self._look()
        self.last = super().launch(lengths, ended, ahead, mark)
        return self.last

    @torch.no_grad()
    def _look(self) -> None:
        engine, state = self.engine, self.state
        position = state.length - 1
        anchor = state.ids.gather(1, position[:, None])[:, 0]
        block = engine.backbone.draft(state.context, anchor, position, state.ids.shape[1])
        tree, q, repaired = propose(engine, block, state.seed)
        if engine.trim:
            tree, q, repaired = shorten(tree, q, repaired)
        self.anchor = int(anchor[0])
        rows = zip(tree.tokens[0, 1:], tree.parents[0, 1:], tree.depths[0, 1:], tree.valid[0, 1:], strict=True)
        self.tree = [(int(t), int(p), int(d)) for t, p, d, valid in rows if valid]

        native = [block.native] if block.native is not None else []
        heads, _ = split_heads(engine.heads)
        pool = make_pool(block.logits, engine.pool) if engine.pool is not None else None
        before, after = _Scores(), _Scores()
        law = u = None
        if engine.sampled:
            slots = torch.arange(block.slots, device=state.seed.device)
            law, u = engine.law, uniform(state.seed, position[:, None] + 1 + slots, Stream.DRAFT)
        chain, *_ = walk(block, [*native, before, *heads, after], pool, law=law, u=u)  # type: ignore[arg-type]
        log_q = block.logits[0].float().log_softmax(-1)  # [S, V]
        self.slots = []
        for i in range(block.slots):
            ids = torch.arange(log_q.shape[-1], device=log_q.device) if pool is None else pool.ids[0, i]
            walked = after.seen[i][0].float().softmax(-1)
            mass = 1.0 if pool is None else float(log_q[i, ids].exp().sum().clamp_max(1))
            shown = log_q[i, ids].topk(min(self.candidates, len(ids))).indices.tolist()
            best = int(walked.argmax())
            shown += [k for k in (best,) if k not in shown]
            found = [Candidate(int(ids[k]), "", float(log_q[i, ids[k]].exp()), mass * float(walked[k])) for k in shown]
            self.slots.append(Slot(found, int(ids[int(before.seen[i][0].argmax())]), int(chain[0, i])))


def watch(zoo: Zoo, inputs: Any, *, chat: bool | None = None, candidates: int = 8, **options: Any) -> Iterator[Round]:
    """Run one prompt and yield every round as it ends; ``zoo.last`` is set at the end.

    Args:
        inputs, chat, options: as ``Zoo.generate``. candidates: of a slot that are kept, the draft's best first.

    Raises:
        InvalidInput: several prompts, or what ``Zoo.generate`` refuses.
    """
    rows = prompt_ids(zoo.target, inputs, None, chat)
    if len(rows) != 1:
        raise InvalidInput(f"one prompt is watched at a time, not {len(rows)}")
    request = zoo._request(inputs, None, chat, options)
    loop = _Watched(zoo.engine(request), candidates)
    words = _Words(zoo.target.tokenizer, rows[0])
    session: Session | None = None
    number = 0
    with torch.no_grad():
        for session in speculate(loop.engine, request, loop=loop):
            row = session.rows[0]
            if number == 0:
                yield Round(0, "", [Piece(words.add(t), "first") for t in row.tokens])
            else:
                yield _round(number, loop, words, row.tokens[len(row.tokens) - row.accepted[-1] :])
            number += 1
    assert session is not None
    zoo.last = session.result()


def _round(number: int, loop: _Watched, words: _Words, committed: Sequence[int]) -> Round:
    assert loop.last is not None
    row = next(iter(loop.last))
    path = row.path[: row.accepted]
    main, repaired = _main(loop.tree), {i for i, s in enumerate(loop.slots) if s.native != s.chosen}
    drafted = {1: "repaired", 0: "drafted"}

    def kind(node: int) -> str:
        return drafted[main.index(node) in repaired] if node in main else "branch"

    texts: dict[int, str] = {}
    known = list(words.ids)
    nodes = []
    for index, (token, parent, depth) in enumerate(loop.tree, 1):
        trail, at = [], parent
        while at > 0:
            trail.append(loop.tree[at - 1][0])
            at = loop.tree[at - 1][1]
        texts[index] = words.after([*known, *trail[::-1]], token)
        nodes.append(Node(token, texts[index], parent, depth, kind(index) if index in path else "rejected"))
    anchor = words.name(loop.anchor)
    truth = row.emitted[: row.accepted + 1]
    for i, slot in enumerate(loop.slots):
        slot.target = truth[i] if i < len(truth) else None
        for candidate in slot.candidates:
            candidate.text = words.name(candidate.token)
    # the chain's own token where the target went another way
    refused = next((n for n in main if n not in path), None) if len(committed) > len(path) else None
    at = 0 if refused is None else main.index(refused)
    pieces = []
    for j, token in enumerate(committed):
        if refused is not None and j == at:
            pieces.append(Piece(texts[refused], "rejected"))
        pieces.append(Piece(words.add(token), kind(path[j]) if j < len(path) else "bonus"))
    return Round(number, anchor, pieces, loop.slots, nodes)


def _main(tree: Sequence[tuple[int, int, int]]) -> list[int]:
    """Nodes of the first path, from the top: the chain, branch 0, or the likeliest child of every node."""
    path, at = [], 0
    for index, (_, parent, _) in enumerate(tree, 1):
        if parent == at:
            path.append(index)
            at = index
    return path


class _Words:
    """Text of tokens in their places: what a token adds to the text before it."""

    _WINDOW = 8

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt)

    def after(self, before: Sequence[int], token: int) -> str:
        if self.tokenizer is None:
            return f" {token}"
        window = list(before[-self._WINDOW :])
        known = self._decode(window)
        return self._decode([*window, token])[len(known) :]

    def add(self, token: int) -> str:
        text = self.after(self.ids, token)
        self.ids.append(token)
        return text

    def name(self, token: int) -> str:
        """A token by itself, special ones too."""
        if self.tokenizer is None:
            return str(token)
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- the terminal -----------------------------------------------------------------------------------------------------
def wants_colour(stream: Any) -> bool:
    """A terminal that was not asked to stay plain (https://no-color.org; a dumb terminal shows escapes as they are)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and bool(getattr(stream, "isatty", lambda: False)())


def painted(text: str, kind: str, colour: bool) -> str:
    """A piece in its colour; without colours, between its signs."""
    if not text:
        return ""
    text = text.translate(_CONTROLS)
    if not colour:
        return _SIGNS.get(kind, "%s").replace("%s", text)
    lines = text.split("\n")  # an attribute that spans lines would paint the rest of the terminal's line
    return "\n".join(f"\x1b[{_COLOURS[kind]}m{line}\x1b[0m" if line else "" for line in lines)


def line(round: Round, colour: bool) -> str:
    """What a round adds to the text in the terminal."""
    return "".join(painted(piece.text, piece.kind, colour) for piece in round.pieces)


def legend(rounds: Sequence[Round], colour: bool) -> str:
    """The kinds that occurred, each as it is painted, with its number."""
    parts = []
    for kind, words in KINDS.items():
        count = sum(piece.kind == kind for r in rounds for piece in r.pieces)
        if count:
            parts.append(f"{painted(words, kind, colour)} {count}")
    return " · ".join(parts)


# --- the page ---------------------------------------------------------------------------------------------------------
_STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #1d1c1a; --faint: #6a665f; --rule: #dcd8cf; --panel: #f2efe8;
  --first: #6a665f; --drafted: #1c6b3a; --repaired: #0a5f8a; --branch: #7a2f9c; --rejected: #a8281c; --bonus: #7d5700; }
@media (prefers-color-scheme: dark) { :root { --paper: #16171a; --ink: #e8e6e1; --faint: #a09c94; --rule: #36373c;
  --panel: #1f2125; --first: #a09c94; --drafted: #74cf95; --repaired: #6cc4f2; --branch: #d79bf2; --rejected: #f58c80;
  --bonus: #e6bd5c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.facts { color: var(--faint); margin: 0; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border: 1px solid var(--rule);
  border-radius: 6px; padding: 1rem; font: 15px/1.7 ui-monospace, monospace; }
.first { color: var(--first); } .drafted { color: var(--drafted); } .bonus { color: var(--bonus); }
.repaired { color: var(--repaired); font-weight: 700; border-bottom: 2px solid; }
.branch { color: var(--branch); font-weight: 700; border-bottom: 2px dotted; }
.rejected { color: var(--rejected); text-decoration: line-through; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: .75rem 0; }
details { border-top: 1px solid var(--rule); padding: .35rem 0; }
details:last-child { border-bottom: 1px solid var(--rule); }
summary { cursor: pointer; } summary code { white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; margin: .5rem 0; }
th, td { border: 1px solid var(--rule); padding: .2rem .5rem; text-align: left; vertical-align: top; white-space: pre; }
th { font-weight: 600; background: var(--panel); } td small { color: var(--faint); display: block; }
td.chosen { outline: 2px solid var(--repaired); outline-offset: -2px; } td.native { text-decoration: underline; }
td.target { background: color-mix(in srgb, var(--drafted) 16%, transparent); }
code { font: 14px/1.5 ui-monospace, monospace; }
ul.tree { font: 14px/1.6 ui-monospace, monospace; padding-left: 1.2rem; }
"""


def page(rounds: Sequence[Round], title: str, facts: Sequence[str] = ()) -> str:
    """A self-contained page: the answer with every token's origin, then each round's slots, pools and scores.

    Args:
        rounds: of :func:`watch`. title: such as the prompt. facts: lines below it.
    """
    answer = "".join(
        f'<span class="{p.kind}" title="round {r.number}: {KINDS[p.kind]}">{_plain(p.text)}</span>'
        for r in rounds
        for p in r.pieces
    )
    counts = {kind: sum(p.kind == kind for r in rounds for p in r.pieces) for kind in KINDS}
    entries = "".join(
        f'<li><span class="{kind}">{words}</span> {counts[kind]}</li>' for kind, words in KINDS.items() if counts[kind]
    )
    parts = "\n".join(_section(r) for r in rounds if r.number)
    lines = "".join(f'<p class="facts">{html.escape(fact)}</p>' for fact in facts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(_short(title, 60))}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{html.escape(_short(title, 400))}</h1>{lines}</header>
<main>
<h2>The answer</h2>
<ul class="legend">{entries}</ul>
<div class="answer">{answer}</div>
<h2>Round by round</h2>
<p class="facts">A column is a slot; its candidates stand in the draft's order with their probability in the draft and
after the walk. Underlined: the backbone's own choice. Framed: what was proposed. Shaded: what the target wanted, as far
as the round got to know it.</p>
{parts}
</main>
</body>
</html>
"""


def _section(r: Round) -> str:
    given = "".join(f'<span class="{p.kind}">{html.escape(_visible(p.text))}</span>' for p in r.pieces)
    depth = max((len(s.candidates) for s in r.slots), default=0)
    heads = "".join(f'<th scope="col">slot {i}</th>' for i in range(len(r.slots)))
    rows = "".join(
        "<tr>" + "".join(_cell(s, k) if k < len(s.candidates) else "<td></td>" for s in r.slots) + "</tr>"
        for k in range(depth)
    )
    unary = all(node.parent == index for index, node in enumerate(r.nodes))
    verified = "" if unary else f'<p class="facts">Verified as a tree:</p>{_tree(r.nodes, 0)}'
    many = f"{r.committed} {'token' if r.committed == 1 else 'tokens'}"
    return (
        f"<details{' open' if r.number == 1 else ''}><summary>Round {r.number}: {many} after "
        f"<code>{html.escape(_visible(r.anchor))}</code> — <code>{given}</code></summary>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{verified}</details>"
    )


def _cell(slot: Slot, k: int) -> str:
    c = slot.candidates[k]
    names = {"chosen": slot.chosen, "native": slot.native, "target": slot.target}
    marks = [name for name, token in names.items() if token == c.token]
    told = {"chosen": "proposed", "native": "the backbone's own choice", "target": "the target's"}
    return (
        f'<td class="{" ".join(marks)}" title="{html.escape(", ".join(told[m] for m in marks))}">'
        f"{html.escape(_visible(c.text))}<small>{_percent(c.draft)} → {_percent(c.walked)}</small></td>"
    )


def _tree(nodes: Sequence[Node], parent: int) -> str:
    children = [(i, n) for i, n in enumerate(nodes, 1) if n.parent == parent]
    if not children:
        return ""
    items = "".join(
        f'<li><span class="{n.kind}">{html.escape(_visible(n.text))}</span>{_tree(nodes, i)}</li>' for i, n in children
    )
    return f'<ul class="tree">{items}</ul>'


def _percent(p: float) -> str:
    return f"{100 * p:.1f} %" if p >= 0.0005 else "<0.1 %".replace("<", "&lt;")


def _plain(text: str) -> str:
    return html.escape(text.translate(_CONTROLS))


def _visible(text: str) -> str:
    """Text on one line, its spaces to be seen."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").translate(_CONTROLS) or "∅"


def _short(text: str, limit: int) -> str:
    flat = " ".join(text.split()).translate(_CONTROLS)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
