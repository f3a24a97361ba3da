"""The Domino objective: corrected and base cross entropy, the second fading (arXiv 2605.29707, section 4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.data import Batch, prefix
from repairzoo.train.drafts import draft_job, first_trunk
from repairzoo.train.losses import decay_weights, place_in
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Terms

from .backbone import Domino
from .config import new_config

_CHUNK = 512  # rows whose logits over the whole vocabulary are alive at once in an evaluation


@dataclass(slots=True)
class DominoObjective:
    """Trains a Domino that is bound to its target: ``(1 - lambda) CE(corrected) + lambda CE(base)``.

    Attributes:
        module: the backbone. output_weight: ``[V, D]`` frozen output head.
        gamma: slot decay of the loss, counted from the first slot; None for none.
        base_start: lambda at the first step. base_decay: share of the run over which it falls to 0, linearly.
        columns: sorted vocabulary ids of the training softmax, or None for all.
    """

    module: Domino
    output_weight: Tensor
    gamma: float | None = 4.0
    base_start: float = 1.0
    base_decay: float = 1.0
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.base_start <= 1 or not 0 < self.base_decay <= 1:
            raise InvalidInput(
                f"base_start={self.base_start!r}, base_decay={self.base_decay!r}: give numbers from 0 to 1, the decay "
                "above 0"
            )

    def base_share(self, progress: float) -> float:
        """``lambda``."""
        return self.base_start * max(0.0, 1 - progress / self.base_decay)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        backbone = self.module
        hidden = module(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]  # [B, N, S, D]
        labels, mask = batch.labels(backbone.slots)
        y = backbone.teacher_forced(hidden, batch.before(labels))  # [B, N, S, E]
        output, correction = self.output_weight, backbone.output_rows[: self.output_weight.shape[0]]
        if self.columns is not None:
            output, correction = output[self.columns], correction[self.columns]
            labels, known = place_in(self.columns, labels)
            mask = mask & known
        rows = mask.nonzero(as_tuple=True)
        weights = decay_weights(labels.shape[-1], self.gamma, hidden.device)[rows[-1]]
        base = F.linear(hidden[rows].to(output.dtype), output).float()
        final = base + F.linear(y[rows], correction).float()
        share = self.base_share(progress)

        def entropy(logits: Tensor) -> Tensor:
            return (F.cross_entropy(logits, labels[rows], reduction="none") * weights).sum()

        return {
            "final": ((1 - share) * entropy(final), weights.sum()),
            "base": (share * entropy(base), weights.sum()),
        }

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slot i is judged with the true tokens before it: up to the first error those are what the walk chose."""
        backbone = self.module
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]
        labels, mask = batch.labels(backbone.slots)
        blocks, previous = hidden.flatten(0, 1), batch.before(labels).flatten(0, 1)  # [B*N, S, ...]
        size = max(1, _CHUNK // backbone.slots)
        pieces = zip(blocks.split(size), previous.split(size), strict=True)
        choice = torch.cat([backbone.corrected_logits(*piece).argmax(-1) for piece in pieces])
        return choice == labels.flatten(0, 1), prefix(mask).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe; the trunk is that of the draft it begins with. Keys as in :class:`DominoConfig`."""

    emb_dim: int
    gru_hidden_dim: int
    shift_label: bool
    pure_draft_prefix_len: int = 1
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe; see :class:`DominoObjective` and :func:`repairzoo.train.drafts.draft_job`."""

    gamma: float | None = 4.0
    base_start: float = 1.0
    base_decay: float = 1.0
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
    """A Domino on the trunk of the draft in ``init``, on the target's answers.

    Raises:
        InvalidInput: no ``init``, or a key of the recipe. IncompatibleArtifact: ``init`` does not fit.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    stated = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    found = first_trunk(recipe, init)
    assert init is not None
    config = new_config(found.config, **asdict(model))

    def objective(draft: Any, columns: Tensor | None) -> DominoObjective:
        return DominoObjective(draft, target.output_weight, stated.gamma, stated.base_start, stated.base_decay, columns)

    return draft_job(
        recipe,
        target,
        folders,
        init,
        found,
        lambda: Domino(config, seed=recipe.run.seed),
        objective,
        {"model": asdict(model), "objective": asdict(stated)},
        least_count=stated.least_count,
        text_from=stated.text_from,
        passes=passes,
    )
