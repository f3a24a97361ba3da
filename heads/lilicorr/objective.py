"""Training LiLiCorr on answers: the head alone on a frozen backbone, or both together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.blocks import PoolBlocks, pool_blocks, prefixes, right, summed, target_scores
from repairzoo.train.data import Batch, prefix
from repairzoo.train.heads import OnBackbone, backbone_keys, freeze_at_zero, pool_job, target_keys
from repairzoo.train.losses import decay_weights
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Terms

from .head import LiLiCorr, LiLiCorrConfig
from .train import Weights, rows_after, supervision, terms


class Trained(OnBackbone):
    """The head, and the backbone where it is trained as well; forward drafts and scores."""

    def forward(self, batch: Batch) -> tuple[PoolBlocks, Tensor, Tensor, Tensor]:
        """Blocks, decision scores ``[N, S, K]`` after the true prefix, the label's rank, and where it is supervised."""
        head, size = self.head, self.head.config.candidates
        blocks = pool_blocks(self.backbone, batch, size, joint=self.joint, columns=self.columns)
        block, pool = blocks.block, blocks.pool
        supervised, rank = supervision(pool.ids, blocks.labels, blocks.mask)
        if self.control:
            return blocks, blocks.scores, rank, supervised
        embedded = F.embedding(pool.ids, block.embedding).detach()
        start, pair = head.scores(embedded, pool.log_probs, block.hidden, block.context, block.history_mask[:, -1])
        psi = rows_after(start, pair, rank)
        z = head.decide(psi, blocks.scores, pool.log_probs, slice(0, psi.shape[1]))
        return blocks, z, rank, supervised


@dataclass(slots=True)
class LiLiCorrObjective:
    """The recipe of arXiv 2608.20530.

    Attributes:
        head: in float32. backbone: bound. target: for the penalty; None if its weight is 0.
        weights: of the head's terms. joint: train the backbone too. gamma: decay of its cross entropy.
        columns: sorted ids that softmax and pools run over in training, or None.
        control: train the backbone alone, with the same blocks and cross entropy.
    """

    head: LiLiCorr
    backbone: Any
    target: Target | None = None
    weights: Weights = field(default_factory=Weights)
    joint: bool = False
    gamma: float | None = 7.0
    columns: Tensor | None = None
    control: bool = False
    module: Trained = field(init=False)

    def __post_init__(self) -> None:
        if self.weights.penalty and self.target is None:
            raise InvalidInput("lilicorr: the penalty needs the target; give it, or set its weight to 0")
        self.module = Trained(self.head, self.backbone, self.joint, self.columns, self.control)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        blocks, z, rank, supervised = module(batch)
        found: Terms = {}
        if not self.control:
            teacher = target_scores(self.target, batch, blocks) if self.weights.penalty and self.target else None
            found = terms(z, rank, supervised, teacher, self.weights)
        if blocks.entropy is not None:
            weight = blocks.mask * decay_weights(z.shape[1], self.gamma, z.device)
            found["draft"] = ((blocks.entropy * weight).sum(), weight.sum())
        return found

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slot i is judged after the true tokens: up to the first error those are what the walk chose."""
        blocks, z, *_ = self.module(batch)
        return right(blocks, z), prefix(blocks.mask)

    @torch.no_grad()
    def diagnose(self, batches: list[Batch]) -> dict[str, Any]:
        """See :func:`repairzoo.train.blocks.prefixes`; with the spread of the head's scores (0: it has collapsed)."""
        found = [(blocks, z) for blocks, z, *_ in map(self.module, batches)]
        counts = [len(b.labels) for b, _ in found]
        spread = sum(
            self.head.diagnostics(b.block, b.pool)["factor_spread"].mean().item() * n
            for (b, _), n in zip(found, counts, strict=True)
        )
        more = {"factor_spread": round(spread / max(1, sum(counts)), 4)}
        return {**summed([prefixes(b, z) for b, z in found], counts), **more}


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe; see :class:`LiLiCorrConfig`. ``dtype`` is that of the stored weights.

    Ablations: ``anchor: false`` keeps the anchor's vector at zero; ``pairwise: false`` gives all candidates the same
    *out* vector, so that no choice depends on the one before it."""

    width: int
    factor_dim: int
    candidates: int = 8
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    logit_scale: float = 8.0
    decision: str = "published"
    anchor: bool = True
    pairwise: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe: weights of the three terms, 0 to take one out (an ablation is ``penalty: 0.0``).
    ``joint`` trains the backbone too, with ``gamma`` as in its own recipe.

    ``least_count``: softmax and pools run over ids that occur so often in the answers; null for all."""

    ce: float = 0.25
    margin: float = 0.0
    penalty: float = 0.25
    joint: bool = False
    gamma: float | None = 7.0
    least_count: int | None = 1


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
    """A LiLiCorr of a recipe's shape on a bound backbone, new or from ``init``; or its control.

    Raises:
        InvalidInput: a key of the recipe; no backbone. InvalidArtifact: a value that the head's config refuses.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    shape = {key: value for key, value in asdict(model).items() if key not in ("anchor", "pairwise")}
    stored = LiLiCorrConfig(
        **shape, pool_size=model.candidates, **backbone_keys(backbone, "lilicorr"), **target_keys(target)
    )
    weights = Weights(objective.ce, objective.margin, objective.penalty)

    def make(head: LiLiCorr, columns: Tensor | None) -> LiLiCorrObjective:
        return LiLiCorrObjective(head, backbone, target, weights, objective.joint, objective.gamma, columns, control)

    def prepare(head: LiLiCorr) -> None:
        if not model.anchor:
            freeze_at_zero(head.anchor_norm.weight)
        if not model.pairwise:
            freeze_at_zero(head.out_head.weight)
        if init is None and stored.decision == "identity_safe":
            # gamma 0 is a saddle: it and psi, whose spread is nearly 0 at first, are each other's gradient
            torch.nn.init.ones_(head.gamma)
        if init is None:  # a vector that has to start somewhere: at zero it would have no direction
            for part, off in ((head.anchor_out_head, not model.anchor), (head.out_head, not model.pairwise)):
                if off:
                    torch.nn.init.normal_(part.bias, generator=torch.Generator().manual_seed(recipe.run.seed))

    return pool_job(
        recipe, target, folders, backbone, head_type=LiLiCorr, stored=stored, model=model, objective=objective,
        make=make, prepare=prepare, init=init, passes=passes, control=control, taught=objective.penalty > 0,
    )  # fmt: skip
