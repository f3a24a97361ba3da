"""What ``repairzoo train corpus | backbone | head`` do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.load_parts import bound_backbone
from repairzoo.prompt_file import read_prompts
from repairzoo.target import Target
from repairzoo.target_source import load_target
from repairzoo.train.corpus import CorpusPlan, read_manifest, write_corpus
from repairzoo.train.heads import refuse_other_run
from repairzoo.train.recipe import Job, RunRecipe, method, read_recipe
from repairzoo.train.trainer import train


def run_corpus(prompts: Path, out: Path, plan: CorpusPlan, target: str | None, dtype: str | None = None) -> None:
    """Answer prompts into a corpus folder; continues what is there."""
    rows = read_prompts(prompts)  # before the target, which takes a while
    _refuse_file(out)
    write_corpus(load_target(target, dtype=dtype), rows, out, plan)
    shards = read_manifest(out)["shards"].values()
    answers, tokens = sum(s["answers"] for s in shards), sum(s["answer_tokens"] for s in shards)
    print(f"{out}: {answers} answers, {tokens} answer tokens")


def run_training(
    group: str,
    recipe: Path,
    corpora: list[Path],
    out: Path,
    *,
    target: str | Target | None = None,
    init: Path | None = None,
    backbone: str | None = None,
    passes: tuple[str, ...] | None = None,
    changes: Sequence[str] = (),
    control: bool = False,
) -> bool:
    """Train a backbone or a head; continues where a checkpoint in ``out`` is.

    Args:
        group: ``"backbones"`` or ``"heads"``.
        init: artifact to start from. backbone: frozen backbone that a head is evaluated on.
        passes: passes of the corpora to train on; None for all.
        changes: of the recipe, see :func:`read_recipe`.
        control: of a head's joint training: the same blocks, cross entropy and steps for the backbone alone.

    Returns:
        whether it was finished. ``out / "artifact"`` is loadable in either case, once a checkpoint exists.
    """
    read = read_recipe(recipe, changes)
    _refuse_file(out)
    module = method(read.kind, group)
    kind = torch.bfloat16 if read.run.precision == "bf16" else torch.float32
    manifests = [read_manifest(folder) for folder in corpora]  # before the target, which takes a while
    verifier = target if isinstance(target, Target) else load_target(target, dtype=kind)
    for folder, manifest in zip(corpora, manifests, strict=True):
        made = {key: manifest["target"].get(key) for key in ("id", "revision")}
        if made != {"id": verifier.name, "revision": verifier.revision}:
            raise IncompatibleArtifact(
                f"{folder} was answered by {made}, the target is {verifier.name} ({verifier.revision}): train on "
                "answers of the target that will be used"
            )
    drafter = None if backbone is None else bound_backbone(backbone, verifier)
    more = {"control": True} if control else {}
    job = module.plan(read, verifier, corpora, init=init, backbone=drafter, passes=passes, **more)
    out.mkdir(parents=True, exist_ok=True)
    refuse_other_run(out, job.facts)

    def save(folder: Path) -> None:
        job.save(folder)
        _beside(folder, out, read, job, manifests)

    finished = train(job.objective, job.corpus, read.run, out, held=job.held, save=save, extra=job.facts)
    if not _first_process():
        return finished
    if finished and job.finish is not None:
        with open(out / "log.jsonl", "a") as log:
            log.writelines(json.dumps(line) + "\n" for line in job.finish(read.run))
        save(out / "artifact")
    elif (out / "artifact").is_dir():
        _beside(out / "artifact", out, read, job, manifests)  # the log's last lines
    print(f"{'trained' if finished else 'interrupted; the same command continues'}: {out / 'artifact'}")
    return finished


def _refuse_file(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out {out} is a file: name a folder")


def _first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _beside(folder: Path, out: Path, recipe: RunRecipe, job: Job, manifests: list[dict[str, Any]]) -> None:
    """The raw log, the recipe and what the corpus was, beside the weights."""
    told = {
        "corpora": manifests,
        "held_out": job.corpus.held_out,
        "train_answers": len(job.corpus.train),
        "train_tokens": job.corpus.tokens,
        "held_answers": len(job.corpus.held),
    }
    for name, write in (
        ("train_log.jsonl", lambda path: shutil.copyfile(out / "log.jsonl", path)),
        ("recipe.yaml", recipe.write),
        ("corpus_manifest.json", lambda path: path.write_text(json.dumps(told, indent=1) + "\n")),
    ):
        temporary = folder / f"{name}.partial"
        write(temporary)
        os.replace(temporary, folder / name)


def parse_taps(text: str) -> tuple[int, ...]:
    """``"1,8,15"`` -> ``(1, 8, 15)``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInput(f"--taps {text!r}: give layer numbers joined by commas, such as 1,8,15,22,27") from error
