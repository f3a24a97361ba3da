"""What a round costs beside its models: the round's time less target, backbone and head measured alone, on its tensors.

Before every round its own parts run once by themselves on the same state (a draft, the heads, the verify pass, the
features handed to the backbone: all they write is scratch that the round overwrites), so that both are timed in the
same moment. What is left is masks, acceptance, commit, and the Python between them. It is a few hundredths of a round
and would drown in the difference of two times that each vary by a tenth; so it is added up from what lies outside the
models, as the round's own clock sees it, and the difference is given beside it. The host's part comes from a normal
run.
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
        left: what of a round lies outside those three, the host's part included. difference: of a round and those
            three, likewise; the same but for the noise of the models.
        host: between rounds, from a normal run. stages: of the round, as its clock sees them.
    """

    round: float
    target: float
    backbone: float
    head: float
    left: float
    difference: float
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
            "difference": self.difference,
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
        mark("alone: anchor")
        block = backbone.draft(state.context, anchor, position, bound)
        mark("alone: draft")
        tree, q, repaired = propose(engine, block, state.seed)
        if engine.trim:
            tree, q, repaired = shorten(tree, q, repaired)
        mark("alone: head")
        entries = position[:, None] + torch.arange(tree.size, device=device)
        mask = verify_mask(tree, position, bound)
        positions = position[:, None] + tree.depths
        mark("alone: mask")
        hidden, features = target.forward(tree.tokens, positions, entries, mask, state.kv, backbone.tapped_layers)
        target.logits(hidden)
        mark("alone: target")
        if features is not None:
            rows = features[:, : tree.height + 1]
            places = position[:, None] + torch.arange(rows.shape[1], device=device)
            last = time.perf_counter()
            backbone.extend(state.context, rows, places)
        mark("alone: extend")
        began = last
        round(engine, state, bound, mark)
        mark("after")
        clock.setdefault("round", []).append(last - began)
        # a commit extends the backbone's cache, which is the backbone's
        extend, models = clock["alone: extend"][-1], ("alone: draft", "alone: head", "alone: target", "alone: extend")
        left = sum(clock[stage][-1] for stage in ("alone: anchor", "alone: mask", "accept", "commit", "after")) - extend
        clock.setdefault("left", []).append(left)
        clock.setdefault("difference", []).append(last - began - sum(clock[stage][-1] for stage in models))
    middle = {stage: statistics.median(values[skip:] or values) for stage, values in clock.items()}
    normal = zoo_cell("host", zoo).run([prompt], {"max_new_tokens": min(budget, 32), "temperature": 0.0, "seed": 0})
    host = statistics.median(normal.rounds.get("host", [0.0]))
    return Overhead(
        round=middle["round"] + host,
        target=middle["alone: target"],
        backbone=middle["alone: draft"] + middle["alone: extend"],
        head=middle["alone: head"],
        left=middle["left"] + host,
        difference=middle["difference"] + host,
        host=host,
        stages={stage: middle[stage] for stage in ("draft", "head", "verify", "accept", "commit")},
    )
