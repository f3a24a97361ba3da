"""The host's side of a run: budgets, stop strings, streaming, Hugging Face processors and criteria, accounting."""

from __future__ import annotations

import collections
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from repairzoo import capacity
from repairzoo.decode import Engine, State, choose
from repairzoo.errors import InvalidInput
from repairzoo.graph import Graphs
from repairzoo.launched import Launched
from repairzoo.registry import unknown
from repairzoo.results import Generation, Stats
from repairzoo.runner import Runner, runner
from repairzoo.sampling import Law
from repairzoo.target import Target
from repairzoo.tree import TokenTree

_BOUND_STEP = 64  # cache columns that take part are rounded up to this, so that shapes seldom change

# These count on being called once a token, in order; a speculative round asks about tokens that may never be.
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkState",
    "WhisperTimeStampLogitsProcessor",
    "EtaLogitsWarper",
}


_BY_ROW = {"PrefixConstrainedLogitsProcessor"}  # looks rows up by their number in the batch


class Clock:
    """Adds wall time to stages; ``mark`` closes the stage that ran since the last call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class Request:
    """One call of ``generate``, checked.

    Attributes:
        prompts: token ids a row. max_new_tokens: at least 0. seeds: one a row.
        stop: strings that end a row; the text is cut before the first match. eos: end-of-text ids.
        processors, criteria: Hugging Face objects, called as ``f(input_ids [1, T], scores [1, V])``.
        before: tokens that these see before each prompt (the padding of a batch that transformers prepared, which its
            own processors count), or empty.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    law: Law
    seeds: list[int]
    eos: tuple[int, ...]
    stop: tuple[str, ...] = ()
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    before: tuple[list[int], ...] = ()

    def history(self, row: int) -> list[int]:
        """What processors and criteria see before the row's answer."""
        return [*(self.before[row] if self.before else ()), *self.prompts[row]]

    def budgets(self, target: Target) -> list[int]:
        """New tokens that each row may have: what was asked for, as far as its context reaches."""
        return [min(self.max_new_tokens, target.max_context - len(p)) for p in self.prompts]

    @property
    def ends_on_host(self) -> bool:
        """Whether a row can end for a reason that the device doesn't know."""
        return bool(self.stop or self.criteria)


def make_request(
    target: Target,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    **other: Any,
) -> Request:
    """Check the options of a call; every error names the option."""
    if other:
        known = [n for n, p in inspect.signature(make_request).parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise InvalidInput(str(unknown("option of generate", min(other), known)))
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise InvalidInput(f"max_new_tokens={max_new_tokens!r}: give an integer of at least 0")
    if stop is not None and not isinstance(stop, (str, list, tuple)):
        raise InvalidInput(f"stop={stop!r}: give a string or a list of strings")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(s, str) or not s for s in stops):
        raise InvalidInput(f"stop={stop!r}: give non-empty strings")
    if stops and target.tokenizer is None:
        raise InvalidInput(f"target {target.name!r} has no tokenizer: stop strings need one; use eos_token_id")
    eos = target.eos_token_ids if eos_token_id is None else _eos(eos_token_id, target.vocab_size)
    processors = _callables("logits_processor", logits_processor)
    criteria = _callables("stopping_criteria", stopping_criteria)
    for processor in processors:
        if type(processor).__name__ in _STATEFUL:
            raise InvalidInput(
                f"logits processor {type(processor).__name__} keeps state between tokens and cannot judge a whole block"
            )
        if type(processor).__name__ in _BY_ROW and len(prompts) > 1:
            raise InvalidInput(
                f"logits processor {type(processor).__name__} asks for the number of its row, and rows are processed "
                "alone: generate the prompts one by one"
            )
    return Request(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        law=Law(temperature, top_k, top_p, min_p),
        seeds=_seeds(seed, len(prompts)),
        eos=eos,
        stop=stops,
        processors=processors,
        criteria=criteria,
    )


def _eos(given: Any, vocab_size: int) -> tuple[int, ...]:
    ids = given.tolist() if isinstance(given, Tensor) else given
    ids = (ids,) if isinstance(ids, int) else ids
    if not isinstance(ids, (list, tuple)) or any(isinstance(e, bool) or not isinstance(e, int) for e in ids):
        raise InvalidInput(f"eos_token_id={given!r}: give a token id or a list of them")
    if bad := [e for e in ids if not 0 <= e < vocab_size]:
        raise InvalidInput(f"eos_token_id={bad[0]} is outside the vocabulary of {vocab_size}")
    return tuple(ids)


def _callables(name: str, given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not all(callable(x) or isinstance(x, PerRow) for x in given):
        raise InvalidInput(f"{name}={given!r}: give a list of them, each called as f(input_ids, scores)")
    return tuple(given)


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        return [int(x) for x in torch.randint(0, 2**62, (rows,), generator=None)]
    # row r of a batch draws what a run of its own with seed + r draws
    seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else seed
    if not isinstance(seeds, (list, tuple)) or any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
        raise InvalidInput(f"seed={seed!r}: give an integer, or one for each row")
    if len(seeds) != rows:
        raise InvalidInput(f"seed has {len(seeds)} entries for {rows} rows")
    if any(not -(2**63) <= s < 2**63 for s in seeds):
        raise InvalidInput(f"seed={seed!r} does not fit into 64 bits")
    return list(seeds)


def hugging_face_processor(request: Request) -> Callable[[Tensor, State, TokenTree], Tensor]:
    """Run processors at every node with the history that the node implies: prefix, then the path to it.

    A node whose token they forbade, that follows an end of text, or that fills the budget has no continuation: what
    they would say there, if anything, is not asked.
    """

    def process(logits: Tensor, state: State, tree: TokenTree) -> Tensor:
        out = logits.clone()
        lengths, parents, valid = state.length.tolist(), tree.parents.tolist(), tree.valid.tolist()
        done, room = state.done.tolist(), (state.limit - state.length).tolist()
        depths = tree.depths.tolist()
        for row in range(logits.shape[0]):
            prefix = state.ids[row, : lengths[row] - 1]  # before the anchor, which is node 0
            if request.before:
                prefix = torch.cat([prefix.new_tensor(request.before[row]), prefix])
            reached = list(valid[row]) if not done[row] else [False] * tree.size
            for node in range(tree.size):
                parent = parents[row][node]
                if reached[node] and parent >= 0:  # parents come before their children
                    ended = parent > 0 and int(tree.tokens[row, parent]) in request.eos
                    allowed = bool(out[row, parent, tree.tokens[row, node]] > float("-inf"))
                    reached[node] = reached[parent] and not ended and allowed and depths[row][node] < room[row]
                if not reached[node]:
                    continue
                path, at = [], node
                while at >= 0:
                    path.append(at)
                    at = parents[row][at]
                history = torch.cat([prefix, tree.tokens[row, path[::-1]]])[None]
                out[row, node] = run_processors(request.processors, row, history, out[row, node][None])[0]
        return out

    return process


@dataclass(frozen=True, slots=True)
class PerRow:
    """A processor that differs from row to row, one for each."""

    rows: tuple[Any, ...]


def run_processors(processors: Sequence[Any], row: int, history: Tensor, scores: Tensor) -> Tensor:
    """``history [1, T]``, ``scores [1, V]`` of a row -> processed scores ``[1, V]``.

    Raises:
        InvalidInput: a processor returns another shape, NaN, or forbids every token.
    """
    for processor in processors:
        processor = processor.rows[row] if isinstance(processor, PerRow) else processor
        shape, scores = scores.shape, processor(history, scores)
        name = type(processor).__name__
        if not isinstance(scores, Tensor) or scores.shape != shape:
            what = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInput(f"logits processor {name} returned {what} for scores of shape {tuple(shape)}")
        best = float(scores.max())
        if best != best or best == float("-inf"):
            why = "NaN" if best != best else "no token that is allowed"
            raise InvalidInput(f"logits processor {name} left {why} after {history.shape[1]} tokens")
    return scores


class TextTrack:
    """Text of one row as it grows: finds stop strings, and tells which part can no longer change.

    A token costs the decoding of a short window, however long the answer is. The window begins a few tokens early,
    since some tokenizers treat the first token of a text in their own way.
    """

    _WINDOW = 64  # bytes that never become a character must not hold the text back for ever

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids: list[int] = []
        self.given = 0  # characters already streamed
        self.begin = self.read = 0  # the window's first token, and the first whose text is not in ``settled``
        self.settled = ""  # text of the tokens before ``read``
        self.tail = ""  # text of the ``unread`` tokens from ``read`` on; it may end in an unfinished character
        self.unread = 0
        self.searched = 0  # no stop string begins before this character

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is complete."""
        self.ids.append(token)
        return bool(self.stops) and self.cut() is not None

    def _read(self) -> str:
        """The text of all tokens so far."""
        if self.read + self.unread < len(self.ids):
            known = len(self.decode(self.ids[self.begin : self.read]))
            self.tail = self.decode(self.ids[self.begin :])[known:]
            self.unread = len(self.ids) - self.read
            if not self.tail.endswith("\ufffd") or self.unread >= self._WINDOW:
                self.settled += self.tail
                self.tail, self.begin, self.read, self.unread = "", self.read, len(self.ids), 0
        return self.settled + self.tail

    def cut(self) -> int | None:
        """Where the first stop string begins, or None."""
        text = self._read()
        found = [at for at in (text.find(s, self.searched) for s in self.stops) if at >= 0]
        if not found:
            self.searched = max(0, len(self.settled) - max(map(len, self.stops), default=0))
        return min(found) if found else None

    def piece(self, final: bool) -> str:
        """Text that may be streamed now: neither an unfinished character nor the beginning of a stop string."""
        text = self._read()
        at = self.cut()
        if at is not None:
            text = text[:at]
        elif not final:
            text = text[: len(text) - self._unsure(text[self.given :])]
        new = text[self.given :]
        self.given = max(self.given, len(text))
        return new

    def _unsure(self, text: str) -> int:
        whole = text.rstrip("\ufffd")  # what follows may become any character, and so go on with a stop string
        held = 0
        for s in self.stops:
            for length in range(min(len(s) - 1, len(whole)), 0, -1):
                if whole.endswith(s[:length]):
                    held = max(held, length)
                    break
        return len(text) - len(whole) + held

    def final_text(self) -> str:
        text, at = self._read(), self.cut()
        return text if at is None else text[:at]


@dataclass(slots=True)
class Row:
    """Host record of a row."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    agreed: int = 0
    repaired: int = 0
    repairs_accepted: int = 0
    branches: int = 0
    branches_accepted: int = 0
    branch_nodes: int = 0
    surplus: int = 0
    reason: str | None = None
    track: TextTrack | None = None


class Session:
    """Rows of one request, fed with committed tokens by whichever loop runs them."""

    def __init__(self, target: Target, request: Request) -> None:
        self.target, self.request = target, request
        self.clock = Clock()
        self.rows = [Row() for _ in request.prompts]
        self.idle_rounds = 0
        if target.tokenizer is not None:
            for row in self.rows:
                row.track = TextTrack(target.tokenizer, request.stop)

    @property
    def open(self) -> bool:
        return any(row.reason is None for row in self.rows)

    def feed(self, index: int, tokens: Sequence[int], limit: int) -> int:
        """Commit tokens to a row until something ends it; returns how many count. The earliest event names the reason;
        at the same token "stop" goes before "length"."""
        row = self.rows[index]
        for used, token in enumerate(tokens, 1):
            row.tokens.append(token)
            stopped = token in self.request.eos
            if row.track is not None:
                stopped |= row.track.push(token)
            if not stopped and self.request.criteria:
                stopped = self._criteria(index)
            if stopped:
                row.reason = "stop"
            elif len(row.tokens) >= limit:
                row.reason = "length"
            if row.reason is not None:
                return used
        return len(tokens)

    def _criteria(self, index: int) -> bool:
        history = torch.tensor([self.request.history(index) + self.rows[index].tokens], device=self.target.device)
        return any(bool(torch.as_tensor(c(history, None)).all()) for c in self.request.criteria)

    def begin(self, budgets: Sequence[int]) -> bool:
        """False when nothing may be generated at all."""
        if max(budgets) > 0:
            return True
        for row in self.rows:
            row.reason = "length"
        return False

    def commit_first(self, tokens: Sequence[int], budgets: Sequence[int]) -> None:
        """The token that reading the prompt gave; it belongs to no round."""
        for index, token in enumerate(tokens):
            self.feed(index, [token], budgets[index])

    def commit_tokens(self, tokens: Sequence[int], budgets: Sequence[int]) -> None:
        """One token for every open row: a round of length one."""
        for index, token in enumerate(tokens):
            if self.rows[index].reason is None:
                self.feed(index, [token], budgets[index])
                self.rows[index].accepted.append(1)

    def commit_round(self, launched: Launched, budgets: Sequence[int]) -> None:
        """Wait for a round's result, one transfer, and commit it."""
        taken = False
        for done in launched:
            row = self.rows[done.row]
            if row.reason is not None:
                row.surplus += done.committed
                continue
            taken = True
            used = self.feed(done.row, done.emitted[: done.committed], budgets[done.row])
            path = done.path[: min(used, done.accepted)]  # committed draft nodes, from 1
            row.accepted.append(used)
            row.surplus += done.committed - used
            row.drafted += done.drafted
            row.agreed += done.accepted
            row.repaired += sum(done.repaired)
            row.repairs_accepted += sum(done.repaired[node - 1] for node in path)
            row.branches += sum(done.branches)
            row.branches_accepted += sum(done.branches[node - 1] for node in path)
            row.branch_nodes += done.added
        self.idle_rounds += not taken

    def result(self) -> Generation:
        rows = self.rows
        text = None if self.target.tokenizer is None else [r.track.final_text() for r in rows if r.track is not None]
        stats = Stats(
            accepted=[r.accepted for r in rows],
            drafted=[r.drafted for r in rows],
            agreed=[r.agreed for r in rows],
            repaired=[r.repaired for r in rows],
            repairs_accepted=[r.repairs_accepted for r in rows],
            branches=[r.branches for r in rows],
            branches_accepted=[r.branches_accepted for r in rows],
            branch_nodes=[r.branch_nodes for r in rows],
            surplus=[r.surplus for r in rows],
            idle_rounds=self.idle_rounds,
            seconds=self.clock.seconds,
        )
        return Generation([r.tokens for r in rows], text, [r.reason or "length" for r in rows], stats)


def speculate(
    engine: Engine, request: Request, graphs: Graphs | None = None, loop: Runner | None = None
) -> Iterator[Session]:
    """Run a request in rounds; yields the session each time tokens were committed.

    Args:
        graphs: captured rounds to replay, or None to run every operation by itself. loop: runs them instead.
    """
    session = Session(engine.target, request)
    budgets = request.budgets(engine.target)
    if not session.begin(budgets):
        yield session
        return
    loop = loop or runner(engine, graphs)
    with capacity.fits(), closing(loop):
        session.commit_first(loop.start(request.prompts, budgets, request.seeds), budgets)
        session.clock.mark("prefill")
        yield session
        launched: collections.deque[Launched] = collections.deque()
        while session.open:
            ended = [row.reason is not None for row in session.rows]
            if request.ends_on_host:
                loop.end(ended)
            lengths = [len(p) + len(row.tokens) for p, row in zip(request.prompts, session.rows, strict=True)]
            session.clock.mark("host")
            launched.append(loop.launch(lengths, ended, len(launched), session.clock.mark))
            if len(launched) > loop.lag:
                session.commit_round(launched.popleft(), budgets)
                session.clock.mark("host" if loop.lag == 0 else "wait")
                yield session
        for late in launched:
            session.commit_round(late, budgets)


def autoregress(target: Target, request: Request) -> Iterator[Session]:
    """The lean baseline: one token a step, preallocated KV, nothing that a step does not need."""
    session = Session(target, request)
    budgets = request.budgets(target)
    if not session.begin(budgets):
        yield session
        return
    with capacity.fits():
        device, batch = target.device, len(request.prompts)
        lengths = torch.tensor([len(p) for p in request.prompts], device=device)
        width = int(lengths.max())
        room = width + max(budgets) + 1
        prompt = torch.zeros(batch, width, dtype=torch.int64, device=device)
        for row, ids in enumerate(request.prompts):
            prompt[row, : len(ids)] = torch.tensor(ids, device=device)
        cache = target.new_cache(batch, room)
        seed = torch.tensor(request.seeds, device=device)
        columns = torch.arange(room, device=device)
        logits, _ = target.prefill(prompt, lengths, cache)
        token = _next_token(session, logits, seed, lengths)
        session.commit_first(token.tolist(), budgets)
        session.clock.mark("prefill")
        yield session
        position, longest = lengths[:, None].clone(), width + 1
        while session.open:
            bound = min(_round_up(longest, _BOUND_STEP), room)
            mask = (columns[:bound] <= position)[:, None]  # [B, 1, bound]
            hidden, _ = target.forward(token[:, None], position, position, mask, cache)
            token = _next_token(session, target.logits(hidden[:, 0]), seed, position[:, 0] + 1)
            session.commit_tokens(token.tolist(), budgets)
            position = (position + 1).clamp_max(room - 1)  # rows that are done may stay behind the others' end
            longest += 1
            session.clock.mark("step")
            yield session


def _next_token(session: Session, logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    request = session.request
    if request.processors:
        device = logits.device
        rows = [
            run_processors(
                request.processors,
                i,
                torch.tensor([request.history(i) + row.tokens], device=device),
                logits[i : i + 1],
            )
            for i, row in enumerate(session.rows)
        ]
        logits = torch.cat(rows)
    return choose(request.law, logits[:, None], seed, position[:, None])[:, 0]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@torch.no_grad()
def finish(runs: Iterator[Session]) -> Generation:
    """Run to the end."""
    last = collections.deque(runs, maxlen=1)
    return last[0].result()


@torch.no_grad()
def pieces(runs: Iterator[Session]) -> Iterator[tuple[str, Session]]:
    """Stream the text of a single row; what was given is never taken back, and the pieces join to the final text."""
    for session in runs:
        row = session.rows[0]
        assert row.track is not None
        piece = row.track.piece(final=row.reason is not None)
        if piece or row.reason is not None:
            yield piece, session


@torch.no_grad()
def streamed(runs: Iterator[Any], request: Request, streamer: Any, prompt: bool = True) -> Generation:
    """Run a single row to the end, its tokens put to a ``transformers`` streamer; ``prompt``: the prompt's, too."""
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise InvalidInput(f"streamer={streamer!r}: give an object with put and end, like transformers' TextStreamer")
    if len(request.prompts) != 1:
        raise InvalidInput(f"a streamer takes one prompt, not {len(request.prompts)}")
    if prompt:
        streamer.put(torch.tensor([request.prompts[0]]))
    given, session = 0, None
    for session in runs:
        tokens = session.rows[0].tokens
        if tokens[given:]:
            streamer.put(torch.tensor(tokens[given:]))
        given = len(tokens)
    streamer.end()
    assert session is not None
    return session.result()
