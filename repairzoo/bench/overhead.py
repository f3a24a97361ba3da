"""What a round costs beside its models: the round's time less target, backbone and head measured alone, on its tensors.

Before every round its own parts run once by themselves on the same state (a draft, the heads, the verify pass, the
features handed to the backbone: all they write is scratch that the round overwrites), so that both are timed in the
same moment. What is left is masks, acceptance, commit, and the Python between them: the median of each round's own
difference, since a machine whose speed drifts by a tenth would drown it in a difference of medians. The host's part
comes from a normal run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from repairzoo.bench.clock import synchronise
from repairzoo.bench.measure import zoo_cell
from repairzoo.decode import propose, round, shorten, start, verify_mask
from repairzoo.generation import make_request
from repairzoo.zoo import Zoo


@dataclass(slots=True)
class Overhead:
    """Medians over rounds, in seconds.

    Attributes:
        round: one round, the host's part included. target, backbone, head: measured alone.
        left: of a round less those three, the host's part included.
        host: between rounds, from a normal run. stages: of the round, as its clock sees them.
    """

    round: float
    target: float
    backbone: float
    head: float
    left: float
    host: float
    stages: dict[str, float]

    @property
    def share(self) -> float:
        """Overhead as a share of the round."""
        return self.left / self.round

    def as_dict(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "target": self.target,
            "backbone": self.backbone,
            "head": self.head,
            "left": self.left,
            "host": self.host,
            "stages": self.stages,
            "share": self.share,
        }


@torch.no_grad()
def overhead(zoo: Zoo, prompt: list[int], *, rounds: int = 40, skip: int = 3) -> Overhead:
    """Greedy, batch 1.

    Args:
        rounds: how many are measured. skip: not counted at the beginning.
    """
    target, backbone, device = zoo.target, zoo.backbone, zoo.target.device
    budget = min((rounds + skip) * (backbone.slots + 1), target.max_context - len(prompt))
    request = make_request(target, [prompt], max_new_tokens=budget, temperature=0.0, seed=0, eos_token_id=[])
    engine = zoo.engine(request)
    state = start(engine, [prompt], [budget], [0])
    clock: dict[str, list[float]] = {}
    last = time.perf_counter()

    def mark(stage: str) -> None:
        nonlocal last
        synchronise(device)
        now = time.perf_counter()
        clock.setdefault(stage, []).append(now - last)
        last = now

    for _ in range(rounds + skip):
        if bool(state.done.all()):
            break
        bound = min(-(-(int(state.length.max()) + engine.slack) // 64) * 64, state.ids.shape[1])
        synchronise(device)
        last = time.perf_counter()
        position = state.length - 1
        anchor = state.ids.gather(1, position[:, None])[:, 0]
        last = time.perf_counter()
        block = backbone.draft(state.context, anchor, position, bound)
        mark("alone: draft")
        tree, q, repaired = propose(engine, block, state.seed)
        if engine.trim:
            tree, q, repaired = shorten(tree, q, repaired)
        mark("alone: head")
        entries = position[:, None] + torch.arange(tree.size, device=device)
        mask = verify_mask(tree, position, bound)
        positions = position[:, None] + tree.depths
        last = time.perf_counter()
        hidden, features = target.forward(tree.tokens, positions, entries, mask, state.kv, backbone.tapped_layers)
        target.logits(hidden)
        mark("alone: target")
        if features is not None:
            rows = features[:, : tree.height + 1]
            places = position[:, None] + torch.arange(rows.shape[1], device=device)
            last = time.perf_counter()
            backbone.extend(state.context, rows, places)
        mark("alone: extend")
        alone = sum(clock[f"alone: {part}"][-1] for part in ("draft", "head", "target", "extend"))
        began = last
        round(engine, state, bound, mark)
        synchronise(device)
        whole = time.perf_counter() - began
        clock.setdefault("round", []).append(whole)
        clock.setdefault("left", []).append(whole - alone)
    middle = {stage: statistics.median(values[skip:] or values) for stage, values in clock.items()}
    normal = zoo_cell("host", zoo).run([prompt], {"max_new_tokens": min(budget, 32), "temperature": 0.0, "seed": 0})
    host = statistics.median(normal.rounds.get("host", [0.0]))
    return Overhead(
        round=middle["round"] + host,
        target=middle["alone: target"],
        backbone=middle["alone: draft"] + middle["alone: extend"],
        head=middle["alone: head"],
        left=middle["left"] + host,
        host=host,
        stages={s: v for s, v in middle.items() if not s.startswith("alone") and s not in ("round", "left")},
    )
