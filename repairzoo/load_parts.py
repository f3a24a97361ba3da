"""Names and folders -> backbones and heads; what fits a target is bound to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from repairzoo.artifact import check_fit, fingerprint, read_config
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.registry import HUB_PREFIX, registry
from repairzoo.resolve import resolve
from repairzoo.target import Target


def load_backbone(
    source: str | Path,
    *,
    target: str = "smollm2-135m",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """A backbone, not yet bound to a target.

    Args:
        source: a registry name (with its weights for ``target``, likewise a name) or a folder in a published format.
        device, dtype: None keeps the CPU and the file's dtype.

    Raises:
        UnknownName, InvalidArtifact, IncompatibleArtifact.
    """
    known = registry()
    if str(source) in known.entries["backbone"]:
        entry = known.get("backbone", str(source))
        folder = _local(known.weights(known.pair(str(source), "none", target), "backbone"))
    else:
        folder = _folder(source, "backbone")
        entry = known.get("backbone", resolve(folder).kind)
    return entry.load().load(folder, device=device, dtype=dtype)


def load_head(source: str | Path, *, backbone: str = "dflash", target: str = "smollm2-135m") -> Any:
    """A head, not yet bound to a target.

    Args:
        source: a registry name (with its weights for ``backbone`` and ``target``, where there is something to train) or
            the folder of an artifact.

    Raises:
        UnknownName, InvalidArtifact, IncompatibleArtifact.
    """
    known = registry().entries["head"].get(str(source))
    if known is not None and known.weightless:
        return known.load()()
    if str(source) == "none":
        raise InvalidInput("head 'none' is the absence of a head: there is nothing to load")
    folder = _head_folder(source, backbone, target)
    return registry().get("head", read_config(folder)["kind"]).load().load(folder)


def bound_backbone(source: Any, target: Target) -> Any:
    """A backbone by name, folder or as a module, bound to its target."""
    backbone = source
    if isinstance(source, (str, Path)):
        name = target_name(target) if str(source) in registry().entries["backbone"] else ""
        backbone = load_backbone(source, target=name, device=target.device, dtype=target.dtype)
    if hasattr(backbone, "bind"):
        backbone.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    return backbone


def check_names(backbone: Any, head: Any) -> None:
    """Raise now for a name or folder that does not exist, before anything is loaded."""
    if isinstance(backbone, (str, Path)) and str(backbone) not in registry().entries["backbone"]:
        _folder(backbone, "backbone")
    for part in head if isinstance(head, (list, tuple)) else [head]:
        if isinstance(part, Path) or (isinstance(part, str) and _is_path(part)):
            _folder(part, "head")
        elif isinstance(part, str):
            _names(part)


def _names(head: str) -> list[str]:
    """``"a+b"`` -> ``["a", "b"]``, all of them registered."""
    names = head.split("+")
    if not all(names):
        raise InvalidInput(f"head={head!r}: names joined by '+' must not be empty")
    for name in names:
        registry().get("head", name)
    return names


def bound_heads(head: Any, target: Target, backbone: Any) -> tuple[Any, ...]:
    """The heads of ``head``, in order, bound: None / ``"none"``, ``"a+b"``, a folder, modules, or a list of those."""
    return tuple(_bound_heads(head, target, backbone))


def _bound_heads(head: Any, target: Target, backbone: Any) -> Iterator[Any]:
    if head is None:
        return
    if isinstance(head, (list, tuple)):
        for part in head:
            yield from _bound_heads(part, target, backbone)
    elif isinstance(head, Path) or (isinstance(head, str) and _is_path(head)):
        yield _bind_head(_folder(head, "head"), target, backbone)
    elif isinstance(head, str):
        names = _names(head)
        kind = getattr(backbone, "kind", "custom")
        for name in names:
            if registry().get("head", name).weightless:
                yield registry().get("head", name).load()()
            elif name != "none":
                yield _bind_head(_head_folder(name, kind, target_name(target)), target, backbone)
    else:
        if hasattr(head, "bind"):
            head.bind(target.embedding, target.output_weight)
        yield head


def _bind_head(folder: Path, target: Target, backbone: Any) -> Any:
    config = read_config(folder)
    notes = check_fit(
        config,
        target_id=target.name,
        revision=target.revision,
        fingerprint=fingerprint(target.model),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        backbone=getattr(backbone, "kind", None),
        mask_token_id=getattr(backbone, "mask_token_id", None),
        tapped_layers=backbone.tapped_layers,
        where=folder / "config.json",
    )
    for note in notes:
        warnings.warn(note, stacklevel=4)
    head = registry().get("head", config["kind"]).load().load(folder).to(target.device)
    head.bind(target.embedding, target.output_weight)
    return head


def target_name(target: Target) -> str:
    """The registry name of a target.

    Raises:
        IncompatibleArtifact: the registry has no weights for it.
    """
    entry = registry().target(target.name)
    if entry is None:
        known = ", ".join(registry().names("target"))
        raise IncompatibleArtifact(
            f"the registry has weights for {known}, not for target {target.name!r}: give folders for the backbone and "
            "the head, or train them (repairzoo train)"
        )
    return entry.name


def _head_folder(source: str | Path, backbone: str, target: str) -> Path:
    known = registry()
    if isinstance(source, Path) or _is_path(source):
        return _folder(source, "head")
    known.get("head", source)
    return _local(known.weights(known.pair(backbone, source, target), "head"))


def _is_path(source: str) -> bool:
    return source.startswith((HUB_PREFIX, ".", "~")) or "/" in source


def _folder(source: str | Path, kind: str) -> Path:
    if not str(source):
        raise InvalidInput(f"{kind}='': give a name or a folder")
    folder = Path(source).expanduser()
    if isinstance(source, str) and not _is_path(source) and not folder.is_dir():
        registry().get(kind, source)  # raises, naming the nearest
    return _local(source if str(source).startswith(HUB_PREFIX) else folder)


def _local(source: str | Path) -> Path:
    if str(source).startswith(HUB_PREFIX):
        raise InvalidInput(f"{source}: this version reads folders only; download the repository and give its folder")
    if not Path(source).is_dir():
        raise InvalidArtifact(f"{source}: there is no such folder")
    return Path(source)
