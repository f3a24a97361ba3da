"""The weights of a published draft folder: one safetensors file or shards with an index, never a pickle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from repairzoo.artifact import tensors_hash
from repairzoo.errors import InvalidArtifact
from repairzoo.safe_file import read_header, read_json, read_safetensors, require_tensors, write_safetensors
from repairzoo.speculators import is_speculators
from repairzoo.speculators import tensors as speculators_tensors

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HASH = "tensors_sha256"
OLD_PREFIX = "logit_head."  # early Domino and DSpark files have it before the names of their causal head
# ModelOpt's flat names of DSpark's heads
FLAT_NAMES = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_weights(
    folder: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype, optional: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a folder, on the CPU.

    Args:
        folder: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        expected: every tensor's name and shape; no other may be there.
        dtype: of every tensor, as the config states it.
        optional: expected tensors that may be absent.

    Returns:
        the tensors by their expected names, and the names in the file of those that have older or ModelOpt's names.

    Raises:
        InvalidArtifact: a file is missing or damaged; a tensor is missing, unknown, not finite, or of another shape or
            dtype. The message names the file and the tensor.
    """
    tensors, homes, where = read_all(folder)
    config = folder / CONFIG
    if config.is_file() and is_speculators(read_json(config)):
        old = dict(tensors)
        tensors = speculators_tensors(tensors, str(where))
        homes = {name: homes[name if name in old else f"domino_head.{name}"] for name in tensors}
        borrowed = [n for n in tensors if n.startswith(("embed_tokens.", "lm_head.")) and n not in expected]
        if borrowed:
            raise InvalidArtifact(
                f"{homes[borrowed[0]]}: tensor {borrowed[0]!r}: this file brings its own copy of the target's table; "
                "`repairzoo convert SRC DST --target TARGET` compares it and shares the target's"
            )
    for name in tensors:
        if name.startswith(("embed_tokens.", "lm_head.")) and name not in expected:
            raise InvalidArtifact(
                f"{homes[name]}: unknown tensor {name!r}: this kind of draft borrows it from its target; drafts that "
                "store it (DeepSpec's) follow another slot convention"
            )
    renamed = {name: FLAT_NAMES.get(name, name.removeprefix(OLD_PREFIX)) for name in tensors}
    stored = {name: old for old, name in renamed.items() if name != old and name in expected}
    for name, old in stored.items():
        if name in tensors:
            raise InvalidArtifact(f"{homes[old]}: tensor {name!r} is there twice, once as {old!r}; keep one")
        tensors[name], homes[name] = tensors.pop(old), homes[old]
    required = {name: shape for name, shape in expected.items() if name in tensors or name not in optional}
    require_tensors(tensors, required, where)
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise InvalidArtifact(
                f"{homes[name]}: tensor {name!r} is {tensor.dtype} but the config's key 'dtype' states {dtype}; use "
                "config and weights of one release"
            )
    return tensors, stored


def read_all(folder: Path) -> tuple[dict[str, Tensor], dict[str, Path], Path]:
    """Every tensor of a draft's folder by its stored name, the file of each, and the file that lists them.

    Raises:
        InvalidArtifact: a file is missing or damaged; pickles are named, not read.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise InvalidArtifact(
            f"{folder}: has both {WEIGHTS} and {INDEX}; remove the one that the release does not have"
        )
    if single.is_file():
        tensors = _read_file(single)
        return tensors, dict.fromkeys(tensors, single), single
    if index.is_file():
        tensors, homes = _read_shards(folder, index)
        return tensors, homes, index
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in _PICKLES)
    if pickles:
        raise InvalidArtifact(
            f"{folder}: no {WEIGHTS}, only {', '.join(pickles)}, which is never unpickled here; make safetensors "
            "of it with `repairzoo convert`"
        )
    raise InvalidArtifact(f"{folder / WEIGHTS}: no such file (nor {INDEX}); fetch the draft again")


def write_weights(path: Path, tensors: Mapping[str, Tensor], more: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file by a temporary name, with a hash of its content that :func:`read_weights` checks.

    ``more`` is further metadata (:func:`repairzoo.statement.metadata`).
    """
    write_safetensors(path, tensors, {"format": "pt", HASH: tensors_hash(tensors), **(more or {})})


def _read_file(path: Path) -> dict[str, Tensor]:
    tensors = read_safetensors(path)
    stated = read_header(path).metadata.get(HASH)  # published files have none
    if stated is not None and stated != tensors_hash(tensors):
        raise InvalidArtifact(
            f"{path}: the tensors are not those that were written (metadata key {HASH!r}); fetch the file again"
        )
    return tensors


def _read_shards(folder: Path, index: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """Tensors of all shards, and the file of each; index and shards must list the same tensors."""
    table = read_json(index)
    places = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise InvalidArtifact(f"{index}: key 'weight_map' must map tensor names to files; fetch the file again")
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Path] = {}
    for shard in sorted(set(places.values())):
        path = folder / shard
        if Path(shard).name != shard or len(shard) > 200:  # no file system takes much longer ones
            raise InvalidArtifact(f"{index}: shard {shard!r} is no plain file name; fetch the file again")
        if not path.is_file():
            raise InvalidArtifact(f"{path}: no such file, but {INDEX} lists it; fetch the missing shard")
        for name, tensor in _read_file(path).items():
            if places.get(name) != shard:
                raise InvalidArtifact(
                    f"{path}: tensor {name!r} is not listed for this file in {INDEX}; fetch both again"
                )
            tensors[name], homes[name] = tensor, path
    for name, shard in places.items():
        if name not in tensors:
            raise InvalidArtifact(
                f"{folder / shard}: tensor {name!r} is listed in {INDEX} but not there; fetch both again"
            )
    return tensors, homes
