"""Self-distillation: the target answers prompts, and what a drafter learns from is kept.

A corpus is a folder of shards, one a batch of answers, and a manifest. A shard holds token ids and the target's tapped
features, which the answering pass has computed anyway: training then never runs the target again.

    corpus/manifest.json                  target, taps, options, and a sha256 of every shard's tokens
    corpus/<pass>-<number>.tokens.safetensors     ids [N] int32, offsets [R+1] int64, prompt_lengths [R], prompts [R]
    corpus/<pass>-<number>.features.safetensors   features [N - R, F*D] bfloat16: none for the last token of an answer

Interrupted runs resume at the first missing shard; what is there must have been made with the same options. Runs of
different passes may share a folder at the same time: each merges what it adds into the manifest, under a lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.registry import unknown
from repairzoo.safe_file import read_json, read_safetensors
from repairzoo.target import Target


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """How a corpus is answered.

    Attributes:
        name: name of the pass; part of the shards' names.
        taps: target layers whose outputs are stored.
        temperature: 0 for greedy answers.
        max_new_tokens, max_prompt_tokens: longer prompts are skipped, longer answers are cut.
        batch: answers at once. answers: how many a prompt, above temperature 0: they share the reading of the prompt.
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
    answers: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name):
            raise InvalidInput(f"the pass name {self.name!r} becomes part of file names: letters, digits and . _ + -")
        for key in ("max_new_tokens", "max_prompt_tokens", "batch", "answers"):
            if getattr(self, key) < 1:
                raise InvalidInput(f"{key}={getattr(self, key)}: give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InvalidInput(f"temperature={self.temperature}: give 0 (greedy) or more")
        if self.answers > 1 and self.temperature == 0:
            raise InvalidInput(f"answers={self.answers} at temperature 0: greedy answers would all be the same")
        if self.batch % self.answers:
            raise InvalidInput(f"batch={self.batch}: give a multiple of answers={self.answers}")

    @property
    def stored(self) -> tuple[int, ...]:
        """Layers whose features are kept."""
        return self.taps if self.features else ()


def plan_batches(lengths: list[int], sources: list[str], plan: CorpusPlan) -> list[list[int]]:
    """Batches of prompt numbers: every batch of like lengths, every prefix of the batches a mix of all sources."""
    size = plan.batch // plan.answers
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
    window = size * 4
    for start in range(0, len(order), window):
        chunk = sorted(order[start : start + window], key=lambda i: lengths[i])
        batches += [chunk[i : i + size] for i in range(0, len(chunk), size)]
    return batches


@torch.inference_mode()
def answer(target: Target, prompts: list[list[int]], plan: CorpusPlan, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Answers to a batch of prompts, ``plan.answers`` of each, one prompt after the other.

    Returns:
        for each answer its ids (prompt, answer, end-of-text) and its features, one row for every id but the last.
    """
    device = target.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max())
    capacity = width + plan.max_new_tokens + 1
    ids = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache = target.new_cache(len(prompts), capacity)
    taps = plan.stored
    logits, features = target.prefill(ids[:, :width], lengths, cache, taps)
    size = (len(prompts), capacity, len(taps) * target.hidden_size)
    stored = torch.zeros(size, dtype=torch.bfloat16, device=device)
    if features is not None:
        stored[:, :width] = features
    generator = torch.Generator(device).manual_seed(seed)
    eos = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=device)
    alive = torch.arange(len(prompts) * plan.answers, device=device)  # row of the running batch -> answer
    if plan.answers > 1:
        copies = alive // plan.answers
        ids, stored, logits, lengths = ids[copies], stored[copies], logits[copies], lengths[copies]
        cache.keep(copies)
    done_ids: list[Tensor] = [torch.empty(0)] * len(alive)
    done_features: list[Tensor] = [torch.empty(0)] * len(alive)
    position, budget = lengths.clone(), lengths + plan.max_new_tokens
    finished = torch.zeros(len(alive), dtype=torch.bool, device=device)
    while True:
        if plan.temperature > 0:
            token = torch.multinomial((logits / plan.temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        rows = torch.arange(len(alive), device=device)
        place = torch.where(finished, position - 1, position)  # a finished row writes its last token again
        token = torch.where(finished, ids[rows, place], token)
        ids[rows, place] = token
        position = place + 1
        ended = ~finished & (torch.isin(token, eos) | (position >= budget))
        for row in ended.nonzero()[:, 0].tolist():
            length = int(position[row])
            done_ids[int(alive[row])] = ids[row, :length].cpu()
            done_features[int(alive[row])] = stored[row, : length - 1].cpu()
        finished = finished | ended
        # finished rows cost arithmetic, leaving them out costs a copy of everything: now and then
        if int(finished.sum()) >= max(1, len(alive) // 8):
            keep = (~finished).nonzero()[:, 0]
            if not len(keep):
                return done_ids, done_features
            alive, position, budget, token = alive[keep], position[keep], budget[keep], token[keep]
            ids, stored, finished = ids[keep], stored[keep], finished[keep]
            cache.keep(keep)
        at = (position - 1)[:, None]
        bound = min(-(-int(position.max()) // 32) * 32, capacity)
        mask = torch.arange(bound, device=device)[None, None] <= at[..., None]
        hidden, features = target.forward(token[:, None], at, at, mask, cache, taps)
        logits = target.logits(hidden[:, 0])
        if features is not None:
            stored[torch.arange(len(alive), device=device), position - 1] = features[:, 0].to(torch.bfloat16)


def write_corpus(target: Target, prompts: list[dict[str, str]], folder: Path, plan: CorpusPlan) -> None:
    """Answer all prompts into ``folder``, shard by shard; shards that exist are kept. Too long prompts are skipped.

    Raises:
        InvalidInput: a pass of this name was begun with other options, prompts or another target, or another process is
            at it; a tap that the target doesn't have; answers that can be longer than its context.
    """
    wrong = [t for t in plan.stored if not -1 <= t < target.num_layers]
    if wrong:
        raise InvalidInput(f"taps {wrong}: {target.name} has layers 0 .. {target.num_layers - 1} (-1: the embedding)")
    if plan.max_prompt_tokens + plan.max_new_tokens > target.max_context:
        raise InvalidInput(
            f"max_prompt_tokens {plan.max_prompt_tokens} and max_new_tokens {plan.max_new_tokens} together exceed the "
            f"context of {target.name}, {target.max_context} tokens"
        )
    encoded = [chat_ids(target, row["prompt"]) for row in prompts]
    batches = plan_batches([len(x) for x in encoded], [row.get("source", "") for row in prompts], plan)
    if not batches:
        raise InvalidInput(f"all {len(prompts)} prompts are longer than max_prompt_tokens={plan.max_prompt_tokens}")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, f"pass-{plan.name}", f"the pass {plan.name!r}"):
        _write_pass(target, encoded, batches, folder, plan, _begin(target, folder, plan, prompts))


def _write_pass(
    target: Target, encoded: list[list[int]], batches: list[list[int]], folder: Path, plan: CorpusPlan, listed: set[str]
) -> None:
    """Answer the batches whose shards are missing; ``listed`` are those that the manifest knows."""
    total = sum(map(len, batches)) * plan.answers
    progress = tqdm(total=total, desc=f"corpus pass {plan.name!r}", unit="answer")
    for number, batch in enumerate(batches):
        stem = f"{plan.name}-{number:04d}"
        tokens_file = folder / f"{stem}.tokens.safetensors"
        made = not tokens_file.exists()
        if made:
            ids, features = answer(target, [encoded[i] for i in batch], plan, plan.seed * 100_003 + number)
            if plan.features:  # before the tokens: a shard is there when its tokens are
                _save({"features": torch.cat(features)}, folder / f"{stem}.features.safetensors")
            offsets = torch.tensor([0] + [len(x) for x in ids]).cumsum(0)
            _save(
                {
                    "ids": torch.cat(ids).to(torch.int32),
                    "offsets": offsets,
                    "prompt_lengths": torch.tensor([len(encoded[i]) for i in batch]).repeat_interleave(plan.answers),
                    "prompts": torch.tensor(batch).repeat_interleave(plan.answers),
                },
                tokens_file,
            )
        if made or tokens_file.name not in listed:
            facts = _describe(tokens_file)
            _update_manifest(folder, lambda m, name=tokens_file.name, facts=facts: m["shards"].update({name: facts}))
        progress.update(len(batch) * plan.answers)
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


def _begin(target: Target, folder: Path, plan: CorpusPlan, prompts: list[dict[str, str]]) -> set[str]:
    """Put the pass into the folder's manifest; refuses to continue one begun otherwise. Gives the listed shards."""
    digest = hashlib.sha256("\n".join(row["prompt"] for row in prompts).encode()).hexdigest()
    options = json.loads(json.dumps({**asdict(plan), "prompts_sha256": digest, "prompts": len(prompts)}))
    identity = {"id": target.name, "revision": target.revision}

    def begin(manifest: dict[str, Any]) -> None:
        known = {key: manifest["target"].get(key) for key in identity} if manifest["target"] else identity
        if known != identity:
            raise InvalidInput(f"{folder} was answered by the target {known}, not by {identity}: give another folder")
        begun = {"answers": 1} | manifest["passes"].get(plan.name, options)  # older manifests say one answer by silence
        for key in options:
            if begun.get(key) != options[key]:
                raise InvalidInput(
                    f"{folder}: the pass {plan.name!r} was begun with {key}={begun.get(key)!r}, now {options[key]!r}; "
                    "continue it as it was begun, or give the pass another name"
                )
        manifest["target"] = {**identity, "source": target.source}
        manifest["passes"][plan.name] = options

    return set(_update_manifest(folder, begin)["shards"])


@contextmanager
def _alone(folder: Path, name: str, what: str) -> Iterator[None]:
    """Hold a lock of a corpus folder, or say who else does."""
    lock = FileLock(folder / f".{name}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidInput(
            f"{folder}: another process is at {what}; wait for it (this one then continues), or give another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _update_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Change the manifest as it is now: another run may have added to it since this one last looked."""
    with FileLock(folder / ".manifest.lock"):
        manifest = read_manifest(folder, missing_ok=True)
        change(manifest)
        for key in ("passes", "shards"):
            manifest[key] = dict(sorted(manifest[key].items()))  # whichever run was first
        temporary = folder / "manifest.partial"
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(temporary, folder / "manifest.json")
    return manifest


def read_manifest(folder: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The manifest of a corpus folder.

    Raises:
        InvalidInput: it has none (unless ``missing_ok``: an empty one). InvalidArtifact: one that is damaged.
    """
    path = folder / "manifest.json"
    if path.exists():
        found = read_json(path)
        parts = found if isinstance(found, dict) else {}
        if bad := [k for k in ("target", "passes", "shards") if not isinstance(parts.get(k), dict)]:
            raise InvalidArtifact(f"{path}: key {bad[0]!r} must map names to what is known of them; is it undamaged?")
        return parts
    if not missing_ok:
        raise InvalidInput(f"{folder} holds no manifest.json: it is no corpus; make one with: repairzoo train corpus")
    return {"target": {}, "passes": {}, "shards": {}}


def _describe(shard: Path) -> dict[str, Any]:
    tensors = read_safetensors(shard)
    return {
        "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
        "answers": len(tensors["prompt_lengths"]),
        "answer_tokens": int(len(tensors["ids"]) - tensors["prompt_lengths"].sum()),
    }


@torch.inference_mode()
def write_features(target: Target, folder: Path, batch: int = 32) -> None:
    """Compute the features of shards that have none: a corpus travels as tokens, a thousandth of the bytes.

    Raises:
        InvalidInput: the folder is no corpus, or another target answered it.
    """
    manifest = read_manifest(folder)
    identity = {"id": target.name, "revision": target.revision}
    known = {key: manifest["target"].get(key) for key in identity}
    if known != identity:
        raise InvalidInput(f"{folder} was answered by the target {known}, not by {identity}: features would differ")
    sequences = [s for s in read_corpus(folder) if not features_file(s.shard).exists()]
    progress = tqdm(total=len(sequences), desc=f"features of {folder.name}", unit="answer")
    for shard in sorted({s.shard for s in sequences}):
        taps = tuple(taps_of(folder, manifest, shard.name.rsplit("-", 1)[0]))
        mine = [s for s in sequences if s.shard == shard]
        rows = torch.zeros(sum(len(s) - 1 for s in mine), len(taps) * target.hidden_size, dtype=torch.bfloat16)
        mine.sort(key=len)
        for group in (mine[i : i + batch] for i in range(0, len(mine), batch)):
            lengths = torch.tensor([len(s) for s in group], device=target.device)
            ids = torch.zeros(len(group), len(group[-1]), dtype=torch.int64, device=target.device)
            for row, s in enumerate(group):
                ids[row, : len(s)] = s.ids
            cache = target.new_cache(len(group), ids.shape[1])
            _, features = target.prefill(ids, lengths, cache, taps)
            assert features is not None
            for row, s in enumerate(group):
                rows[s.start : s.start + len(s) - 1] = features[row, : len(s) - 1]
            progress.update(len(group))
        _save({"features": rows}, features_file(shard))
    progress.close()


def taps_of(folder: Path, manifest: dict[str, Any], name: str) -> list[int]:
    """Layers whose features a pass stores. Raises ``InvalidArtifact``: its manifest does not say."""
    taps = manifest["passes"].get(name, {}).get("taps")
    if not isinstance(taps, list) or not all(isinstance(t, int) for t in taps):
        raise InvalidArtifact(f"{folder / 'manifest.json'} does not say which layers ('taps') the pass {name!r} stores")
    return taps


def features_file(shard: Path) -> Path:
    """Where the features of a token shard lie."""
    return shard.with_name(shard.name.replace(".tokens.", ".features."))


@dataclass(slots=True)
class Sequence:
    """One answer: ``ids [T] int32``, its ``prompt`` length in tokens, the prompt's ``number``, and where it lies."""

    ids: Tensor
    prompt: int
    number: int
    shard: Path
    start: int  # first row of its features in the shard

    def __len__(self) -> int:
        return len(self.ids)


def read_corpus(folder: Path, passes: Iterable[str] | None = None) -> list[Sequence]:
    """All answers of a corpus, in the order of its shards.

    Raises:
        UnknownName: none of these passes. InvalidInput: no shards, or one that is not the one its manifest lists.
        InvalidArtifact: a shard that is damaged, and not listed.
    """
    listed = read_manifest(folder)["shards"]
    shards = sorted(folder.glob("*.tokens.safetensors"))
    found = sorted({s.name.rsplit("-", 1)[0] for s in shards})
    if shards and passes is not None:
        shards = [s for s in shards if s.name.rsplit("-", 1)[0] in set(passes)]
        if not shards:
            raise unknown(f"pass of {folder}", ", ".join(passes), found)
    if not shards:
        raise InvalidInput(f"{folder} holds no shards (*.tokens.safetensors); make them with: repairzoo train corpus")
    sequences = []
    for shard in shards:
        # a shard that was just written may not be listed yet
        if shard.name in listed and hashlib.sha256(shard.read_bytes()).hexdigest() != listed[shard.name]["sha256"]:
            raise InvalidInput(f"{shard} is not what the manifest lists (sha256): delete it and resume the pass")
        tensors = read_safetensors(shard)
        if lacking := {"ids", "offsets", "prompt_lengths", "prompts"} - tensors.keys():
            raise InvalidArtifact(f"{shard} holds no {min(lacking)}: delete it and resume the pass")
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
