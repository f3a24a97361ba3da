"""Training jobs of drafts that begin with the trunk of another draft: one corpus, one trunk, heads that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repairzoo.artifact import fingerprint
from repairzoo.draft_backbone import BlockBackbone
from repairzoo.draft_config import DraftConfig
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.load_parts import load_backbone
from repairzoo.target import Target
from repairzoo.train.data import Corpus, softmax_columns
from repairzoo.train.recipe import Job, RunRecipe
from repairzoo.train.trainer import Objective


def first_trunk(recipe: RunRecipe, init: Path | None) -> BlockBackbone:
    """The draft in ``init``, in float32: its trunk is where training begins.

    Raises:
        InvalidInput: no ``init``.
    """
    if init is None:
        raise InvalidInput(
            f"{recipe.path}: a {recipe.kind} begins with the trunk of a trained draft (a DFlash of this target, or a "
            f"{recipe.kind} to go on with): give its folder with --init"
        )
    return load_backbone(init, dtype=torch.float32)


def inherit(draft: BlockBackbone, found: BlockBackbone, folder: Path) -> None:
    """Take over the trunk of ``found``, and its head where it is of the same kind.

    Raises:
        IncompatibleArtifact: of the same kind, but of another shape than the recipe.
    """
    theirs, mine = found.state_dict(), draft.state_dict()
    if found.kind == draft.kind:
        for name, tensor in mine.items():
            other = theirs.get(name)
            if other is None or other.shape != tensor.shape:
                shape = None if other is None else list(other.shape)
                raise IncompatibleArtifact(f"{folder}: {name} is {shape}, the recipe's is {list(tensor.shape)}")
        draft.load_state_dict({name: theirs[name] for name in mine})
        return
    trunk = ("fc.", "hidden_norm.", "layers.", "norm.")
    draft.load_state_dict(mine | {name: t for name, t in theirs.items() if name.startswith(trunk)})


def draft_job(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    init: Path,
    found: BlockBackbone,
    make: Callable[[], BlockBackbone],
    objective: Callable[[BlockBackbone, Tensor | None], Objective],
    facts: dict[str, Any],
    *,
    least_count: int | None,
    text_from: int | None,
    passes: tuple[str, ...] | None,
    taught: bool = False,
) -> Job:
    """The job of a draft that inherits from ``found``.

    Args:
        make: a new draft. objective: of a bound draft and the columns of its softmax.
        facts: the recipe's sections, for the log.
        least_count: the softmax runs over ids that occur so often in training answers; None for all.
        text_from: train on the prompts' own text from this token on; None for answers alone.
        taught: the objective asks for the target's law.
    """
    draft = make()
    config: DraftConfig = draft.config
    last = target.num_layers - 1 if taught else None
    corpus = Corpus(folders, config.target_layer_ids, target.hidden_size, passes=passes, text_from=text_from, last=last)
    inherit(draft, found, init)
    draft.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    columns = softmax_columns(corpus, target, least_count)

    def save(folder: Path) -> None:
        stored = make()
        stored.load_state_dict(draft.state_dict())
        stored.to(torch.bfloat16).state_target(target).save(folder)

    facts = {
        "kind": draft.kind,
        "target": {"id": target.name, "revision": target.revision, "fingerprint": fingerprint(target.model)},
        **facts,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "columns": None if columns is None else len(columns),
        "init": {"kind": found.kind, "folder": init.name},
    }
    return Job(objective(draft, columns), corpus, save, facts)
