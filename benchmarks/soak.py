"""Generate without end over random prompts, lengths, temperatures and heads; nothing may grow, no token may differ.

    python benchmarks/soak.py --minutes 10 [--seed 0] [--out benchmarks/results/soak.json]

Tiny random models in float32 on a CPU. Half of the zoos replay recorded rounds on static buffers. Deterministic
proposals give the very draws of plain decoding, so every answer is compared with it token by token. Where a proposal is
sampled only the law is the same; such answers are compared with those of the same zoo run eagerly and alone. Two
answers may part where the target itself is undecided to within float32 rounding (batches of other sizes round
otherwise); that is checked in float64 and counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from conftest import VOCAB, causal_lm
from round_toys import BACKBONES, HEADS, backbone_for, head_for

import repairzoo
from repairzoo.capture import Recorder
from repairzoo.graph import Graphs
from repairzoo.sampling import Law, Stream, uniform
from repairzoo.target import Target

FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05})
ROWS, PROMPT, NEW = 4, 60, (1, 5, 17, 40, 66)
UNDECIDED = 1e-4  # logits, or probability mass, that float32 cannot tell apart behind a few layers
SLACK = 24 * 2**20  # resident bytes that an allocator may take after the first quarter


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def live() -> tuple[int, int]:
    """How many tensors exist, and the bytes they hold."""
    gc.collect()
    # packed matrices of other models in this process are opaque: they have no storage to look at
    every = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))  # isinstance wakes deprecated names
    tensors = [x for x in every if x.layout == torch.strided]
    return len(tensors), sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def make_zoos(target: Target, chance: random.Random, count: int) -> list[Any]:
    """Random pairs as chains, drawn chains and trees; every other one replays recorded rounds."""
    zoos = []
    for at in range(count):
        head = HEADS[at % len(HEADS)]
        ways = [{}] if "cure" in head else [{}, {"tree": chance.randint(2, 7)}, {"proposal": "sampled"}]
        backbone = backbone_for(chance.choice(BACKBONES), target, at)
        zoo = repairzoo.build(backbone, head_for(head, target, at), target, **chance.choice(ways))
        if at % 2:
            zoo.graphs = Graphs(Recorder(blank=False), smallest=64, ahead=48)
            zoo.graphs.sampled = zoo.proposal == "sampled"
        zoos.append(zoo)
    return zoos


def capture_all(zoos: list[Any]) -> int:
    """Capture every round that the runs will replay, and count them: a capture is kept, so one that first comes up late
    would look like a leak."""
    captured = 0
    for zoo in zoos:
        if zoo.graphs is not None:
            for filters in FILTERS:
                zoo.warm_up(ROWS, PROMPT + max(NEW), temperature=1.0, **filters)
            captured += sum(len(arena.graphs) for arena in zoo.graphs.free)
    return captured


@torch.no_grad()
def undecided(exact: Target, prefix: list[int], two: set[int], law: Law, seed: int) -> bool:
    """Whether the target itself, in float64, cannot choose between two tokens after a prefix."""
    logits = exact.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
    if law.greedy:
        return float(logits.max() - min(logits[t] for t in two)) < UNDECIDED
    u = float(uniform(torch.tensor([seed]), torch.tensor([len(prefix)]), Stream.VERIFY))
    ends = law.probs(logits).cumsum(-1)
    return all(float(ends[t - 1] if t else 0.0) - UNDECIDED <= u <= float(ends[t]) + UNDECIDED for t in two)


def soak(minutes: float, seed: int = 0, zoos: int = 14) -> dict[str, Any]:
    """Run for a time; raises ``AssertionError`` on a wrong token or growing memory."""
    chance = random.Random(seed)
    target = Target(causal_lm(seed=4, num_hidden_layers=2, dtype=torch.float32), None, name="toy", pack=False)
    double = Target(causal_lm(seed=4, num_hidden_layers=2, dtype=torch.float64), None, name="exact", pack=False)
    double.model.load_state_dict(target.model.state_dict())
    every = make_zoos(target, chance, zoos)
    captured = capture_all(every)
    begin, told = time.monotonic(), time.monotonic()
    facts: dict[str, Any] = {
        "minutes": minutes,
        "seed": seed,
        "captured": captured,
        "runs": 0,
        "rows": 0,
        "tokens": 0,
        "rounds": 0,
        "ties": 0,
    }
    marks: list[tuple[float, int, int, int]] = []
    while (spent := time.monotonic() - begin) < 60 * minutes or facts["runs"] < 2 * zoos:
        zoo = every[facts["runs"]] if facts["runs"] < zoos else chance.choice(every)
        rows = [
            [chance.randrange(VOCAB) for _ in range(chance.randint(1, PROMPT))] for _ in range(chance.randint(1, ROWS))
        ]
        options: dict[str, Any] = {"max_new_tokens": chance.choice(NEW), "seed": chance.randrange(2**40)}
        options["temperature"] = chance.choice([0.0, 0.0, 0.6, 1.0, 1.7])
        if options["temperature"]:
            options |= chance.choice(FILTERS)
        options["eos_token_id"] = [chance.randrange(VOCAB)] if chance.random() < 0.5 else []
        ours = zoo.generate(rows, **options)
        compare(zoo, double, rows, options, ours.token_ids, facts)
        facts["runs"] += 1
        facts["rows"] += len(rows)
        facts["tokens"] += sum(map(len, ours.token_ids))
        facts["rounds"] += ours.stats.rounds
        if time.monotonic() - told > 15 or facts["runs"] in (2 * zoos, 3 * zoos):
            told = time.monotonic()
            marks.append((round(spent, 1), resident(), *live()))
    marks.append((round(time.monotonic() - begin, 1), resident(), *live()))
    late = sum(len(a.graphs) for z in every if z.graphs is not None for a in z.graphs.free) - captured
    assert late == 0, f"{late} rounds were captured behind the warm-up: what they take is no leak, but hides one"
    facts["memory"] = [dict(zip(("seconds", "resident", "tensors", "bytes"), m, strict=True)) for m in marks]
    check_memory(marks)
    return facts


def compare(zoo: Any, exact: Target, rows: Any, options: dict[str, Any], answers: Any, facts: dict[str, Any]) -> None:
    law = Law(options["temperature"], *(options.get(name) for name in ("top_k", "top_p", "min_p")))
    if zoo.proposal == "sampled" and not law.greedy:
        alone = repairzoo.Zoo(zoo.target, zoo.backbone, zoo.heads, zoo.nodes, zoo.proposal)
        expected = alone.generate(rows, **options).token_ids
    else:
        expected = repairzoo.autoregressive(zoo.target, rows, **options).token_ids
    for at, (row, ours, theirs) in enumerate(zip(rows, answers, expected, strict=True)):
        if ours == theirs:
            continue
        split = next(i for i, pair in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)) if pair[0] != pair[1])
        two = {ours[split], theirs[split]} if split < min(len(ours), len(theirs)) else set()
        tied = len(two) == 2 and zoo.proposal != "sampled"
        tied = tied and undecided(exact, row + ours[:split], two, law, options["seed"] + at)
        assert tied, f"row {at} parts at token {split}: {ours} and {theirs}; {options}, prompt {row}"
        facts["ties"] += 1


def check_memory(marks: list[tuple[float, int, int, int]]) -> None:
    """Nothing grows behind the first quarter of the run, in which buffers and caches come to be."""
    settled = marks[min(len(marks) // 4, len(marks) - 1)]
    last = marks[-1]
    assert last[1] - settled[1] < SLACK, f"resident memory grew from {settled[1]} to {last[1]} bytes"
    if len(marks) > 4:
        assert last[3] <= 1.02 * settled[3] + 2**20, f"tensors grew from {settled[3]} to {last[3]} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    facts = soak(given.minutes, given.seed)
    if given.out is not None:
        temporary = given.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(facts, indent=1) + "\n")
        os.replace(temporary, given.out)
    print(json.dumps({key: value for key, value in facts.items() if key != "memory"}))
    print(f"resident memory {facts['memory'][0]['resident']} -> {facts['memory'][-1]['resident']} bytes")


if __name__ == "__main__":
    main()
