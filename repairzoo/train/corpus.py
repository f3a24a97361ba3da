"""Self-distillation: the target answers prompts, and what a drafter learns from is kept.

A corpus is a folder of shards, one a batch of answers, and a manifest. A shard holds token ids and the target's tapped
features, which the answering pass has computed anyway: training then never runs the target again.

    corpus/manifest.json                  target, taps, options, and a sha256 of every shard's tokens
    corpus/<pass>-<number>.tokens.safetensors     ids [N] int32, offsets [R+1] int64, prompt_lengths [R], prompts [R]
    corpus/<pass>-<number>.features.safetensors   features [N, F*D] bfloat16 (optional; can be recomputed from the tokens)

Interrupted runs resume at the first missing shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from repairzoo.errors import InvalidInput
from repairzoo.target import Target


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """How a corpus is answered.

    Attributes:
        name: name of the pass; part of the shards' names.
        taps: target layers whose outputs are stored.
        temperature: 0 for greedy answers.
        max_new_tokens, max_prompt_tokens: longer prompts are skipped, longer answers are cut.
        batch: answers at once.
        seed: of the order of the prompts and of sampled answers.
    """

    name: str = "greedy"
    taps: tuple[int, ...] = (1, 8, 15, 22, 27)
    temperature: float = 0.0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 700
    batch: int = 128
    seed: int = 0
    features: bool = True


def load_prompts(path: Path) -> list[dict[str, str]]:
    """JSON lines with ``prompt`` and ``source``."""
    # split at newlines only: splitlines() would also cut at U+2028 inside a JSON string
    prompts = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, row in enumerate(prompts, 1):
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise InvalidInput(f"{path}, line {number}: needs a non-empty string under the key 'prompt'")
    return prompts


def plan_batches(lengths: list[int], sources: list[str], plan: CorpusPlan) -> list[list[int]]:
    """Batches of prompt numbers: every batch of like lengths, every prefix of the batches a mix of all sources."""
    generator = torch.Generator().manual_seed(plan.seed)
    by_source: dict[str, list[int]] = {}
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if lengths[index] <= plan.max_prompt_tokens:
            by_source.setdefault(sources[index], []).append(index)
    # place each source evenly over the unit interval, so that any prefix holds every source in proportion
    placed = sorted(
        ((rank + 0.5) / len(group), source, index)
        for source, group in by_source.items()
        for rank, index in enumerate(group)
    )
    order = [index for _, _, index in placed]
    batches = []
    window = plan.batch * 4
    for start in range(0, len(order), window):
        chunk = sorted(order[start : start + window], key=lambda i: lengths[i])
        batches += [chunk[i : i + plan.batch] for i in range(0, len(chunk), plan.batch)]
    return batches


@torch.inference_mode()
def answer(target: Target, prompts: list[list[int]], plan: CorpusPlan, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Answers to a batch of prompts.

    Returns:
        for each prompt its ids (prompt, answer, end-of-text) and its features, one row for every id but the last.
    """
    lengths = torch.tensor([len(p) for p in prompts])
    width = int(lengths.max())
    capacity = width + plan.max_new_tokens + 1
    ids = torch.zeros(len(prompts), capacity, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache = target.new_cache(len(prompts), capacity)
    logits, features = target.prefill(ids[:, :width], lengths, cache, plan.taps)
    stored = torch.zeros(len(prompts), capacity, features.shape[-1] if features is not None else 0, dtype=torch.bfloat16)
    if features is not None:
        stored[:, :width] = features
    generator = torch.Generator().manual_seed(seed)
    eos = torch.tensor(target.eos_token_ids)
    budget = lengths + plan.max_new_tokens
    done_ids: list[Tensor] = [torch.empty(0)] * len(prompts)
    done_features: list[Tensor] = [torch.empty(0)] * len(prompts)
    alive = torch.arange(len(prompts))  # row of the running batch -> prompt
    position = lengths.clone()
    while len(alive):
        if plan.temperature > 0:
            token = torch.multinomial((logits / plan.temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        rows = torch.arange(len(alive))
        ids[rows, position] = token
        position = position + 1
        finished = torch.isin(token, eos) | (position >= budget)
        if bool(finished.any()):
            for row in finished.nonzero()[:, 0].tolist():
                length = int(position[row])
                done_ids[int(alive[row])] = ids[row, :length].clone()
                done_features[int(alive[row])] = stored[row, : length - 1].clone()
            keep = (~finished).nonzero()[:, 0]
            alive, position, budget, token = alive[keep], position[keep], budget[keep], token[keep]
            ids, stored = ids[keep], stored[keep]
            cache = cache.select(keep)
            if not len(alive):
                break
        at = (position - 1)[:, None]
        bound = min(-(-int(position.max()) // 32) * 32, capacity)
        mask = torch.arange(bound)[None, None] <= at[..., None]
        hidden, features = target.forward(token[:, None], at, at, mask, cache, plan.taps)
        logits = target.logits(hidden[:, 0])
        if features is not None:
            stored[torch.arange(len(alive)), position - 1] = features[:, 0].to(torch.bfloat16)
    return done_ids, done_features


def write_corpus(target: Target, prompts: list[dict[str, str]], folder: Path, plan: CorpusPlan) -> None:
    """Answer all prompts into ``folder``, shard by shard; shards that exist are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [chat_ids(target, row["prompt"]) for row in prompts]
    batches = plan_batches([len(x) for x in encoded], [row.get("source", "") for row in prompts], plan)
    progress = tqdm(total=sum(map(len, batches)), desc=f"corpus pass {plan.name!r}", unit="answer")
    for number, batch in enumerate(batches):
        stem = folder / f"{plan.name}-{number:04d}"
        tokens_file = stem.with_suffix(".tokens.safetensors")
        if not tokens_file.exists():
            ids, features = answer(target, [encoded[i] for i in batch], plan, plan.seed * 100_003 + number)
            if plan.features:
                _save({"features": torch.cat(features)}, stem.with_suffix(".features.safetensors"))
            offsets = torch.tensor([0] + [len(x) for x in ids]).cumsum(0)
            _save(
                {
                    "ids": torch.cat(ids).to(torch.int32),
                    "offsets": offsets,
                    "prompt_lengths": torch.tensor([len(encoded[i]) for i in batch]),
                    "prompts": torch.tensor(batch),
                },
                tokens_file,
            )
        progress.update(len(batch))
        _write_manifest(target, folder, plan, prompts)
    progress.close()


def chat_ids(target: Target, prompt: str) -> list[int]:
    """A single user turn under the target's chat template."""
    if target.tokenizer is None:
        raise InvalidInput(f"target {target.name!r} has no tokenizer: a corpus needs one")
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(path.name + ".partial")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def _write_manifest(target: Target, folder: Path, plan: CorpusPlan, prompts: list[dict[str, str]]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {"target": {}, "passes": {}, "shards": {}}
    manifest["target"] = {"id": target.name, "revision": target.revision, "source": target.source}
    digest = hashlib.sha256("\n".join(row["prompt"] for row in prompts).encode()).hexdigest()
    manifest["passes"][plan.name] = {**asdict(plan), "prompts_sha256": digest, "prompts": len(prompts)}
    for shard in sorted(folder.glob("*.tokens.safetensors")):
        if shard.name not in manifest["shards"]:
            tensors = load_file(shard)
            manifest["shards"][shard.name] = {
                "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
                "answers": len(tensors["prompt_lengths"]),
                "answer_tokens": int(len(tensors["ids"]) - tensors["prompt_lengths"].sum()),
            }
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(temporary, path)


@dataclass(slots=True)
class Sequence:
    """One answer: ``ids [T] int32``, its ``prompt`` length in tokens, the ``source`` of the prompt, and where it lies."""

    ids: Tensor
    prompt: int
    number: int
    shard: Path
    start: int  # first row of its features in the shard

    def __len__(self) -> int:
        return len(self.ids)


def read_corpus(folder: Path, passes: Iterable[str] | None = None) -> list[Sequence]:
    """All answers of a corpus, in the order of its shards."""
    shards = sorted(folder.glob("*.tokens.safetensors"))
    if passes is not None:
        shards = [s for s in shards if s.name.rsplit("-", 1)[0] in set(passes)]
    if not shards:
        raise InvalidInput(f"{folder} holds no corpus shards (*.tokens.safetensors); make them with: repairzoo train corpus")
    sequences = []
    for shard in shards:
        tensors = load_file(shard)
        row = 0
        for index, (start, stop) in enumerate(zip(tensors["offsets"][:-1], tensors["offsets"][1:], strict=True)):
            sequences.append(
                Sequence(
                    ids=tensors["ids"][start:stop],
                    prompt=int(tensors["prompt_lengths"][index]),
                    number=int(tensors["prompts"][index]),
                    shard=shard,
                    start=row,
                )
            )
            row += int(stop - start) - 1
    return sequences
