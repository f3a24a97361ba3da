"""Names, folders and Hub ids -> backbones and heads that are bound to a target."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from repairzoo.artifact import fingerprint
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.registry import registry
from repairzoo.target import Target


def load_backbone(source: str | Path, target: Target) -> Any:
    """A backbone by registry name (with its weights for this target) or from a folder in a published format."""
    folder = Path(source).expanduser()
    known = registry()
    if str(source) in known.entries["backbone"]:
        entry = known.get("backbone", str(source))
        pair = known.pair(str(source), "none", _target_name(target))
        folder = Path(known.weights(pair, "backbone"))
    elif folder.is_dir():
        entry = known.get("backbone", "dflash")
    else:
        entry = known.get("backbone", str(source))  # raises, naming the nearest
    backbone = entry.load().load(folder, device=target.device, dtype=target.dtype)  # type: ignore[attr-defined]
    backbone.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    return backbone


def load_heads(head: Any, target: Target, backbone: Any) -> tuple[Any, ...]:
    """The heads of ``head``, in order: None / ``"none"``, ``"a+b"``, a folder, ``"hf:owner/name@revision"`` or modules."""
    if head is None or head == "none":
        return ()
    if isinstance(head, (list, tuple)):
        return tuple(h for part in head for h in load_heads(part, target, backbone))
    if not isinstance(head, (str, Path)):
        if hasattr(head, "bind"):
            head.bind(target.embedding, target.output_weight)
        return (head,)
    folder = Path(head).expanduser()
    if isinstance(head, Path) or (folder.is_dir() and ("/" in str(head) or str(head).startswith("."))):
        return (_load_head_folder(folder, target, backbone),)
    names = str(head).split("+")
    if any(not name for name in names):
        raise InvalidInput(f"head={head!r}: names joined by '+' must not be empty")
    known = registry()
    heads = []
    for name in names:
        known.get("head", name)
        if name == "none":
            continue
        pair = known.pair(getattr(backbone, "kind", "custom"), name, _target_name(target))
        heads.append(_load_head_folder(Path(known.weights(pair, "head")), target, backbone))
    return tuple(heads)


def _load_head_folder(folder: Path, target: Target, backbone: Any) -> Any:
    from repairzoo.artifact import check_fit, read_config

    config = read_config(folder)
    entry = registry().get("head", config["kind"])
    notes = check_fit(
        config,
        target_id=target.name,
        revision=target.revision,
        fingerprint=fingerprint(target.model),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        where=folder / "config.json",
    )
    for note in notes:
        warnings.warn(note, stacklevel=3)
    head = entry.load().load(folder)  # type: ignore[attr-defined]
    head.to(target.device)
    head.bind(target.embedding, target.output_weight)
    return head


def _target_name(target: Target) -> str:
    entry = registry().target(target.name)
    if entry is None:
        known = ", ".join(registry().names("target"))
        raise IncompatibleArtifact(
            f"the registry has weights for {known}, not for target {target.name!r}: give a folder or a Hub id for the "
            "backbone and the head, or train them (repairzoo train)"
        )
    return entry.name
