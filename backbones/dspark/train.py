"""The DSpark objective: cross entropy, distance to the target's law, and the confidence (arXiv 2607.05147)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repairzoo.target import Target
from repairzoo.train.data import Batch, prefix
from repairzoo.train.drafts import draft_job, first_trunk
from repairzoo.train.losses import decay_weights, place_in
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.teacher import Teacher, teacher
from repairzoo.train.trainer import Terms

from .backbone import DSpark
from .config import new_config

_CHUNK = 512  # rows whose logits over the vocabulary are alive at once


@dataclass(slots=True)
class DSparkObjective:
    """Trains a DSpark that is bound to its target: ``ce CE + l1 L1 + confidence BCE``.

    ``L1 = sum_v |p_draft - p_target|``; the confidence learns ``1 - L1 / 2``, without a gradient into that label. Slots
    count up to the first that is not supervised, with weight ``exp(-k / gamma)``.

    Attributes:
        module: the backbone. output_weight: ``[V, D]`` frozen output head.
        teacher: see :func:`repairzoo.train.teacher.teacher`.
        ce, l1, confidence: weights of the terms (0.1, 0.9 and 1 in the paper).
        gamma: slot decay of the loss, counted from the first slot; None for none.
        detach: let the confidence term train its head alone, not what that reads (speculators#848); the reference lets
            it through.
        columns: sorted vocabulary ids that both laws are taken over, or None for all.
    """

    module: DSpark
    output_weight: Tensor
    teacher: Teacher
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    gamma: float | None = 4.0
    detach: bool = True
    columns: Tensor | None = None

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        backbone = self.module
        hidden = module(batch.features, batch.input_ids, batch.anchors)  # [B, N, S, D]
        labels, mask = batch.labels(backbone.slots)
        previous, places, mask = batch.before(labels), labels, prefix(mask)
        if self.columns is not None:
            places, known = place_in(self.columns, labels)
            mask = mask & known
        rows = mask.nonzero(as_tuple=True)
        weights = decay_weights(labels.shape[-1], self.gamma, hidden.device)[rows[-1]]
        total = weights.sum()
        y = None if backbone.markov_head is None else backbone.teacher_forced(hidden, previous)[rows]
        judged = None
        if backbone.confidence_head is not None and self.confidence:
            judged = self._judge(hidden[rows], previous[rows])
        true = self._target_rows(batch, rows)
        sums = self._sums(hidden[rows], y, true, places[rows], weights, judged)
        terms = {"ce": (self.ce * sums[0], total), "l1": (self.l1 * sums[1], total)}
        if judged is not None:
            terms["confidence"] = (self.confidence * sums[2], total)
        return terms

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slot i is judged with the true tokens before it: up to the first error those are what the walk chose."""
        backbone = self.module
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)
        labels, mask = batch.labels(backbone.slots)
        blocks, previous = hidden.flatten(0, 1), batch.before(labels).flatten(0, 1)  # [B*N, S, ...]
        size = max(1, _CHUNK // backbone.slots)
        pieces = zip(blocks.split(size), previous.split(size), strict=True)
        choice = torch.cat([backbone.corrected_logits(*piece).argmax(-1) for piece in pieces])
        return choice == labels.flatten(0, 1), prefix(mask).flatten(0, 1)

    def _judge(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Confidence logits of rows; detached, only the head itself learns from them."""
        backbone = self.module
        head = backbone.confidence_head
        assert head is not None
        if not self.detach:
            return backbone.confidence_logits(hidden, previous)
        features = hidden.detach()
        if backbone.config.confidence_with_markov:
            assert backbone.markov_head is not None
            features = torch.cat((features, backbone.markov_head.markov_w1(previous).detach()), -1)
        return head.proj(features).float()[..., 0]

    @torch.no_grad()
    def _target_rows(self, batch: Batch, rows: tuple[Tensor, ...]) -> Tensor:
        """The target's states ``[M, D]`` that predict the labels of ``rows``: at the position before each."""
        return batch.at_labels(self.teacher(batch), self.module.slots)[rows]

    def _sums(
        self, hidden: Tensor, y: Tensor | None, true: Tensor, places: Tensor, weights: Tensor, judged: Tensor | None
    ) -> list[Tensor]:
        """Weighted sums of cross entropy, L1 and confidence loss over ``M`` rows, recomputed in the backward pass."""
        output = self.output_weight if self.columns is None else self.output_weight[self.columns]
        bias = None
        if y is not None:
            bias = self.module.output_rows[: self.output_weight.shape[0]]
            bias = bias if self.columns is None else bias[self.columns]

        def piece(h: Tensor, low: Tensor | None, t: Tensor, label: Tensor, w: Tensor, c: Tensor | None) -> Tensor:
            logits = F.linear(h.to(output.dtype), output).float()
            if low is not None and bias is not None:
                logits = logits + F.linear(low, bias).float()
            wanted = F.linear(t.to(output.dtype), output).float().softmax(-1)
            distance = (logits.softmax(-1) - wanted).abs().sum(-1)
            out = [F.cross_entropy(logits, label, reduction="none"), distance]
            if c is not None:
                agreement = (1 - distance.detach() / 2).clamp(0, 1)
                out.append(F.binary_cross_entropy_with_logits(c.float(), agreement, reduction="none"))
            return (torch.stack(out) * w).sum(1)

        def parts(x: Tensor | None) -> list[Tensor | None]:
            return [None] * -(-len(hidden) // _CHUNK) if x is None else list(x.split(_CHUNK))

        total = hidden.new_zeros(2 if judged is None else 3, dtype=torch.float32)
        for chunk in zip(*map(parts, (hidden, y, true, places, weights, judged)), strict=True):
            total = total + checkpoint(piece, *chunk, use_reentrant=False)
        return list(total.unbind())


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe; the trunk is that of the draft it begins with. Keys as in :class:`DSparkConfig`."""

    markov_rank: int
    markov_head_type: str
    confidence: bool = True
    confidence_with_markov: bool = True
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe; see :class:`DSparkObjective` and :func:`repairzoo.train.drafts.draft_job`."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    gamma: float | None = 4.0
    detach: bool = True
    least_count: int | None = 1
    text_from: int | None = None


def plan(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    *,
    init: Path | None = None,
    backbone: Any = None,
    passes: tuple[str, ...] | None = None,
) -> Job:
    """A DSpark on the trunk of the draft in ``init``.

    Raises:
        InvalidInput: no ``init``, or a key of the recipe. IncompatibleArtifact: ``init`` does not fit.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    stated = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    found = first_trunk(recipe, init)
    assert init is not None
    config = new_config(found.config, **asdict(model))

    def objective(draft: Any, columns: Tensor | None) -> DSparkObjective:
        weights = (stated.ce, stated.l1, stated.confidence, stated.gamma, stated.detach)
        return DSparkObjective(draft, target.output_weight, teacher(target), *weights, columns)

    return draft_job(
        recipe,
        target,
        folders,
        init,
        found,
        lambda: DSpark(config, seed=recipe.run.seed),
        objective,
        {"model": asdict(model), "objective": asdict(stated)},
        least_count=stated.least_count,
        text_from=stated.text_from,
        passes=passes,
        taught=True,
    )
