"""The DFlash objective: cross entropy of every slot, nearer slots weighing more (arXiv 2602.06036, section 4.2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repairzoo.artifact import fingerprint
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.target import Target
from repairzoo.train.data import Batch, Corpus, prefix, softmax_columns
from repairzoo.train.losses import block_cross_entropy
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.teacher import Teacher, teacher
from repairzoo.train.trainer import Terms

from .backbone import DFlash
from .config import DFlashConfig, new_config


@dataclass(slots=True)
class DFlashObjective:
    """Trains a DFlash that is bound to its target.

    Attributes:
        module: the backbone. output_weight: ``[V, D]`` frozen output head.
        gamma: slot decay of the loss. columns: sorted vocabulary ids of the training softmax, or None for all.
        dpace: a part of ``losses.dpace_weights`` to weigh slots by instead, or None.
        distill, teacher: share of the target's law in what is learned, and where it comes from.
    """

    module: DFlash
    output_weight: Tensor
    gamma: float | None = 4.0
    columns: Tensor | None = None
    dpace: str | None = None
    distill: float = 0.0
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        if self.distill and self.teacher is None:
            raise InvalidInput("distill needs a teacher: give the target's, or distill=0")

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        backbone = self.module
        hidden = module(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]  # [B, N, S, D]
        labels, mask = batch.labels(backbone.slots)
        true = None
        if self.teacher is not None and self.distill:
            true = batch.at_labels(self.teacher(batch), backbone.slots)
        loss = block_cross_entropy(
            hidden, self.output_weight, labels, mask,
            gamma=self.gamma, columns=self.columns, dpace=self.dpace, true=true, distill=self.distill,
        )  # fmt: skip
        return {"ce": loss}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        backbone = self.module
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]
        labels, mask = batch.labels(backbone.slots)
        flat = hidden.flatten(0, 2)
        choice = torch.cat([backbone.logits(rows).argmax(-1) for rows in flat.split(512)]).view_as(labels)
        return (choice == labels).flatten(0, 1), prefix(mask).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe.

    Attributes:
        block_size: rows of a block, the anchor included. depth: layers. taps: target layers, in order.
        mask_token: token of the target, text or id, that never occurs in texts; its embedding stands for an open slot.
    """

    block_size: int
    depth: int
    taps: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    mask_token: str | int


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe.

    Attributes:
        gamma: slot decay, or null. dpace: ``"dpace"``, ``"confidence"``, ``"continuation"`` or null.
        least_count: the softmax runs over ids that occur at least so often in training answers; null for all ids.
        text_from: train on the prompts' own text too, from this token on; null for answers only.
        distill: share of the target's law, 0 to 1, in what is learned: the paper learns the tokens alone (0).
    """

    gamma: float | None = 4.0
    least_count: int | None = 1
    dpace: str | None = None
    text_from: int | None = None
    distill: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.distill <= 1:
            raise InvalidInput(f"distill is {self.distill}: give a share from 0 to 1")
        if self.dpace not in (None, "dpace", "confidence", "continuation"):
            raise InvalidInput(f"dpace is {self.dpace!r}: give dpace, confidence, continuation or null")


def plan(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    *,
    init: Path | None = None,
    backbone: Any = None,
    passes: tuple[str, ...] | None = None,
) -> Job:
    """A DFlash of a recipe's shape, new or from ``init``, on the target's answers.

    Raises:
        InvalidInput: a key of the recipe, a mask token that occurs in texts.
        IncompatibleArtifact: ``init`` has another shape than the recipe.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    config = draft_config(model, target, mask_token(model.mask_token, target, f"{recipe.path}: key 'model.mask_token'"))
    corpus = Corpus(
        folders, config.target_layer_ids, target.hidden_size, passes=passes, text_from=objective.text_from,
        last=target.num_layers - 1 if objective.distill else None,
    )  # fmt: skip
    seen, tokens = int(corpus.counts(target.vocab_size)[config.mask_token_id]), corpus.tokens
    if seen > tokens * 1e-4:  # answers above temperature 0 draw any token now and then
        raise InvalidInput(
            f"{recipe.path}: key 'model.mask_token': token {config.mask_token_id} occurs in the corpus, {seen} "
            f"times in {tokens} tokens; choose one that texts do not hold"
        )
    draft = DFlash(config, seed=recipe.run.seed)
    if init is not None:
        _start_from(draft, init)
    draft.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    columns = softmax_columns(corpus, target, objective.least_count)

    def save(folder: Path) -> None:
        stored = DFlash(config)
        stored.load_state_dict(draft.state_dict())
        stored.to(torch.bfloat16).state_target(target).save(folder)

    facts = {
        "kind": "dflash",
        "target": {"id": target.name, "revision": target.revision, "fingerprint": fingerprint(target.model)},
        "model": asdict(model),
        "objective": asdict(objective),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "columns": None if columns is None else len(columns),
        "init": None if init is None else init.name,
    }
    trained = DFlashObjective(
        draft, target.output_weight, objective.gamma, columns, objective.dpace,
        objective.distill, teacher(target) if objective.distill else None,
    )  # fmt: skip
    return Job(trained, corpus, save, facts)


def draft_config(model: ModelSection, target: Target, mask: int) -> DFlashConfig:
    """The config of a new draft: what belongs to the target is read from it, the rest is the recipe's."""
    config = target.model.config
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    theta = rope.get("rope_theta")
    if theta is None:
        raise InvalidInput(f"target {target.name} states no rope_theta, which a new draft takes over")
    return new_config(
        block_size=model.block_size,
        mask_token_id=mask,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.depth,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rope_theta=float(theta),
        target_layer_ids=model.taps,
        rms_norm_eps=float(config.rms_norm_eps),
        max_position_embeddings=int(config.max_position_embeddings),
    )


def mask_token(token: str | int, target: Target, where: str) -> int:
    """The id of a mask token: a row of the target's embedding that is no end, begin or padding token.

    Raises:
        InvalidInput: it is none of the target's tokens, or has a meaning of its own.
    """
    known = target.tokenizer
    if isinstance(token, str):
        vocabulary = {} if known is None else known.get_vocab()
        if token not in vocabulary:
            raise InvalidInput(f"{where}: {token!r} is no token of {target.name}")
        number: int = vocabulary[token]
    else:
        number = token
    if not 0 <= number < target.vocab_size:
        raise InvalidInput(f"{where}: {number} lies outside the embedding of {target.name}, {target.vocab_size} rows")
    used = {*target.eos_token_ids, *(getattr(known, n, None) for n in ("bos_token_id", "eos_token_id", "pad_token_id"))}
    if number in used:
        raise InvalidInput(
            f"{where}: token {number} begins, ends or pads texts of {target.name}; choose one that never occurs"
        )
    return number


def _start_from(draft: DFlash, folder: Path) -> None:
    """Load the weights of an artifact; only its block size and dtype may differ (a longer block fits a shorter one)."""
    found = DFlash.load(folder, dtype=torch.float32)
    for f in fields(draft.config):
        mine, theirs = getattr(draft.config, f.name), getattr(found.config, f.name)
        if f.name not in ("block_size", "dtype", "published") and mine != theirs:
            raise IncompatibleArtifact(f"{folder}: {f.name} is {theirs!r}, the recipe's is {mine!r}")
    draft.load_state_dict(found.state_dict())
