"""Batches of a corpus: a pure function of (seed, step), so that a resumed run sees what an uninterrupted one sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from repairzoo.errors import InvalidInput
from repairzoo.train.corpus import Sequence, read_corpus

_BUCKET = 32  # batches whose sequences are sorted by length together: less padding, still mixed


@dataclass(slots=True)
class Batch:
    """Some answers with sampled anchors.

    Attributes:
        input_ids: ``[B, T]`` int64, padded with 0. loss_mask: ``[B, T]`` bool, True on answer tokens.
        features: ``[B, T, F*D]`` target features; zero where there are none (the last token, padding).
        anchors: ``[B, N]`` int64 positions. keep: ``[B, N]`` bool, False where a sequence has fewer anchors.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    anchors: Tensor
    keep: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))

    def labels(self, slots: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, S]`` after each anchor, and where they are supervised: the contiguous answer tokens that follow."""
        steps = torch.arange(1, slots + 1, device=self.anchors.device)
        places = self.anchors[..., None] + steps  # [B, N, S]
        inside = places < self.input_ids.shape[1]
        places = places.clamp_max(self.input_ids.shape[1] - 1)
        flat = places.flatten(1)
        labels = self.input_ids.gather(1, flat).view_as(places)
        mask = self.loss_mask.gather(1, flat).view_as(places) & inside & self.keep[..., None]
        return labels, mask.long().cumprod(-1).bool()


@dataclass(slots=True)
class Corpus:
    """The answers of one or more corpus folders, split into training and held-out prompts.

    A prompt is held out by the hash of its tokens, so all its answers are, in every pass and every corpus.

    Args:
        folders: corpus folders. taps: feature layers to read, in the backbone's order.
        held_out: one in how many prompts.
    """

    folders: list[Path]
    taps: tuple[int, ...]
    hidden_size: int
    held_out: int = 40
    train: list[Sequence] = field(init=False)
    held: list[Sequence] = field(init=False)
    _columns: dict[Path, Tensor] = field(init=False, default_factory=dict)
    _open: dict[Path, object] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        sequences = [s for folder in self.folders for s in read_corpus(folder) if len(s) - s.prompt >= 4]
        self.train = [s for s in sequences if not self._is_held(s)]
        self.held = [s for s in sequences if self._is_held(s)]
        if not self.train or not self.held:
            raise InvalidInput(f"{len(sequences)} answers in {self.folders} are too few to hold one prompt in {self.held_out} out")

    def _is_held(self, sequence: Sequence) -> bool:
        digest = hashlib.sha256(sequence.ids[: sequence.prompt].numpy().tobytes()).digest()
        return int.from_bytes(digest[:4], "big") % self.held_out == 0

    @property
    def tokens(self) -> int:
        return sum(len(s) - s.prompt for s in self.train)

    def features(self, sequence: Sequence) -> Tensor:
        """``[T-1, F*D]`` bfloat16 features of the wanted layers, in the wanted order."""
        path = sequence.shard.with_name(sequence.shard.name.replace(".tokens.", ".features."))
        if path not in self._open:
            if not path.exists():
                raise InvalidInput(f"{path} is missing: answer the corpus again with features, or recompute them")
            self._open[path] = safe_open(path, "pt").get_slice("features")  # pyright: ignore
            self._columns[path.parent] = self._select(path.parent)
        rows = self._open[path][sequence.start : sequence.start + len(sequence) - 1]  # type: ignore[index]
        return rows[:, self._columns[path.parent]]

    def _select(self, folder: Path) -> Tensor:
        import json

        manifest = json.loads((folder / "manifest.json").read_text())
        stored = next(iter(manifest["passes"].values()))["taps"]
        missing = [t for t in self.taps if t not in stored]
        if missing:
            raise InvalidInput(f"{folder} stores the layers {stored}, not {missing}: answer it again with these taps")
        width = torch.arange(self.hidden_size)
        return torch.cat([stored.index(t) * self.hidden_size + width for t in self.taps])

    def batch(self, sequences: SequenceOf[Sequence], anchors: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        """Assemble sequences with up to ``anchors`` random anchors each; an anchor and its successor are answer tokens."""
        length = max(len(s) for s in sequences)
        rows = len(sequences)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        mask = torch.zeros(rows, length, dtype=torch.bool)
        features = torch.zeros(rows, length, len(self.taps) * self.hidden_size, dtype=dtype)
        places = torch.zeros(rows, anchors, dtype=torch.int64)
        keep = torch.zeros(rows, anchors, dtype=torch.bool)
        for row, s in enumerate(sequences):
            ids[row, : len(s)] = s.ids
            mask[row, s.prompt : len(s)] = True
            features[row, : len(s) - 1] = self.features(s)
            choices = len(s) - 1 - s.prompt  # anchors prompt .. T-2
            picked = torch.randperm(choices, generator=generator)[:anchors] + s.prompt
            places[row, : len(picked)] = picked
            keep[row, : len(picked)] = True
        return Batch(ids, mask, features, places, keep)

    def training_batch(
        self, step: int, size: int, anchors: int, seed: int, dtype: torch.dtype, rank: int = 0, world: int = 1
    ) -> Batch:
        """The batch of one process at one step; epochs follow each other without end."""
        per_epoch = max(1, len(self.train) // (size * world))
        epoch, index = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator).tolist()
        total = size * world
        bucket = index // _BUCKET
        chunk = order[bucket * _BUCKET * total : min((bucket + 1) * _BUCKET, per_epoch) * total]
        chunk.sort(key=lambda i: len(self.train[i]))
        batches = [chunk[i : i + total] for i in range(0, len(chunk), total)]
        shuffle = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed + 7 * bucket + epoch)).tolist()
        picked = batches[shuffle[index % _BUCKET]][rank::world]
        anchor_seed = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 4099 + rank) % 2**62)
        return self.batch([self.train[i] for i in picked], anchors, anchor_seed, dtype)

    def held_batches(self, size: int, anchors: int, limit: int, dtype: torch.dtype) -> list[Batch]:
        """Fixed batches of held-out answers, at most ``limit`` sequences."""
        generator = torch.Generator().manual_seed(1)
        chosen = sorted(
            (self.held[i] for i in torch.randperm(len(self.held), generator=generator)[:limit].tolist()), key=len
        )
        return [self.batch(chosen[i : i + size], anchors, generator, dtype) for i in range(0, len(chosen), size)]

    def columns(self, vocab_size: int, least: int = 1) -> Tensor:
        """Vocabulary ids that occur at least ``least`` times in training answers: the loss needs no other rows."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for s in self.train:
            counts += torch.bincount(s.ids[s.prompt :].long(), minlength=vocab_size)
        return (counts >= least).nonzero()[:, 0]
