"""Training LiLiCorr on answers: the head alone on a frozen backbone, or both together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.artifact import fingerprint
from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.blocks import PoolBlocks, pool_blocks, prefixes, right, summed, target_scores
from repairzoo.train.data import Batch, Corpus, prefix
from repairzoo.train.losses import decay_weights
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Recipe, Terms

from .head import LiLiCorr, LiLiCorrConfig
from .train import Weights, rows_after, supervision, terms


class Trained(nn.Module):
    """The head, and the backbone where it is trained as well; forward drafts and scores."""

    def __init__(self, head: LiLiCorr, backbone: Any, joint: bool, columns: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.joint, self.columns = head, joint, columns
        self.frozen = [] if joint else [backbone]  # a list hides it from parameters()
        self.trained = backbone if joint else None

    @property
    def backbone(self) -> Any:
        return self.trained if self.joint else self.frozen[0]

    def forward(self, batch: Batch) -> tuple[PoolBlocks, Tensor, Tensor, Tensor]:
        """Blocks, decision scores ``[N, S, K]`` after the true prefix, the label's rank, and where it is supervised."""
        head, size = self.head, self.head.config.candidates
        blocks = pool_blocks(self.backbone, batch, size, joint=self.joint, columns=self.columns)
        block, pool = blocks.block, blocks.pool
        embedded = F.embedding(pool.ids, block.embedding).detach()
        start, pair = head.scores(embedded, pool.log_probs, block.hidden, block.context, block.history_mask[:, -1])
        supervised, rank = supervision(pool.ids, blocks.labels, blocks.mask)
        psi = rows_after(start, pair, rank)
        z = head.decide(psi, blocks.scores, pool.log_probs, slice(0, psi.shape[1]))
        return blocks, z, rank, supervised


@dataclass(slots=True)
class LiLiCorrObjective:
    """The recipe of arXiv 2608.20530.

    Attributes:
        head: in float32. backbone: bound. target: for the penalty; None if its weight is 0.
        weights: of the head's terms. joint: train the backbone too. gamma: decay of its cross entropy.
        columns: sorted ids of the joint softmax, or None.
    """

    head: LiLiCorr
    backbone: Any
    target: Target | None = None
    weights: Weights = field(default_factory=Weights)
    joint: bool = False
    gamma: float | None = 7.0
    columns: Tensor | None = None
    module: Trained = field(init=False)

    def __post_init__(self) -> None:
        if self.weights.penalty and self.target is None:
            raise InvalidInput("lilicorr: the penalty needs the target; give it, or set its weight to 0")
        self.module = Trained(self.head, self.backbone, self.joint, self.columns)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        blocks, z, rank, supervised = module(batch)
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
    def diagnose(self, batches: list[Batch]) -> dict[str, float]:
        """See :func:`repairzoo.train.blocks.prefixes`."""
        found = [(blocks, z) for blocks, z, *_ in map(self.module, batches)]
        return summed([prefixes(b, z) for b, z in found], [len(b.labels) for b, _ in found])


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe; see :class:`LiLiCorrConfig`. ``dtype`` is that of the stored weights."""

    width: int
    factor_dim: int
    candidates: int = 8
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    logit_scale: float = 8.0
    decision: str = "published"
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe: weights of the three terms; ``joint`` trains the backbone too, with ``gamma`` and
    ``least_count`` as in the backbone's own recipe."""

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
) -> Job:
    """A LiLiCorr of a recipe's shape on a bound backbone, new or from ``init``.

    Raises:
        InvalidInput: a key of the recipe; no backbone. InvalidArtifact: a value that the head's config refuses.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    if backbone is None:
        raise InvalidInput("lilicorr reads a backbone's hidden states: give the backbone that it is trained on")
    vocabulary = target.output_weight.shape[0]
    stored = LiLiCorrConfig(
        **asdict(model),
        pool_size=model.candidates,
        block_size=backbone.slots + 1,
        tapped_layers=tuple(backbone.tapped_layers),
        backbone=backbone.kind,
        hidden_size=target.hidden_size,
        vocab_size=vocabulary,
        padded_vocab_size=max(vocabulary, target.vocab_size),
        target_id=target.name,
        target_revision=target.revision,
        target_fingerprint=fingerprint(target.model),
    )
    corpus = Corpus(folders, tuple(backbone.tapped_layers), target.hidden_size, passes=passes)
    head = LiLiCorr(replace(stored, dtype="float32"), torch.Generator().manual_seed(recipe.run.seed))
    if init is not None:
        head.load_state_dict({n: t.float() for n, t in LiLiCorr.load(init).state_dict().items()})
    head.to(target.device)
    backbone.requires_grad_(objective.joint)
    least = objective.least_count if objective.joint else None
    columns = None if least is None else corpus.columns(vocabulary, least).to(target.device)
    weights = Weights(objective.ce, objective.margin, objective.penalty)
    trained = LiLiCorrObjective(head, backbone, target, weights, objective.joint, objective.gamma, columns)

    def save(folder: Path) -> None:
        tensors = {n: t.detach().to("cpu", stored.torch_dtype) for n, t in head.state_dict().items()}
        LiLiCorr.from_config_and_tensors(stored, tensors).save(folder)
        if objective.joint:
            backbone.state_target(target).save(folder / "backbone")

    def finish(run: Recipe) -> list[dict[str, Any]]:
        batches = corpus.held_batches(run.batch, run.anchors, run.eval_sequences)
        return [{"prefixes": trained.diagnose([b.to(target.device) for b in batches])}]

    facts = {
        "kind": "lilicorr",
        "target": {"id": target.name, "revision": target.revision, "fingerprint": stored.target_fingerprint},
        "model": asdict(model),
        "objective": asdict(objective),
        "parameters": sum(p.numel() for p in head.parameters()),
        "backbone": backbone.kind,
        "init": None if init is None else init.name,
    }
    return Job(trained, corpus, save, facts, finish=finish)
