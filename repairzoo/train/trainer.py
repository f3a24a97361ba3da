"""The training loop: any objective, one or several processes, exact resume.

    <run>/log.jsonl                one line a logged step: loss, learning rate, held-out accuracy a slot, estimated tau;
                                   at the end tau along the walk of decoding
    <run>/checkpoint.safetensors   weights, optimiser moments, step

A step is a pure function of (weights, corpus, recipe, step), so a run that was killed continues as if it had not been.
Ctrl-C ends a run after the step at hand, with a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.train.data import Batch, Corpus
from repairzoo.train.held import accepted, judged, walked_taus

Terms = dict[str, tuple[Tensor, Tensor]]


class Objective(Protocol):
    """What a method trains."""

    @property
    def module(self) -> nn.Module: ...

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        """Loss terms as (numerator, denominator); their quotients are added. ``progress`` runs from 0 to 1."""
        ...

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[R, S]`` bool: whether each slot's token is right, and whether it is supervised (a prefix)."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of a run.

    Attributes:
        steps, batch, anchors: optimiser steps, answers a step (of all processes), anchors an answer.
        lr, warmup, weight_decay, clip: AdamW, cosine to ``final_lr`` times the peak; warm-up as a share of the steps.
        precision: ``"fp32"`` or ``"bf16"`` (autocast). seed: of data order and anchors.
        log_every, eval_every, save_every: in steps. eval_sequences: held-out answers of an evaluation.
    """

    steps: int
    batch: int = 8
    anchors: int = 48
    lr: float = 2e-3
    final_lr: float = 0.02
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    log_every: int = 20
    eval_every: int = 200
    save_every: int = 200
    eval_sequences: int = 64

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise InvalidInput(f"precision={self.precision!r}: give 'fp32' or 'bf16'")
        for name in ("steps", "batch", "anchors", "log_every", "eval_every", "save_every", "eval_sequences"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)}: give at least 1")
        for name in ("lr", "weight_decay"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name}={getattr(self, name)}: give 0 or more")
        for name in ("warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(f"{name}={getattr(self, name)}: it is a share, from 0 to 1")
        if self.clip <= 0:
            raise InvalidInput(f"clip={self.clip}: give more than 0")

    def law(self) -> dict[str, Any]:
        """What determines the weights; the rest only determines what is written down."""
        silent = ("log_every", "eval_every", "save_every", "eval_sequences")
        return {key: value for key, value in asdict(self).items() if key not in silent}

    def rate(self, step: int) -> float:
        """Learning rate of a step (0-based)."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        t = min(1.0, (step - warm) / max(1, self.steps - warm))
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * t)))


def train(
    objective: Objective,
    corpus: Corpus,
    recipe: Recipe,
    folder: Path,
    *,
    held: Corpus | None = None,
    save: Callable[[Path], None] | None = None,
    extra: dict[str, Any] | None = None,
) -> bool:
    """Train ``objective.module`` to the end of the recipe, continuing from ``folder`` where a checkpoint is.

    Args:
        held: whose held-out answers evaluate; default ``corpus``.
        save: writes the artifact, called at every checkpoint and at the end with ``folder / "artifact"``.
        extra: written into the log's first line.

    Returns:
        whether the recipe was finished (False: interrupted).

    Raises:
        InvalidInput: ``folder`` holds a run of another recipe; a batch that the processes cannot share.
    """
    from accelerate import Accelerator

    # autocast is ours: Accelerate's would replace the module's forward
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device, main = accelerator.device, accelerator.is_main_process
    world, rank = accelerator.num_processes, accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    decay = [p for p in objective.module.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in objective.module.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.lr, betas=(0.9, 0.95))
    digest = corpus.digest()
    step, running = _resume(objective.module, optimiser, folder, recipe, digest, quiet=not main)
    module, optimiser = accelerator.prepare(objective.module, optimiser)
    if main:
        _trim_log(folder, step)
        if step == 0:
            facts = {"recipe": asdict(recipe), "train_tokens": corpus.tokens, "corpus_sha256": digest, "world": world}
            _log(folder, facts | (extra or {}))
    batches = (held or corpus).held_batches(recipe.batch, recipe.anchors, recipe.eval_sequences) if main else []
    batches = [batch.to(device) for batch in batches]
    bar = tqdm(total=recipe.steps, initial=step, desc=folder.name, unit="step", disable=not main)
    started = time.time()

    def keep() -> None:
        accelerator.wait_for_everyone()
        if main:
            run = {"step": step, "running": running, "recipe": recipe.law(), "corpus": digest}
            _checkpoint(accelerator.unwrap_model(module), optimiser, run, folder)
            if save is not None:
                save(folder / "artifact")

    with _interrupts(enabled=world == 1) as interrupted:
        while step < recipe.steps and not interrupted.is_set():
            batch = corpus.training_batch(step, recipe.batch, recipe.anchors, recipe.seed, rank, world).to(device)
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                loss = total_loss(objective.terms(module, batch, step / recipe.steps), accelerator)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), recipe.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step += 1
            mean: Any = accelerator.reduce(loss.detach(), "mean")
            value = float(mean)
            running = value if step == 1 else 0.95 * running + 0.05 * value
            bar.update()
            last = step == recipe.steps
            if main and (step % recipe.log_every == 0 or step % recipe.eval_every == 0 or last):
                line = {"step": step, "loss": round(running, 4), "lr": recipe.rate(step - 1)}
                line["seconds"] = round(time.time() - started, 1)
                if step % recipe.eval_every == 0 or last:
                    tau, accuracy = judged(objective.evaluate, batches)
                    line |= {"held_tau": round(tau, 4), "held_accuracy": [round(a, 4) for a in accuracy]}
                    bar.set_postfix(loss=f"{running:.3f}", tau=f"{tau:.3f}")
                if last:  # every position is judged: once
                    line["held_walked_tau"] = round(walked_tau(objective, batches, recipe.anchors), 4)
                _log(folder, line)
            if step % recipe.save_every == 0 or last:
                keep()
        if interrupted.is_set() and step < recipe.steps:
            keep()
    bar.close()
    accelerator.wait_for_everyone()
    return step == recipe.steps


@contextmanager
def _interrupts(enabled: bool) -> Iterator[threading.Event]:
    """An event that Ctrl-C or a termination request sets; a second one interrupts at once.

    Processes could stop at different steps and wait for each other, so several of them go without.
    """
    event = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print("\ninterrupted: ending after this step, with a checkpoint", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def walked_tau(objective: Objective, batches: list[Batch], chunk: int) -> float:
    """See :func:`walked_taus`."""
    return walked_taus(lambda hop: [accepted(hop, *objective.evaluate(hop))], batches, chunk)[0]


def total_loss(terms: Terms, accelerator: Any = None) -> Tensor:
    """Sum of the terms over *global* denominators.

    Gradients are averaged over processes, so each process's loss is scaled up by their number; a mean of means would
    weigh a short batch like a long one. The mean of the result over processes is the loss of the whole batch.
    """
    loss = torch.zeros(())
    for numerator, denominator in terms.values():
        denominator = denominator.detach()
        world = 1
        if accelerator is not None and accelerator.num_processes > 1:
            denominator = accelerator.reduce(denominator.clone(), "sum")
            world = accelerator.num_processes
        loss = loss.to(numerator.device) + world * numerator / denominator.clamp_min(1e-6)
    return loss


def _log(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _trim_log(folder: Path, step: int) -> None:
    """Drop what was logged after the checkpoint that the run continues from: those steps are done again."""
    path = folder / "log.jsonl"
    if not path.exists():
        return
    kept = []
    for text in path.read_text().split("\n"):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # cut off by a kill
            continue
        if line.get("step", 0) <= step and step > 0:
            kept.append(text + "\n")
    temporary = folder / "log.partial"
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def _checkpoint(module: nn.Module, optimiser: Any, run: dict[str, Any], folder: Path) -> None:
    """One file, replaced at once: weights, optimiser moments and step belong together."""
    tensors = {f"model.{k}": v.detach().clone().contiguous() for k, v in module.state_dict().items()}
    for index, moments in optimiser.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value).detach().clone().contiguous()
    temporary = folder / "checkpoint.partial"
    save_file(tensors, temporary, metadata={key: json.dumps(value) for key, value in run.items()})
    os.replace(temporary, folder / "checkpoint.safetensors")


def _resume(
    module: nn.Module, optimiser: Any, folder: Path, recipe: Recipe, digest: str, quiet: bool
) -> tuple[int, float]:
    """Steps done and the running loss; 0 without a checkpoint."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0, 0.0
    try:
        with safe_open(path, "pt") as file:
            run = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
        tensors = load_file(path)
        if lacking := {"step", "running", "recipe", "corpus"} - run.keys():
            raise ValueError(f"it does not state {min(lacking)}")
    except (SafetensorError, ValueError) as error:
        raise InvalidArtifact(
            f"{path} is no checkpoint, or a damaged one ({error}): remove it to begin anew (with --init "
            f"{folder / 'artifact'}, from the weights that were saved last), or name another folder"
        ) from error
    for key, value in recipe.law().items():
        if run["recipe"].get(key) != value:
            raise InvalidInput(
                f"{path} is of a run with {key}={run['recipe'].get(key)!r}, the recipe says {value!r}: continue it as "
                "it was begun, or begin another folder (for instance with --init)"
            )
    if run["corpus"] != digest and not quiet:
        print("note: the corpus has changed since the checkpoint; the run goes on with what is there", file=sys.stderr)
    weights = {k[6:]: v for k, v in tensors.items() if k.startswith("model.")}
    shapes = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    if {k: tuple(v.shape) for k, v in weights.items()} != shapes:
        raise InvalidInput(f"{path} is of a run with another model than the recipe's: begin another folder")
    module.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return run["step"], run["running"]
