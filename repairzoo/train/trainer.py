"""The training loop: any objective, one or several processes, exact resume.

    runs/<name>/log.jsonl          one line a logged step: loss, learning rate, held-out per-slot accuracy and estimated tau
    runs/<name>/checkpoint.pt...   model and optimiser (safetensors), step

A step is a pure function of (recipe, step), so a run that was killed continues as if it had not been.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from repairzoo.errors import InvalidInput
from repairzoo.train.data import Batch, Corpus

Terms = dict[str, tuple[Tensor, Tensor]]


class Objective(Protocol):
    """What a method trains."""

    module: nn.Module

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
        lr, warmup, weight_decay, clip: AdamW with cosine to ``final_lr`` times the peak; warm-up as a share of the steps.
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
        for name in ("steps", "batch", "anchors", "log_every", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)}: give at least 1")

    def rate(self, step: int) -> float:
        """Learning rate of a step (0-based)."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        t = min(1.0, (step - warm) / max(1, self.steps - warm))
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * t)))


def estimated_tau(right: Tensor, valid: Tensor) -> tuple[float, list[float]]:
    """Estimated tau and per-slot accuracy of teacher-forced slots ``[R, S]``.

    Greedy answers are what the target would commit, so 1 plus the mean length of the right prefix estimates the tokens of a
    round that starts at a random position.
    """
    rows = valid[:, 0]
    prefix = (right & valid).long().cumprod(1).sum(1)[rows].float()
    accuracy = [(right & valid)[:, s].sum().item() / max(1, int(valid[:, s].sum())) for s in range(right.shape[1])]
    return 1 + float(prefix.mean()), accuracy


def train(
    objective: Objective,
    corpus: Corpus,
    recipe: Recipe,
    folder: Path,
    *,
    save: Callable[[Path], None] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Train ``objective.module`` to the end of the recipe, continuing from ``folder`` where a checkpoint is.

    Args:
        save: writes the artifact into a folder, called at every checkpoint and at the end with ``folder / "artifact"``.
        extra: written into the log's first line.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16" if recipe.precision == "bf16" else "no", cpu=not torch.cuda.is_available()
    )
    folder.mkdir(parents=True, exist_ok=True)
    decay = [p for p in objective.module.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in objective.module.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95))
    step = _resume(objective.module, optimiser, folder, accelerator.device)
    module, optimiser = accelerator.prepare(objective.module, optimiser)
    main = accelerator.is_main_process
    if main and step == 0:
        _log(folder, {"recipe": asdict(recipe), "train_tokens": corpus.tokens, "world": accelerator.num_processes,
                      **(extra or {})})
    held = corpus.held_batches(recipe.batch, recipe.anchors, recipe.eval_sequences, torch.float32)
    bar = tqdm(total=recipe.steps, initial=step, desc=folder.name, unit="step", disable=not main)
    started, running = time.time(), 0.0
    share = max(1, recipe.batch // accelerator.num_processes)
    while step < recipe.steps:
        batch = corpus.training_batch(
            step, share, recipe.anchors, recipe.seed, torch.float32, accelerator.process_index, accelerator.num_processes
        ).to(accelerator.device)
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(step)
        with accelerator.autocast():
            terms = objective.terms(module, batch, step / recipe.steps)
            loss = total_loss(terms, accelerator)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), recipe.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        running = float(loss.detach()) if running == 0 else 0.95 * running + 0.05 * float(loss.detach())
        bar.update()
        last = step == recipe.steps
        if main and (step % recipe.log_every == 0 or last):
            line = {"step": step, "loss": round(running, 4), "lr": recipe.rate(step - 1), "seconds": round(time.time() - started, 1)}
            if step % recipe.eval_every == 0 or last:
                tau, accuracy = evaluate(objective, held)
                line |= {"held_tau": round(tau, 4), "held_accuracy": [round(a, 4) for a in accuracy]}
                bar.set_postfix(loss=f"{running:.3f}", tau=f"{tau:.3f}")
            _log(folder, line)
        if step % recipe.save_every == 0 or last:
            accelerator.wait_for_everyone()
            if main:
                _checkpoint(accelerator.unwrap_model(module), optimiser, step, folder)
                if save is not None:
                    save(folder / "artifact")
    bar.close()
    accelerator.wait_for_everyone()


def total_loss(terms: Terms, accelerator: Any = None) -> Tensor:
    """Sum of the terms over *global* denominators: gradients are averaged over processes, so each is scaled up by their
    number (a mean of means would weigh a short batch like a long one)."""
    loss = torch.zeros(())
    for numerator, denominator in terms.values():
        denominator = denominator.detach()
        world = 1
        if accelerator is not None and accelerator.num_processes > 1:
            denominator = accelerator.reduce(denominator.clone(), "sum")
            world = accelerator.num_processes
        loss = loss.to(numerator.device) + world * numerator / denominator.clamp_min(1e-6)
    return loss


@torch.no_grad()
def evaluate(objective: Objective, batches: list[Batch]) -> tuple[float, list[float]]:
    """Estimated tau and per-slot accuracy on held-out batches."""
    rights, valids = zip(*(objective.evaluate(batch) for batch in batches), strict=True)
    return estimated_tau(torch.cat(rights), torch.cat(valids))


def _log(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _checkpoint(module: nn.Module, optimiser: Any, step: int, folder: Path) -> None:
    """One file, replaced at once: weights, optimiser moments and step belong together."""
    tensors = {f"model.{k}": v.detach().contiguous() for k, v in module.state_dict().items()}
    state = optimiser.state_dict()["state"]
    for index, moments in state.items():
        for name, value in moments.items():
            tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value).detach().clone().contiguous()
    temporary = folder / "checkpoint.partial"
    save_file(tensors, temporary, metadata={"step": str(step)})
    os.replace(temporary, folder / "checkpoint.safetensors")


def _resume(module: nn.Module, optimiser: Any, folder: Path, device: torch.device) -> int:
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
    module.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value.to(device) if name != "step" else value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return step
