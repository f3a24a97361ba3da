"""Artifacts on disk: a folder with ``config.json``, one safetensors file and a card, written whole and read strictly.

A head read with the wrong slot convention, for another vocabulary or from damaged weights raises nothing later: it only
drafts badly. So nothing is guessed here, and what does not fit is refused with the key, the file and the fix.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repairzoo.errors import IncompatibleArtifact, InvalidArtifact
from repairzoo.safe_file import (
    canonical_json,
    parse_json,
    read_header,
    read_json,
    read_safetensors,
    replacing,
    require_tensors,
    write_safetensors,
)

SCHEMA_VERSION = 1
SCHEMA = f"repairzoo-artifact-{SCHEMA_VERSION}"
SLOT_CONVENTION = "anchor_plus_1"  # slot i (0-based) predicts the token at anchor position + 1 + i
CONFIG_NAME, CARD_NAME = "config.json", "README.md"
DTYPES = ("float32", "bfloat16", "float16", "float64")
# the only keys that may be unknown: whatever else a config holds may change what is computed
INFO_KEYS = ("library_version", "licence", "training_data", "notes")
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # n: a config of version n -> one of n + 1


def _count(least: int, *, nullable: bool = False) -> tuple[Any, str]:
    words = f"an integer of at least {least}" + (" or null" if nullable else "")
    return lambda value: (nullable and value is None) or (type(value) is int and value >= least), words


def _layers(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(type(n) is int and n >= -1 for n in value) and value != [])


def _text(value: object, nullable: bool = False) -> bool:
    return (nullable and value is None) or (isinstance(value, str) and value != "")


def _target(value: object) -> bool:
    return (
        isinstance(value, dict)
        and {"id", "revision"} <= set(value) <= {"id", "revision", "fingerprint"}
        and _text(value["id"])
        and _text(value["revision"], nullable=True)
        and _text(value.get("fingerprint"), nullable=True)
    )


# Every artifact states these; a method adds its own.
COMMON_KEYS: dict[str, tuple[Any, str]] = {
    "schema_version": (lambda value: type(value) is int and value == SCHEMA_VERSION, f"{SCHEMA_VERSION}"),
    "kind": (_text, "the name of the method"),
    "block_size": _count(1),
    "slot_convention": (lambda value: value == SLOT_CONVENTION, f'"{SLOT_CONVENTION}"'),
    "mask_token_id": _count(0, nullable=True),
    "tapped_layers": (_layers, "a list of layer numbers (-1: the embedding), or null"),
    "pool_size": _count(1, nullable=True),
    "vocab_size": _count(1),
    "padded_vocab_size": _count(1),
    "hidden_size": _count(1),
    "dtype": (lambda value: value in DTYPES, f"one of {', '.join(DTYPES)}"),
    "target": (_target, "an object with id, revision (may be null) and, if known, fingerprint"),
}


def _backbone(value: object) -> bool:
    return value is None or (isinstance(value, dict) and _text(value.get("kind")))


def check_config(config: object, where: str | Path = CONFIG_NAME, *, kind: str | None = None) -> dict[str, Any]:
    """Check the keys that every artifact states, and list every problem at once.

    Args:
        config: what ``config.json`` holds.
        where: named in the error.
        kind: the method it must be of, or None for any.

    Raises:
        InvalidArtifact: a key that is missing or holds what it cannot hold.
        IncompatibleArtifact: a sound config of another method.
    """
    if not isinstance(config, dict):
        raise InvalidArtifact(f"{where}: a config is a JSON object, not {type(config).__name__}")
    check_schema(config, where)
    problems = []
    for key, (valid, expected) in COMMON_KEYS.items():
        if key not in config:
            problems.append(f"the key {key!r} is missing (it holds {expected})")
        elif not valid(config[key]):
            problems.append(f"the key {key!r} is {config[key]!r}, expected {expected}")
    if not _backbone(config.get("backbone")):
        problems.append(f"the key 'backbone' is {config['backbone']!r}, expected an object with kind, or null")
    if not problems and config["padded_vocab_size"] < config["vocab_size"]:
        problems.append("the key 'padded_vocab_size' is smaller than 'vocab_size'")
    if problems:
        raise InvalidArtifact(
            f"{where}: {'; '.join(problems)}. Nothing is guessed: state it, or export the artifact again"
        )
    check_info(config.get("info"), where)
    if kind is not None and config["kind"] != kind:
        raise IncompatibleArtifact(f"{where}: key 'kind' is {config['kind']!r}, not {kind!r}; load it as what it is")
    return config


def check_schema(config: Mapping[str, Any], where: str | Path) -> None:
    """Refuse a schema version that this version cannot read; a missing one is left to the caller.

    Raises:
        InvalidArtifact: with what to do about it.
    """
    version = config.get("schema_version", SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        raise InvalidArtifact(
            f"{where}: the key 'schema_version' is {version}, this version of repairzoo reads up to {SCHEMA_VERSION}: "
            "update it (pip install -U repairzoo)"
        )
    if type(version) is int and version < SCHEMA_VERSION:
        raise InvalidArtifact(
            f"{where}: the key 'schema_version' is {version}, which nothing reads any more: convert the artifact with "
            f"a version of repairzoo that writes {SCHEMA_VERSION}, or train it again"
        )


def upgraded(config: Any, where: str | Path) -> Any:
    """A config of an older schema version, brought to this one step by step; any other as it is.

    Raises:
        InvalidArtifact: a step that no version of this package takes.
    """
    while isinstance(config, dict):
        version = config.get("schema_version")
        if type(version) is not int or version >= SCHEMA_VERSION:
            break
        if version not in UPGRADES:
            check_schema(config, where)  # raises
        try:
            config = {**UPGRADES[version](dict(config)), "schema_version": version + 1}
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArtifact(f"{where}: no sound config of schema version {version}: {error!r}") from error
    return config


def check_info(info: Any, where: str | Path) -> None:
    """``info`` holds what changes nothing; keys that are unknown there are a warning, anywhere else an error.

    Raises:
        InvalidArtifact: it is no object.
    """
    if info is None:
        return
    if not isinstance(info, Mapping):
        raise InvalidArtifact(f"{where}: the key 'info' must be an object, not {info!r}; remove it")
    unknown = sorted(str(key) for key in info if key not in INFO_KEYS)
    if unknown:
        warnings.warn(f"{where}: unknown keys in 'info', which change nothing: {', '.join(unknown)}", stacklevel=3)


def schema_of(metadata: Mapping[str, str], path: str | Path) -> int:
    """The schema version that the metadata of a weights file state.

    Raises:
        InvalidArtifact: none, or one that this version does not read.
    """
    stated = metadata.get("schema") or ""
    number = stated.removeprefix("repairzoo-artifact-")
    if number == stated or not number.isdecimal() or not number.isascii() or len(number) > 9:
        raise InvalidArtifact(
            f"{path}: metadata key 'schema' is {metadata.get('schema')!r}, this version reads {SCHEMA!r}; "
            "convert the weights or install the version that wrote them"
        )
    version = int(number)
    if version not in UPGRADES:
        check_schema({"schema_version": version}, f"{path}: metadata key 'schema'")
    return version


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON: layout and key order do not matter, values do."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes; nothing else finds a flipped bit that leaves a finite weight."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def save_artifact(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    card: str | None = None,
    weights_name: str = "head.safetensors",
) -> None:
    """Write ``config.json``, the weights and, if given, ``README.md``. Equal input gives equal bytes.

    A new folder appears complete or not at all. In an existing one each file is replaced at once, and a crash between
    two of them is found on reading, since the weights carry the hash of their config.

    Args:
        folder: where; made if it does not exist.
        config: with the keys of ``COMMON_KEYS`` and the method's own; JSON values.
        tensors: by name, any of the dtypes that safetensors files are read in.
        card: the model card.
        weights_name: ``head.safetensors`` or ``model.safetensors``.

    Raises:
        InvalidArtifact: a config or tensors that :func:`load_artifact` would refuse.
    """
    folder = Path(folder)
    try:
        text = canonical_json(config)
    except (TypeError, ValueError) as error:
        raise InvalidArtifact(f"{folder / CONFIG_NAME}: {error}; use finite JSON values") from error
    check_config(parse_json(text, str(folder / CONFIG_NAME)), folder / CONFIG_NAME)
    if folder.exists() and not folder.is_dir():
        raise InvalidArtifact(f"{folder} is a file; name a folder")
    new = not folder.exists()
    place = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp") if new else folder
    try:
        place.mkdir(parents=True, exist_ok=True)
        hashes = {"config_sha256": config_hash(config), "tensors_sha256": tensors_hash(tensors)}
        write_safetensors(place / weights_name, tensors, {"format": "pt", "schema": SCHEMA, **hashes})
        for name, content in ((CONFIG_NAME, text), (CARD_NAME, card)):
            if content is not None:
                with replacing(place / name) as file:
                    file.write(content.encode("utf-8"))
        if new:
            os.replace(place, folder)
    finally:
        if new:
            shutil.rmtree(place, ignore_errors=True)


def read_config(folder: str | Path, *, kind: str | None = None) -> dict[str, Any]:
    """The checked ``config.json`` of an artifact, without its weights and without ``info``.

    Raises:
        InvalidArtifact: no such folder or file, no valid JSON, or see :func:`check_config`.
    """
    parsed, path = _parsed(folder)
    return _without_info(check_config(upgraded(parsed, path), path, kind=kind))


def read_info(folder: str | Path) -> dict[str, Any]:
    """The informational part ``info`` of an artifact's config; empty where there is none.

    Raises:
        InvalidArtifact: see :func:`read_config`.
    """
    parsed, path = _parsed(folder)
    return dict(check_config(upgraded(parsed, path), path).get("info") or {})


def _without_info(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "info"}


def _parsed(folder: str | Path) -> tuple[Any, Path]:
    """What ``config.json`` holds, as it is written, and its path."""
    folder = Path(folder)
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InvalidArtifact(f"{folder}: {what}; name the folder that holds {CONFIG_NAME} and the weights")
    if not path.is_file():
        raise InvalidArtifact(f"{path}: does not exist; an artifact states what it is in {CONFIG_NAME}")
    return read_json(path), path


def load_artifact(
    folder: str | Path,
    *,
    weights_name: str = "head.safetensors",
    expected: Mapping[str, tuple[int, ...]] | None = None,
    kind: str | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read an artifact that :func:`save_artifact` wrote.

    Args:
        folder: the folder.
        weights_name: ``head.safetensors`` or ``model.safetensors``.
        expected: name and shape of every tensor; None leaves that to the caller, who knows them only from the config.
        kind: the method it must be of, or None for any.

    Returns:
        the config, without its informational part ``info``, and the tensors by name on the CPU, in the dtypes of the
        file.

    Raises:
        InvalidArtifact: missing or damaged files (down to one flipped bit), another schema, a config that is not the
            one the weights were written with, missing or unknown tensors, wrong shapes, non-finite values.
        IncompatibleArtifact: a sound artifact of another kind.
    """
    folder = Path(folder)
    written, where = _parsed(folder)
    config = check_config(upgraded(written, where), where, kind=kind)
    path = folder / weights_name
    metadata = read_header(path).metadata
    schema_of(metadata, path)
    if metadata.get("config_sha256") != config_hash(written):
        raise InvalidArtifact(
            f"{folder}: {CONFIG_NAME} is not the config that {weights_name} was written with (metadata key "
            "'config_sha256'); restore it, or save the artifact again"
        )
    tensors = read_safetensors(path)
    if metadata.get("tensors_sha256") != tensors_hash(tensors):
        raise InvalidArtifact(
            f"{path}: the tensors are not those that were written (metadata key 'tensors_sha256'); fetch the file again"
        )
    if expected is not None:
        require_tensors(tensors, expected, path)
    return _without_info(config), tensors


def check_fit(
    config: Mapping[str, Any],
    *,
    target_id: str,
    vocab_size: int,
    hidden_size: int,
    padded_vocab_size: int | None = None,
    revision: str | None = None,
    fingerprint: str | None = None,
    backbone: str | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    tapped_layers: Sequence[int] | None = None,
    slot_convention: str = SLOT_CONVENTION,
    where: str | Path = CONFIG_NAME,
) -> list[str]:
    """Does a sound artifact fit what it is used with? Every mismatch is listed at once.

    The id may differ where the weights are the same (a folder with a copy of a Hub repository): an equal
    ``fingerprint`` settles it. Other weights under the same id are no error, since drafts stay verified and only τ
    suffers: that is returned as a note.

    Args:
        config: a checked config (:func:`check_config`).
        target_id, revision, fingerprint: of the target in use; None where unknown.
        vocab_size, hidden_size: of the target in use; its real or, without ``padded_vocab_size``, its padded
            vocabulary.
        padded_vocab_size: rows of the target's embedding; None is not compared.
        backbone, mask_token_id, tapped_layers: of the backbone in use; None is not compared. Each is compared only
            where the artifact states it (a head that reads no features has no tapped layers).
        block_size: tokens that the backbone drafts at once, anchor included; None is not compared. At most those of
            the artifact's training. An artifact of blocks of 2 was trained on pairs, which any block is made of.
        slot_convention: of the block in use.
        where: named in the error.

    Returns:
        notes for the user, often none.

    Raises:
        IncompatibleArtifact: lists every key that does not fit, with both values.
    """
    target = config["target"]
    stated = target.get("fingerprint")
    same = fingerprint is not None and fingerprint in (stated, target["revision"])
    other_hash = stated is not None and fingerprint is not None and not same
    problems, notes = [], []

    def compare(key: str, mine: object, theirs: object) -> None:
        if mine is not None and theirs is not None and mine != theirs:
            problems.append(f"{key} is {mine!r} but here it is {theirs!r}")

    if not same:
        compare("target.id", target["id"], target_id)
        if problems and other_hash:
            compare("target.fingerprint", stated, fingerprint)
    real, padded, pool = config["vocab_size"], config["padded_vocab_size"], config["pool_size"]
    if vocab_size != real and (padded_vocab_size is not None or vocab_size != padded):
        compare("vocab_size", real, vocab_size)
    compare("padded_vocab_size", padded, padded_vocab_size)
    compare("hidden_size", config["hidden_size"], hidden_size)
    compare("backbone.kind", (config.get("backbone") or {}).get("kind"), backbone)
    if block_size is not None and block_size > config["block_size"] > 2:
        compare("block_size", config["block_size"], block_size)
    if pool is not None and pool > vocab_size:
        problems.append(f"pool_size is {pool!r} but here there are {vocab_size} tokens to choose from")
    compare("mask_token_id", config["mask_token_id"], mask_token_id)
    compare("tapped_layers", config["tapped_layers"], None if tapped_layers is None else list(tapped_layers))
    compare("slot_convention", config["slot_convention"], slot_convention)
    if problems:
        raise IncompatibleArtifact(
            f"{where}: this {config['kind']} artifact does not fit: {'; '.join(problems)}. "
            f"It was made for {target['id']}; use it with that, or choose or train one for {target_id}"
        )
    other_commit = target["revision"] is not None and revision is not None and target["revision"] != revision
    if other_hash or (other_commit and not same):
        notes.append(
            f"{config['kind']} was trained for other weights of {target['id']} (revision {target['revision']}, here "
            f"{revision}): output is unchanged, τ may be lower"
        )
    return notes


def fingerprint(model: nn.Module | Mapping[str, Tensor], samples: int = 64) -> str:
    """A stable name for a model's weights: sha256 over names, shapes and ``samples`` values of each parameter.

    The values are rounded to bfloat16 first, so that one checkpoint has one name whether it is loaded in float32 or
    bfloat16. Tied parameters count once. Cheap: it reads a few thousand values, not the model.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        flat = tensor.detach().reshape(-1)
        index = torch.arange(min(samples, flat.numel()), device=flat.device) * max(1, flat.numel() // samples)
        values = flat[index]
        if values.is_floating_point():
            values = values.to(torch.bfloat16)
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(_raw(values))
    return digest.hexdigest()
