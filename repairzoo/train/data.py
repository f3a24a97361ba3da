"""Batches of a corpus: a pure function of (seed, step), so that a resumed run sees what an uninterrupted one sees.

The batch of a step belongs to all processes together: each takes its rows of it, so that their number changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.safe_file import read_header
from repairzoo.target import Target
from repairzoo.train.corpus import Sequence, features_file, read_corpus, read_manifest, taps_of

_BUCKET = 32  # batches whose sequences are sorted by length together: less padding, still mixed


@dataclass(slots=True)
class Batch:
    """Some answers with sampled anchors.

    Attributes:
        input_ids: ``[B, T]`` int64, padded with 0. loss_mask: ``[B, T]`` bool, True on answer tokens.
        features: ``[B, T, F*D]`` target features; zero where there are none (the last token, padding).
        anchors: ``[B, N]`` int64 positions. keep: ``[B, N]`` bool, False where a sequence has fewer anchors.
        last: ``[B, T, D]`` output of the target's last layer, before the final norm, zero where ``features`` are; None
            where it was not asked for or is not stored.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    anchors: Tensor
    keep: Tensor
    last: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        def moved(value: Tensor | None) -> Any:
            return None if value is None else value.to(device)

        return Batch(*(moved(getattr(self, name)) for name in Batch.__slots__))

    def labels(self, slots: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, S]`` after each anchor, and where they are supervised (answer tokens of kept anchors)."""
        steps = torch.arange(1, slots + 1, device=self.anchors.device)
        places = self.anchors[..., None] + steps  # [B, N, S]
        inside = places < self.input_ids.shape[1]
        places = places.clamp_max(self.input_ids.shape[1] - 1)
        flat = places.flatten(1)
        labels = self.input_ids.gather(1, flat).view_as(places)
        mask = self.loss_mask.gather(1, flat).view_as(places) & inside & self.keep[..., None]
        return labels, mask

    def before(self, labels: Tensor) -> Tensor:
        """The true token before each slot, ``[B, N, S]``: the anchor, then the labels."""
        anchors = self.input_ids.gather(1, self.anchors)[..., None]
        return torch.cat((anchors, labels[..., :-1]), -1)

    def at_labels(self, rows: Tensor, slots: int) -> Tensor:
        """Of ``rows [B, T, D]`` those that predict the labels, ``[B, N, S, D]``: at the position before each."""
        at = (self.anchors[..., None] + torch.arange(slots, device=rows.device)).clamp_max(rows.shape[1] - 1)
        return rows[torch.arange(len(rows), device=rows.device)[:, None, None], at]


def prefix(mask: Tensor) -> Tensor:
    """``[..., S]`` bool up to the first False: slots that count towards an accepted length."""
    return mask.long().cumprod(-1).bool()


@torch.no_grad()
def scouted(batch: Batch, share: float, accepted: Callable[[Batch], Tensor], hops: int = 3) -> Batch:
    """The batch with a share of its anchors moved to where rounds would begin (DRelay, appendix B).

    A scout starts at uniform anchors and advances as decoding would, by the accepted tokens and the bonus, along the
    true text; every place it comes to is an anchor. Where it runs past the end the uniform anchor stays.

    Args:
        share: of the anchors of a text, from the last. accepted: batch -> ``[B, N]``, see ``held.accepted``.
        hops: rounds that one scout makes; more scouts with fewer hops cost the same.
    """
    total = batch.anchors.shape[1]
    count = min(total, round(share * total))
    if count == 0:
        return batch
    scouts = min(-(-count // hops), total)
    hop = replace(batch, anchors=batch.anchors[:, :scouts], keep=batch.keep[:, :scouts])
    found, sound = [], []
    last = batch.input_ids.shape[1] - 2  # an anchor has a successor
    while sum(x.shape[1] for x in found) < count:
        length = accepted(hop)
        there = hop.anchors + length + 1
        keep = hop.keep & (length >= 0) & (there <= last)
        there = torch.where(keep, there, hop.anchors)
        keep &= batch.loss_mask.gather(1, there + 1)
        hop = replace(hop, anchors=there, keep=keep)
        found.append(there)
        sound.append(keep)
    there, keep = torch.cat(found, 1)[:, :count], torch.cat(sound, 1)[:, :count]
    anchors, kept = batch.anchors.clone(), batch.keep.clone()
    anchors[:, total - count :] = torch.where(keep, there, anchors[:, total - count :])
    kept[:, total - count :] |= keep
    return replace(batch, anchors=anchors, keep=kept)


@dataclass(slots=True)
class Corpus:
    """The answers of one or more corpus folders, split into training and held-out prompts.

    A prompt is held out by the hash of its tokens, so all its answers are, in every pass and every corpus.

    Args:
        folders: corpus folders. taps: feature layers to read, in the backbone's order; none for tokens alone.
        hidden_size: width of a layer's features.
        held_out: one in how many prompts. passes: names of the passes to read; None for all.
        text_from: train on the prompts' own text too, from this token on (past the fixed beginning of a chat template):
            their features are stored anyway. None: on answers only. Held-out figures always count answers only.
        last: the target's last layer, for objectives that learn the target's law: batches carry its output where every
            pass stores it, and the target need not read the texts again.
    """

    folders: list[Path]
    taps: tuple[int, ...]
    hidden_size: int
    held_out: int = 40
    passes: tuple[str, ...] | None = None
    text_from: int | None = None
    last: int | None = None
    train: list[Sequence] = field(init=False)
    held: list[Sequence] = field(init=False)
    _columns: dict[tuple[Path, str, tuple[int, ...]], Tensor] = field(init=False, default_factory=dict)
    _open: dict[Path, object] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.text_from is not None and self.text_from < 0:
            raise InvalidInput(f"text_from={self.text_from}: give the number of tokens to skip, from 0")
        sequences = [s for folder in self.folders for s in read_corpus(folder, self.passes) if len(s) - s.prompt >= 4]
        self.train = [s for s in sequences if not self._is_held(s)]
        self.held = [s for s in sequences if self._is_held(s)]
        if self.text_from is not None:
            self.train = [replace(s, prompt=min(s.prompt, self.text_from)) for s in self.train]
        if not self.train or not self.held:
            places = ", ".join(map(str, self.folders))
            raise InvalidInput(
                f"{len(sequences)} answers in {places} are too few to hold one prompt in {self.held_out} out"
            )
        passes = {_pass_of(s) for s in sequences}
        if self.last is not None and not all(self.last in _stored(*place) for place in passes):
            self.last = None

    def _is_held(self, sequence: Sequence) -> bool:
        digest = hashlib.sha256(sequence.ids[: sequence.prompt].numpy().tobytes()).digest()
        return int.from_bytes(digest[:4], "big") % self.held_out == 0

    @property
    def tokens(self) -> int:
        return sum(len(s) - s.prompt for s in self.train)

    def digest(self) -> str:
        """Names what is trained on: another digest, other batches."""
        content = hashlib.sha256()
        for s in self.train:
            content.update(s.prompt.to_bytes(4, "big") + s.ids.numpy().tobytes())
        return content.hexdigest()

    def features(self, sequence: Sequence, taps: tuple[int, ...] | None = None) -> Tensor:
        """``[T-1, F*D]`` bfloat16 features of the wanted layers (``self.taps``), in the wanted order."""
        taps = self.taps if taps is None else taps
        if not taps:
            return torch.zeros(len(sequence) - 1, 0, dtype=torch.bfloat16)
        path = features_file(sequence.shard)
        if path not in self._open:
            if not path.exists():
                raise InvalidInput(f"{path} is missing; compute it with: repairzoo train features {path.parent}")
            rows = read_header(path).tensors.get("features")  # a truncated file is told here
            if rows is None or len(rows.shape) != 2:
                raise InvalidArtifact(
                    f"{path} holds no features: delete it, then: repairzoo train features {path.parent}"
                )
            self._open[path] = safe_open(path, "pt").get_slice("features")  # pyright: ignore
        place = (*_pass_of(sequence), taps)
        if place not in self._columns:
            self._columns[place] = self._select(*place)
        rows = self._open[path][sequence.start : sequence.start + len(sequence) - 1]  # type: ignore[index]
        return rows[:, self._columns[place]]

    def _select(self, folder: Path, name: str, taps: tuple[int, ...]) -> Tensor:
        """Columns of the wanted layers among the stored ones, which may differ between passes."""
        stored = _stored(folder, name)
        missing = [t for t in taps if t not in stored]
        if missing:
            raise InvalidInput(
                f"{folder}, pass {name!r}, stores the layers {stored}, not {missing}: answer it again with these taps"
            )
        width = torch.arange(self.hidden_size)
        return torch.cat([stored.index(t) * self.hidden_size + width for t in taps])

    def batch(self, sequences: SequenceOf[Sequence], anchors: int, seeds: SequenceOf[int]) -> Batch:
        """Assemble sequences with up to ``anchors`` random anchors each; an anchor and its successor are answer tokens.

        Args:
            seeds: one a sequence: its anchors do not depend on the other rows of its batch.
        """
        length = max(len(s) for s in sequences)
        rows = len(sequences)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        mask = torch.zeros(rows, length, dtype=torch.bool)
        features = torch.zeros(rows, length, len(self.taps) * self.hidden_size, dtype=torch.bfloat16)
        last = None if self.last is None else torch.zeros(rows, length, self.hidden_size, dtype=torch.bfloat16)
        places = torch.zeros(rows, anchors, dtype=torch.int64)
        keep = torch.zeros(rows, anchors, dtype=torch.bool)
        for row, (s, seed) in enumerate(zip(sequences, seeds, strict=True)):
            ids[row, : len(s)] = s.ids
            mask[row, s.prompt : len(s)] = True
            features[row, : len(s) - 1] = self.features(s)
            if last is not None and self.last is not None:
                last[row, : len(s) - 1] = self.features(s, (self.last,))
            choices = len(s) - 1 - s.prompt  # anchors prompt .. T-2
            generator = torch.Generator().manual_seed(seed)
            picked = torch.randperm(choices, generator=generator)[:anchors] + s.prompt
            places[row, : len(picked)] = picked
            keep[row, : len(picked)] = True
        return Batch(ids, mask, features, places, keep, last)

    def training_batch(self, step: int, size: int, anchors: int, seed: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows ``rank, rank + world, ...`` of a step's batch of ``size`` answers; epochs follow without end."""
        if not world <= size <= len(self.train) or size % world:
            raise InvalidInput(
                f"a batch of {size} answers: give a multiple of {world} (processes), at most {len(self.train)} (all)"
            )
        per_epoch = len(self.train) // size
        epoch, index = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator).tolist()
        bucket = index // _BUCKET
        chunk = order[bucket * _BUCKET * size : min((bucket + 1) * _BUCKET, per_epoch) * size]
        chunk.sort(key=lambda i: len(self.train[i]))
        batches = [chunk[i : i + size] for i in range(0, len(chunk), size)]
        generator = torch.Generator().manual_seed(seed + 7 * bucket + epoch)
        shuffle = torch.randperm(len(batches), generator=generator).tolist()
        picked = batches[shuffle[index % _BUCKET]][rank::world]
        seeds = [((seed * 1_000_003 + step) * 4099 + rank + i * world) % 2**62 for i in range(len(picked))]
        return self.batch([self.train[i] for i in picked], anchors, seeds)

    def held_batches(self, size: int, anchors: int, limit: int) -> list[Batch]:
        """Fixed batches of held-out answers, at most ``limit`` sequences."""
        generator = torch.Generator().manual_seed(1)
        chosen = torch.randperm(len(self.held), generator=generator)[:limit].tolist()
        chosen.sort(key=lambda i: len(self.held[i]))
        groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        return [self.batch([self.held[i] for i in group], anchors, group) for group in groups]

    def counts(self, vocab_size: int) -> Tensor:
        """``[V]`` int64: how often each id occurs in training answers."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for s in self.train:
            counts += torch.bincount(s.ids[s.prompt :].long(), minlength=vocab_size)
        return counts

    def columns(self, vocab_size: int, least: int = 1) -> Tensor:
        """Vocabulary ids that occur at least ``least`` times in training answers: the loss needs no other rows."""
        return (self.counts(vocab_size) >= least).nonzero()[:, 0]


def softmax_columns(corpus: Corpus, target: Target, least: int | None) -> Tensor | None:
    """Ids that a loss's softmax runs over, on the target's device: those that occur ``least`` times; None for all."""
    return None if least is None else corpus.columns(target.output_weight.shape[0], least).to(target.device)


def _pass_of(sequence: Sequence) -> tuple[Path, str]:
    """Corpus folder and pass of an answer."""
    return sequence.shard.parent, sequence.shard.name.rsplit("-", 1)[0]


def _stored(folder: Path, name: str) -> list[int]:
    """Layers whose features a pass stores."""
    return taps_of(folder, read_manifest(folder), name)
