"""What heads that choose within a pool share in training: from recipe and target to a job, ablations, the control."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repairzoo.artifact import fingerprint
from repairzoo.errors import InvalidInput
from repairzoo.learned_head import HeadConfig, LearnedHead
from repairzoo.target import Target
from repairzoo.train.data import Corpus, softmax_columns
from repairzoo.train.recipe import Job, RunRecipe
from repairzoo.train.trainer import Objective, Recipe


class OnBackbone(nn.Module):
    """A head, and the backbone where it is trained as well; subclasses draft and score in ``forward``.

    Args:
        joint: train the backbone too. columns: sorted ids that softmax and pools run over in training, or None.
        control: train the backbone alone, on what the head would have been trained on with it.
    """

    def __init__(
        self, head: Any, backbone: Any, joint: bool, columns: Tensor | None = None, control: bool = False
    ) -> None:
        super().__init__()
        self.joint, self._columns, self.control = joint or control, columns, control
        self.head = head.requires_grad_(False) if control else head
        self.frozen = [] if self.joint else [backbone]  # a list hides it from parameters()
        self.trained = backbone if self.joint else None

    @property
    def columns(self) -> Tensor | None:
        """Ids of the pools; what is measured (without gradients) is measured over the whole vocabulary."""
        return self._columns if torch.is_grad_enabled() else None

    @property
    def backbone(self) -> Any:
        return self.trained if self.joint else self.frozen[0]


def target_keys(target: Target) -> dict[str, Any]:
    """What a head's config states of its target."""
    vocabulary = target.output_weight.shape[0]
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": vocabulary,
        "padded_vocab_size": max(vocabulary, target.vocab_size),
        "target_id": target.name,
        "target_revision": target.revision,
        "target_fingerprint": fingerprint(target.model),
    }


def backbone_keys(backbone: Any, kind: str) -> dict[str, Any]:
    """What a head's config states of the backbone that it is trained on.

    Raises:
        InvalidInput: there is none.
    """
    if backbone is None:
        raise InvalidInput(f"{kind} reads a backbone's hidden states: give the backbone that it is trained on")
    return {
        "block_size": backbone.slots + 1,
        "tapped_layers": tuple(backbone.tapped_layers),
        "backbone": backbone.kind,
    }


def new_or_from(head: LearnedHead, init: Path | None) -> None:
    """Load the weights of an artifact into ``head``, in its own dtype."""
    if init is not None:
        dtype = next(head.parameters()).dtype
        head.load_state_dict({n: t.to(dtype) for n, t in type(head).load(init).state_dict().items()})


def freeze_at_zero(*parameters: Tensor) -> None:
    """Take a part of a head out: what it multiplies is nothing, in training and when the artifact is served."""
    for parameter in parameters:
        nn.init.zeros_(parameter)
        parameter.requires_grad_(False)


def common_facts(kind: str, target: Target, model: Any, objective: Any, head: Any, init: Path | None) -> dict[str, Any]:
    """The log's first line."""
    keys = target_keys(target)
    return {
        "kind": kind,
        "target": {key: keys[f"target_{key}"] for key in ("id", "revision", "fingerprint")},
        "model": asdict(model),
        "objective": asdict(objective),
        "parameters": sum(p.numel() for p in head.parameters()),
        "init": None if init is None else init.name,
    }


def pool_job(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    backbone: Any,
    *,
    head_type: type[LearnedHead],
    stored: HeadConfig,
    model: Any,
    objective: Any,
    make: Callable[[Any, Tensor | None], Any],
    prepare: Callable[[Any], None] | None = None,
    init: Path | None = None,
    passes: tuple[str, ...] | None = None,
    control: bool = False,
    taught: bool = False,
) -> Job:
    """The job of a head on a bound backbone.

    Args:
        stored: the artifact's config; training is in float32. model, objective: the recipe's sections.
        make: head and columns -> objective (with ``diagnose``). prepare: called on the head before (ablations).
        control: the same answers, anchors and steps for the backbone without the head; the artifact is the backbone.
        taught: the objective asks for the target's law.
    """
    assert stored.tapped_layers is not None
    last = target.num_layers - 1 if taught else None
    corpus = Corpus(folders, stored.tapped_layers, target.hidden_size, passes=passes, last=last)
    new: Any = head_type
    head = new(replace(stored, dtype="float32"), torch.Generator().manual_seed(recipe.run.seed))
    new_or_from(head, init)
    if prepare is not None:
        prepare(head)
    head.to(target.device)
    joint = objective.joint or control
    backbone.requires_grad_(joint)
    columns = softmax_columns(corpus, target, objective.least_count)
    trained: Any = make(head, columns)

    def save(folder: Path) -> None:
        if control:
            backbone.state_target(target).save(folder)
            return
        tensors = {n: t.detach().to("cpu", stored.torch_dtype) for n, t in head.state_dict().items()}
        head_type.from_config_and_tensors(stored, tensors).save(folder)
        if joint:
            backbone.state_target(target).save(folder / "backbone")

    def finish(run: Recipe) -> list[dict[str, Any]]:
        batches = corpus.held_batches(run.batch, run.anchors, run.eval_sequences)
        return [{"prefixes": trained.diagnose([b.to(target.device) for b in batches])}]

    facts = common_facts(stored.kind, target, model, objective, head, init)
    kept: Objective = trained
    return Job(kept, corpus, save, facts | {"backbone": backbone.kind, "control": control}, finish=finish)


def refuse_other_run(folder: Path, facts: dict[str, Any]) -> None:
    """A folder is continued by the run that began it, not by another ablation.

    Raises:
        InvalidInput: its log states another model, objective or control; names the key.
    """
    path = folder / "log.jsonl"
    if not (folder / "checkpoint.safetensors").exists() or not path.exists():
        return
    with open(path, encoding="utf-8") as log:
        try:
            first = json.loads(log.readline() or "{}")
        except ValueError:
            first = None
    if not isinstance(first, dict):
        raise InvalidInput(f"{path}: its first line does not say what run this is; begin another folder")
    here = json.loads(json.dumps(facts))
    for section in ("kind", "model", "objective", "control"):
        before, now = first.get(section), here.get(section)
        pairs = {section: (before, now)}
        if isinstance(before, dict) and isinstance(now, dict):
            pairs = {f"{section}.{k}": (before[k], now[k]) for k in before.keys() & now.keys()}
        for key, (old, new) in pairs.items():
            if old is not None and old != new:
                raise InvalidInput(
                    f"{path} is of a run with {key}={old!r}, this one has {new!r}: continue it as it was begun, or "
                    "begin another folder"
                )
