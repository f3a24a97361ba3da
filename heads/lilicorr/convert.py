"""Published LiLiCorr checkpoints: a draft's ``config.json`` with ``lilicorr_*`` keys and tensors ``lilicorr.*``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repairzoo.errors import InvalidArtifact
from repairzoo.safe_file import canonical_json, parse_json, read_safetensors, replacing, write_safetensors

from .head import LiLiCorr, LiLiCorrConfig

PREFIX = "lilicorr."
KEYS = {  # published key -> field
    "lilicorr_candidate_topk": "candidates",
    "lilicorr_hidden_size": "width",
    "lilicorr_num_layers": "num_layers",
    "lilicorr_num_heads": "num_heads",
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}


def convert_published(
    folder: str | Path,
    *,
    target_id: str,
    target_revision: str | None = None,
    target_fingerprint: str | None = None,
    padded_vocab_size: int | None = None,
    backbone: str | None = "dflash",
    pool_size: int | None = None,
) -> LiLiCorr:
    """Read a head from a published folder, either of the head alone or of the draft that embeds it.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``.
        target_id, target_revision, target_fingerprint: of the target, which the published config does not name.
        padded_vocab_size: rows of the target's tables; None: as many as the vocabulary.
        pool_size: candidates to serve, at most the trained ones; None: all.

    Raises:
        InvalidArtifact: a key or a tensor that is missing, unknown or contradictory; names file and key.
    """
    folder = Path(folder)
    path, weights = folder / "config.json", folder / "model.safetensors"
    if not path.is_file():
        raise InvalidArtifact(f"{path}: no such file; a published folder holds config.json and model.safetensors")
    data = parse_json(path.read_bytes(), str(path))
    own = data.get("dflash_config") if isinstance(data, dict) else None
    if not isinstance(own, dict) or own.get("projector_type") != "lilicorr" or own.get("lilicorr_enabled") is not True:
        raise InvalidArtifact(
            f"{path}: dflash_config.projector_type is not 'lilicorr', or lilicorr_enabled is not true: this checkpoint "
            "has no LiLiCorr head"
        )
    known = {"projector_type", "lilicorr_enabled", *KEYS}
    unknown = [key for key in own if key.startswith("lilicorr_") and key not in known]
    missing = [key for key in KEYS if key not in own]
    missing += [k for k in ("block_size", "hidden_size", "vocab_size", "rms_norm_eps", "dtype") if k not in data]
    if unknown or missing:
        raise InvalidArtifact(f"{path}: missing keys {missing}, unknown keys {unknown}; nothing is guessed")
    values = {field: own[key] for key, field in KEYS.items()}
    tensors = {n[len(PREFIX) :]: t for n, t in read_safetensors(weights).items() if n.startswith(PREFIX)}
    if not tensors:
        raise InvalidArtifact(f"{weights}: no tensor {PREFIX}*; the config promises a LiLiCorr head")
    config = LiLiCorrConfig(
        **(values | {"width": values["width"] or data["hidden_size"]}),
        rms_norm_eps=data["rms_norm_eps"],
        block_size=data["block_size"],
        pool_size=pool_size or values["candidates"],
        hidden_size=data["hidden_size"],
        vocab_size=data["vocab_size"],
        padded_vocab_size=padded_vocab_size or data["vocab_size"],
        mask_token_id=own.get("mask_token_id"),
        tapped_layers=tuple(own["target_layer_ids"]) if own.get("target_layer_ids") else None,
        backbone=backbone,
        dtype=data["dtype"],
        target_id=target_id,
        target_revision=target_revision,
        target_fingerprint=target_fingerprint,
    )
    return LiLiCorr.from_config_and_tensors(config, tensors, weights)


def published_config(head: LiLiCorr, draft_config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's config with this head's geometry in it; keys that already say the same are left as they are.

    Raises:
        InvalidArtifact: the identity-safe decision, which the published format cannot express.
    """
    c = head.config
    if c.decision != "published":
        raise InvalidArtifact("the published format has no identity-safe decision; save it as an artifact instead")
    data = copy.deepcopy(dict(draft_config))
    own = data.setdefault("dflash_config", {})
    own |= {"projector_type": "lilicorr", "lilicorr_enabled": True}
    for key, field in KEYS.items():
        value = getattr(c, field)
        says = c.hidden_size if field == "width" and own.get(key) == 0 else own.get(key)
        if says != value:
            own[key] = 0 if field == "width" and value == c.hidden_size else value
    return data


def save_published(head: LiLiCorr, folder: str | Path, draft_config: Mapping[str, Any]) -> None:
    """Write the head alone in the published format, beside the config of its draft."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = published_config(head, draft_config)
    tensors = {PREFIX + name: tensor for name, tensor in head.state_tensors().items()}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    with replacing(folder / "config.json") as file:
        file.write(canonical_json(config).encode())
