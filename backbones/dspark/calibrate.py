"""Are the confidences what they say? Sequential temperature scaling and the calibration error (arXiv 2607.05147, 3.2).

What a schedule uses is the chance that a whole prefix survives, ``c_0 c_1 ... c_k``. Temperatures are therefore fitted
slot by slot on that product, those of earlier slots fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from repairzoo import decode
from repairzoo.errors import InvalidInput
from repairzoo.generation import make_request
from repairzoo.inputs import prompt_ids

GRID = tuple(round(0.25 * 1.06**i, 4) for i in range(61))  # 0.25 to 8.2


@dataclass(frozen=True, slots=True)
class Calibration:
    """A report on ``N`` proposals.

    Attributes:
        temperatures: one a slot. before, after: expected calibration error of the prefix's survival, one a slot.
        survived: share of proposals whose slots 0 .. k were all accepted, one a slot.
    """

    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    survived: tuple[float, ...]


def expected_error(p: Tensor, outcome: Tensor, bins: int = 10) -> float:
    """ECE: mean over equal-width bins of ``|mean outcome - mean p|``, weighted by the number in the bin.

    Args:
        p: ``[N]`` estimated probabilities. outcome: ``[N]`` bool.
    """
    place = (p.double() * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=p.device)
    gap.index_add_(0, place, outcome.double() - p.double())
    return float(gap.abs().sum() / len(p))


def fit(logits: Tensor, accepted: Tensor, *, bins: int = 10, grid: Sequence[float] = GRID) -> Calibration:
    """Temperatures that minimise the calibration error of each prefix, found slot by slot on a grid.

    Args:
        logits: ``[N, S]`` confidence logits (:meth:`DSpark.confidence_logits`) of uncut proposals.
        accepted: ``[N]`` int64, accepted drafts of each: the outcome of slot k is ``accepted > k``.

    Raises:
        InvalidInput: no proposals, or shapes that do not belong together.
    """
    if logits.dim() != 2 or accepted.shape != logits.shape[:1] or not len(logits):
        raise InvalidInput(
            f"confidence logits {list(logits.shape)} and accepted drafts {list(accepted.shape)}: give [N, S] and [N], "
            "N > 0"
        )
    outcome = accepted[:, None] > torch.arange(logits.shape[1], device=logits.device)
    raw, done = torch.ones(2, len(logits), dtype=torch.float64, device=logits.device)
    temperatures, before, after = [], [], []
    for slot in range(logits.shape[1]):
        column, hit = logits[:, slot].double(), outcome[:, slot]
        raw = raw * column.sigmoid()
        before.append(expected_error(raw, hit, bins))
        # the first of equals: a slot that was never reached keeps 1
        errors = {t: expected_error(done * (column / t).sigmoid(), hit, bins) for t in (1.0, *grid)}
        best = min(errors, key=lambda t: errors[t])
        done = done * (column / best).sigmoid()
        temperatures.append(best)
        after.append(errors[best])
    survived = outcome.double().mean(0).tolist()
    return Calibration(tuple(temperatures), tuple(before), tuple(after), tuple(survived))


@torch.no_grad()
def observe(zoo: Any, inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Confidence logits ``[N, S]`` and accepted drafts ``[N]`` of every round of a run without cuts, for :func:`fit`.

    Args:
        zoo: built with a DSpark. inputs, options: as for its ``generate``.

    Raises:
        InvalidInput: the backbone has no confidence head, or see ``generate``.
    """
    backbone, target = zoo.backbone, zoo.target
    request = make_request(target, prompt_ids(target, inputs, None, None), **options)
    engine = replace(zoo.engine(request), confidence=0.0, nodes=None)
    state = decode.start(engine, request.prompts, request.budgets(target), request.seeds)
    logits, accepted = [], []
    while not bool(state.done.all()):
        open_rows, position = ~state.done, state.length - 1
        anchor = state.ids.gather(1, position[:, None])[:, 0]
        block = backbone.draft(state.context, anchor, position)
        tree, _, _ = decode.propose(engine, block, state.seed)  # the round will propose the same
        logits.append(backbone.confidence_logits(block.hidden, tree.tokens[:, :-1])[open_rows])
        accepted.append(decode.round(engine, state, state.ids.shape[1]).accepted[open_rows])
    if not logits:
        raise InvalidInput("no round was run: give prompts with longer answers")
    return torch.cat(logits), torch.cat(accepted)
