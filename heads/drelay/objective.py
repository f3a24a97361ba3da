"""Training DRelay on answers: the head alone on a frozen backbone, or both together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.blocks import PoolBlocks, pool_blocks, prefixes, right, summed
from repairzoo.train.data import Batch, prefix, scouted
from repairzoo.train.heads import OnBackbone, backbone_keys, freeze_at_zero, pool_job, target_keys
from repairzoo.train.held import accepted
from repairzoo.train.losses import decay_weights
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Terms

from .head import PRESETS, DRelay, new_config
from .train import loss_terms, ramp


class Trained(OnBackbone):
    """The head, and the backbone where it is trained as well; forward drafts and scores."""

    def forward(self, batch: Batch) -> tuple[PoolBlocks, Tensor]:
        """Blocks, and the head's scores ``[N, S, K]`` after the true prefix."""
        size = self.head.config.pool_size
        blocks = pool_blocks(self.backbone, batch, size, joint=self.joint, columns=self.columns)
        if self.control:
            return blocks, blocks.scores
        prepared = self.head.encode(blocks.block, blocks.pool)
        return blocks, self.head.forced(prepared, blocks.labels, blocks.block.embedding, blocks.scores)


@dataclass(slots=True)
class DRelayObjective:
    """``sum(m (CE + alpha w l_sel)) / sum(m)`` (arXiv 2610.01439, section 5); the first part in joint training only.

    Attributes:
        head: in float32. backbone: bound. joint: train it too.
        alpha: first and last weight of the selection. credit: whether credit weights replace uniform ones.
        support: weight of the draft's cross entropy; gamma: its slot decay, None as in the paper.
        until: share of the run over which alpha and credit grow. floor, cap: of the credit weights.
        columns: sorted ids that softmax and pools run over in training, or None.
        scout: first and last share of anchors that lie where rounds would begin (:func:`scouted`), growing over the
            first ``until``; the paper's are 0.3 and 0.5.
        control: train the backbone alone, with the same blocks and cross entropy.
    """

    head: DRelay
    backbone: Any
    joint: bool = False
    alpha: tuple[float, float] = (0.05, 1.0)
    credit: bool = True
    support: float = 1.0
    gamma: float | None = None
    until: float = 0.3
    floor: float = 0.25
    cap: float = 4.0
    columns: Tensor | None = None
    scout: tuple[float, float] = (0.0, 0.0)
    control: bool = False
    module: Trained = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1 or self.cap < 1:
            raise InvalidInput(f"floor={self.floor}, cap={self.cap}: give a floor from 0 to 1 and a cap of at least 1")
        if min(self.scout) < 0 or max(self.scout) > 1:
            raise InvalidInput(f"scout={self.scout}: give shares from 0 to 1")
        self.module = Trained(self.head, self.backbone, self.joint, self.columns, self.control)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        share = ramp(progress, *self.scout, self.until)
        if share > 0:
            batch = scouted(batch, share, self._accepted)
        blocks, scores = module(batch)
        found: Terms = {}
        if not self.control:
            found["selection"] = self._selection(blocks, scores, progress)
        if blocks.entropy is not None:
            weight = blocks.mask * decay_weights(scores.shape[1], self.gamma, scores.device)
            found["draft"] = (self.support * (blocks.entropy * weight).sum(), weight.sum())
        return found

    def _accepted(self, batch: Batch) -> Tensor:
        blocks, scores = self.module(batch)
        return accepted(batch, right(blocks, scores), blocks.mask.bool())

    def _selection(self, blocks: PoolBlocks, scores: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        return loss_terms(
            scores,
            blocks.pool.ids,
            blocks.labels,
            blocks.mask,
            alpha=ramp(progress, *self.alpha, self.until),
            mix=ramp(progress, 0.0, 1.0, self.until) if self.credit else 0.0,
            floor=self.floor,
            cap=self.cap,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slot i is judged after the true tokens: up to the first error those are what the walk chose."""
        blocks, scores = self.module(batch)
        return right(blocks, scores), prefix(blocks.mask)

    @torch.no_grad()
    def diagnose(self, batches: list[Batch]) -> dict[str, Any]:
        """See :func:`repairzoo.train.blocks.prefixes`; with the null's mass and the histogram of lambda."""
        parts, counts, null, histogram = [], [], 0.0, torch.zeros(10)
        for batch in batches:
            blocks, scores = self.module(batch)
            seen = self.head.diagnostics(blocks.block, blocks.pool)
            parts.append(prefixes(blocks, scores))
            counts.append(len(blocks.labels))
            null += seen["null_mass"].mean().item() * len(blocks.labels)
            histogram += seen["fusion_histogram"].cpu()
        share = (histogram / histogram.sum().clamp_min(1)).tolist()
        more = {"null_mass": round(null / max(1, sum(counts)), 4), "lambda": [round(x, 4) for x in share]}
        return {**summed(parts, counts), **more}


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe: a preset, whose widths may be replaced one by one. ``dtype``: of the stored weights.
    ``global_read: false`` is the ablation without the candidate read: its output layer stays at zero."""

    preset: str
    pool_size: int = 16
    width: int | None = None
    heads: int | None = None
    ffn: int | None = None
    residual: int | None = None
    rank: int | None = None
    gate: int | None = None
    slot_layers: int = 2
    history: int = 64
    global_read: bool = True
    dtype: str = "bfloat16"

    def widths(self) -> dict[str, int]:
        return {key: value for key in PRESETS["full"] if (value := getattr(self, key)) is not None}


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe; see :class:`DRelayObjective`. ``least_count``: softmax and pools run over ids that
    occur so often in the answers; null for all.

    Ablations: ``credit: false`` weighs all slots alike; ``support: 0`` drops the draft's cross entropy."""

    joint: bool = False
    alpha: tuple[float, ...] = (0.05, 1.0)
    credit: bool = True
    support: float = 1.0
    gamma: float | None = None
    until: float = 0.3
    floor: float = 0.25
    cap: float = 4.0
    least_count: int | None = 1
    scout: tuple[float, ...] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for key in ("alpha", "scout"):
            if len(getattr(self, key)) != 2:
                raise InvalidInput(f"{key} is {list(getattr(self, key))}: give its first and its last value")


def plan(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    *,
    init: Path | None = None,
    backbone: Any = None,
    passes: tuple[str, ...] | None = None,
    control: bool = False,
) -> Job:
    """A DRelay of a recipe's shape on a bound backbone, new or from ``init``; or its control.

    Raises:
        InvalidInput: a key of the recipe; no backbone. InvalidArtifact: a value that the head's config refuses.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    stored = new_config(
        model.preset,
        **model.widths(),
        pool_size=model.pool_size,
        slot_layers=model.slot_layers,
        history=model.history,
        dtype=model.dtype,
        **backbone_keys(backbone, "drelay"),
        **target_keys(target),
    )
    options = {key: value for key, value in asdict(objective).items() if key != "least_count"}

    def make(head: DRelay, columns: Tensor | None) -> DRelayObjective:
        return DRelayObjective(head, backbone, **options, columns=columns, control=control)

    def prepare(head: DRelay) -> None:
        if not model.global_read:
            freeze_at_zero(head.read_out.weight)

    return pool_job(
        recipe, target, folders, backbone, head_type=DRelay, stored=stored, model=model, objective=objective,
        make=make, prepare=prepare, init=init, passes=passes, control=control,
    )  # fmt: skip
