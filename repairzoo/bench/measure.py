"""Measure: every cell on every prompt, interleaved in one process, one raw JSON line a prompt.

The first line of a raw file is its manifest. A run that was interrupted continues where it stopped. A cell's tokens are
compared with plain decoding's before anything is written; where they differ, the line says how near to a tie the target
was there, and the report prints no speed over an answer that is wrong.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from repairzoo.bench.clock import RoundClock, synchronise
from repairzoo.bench.machine import machine, target_facts
from repairzoo.bench.others import first_difference, last_logits
from repairzoo.bench.outcome import Outcome
from repairzoo.bench.suites import Prompt
from repairzoo.errors import InvalidInput
from repairzoo.generation import Session, autoregress, make_request
from repairzoo.inputs import prompt_ids
from repairzoo.sampling import Law, Stream, uniform
from repairzoo.target import Target
from repairzoo.zoo import Zoo

BASELINE = "autoregressive"
SCHEMA = 2
Key = tuple[str, str, str, int, float, int]  # suite, id, cell, repeat, temperature, batch

# Two tokens are tied where their logits differ by less than this share of the largest: a block and a single token take
# different kernels, whose sums are ordered differently.
TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells share in a comparison. Raises ``InvalidInput`` for a temperature or a batch that cannot be."""

    temperature: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        Law(self.temperature)
        if self.batch < 1:
            raise InvalidInput(f"batch={self.batch}: give at least one row")


@dataclass(slots=True)
class Cell:
    """One way to decode.

    Attributes:
        run: ``(prompt ids of a batch, options of generate) -> Outcome``.
        zoo: what drafts, or None for plain decoding and for others.
        greedy_only: batch 1 at temperature 0 only (others' loops).
    """

    name: str
    run: Callable[[list[list[int]], dict[str, Any]], Outcome]
    zoo: Zoo | None = None
    greedy_only: bool = False

    def serves(self, setting: Setting) -> bool:
        if self.zoo is not None and self.zoo.proposal == "sampled" and setting.temperature == 0:
            return False  # it is the argmax cell there
        return not self.greedy_only or setting == Setting()

    def comparable(self, setting: Setting) -> bool:
        """Whether its tokens must be plain decoding's, token for token: target-first walks draw by position, too."""
        return setting.temperature == 0 or self.zoo is None or self.zoo.proposal == "argmax"


def plain_cell(target: Target) -> Cell:
    def run(prompts: list[list[int]], options: dict[str, Any]) -> Outcome:
        return timed(autoregress(target, make_request(target, prompts, **options)), target.device)

    return Cell(BASELINE, run)


def zoo_cell(name: str, zoo: Zoo) -> Cell:
    def run(prompts: list[list[int]], options: dict[str, Any]) -> Outcome:
        return timed(zoo._run(make_request(zoo.target, prompts, **options)), zoo.target.device)

    return Cell(name, run, zoo)


@torch.no_grad()
def timed(runs: Iterator[Session], device: torch.device) -> Outcome:
    """Run a session to its end, with the times of every stage of every round."""
    session = next(runs)
    synchronise(device)
    prefill = session.clock.seconds.get("prefill", 0.0)
    session.clock = clock = RoundClock(device)
    began = time.perf_counter()
    for session in runs:  # noqa: B007 - the last one is the result
        clock.end_round()
    clock.mark("host")
    synchronise(device)
    wall = time.perf_counter() - began
    rounds = clock.rounds()
    out = session.result()
    s = out.stats
    first = [len(tokens) - sum(accepted) for tokens, accepted in zip(out.token_ids, s.accepted, strict=True)]
    return Outcome(
        tokens=out.token_ids,
        finish=out.finish_reason,
        accepted=s.accepted,
        first=first,
        seconds={"prefill": prefill, **clock.seconds},
        wall=wall,
        rounds=rounds,
        drafted=s.drafted,
        agreed=s.agreed,
        repaired=s.repaired,
        repairs_accepted=s.repairs_accepted,
    )


def measure(
    target: Target,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    path: Path,
    *,
    settings: Sequence[Setting] = (Setting(),),
    max_new_tokens: int = 128,
    seed: int = 0,
    repeats: int = 1,
    prefixes: int = 0,
    oracle: int = 16,
    manifest: dict[str, Any] | None = None,
) -> None:
    """Append one line for every prompt, cell, setting and repeat that ``path`` doesn't hold yet.

    Args:
        settings: temperatures and batch sizes; plain decoding runs in each.
        prefixes: prompts of each suite whose rounds are replayed (untimed) for native, selected and oracle prefixes.
        oracle: candidates a slot of the oracle.
        manifest: further entries of the first line.

    Raises:
        InvalidInput: equal cell names, or a file that was begun with other options.
    """
    if twice := [name for name, n in Counter(cell.name for cell in cells).items() if n > 1]:
        raise InvalidInput(f"two cells have the name {twice[0]!r}: leave one out")
    if twice := [key for key, n in Counter((p.suite, p.id) for p in prompts).items() if n > 1]:
        raise InvalidInput(f"two prompts are {'/'.join(twice[0])}: give files of different names, each once")
    if not cells or not prompts or repeats < 1 or max_new_tokens < 1:
        raise InvalidInput("a measurement needs cells, prompts, at least one repeat and one new token")
    options = {"max_new_tokens": max_new_tokens, "seed": seed}
    head = {
        "schema": SCHEMA,
        **machine(target.device),
        "target": target_facts(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "options": options,
        "settings": [{"temperature": s.temperature, "batch": s.batch} for s in settings],
        "repeats": repeats,
        "oracle": oracle,
        "suites": {p.suite: sum(q.suite == p.suite for q in prompts) for p in prompts},
        "cells": [cell.name for cell in cells],
        **(manifest or {}),
    }
    ids = encoded(target, prompts)
    done, plain = _resume(path, head)
    begun = (read_lines(path)[0] or head).get("commit")
    by = {} if begun == head["commit"] else {"commit": head["commit"]}  # of a run that goes on with another one's file
    for cell in cells:  # warm-up, the same for all and not recorded
        cell.run(ids[:1], {**options, "max_new_tokens": min(16, max_new_tokens), "temperature": 0.0})
    replayed = _first_of_suites(prompts, prefixes)
    groups = [
        (repeat, setting, list(range(start, min(start + setting.batch, len(prompts)))))
        for repeat in range(repeats)
        for setting in settings
        for start in range(0, len(prompts), setting.batch)
    ]
    for number, (repeat, setting, group) in enumerate(tqdm(groups, desc=path.name, unit="group")):
        serving = [cell for cell in cells if cell.serves(setting)]

        def key(index: int, cell: str, repeat: int = repeat, setting: Setting = setting) -> Key:
            p = prompts[index]
            return p.suite, p.id, cell, repeat, setting.temperature, setting.batch

        missing = [cell for cell in serving if any(key(i, cell.name) not in done for i in group)]
        shift = number % len(serving)  # no cell always follows the same other
        order = [cell for cell in [*serving[shift:], *serving[:shift]] if cell in missing]
        batch = [ids[i] for i in group]
        outcomes = {cell.name: cell.run(batch, {**options, "temperature": setting.temperature}) for cell in order}
        if BASELINE in outcomes:
            plain |= {key(i, BASELINE): outcomes[BASELINE].tokens[row] for row, i in enumerate(group)}
        for cell in order:
            out = outcomes[cell.name]
            lines = []
            for row, index in enumerate(group):
                if key(index, cell.name) in done:
                    continue
                p = prompts[index]
                line = {
                    "suite": p.suite,
                    "id": p.id,
                    "cell": cell.name,
                    "repeat": repeat,
                    **by,
                    **_shared(setting, row),
                }
                line |= record(out, row)
                expected = plain.get(key(index, BASELINE))
                if expected is not None and cell.name != BASELINE and cell.comparable(setting):
                    difference = judged(target, ids[index], expected, line["tokens"], setting, seed + row)
                    line |= {} if difference is None else {"differs": difference}
                alone = repeat == 0 and setting.batch == 1
                if cell.zoo is not None and index in replayed and alone and cell.comparable(setting):
                    line |= _prefixes(cell.zoo, ids[index], out, setting, seed, oracle)
                lines.append(line)
            _append(path, lines)


def encoded(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt. Raises ``InvalidInput``: names the one that the target cannot read."""
    ids = []
    for p in prompts:
        try:
            ids.append(prompt_ids(target, p.text)[0])
        except InvalidInput as error:
            raise InvalidInput(f"prompt {p.suite}/{p.id}: {error}") from error
    return ids


def record(out: Outcome, row: int = 0) -> dict[str, Any]:
    """The raw line of a row; times are the whole batch's and stand in its first row's line."""
    line: dict[str, Any] = {
        "tokens": out.tokens[row],
        "finish": out.finish[row],
        "first": out.first[row],
        "accepted": out.accepted[row],
    }
    for name in ("drafted", "agreed", "repaired", "repairs_accepted"):
        values = getattr(out, name)
        if values:
            line[name] = values[row]
    if row == 0:
        line["seconds"] = {stage: round(value, 5) for stage, value in out.seconds.items()}
        line["wall"] = round(out.wall, 5)
        line["decoded"] = sum(map(sum, out.accepted))  # tokens of the whole batch in that time
        if out.rounds:
            line["rounds"] = {stage: [round(1e6 * x) for x in values] for stage, values in out.rounds.items()}
    return line


def judged(
    target: Target, prompt: list[int], expected: list[int], tokens: list[int], setting: Setting, seed: int
) -> dict[str, Any] | None:
    """None for equal tokens; else where they part and whether the target was undecided there.

    At temperature 0 that is the distance of the two logits over the largest logit; above it, the distance of the
    random number from the other token's interval of the cumulative law.
    """
    at = first_difference(expected, tokens)
    if at is None:
        return None
    if at >= min(len(expected), len(tokens)):
        return {"at": at, "tie": False}
    logits = last_logits(target, prompt + expected[:at]).double()
    a, b = expected[at], tokens[at]
    if setting.temperature == 0:
        distance = float((logits[a] - logits[b]).abs() / logits.abs().max())
    else:
        probs = Law(setting.temperature).probs(logits[None])[0].double()
        upper = probs.cumsum(0) / probs.sum()
        place = torch.tensor([[len(prompt) + at]], device=logits.device)
        u = float(uniform(torch.tensor([seed], device=logits.device), place, Stream.VERIFY))
        low, high = float(upper[b] - probs[b] / probs.sum()), float(upper[b])
        distance = max(low - u, u - high, 0.0)
    return {"at": at, "distance": float(f"{distance:.3g}"), "tie": distance <= TIE[target.dtype]}


def _prefixes(
    zoo: Zoo, prompt: list[int], out: Outcome, setting: Setting, seed: int, oracle: int
) -> dict[str, dict[str, Any]]:
    from repairzoo.bench.replay import replay

    seen = replay(zoo, prompt, out.tokens[0], temperature=setting.temperature, seed=seed, oracle=oracle)
    return {} if seen.prefix is None else {"prefix": seen.prefix.as_dict()}


def _shared(setting: Setting, row: int) -> dict[str, Any]:
    return {"temperature": setting.temperature, "batch": setting.batch, "row": row}


def _first_of_suites(prompts: Sequence[Prompt], count: int) -> set[int]:
    seen: dict[str, int] = {}
    chosen = set()
    for index, prompt in enumerate(prompts):
        seen[prompt.suite] = seen.get(prompt.suite, 0) + 1
        if seen[prompt.suite] <= count:
            chosen.add(index)
    return chosen


_SAME = (
    "schema",
    "target",
    "dtype",
    "device",
    "options",
    "settings",
    "repeats",
    "oracle",
    "suites",
    "cells",
    "threads",
    "cpu",
    "gpu",
    "packages",
    "artifacts",
)


def _resume(path: Path, head: dict[str, Any]) -> tuple[set[Key], dict[Key, list[int]]]:
    """What a file holds already, after writing the manifest of a new one. A line that a killed run left unfinished is
    removed: that cell is measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest, rows = read_lines(path)
    for key in _SAME if manifest is not None else ():
        assert manifest is not None
        if manifest.get(key) != json.loads(json.dumps(head.get(key))):
            raise InvalidInput(
                f"{path} was begun with {key} {manifest.get(key)!r}, this run has {head.get(key)!r}: name another file"
            )
    whole = 0
    if path.exists():  # nothing of a file is touched before it is known to be ours
        with open(path, "r+b") as file:
            raw = file.read()
            whole = raw.rfind(b"\n") + 1
            file.truncate(whole)
        rows = rows[: max(0, raw[:whole].count(b"\n") - 1)]
    if manifest is None or not whole:
        _append(path, [{"manifest": head}])
        return set(), {}
    done = {key_of(row): row["tokens"] for row in rows}
    return set(done), {key: tokens for key, tokens in done.items() if key[2] == BASELINE}


def key_of(row: dict[str, Any]) -> Key:
    return row["suite"], row["id"], row["cell"], row["repeat"], row.get("temperature", 0.0), row.get("batch", 1)


def read_lines(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Manifest and rows, or (None, []) for a file that does not exist or is empty. What a killed run left of its last
    line is left out.

    Raises:
        InvalidInput: no raw file of a measurement, or a damaged one; names the line.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if number == len(lines) and (found or line.startswith(b'{"manifest"')):
                break
            raise InvalidInput(
                f"{where}: no JSON ({error}); is it a raw file of repairzoo bench, undamaged?"
            ) from error
        if not found and not (isinstance(value, dict) and isinstance(value.get("manifest"), dict)):
            raise InvalidInput(f"{path}: the first line must be the manifest of a measurement (repairzoo bench)")
        if found:
            _check_row(value, where)
        found.append(value)
    return (found[0]["manifest"], found[1:]) if found else (None, [])


_ROW = {"suite": str, "id": str, "cell": str, "repeat": int, "tokens": list, "accepted": list}


def _check_row(row: Any, where: str) -> None:
    """Raises ``InvalidInput``: a key without which no figure can be made."""
    for key, kind in _ROW.items():
        value: Any = row.get(key) if isinstance(row, dict) else None
        if not isinstance(value, kind) or (kind is list and not all(isinstance(n, int) for n in value)):
            raise InvalidInput(f"{where}: {key!r} is {value!r}, no row of repairzoo bench has that; is it undamaged?")
    for key in ("seconds", "rounds", "differs", "prefix"):
        if not isinstance(row.get(key, {}), dict):
            raise InvalidInput(f"{where}: {key!r} is no object, as in every row of repairzoo bench; is it undamaged?")


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
