"""What the published config of a draft does not say: the target and the weights that it was made for.

Drafts keep the config of the release they come from, so that other code reads them too. What an artifact must state
beyond it lies in one object of that config, under the key ``repairzoo``. Published drafts have none: they fit by shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repairzoo.artifact import (
    COMMON_KEYS,
    SCHEMA,
    SCHEMA_VERSION,
    SLOT_CONVENTION,
    check_info,
    check_schema,
    config_hash,
    schema_of,
)
from repairzoo.draft_config import DTYPES, DraftConfig
from repairzoo.errors import InvalidArtifact
from repairzoo.safe_file import read_header

KEY = "repairzoo"
_KEYS = ("schema_version", "kind", "slot_convention", "first_slot", "vocab_size", "target")
_HASH = "config_sha256"


def make(kind: str, first_slot: int, vocab_size: int, target: Mapping[str, Any]) -> dict[str, Any]:
    """The object for a new draft.

    Args:
        kind: of the backbone. first_slot: block row of slot 0, which is where slots begin after loading.
        vocab_size: real vocabulary of the target; the config's own ``vocab_size`` is the padded one.
        target: ``id``, ``revision`` and ``fingerprint``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "slot_convention": SLOT_CONVENTION,
        "first_slot": first_slot,
        "vocab_size": vocab_size,
        "target": dict(target),
    }


def check(config: DraftConfig, kind: str, first_slot: int, where: str | Path) -> None:
    """Hold the object of a draft's config, if there is one, to its keys and to the draft.

    Raises:
        InvalidArtifact: lists every key that is missing, unknown, of the wrong type, or contradicts the draft.
    """
    stated = config.published.get(KEY)
    if stated is None:
        return
    place = f"{where}: key '{KEY}'"
    if not isinstance(stated, Mapping):
        raise InvalidArtifact(f"{place} must be an object, not {stated!r}; export the artifact again")
    check_schema(stated, place)
    problems = [f"lacks {key!r}" for key in _KEYS if key not in stated]
    problems += [f"has the unknown key {key!r}" for key in stated if key not in (*_KEYS, "info")]
    expected = {"kind": kind, "first_slot": first_slot}
    for key in _KEYS:
        if key not in stated:
            continue
        value = stated[key]
        if key in expected:
            if value != expected[key] or type(value) is not type(expected[key]):
                problems.append(f"states {key} {value!r}, the draft's is {expected[key]!r}")
        elif not COMMON_KEYS[key][0](value):
            problems.append(f"states {key} {value!r}, expected {COMMON_KEYS[key][1]}")
        elif key == "vocab_size" and value > config.vocab_size:
            problems.append(f"states vocab_size {value}, more than the {config.vocab_size} rows of the draft's config")
    if problems:
        raise InvalidArtifact(f"{place} {'; '.join(problems)}. Nothing is guessed: state it, or export it again")
    check_info(stated.get("info"), place)


def common(config: DraftConfig, kind: str) -> dict[str, Any]:
    """The keys that every artifact states (``artifact.COMMON_KEYS``), of a draft whose object was checked.

    ``target`` is None for a published draft without the object.
    """
    stated = config.published.get(KEY) or {}
    return {
        "schema_version": stated.get("schema_version", SCHEMA_VERSION),
        "kind": kind,
        "block_size": config.block_size,
        "slot_convention": SLOT_CONVENTION,
        "mask_token_id": config.mask_token_id,
        "tapped_layers": list(config.target_layer_ids),
        "pool_size": None,
        "vocab_size": stated.get("vocab_size", config.vocab_size),
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == config.dtype),
        "target": stated.get("target"),
        **({"info": stated["info"]} if "info" in stated else {}),
    }


def metadata(published: Mapping[str, Any]) -> dict[str, str]:
    """What the weights of a draft carry beside the hash of their tensors: nothing without the object."""
    return {"schema": SCHEMA, _HASH: config_hash(published)} if KEY in published else {}


def check_weights(published: Mapping[str, Any], path: Path) -> None:
    """Hold the metadata of a weights file to the config beside it; published files state nothing.

    Raises:
        InvalidArtifact: the weights were written with another config, or with none of ours.
    """
    if not path.is_file():  # shards carry no hash of the whole
        return
    found = read_header(path).metadata
    if KEY not in published and _HASH not in found:
        return
    schema_of(found, path)
    if found.get(_HASH) != config_hash(published):
        raise InvalidArtifact(
            f"{path.parent}: config.json is not the config that {path.name} was written with (metadata key {_HASH!r}); "
            "restore it, or save the artifact again"
        )
