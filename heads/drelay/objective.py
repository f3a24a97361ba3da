"""Training DRelay on answers: the head alone on a frozen backbone, or both together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repairzoo.artifact import fingerprint
from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.blocks import PoolBlocks, pool_blocks, prefixes, right, summed
from repairzoo.train.data import Batch, Corpus, prefix
from repairzoo.train.losses import decay_weights
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Recipe, Terms

from .head import PRESETS, DRelay, new_config
from .train import loss_terms, ramp


class Trained(nn.Module):
    """The head, and the backbone where it is trained as well; forward drafts and scores."""

    def __init__(self, head: DRelay, backbone: Any, joint: bool, columns: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.joint, self.columns = head, joint, columns
        self.frozen = [] if joint else [backbone]  # a list hides it from parameters()
        self.trained = backbone if joint else None

    @property
    def backbone(self) -> Any:
        return self.trained if self.joint else self.frozen[0]

    def forward(self, batch: Batch) -> tuple[PoolBlocks, Tensor]:
        """Blocks, and the head's scores ``[N, S, K]`` after the true prefix."""
        size = self.head.config.pool_size
        blocks = pool_blocks(self.backbone, batch, size, joint=self.joint, columns=self.columns)
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
        columns: sorted ids of the joint softmax, or None.
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
    module: Trained = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1 or self.cap < 1:
            raise InvalidInput(f"floor={self.floor}, cap={self.cap}: give a floor from 0 to 1 and a cap of at least 1")
        self.module = Trained(self.head, self.backbone, self.joint, self.columns)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        blocks, scores = module(batch)
        selected = loss_terms(
            scores,
            blocks.pool.ids,
            blocks.labels,
            blocks.mask,
            alpha=ramp(progress, *self.alpha, self.until),
            mix=ramp(progress, 0.0, 1.0, self.until) if self.credit else 0.0,
            floor=self.floor,
            cap=self.cap,
        )
        found: Terms = {"selection": selected}
        if blocks.entropy is not None:
            weight = blocks.mask * decay_weights(scores.shape[1], self.gamma, scores.device)
            found["draft"] = (self.support * (blocks.entropy * weight).sum(), weight.sum())
        return found

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
    """``model`` of a recipe: a preset, whose widths may be replaced one by one. ``dtype``: of the stored weights."""

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
    dtype: str = "bfloat16"

    def widths(self) -> dict[str, int]:
        return {key: value for key in PRESETS["full"] if (value := getattr(self, key)) is not None}


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe; see :class:`DRelayObjective`. ``least_count``: of the joint softmax."""

    joint: bool = False
    alpha: tuple[float, ...] = (0.05, 1.0)
    credit: bool = True
    support: float = 1.0
    gamma: float | None = None
    until: float = 0.3
    floor: float = 0.25
    cap: float = 4.0
    least_count: int | None = 1

    def __post_init__(self) -> None:
        if len(self.alpha) != 2:
            raise InvalidInput(f"alpha is {list(self.alpha)}: give its first and its last value")


def plan(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    *,
    init: Path | None = None,
    backbone: Any = None,
    passes: tuple[str, ...] | None = None,
) -> Job:
    """A DRelay of a recipe's shape on a bound backbone, new or from ``init``.

    Raises:
        InvalidInput: a key of the recipe; no backbone. InvalidArtifact: a value that the head's config refuses.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    if backbone is None:
        raise InvalidInput("drelay reads a backbone's hidden states: give the backbone that it is trained on")
    vocabulary = target.output_weight.shape[0]
    stored = new_config(
        model.preset,
        **model.widths(),
        pool_size=model.pool_size,
        slot_layers=model.slot_layers,
        history=model.history,
        dtype=model.dtype,
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
    head = DRelay(replace(stored, dtype="float32"), torch.Generator().manual_seed(recipe.run.seed))
    if init is not None:
        head.load_state_dict({n: t.float() for n, t in DRelay.load(init).state_dict().items()})
    head.to(target.device)
    backbone.requires_grad_(objective.joint)
    options = asdict(objective)
    least = options.pop("least_count")
    least = least if objective.joint else None
    columns = None if least is None else corpus.columns(vocabulary, least).to(target.device)
    trained = DRelayObjective(head, backbone, **options, columns=columns)

    def save(folder: Path) -> None:
        tensors = {n: t.detach().to("cpu", stored.torch_dtype) for n, t in head.state_dict().items()}
        DRelay.from_config_and_tensors(stored, tensors).save(folder)
        if objective.joint:
            backbone.state_target(target).save(folder / "backbone")

    def finish(run: Recipe) -> list[dict[str, Any]]:
        batches = corpus.held_batches(run.batch, run.anchors, run.eval_sequences)
        return [{"prefixes": trained.diagnose([b.to(target.device) for b in batches])}]

    facts = {
        "kind": "drelay",
        "target": {"id": target.name, "revision": target.revision, "fingerprint": stored.target_fingerprint},
        "model": asdict(model),
        "objective": asdict(objective),
        "parameters": sum(p.numel() for p in head.parameters()),
        "backbone": backbone.kind,
        "init": None if init is None else init.name,
    }
    return Job(trained, corpus, save, facts, finish=finish)
