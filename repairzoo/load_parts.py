"""Names, folders and Hub sources -> backbones and heads; what fits a target is bound to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from repairzoo import hub, statement
from repairzoo.artifact import check_fit, fingerprint, read_config
from repairzoo.block import Corrector
from repairzoo.decode import Expander, refuse_order
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.registry import HUB_PREFIX, registry
from repairzoo.resolve import resolve
from repairzoo.target import Target

_BACKBONE = ("slots", "tapped_layers", "new_cache", "extend", "draft")  # what the loop calls


def load_backbone(
    source: str | Path,
    revision: str | None = None,
    *,
    target: str = "smollm2-135m",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """A backbone, not yet bound to a target.

    Args:
        source: a registry name (with its weights for ``target``, likewise a name), a folder in a published format, or
            a Hub repository in one: ``owner/name`` or ``hf:owner/name@revision``.
        revision: of a Hub repository: a branch, a tag or, safest, a commit.
        device, dtype: None keeps the CPU and the file's dtype.
        options: of a Hub source: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``.

    Raises:
        UnknownName, InvalidArtifact, IncompatibleArtifact, HubError.
    """
    known = registry()
    if str(source) in known.entries["backbone"]:
        entry = known.get("backbone", str(source))
        _no_revision(source, revision)
        folder = _local(known.weights(known.pair(str(source), "none", target), "backbone"))
        with hub.blaming(folder):
            return entry.load().load(folder, device=device, dtype=dtype)
    folder = _folder(source, "backbone", revision, **options)
    with hub.blaming(folder):
        _refuse_kind(folder, "backbone")
        return known.get("backbone", resolve(folder).kind).load().load(folder, device=device, dtype=dtype)


def load_head(
    source: str | Path,
    revision: str | None = None,
    *,
    backbone: str = "dflash",
    target: str = "smollm2-135m",
    **options: Any,
) -> Any:
    """A head, not yet bound to a target.

    Args:
        source: a registry name (with its weights for ``backbone`` and ``target``, where there is something to train),
            the folder of an artifact, or a Hub repository: ``owner/name`` or ``hf:owner/name@revision``.
        revision: of a Hub repository: a branch, a tag or, safest, a commit.
        options: of a Hub source: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``.

    Raises:
        UnknownName, InvalidArtifact, IncompatibleArtifact, HubError.
    """
    known = registry().entries["head"].get(str(source))
    if known is not None:
        _no_revision(source, revision)
        if known.weightless:
            return known.load()()
    if str(source) == "none":
        raise InvalidInput("head 'none' is the absence of a head: there is nothing to load")
    if known is not None:
        folder = _head_folder(str(source), backbone, target)
    else:
        folder = _folder(source, "head", revision, **options)
    with hub.blaming(folder):
        _refuse_kind(folder, "head")
        return _class(folder, "head", read_config(folder)["kind"]).load(folder)


def load_folder(folder: str | Path) -> Any:
    """Whatever a folder holds, a head or a backbone, strictly loaded.

    Raises:
        InvalidArtifact: neither, or not a sound one.
    """
    folder = Path(folder)
    kind = hub.check_config_file(folder)["kind"]
    return _class(folder, "backbone" if kind in registry().entries["backbone"] else "head", kind).load(folder)


def _class(folder: Path, part: str, kind: str) -> Any:
    """The class of a folder's kind.

    Raises:
        InvalidArtifact: nothing of that name is installed.
    """
    if kind not in registry().entries[part]:
        raise InvalidArtifact(
            f"{folder / hub.CONFIG}: key 'kind' is {kind!r}, and this installation has no such {part} (it has "
            f"{', '.join(registry().names(part))}): install the package that provides it, or update repairzoo"
        )
    return registry().get(part, kind).load()


def _no_revision(source: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise InvalidInput(
            f"revision={revision!r}: {str(source)!r} is a name of the registry; give its repository's id"
        )


def _refuse_kind(folder: Path, part: str) -> None:
    """Refuse a backbone where a head belongs, and the other way round, by name.

    Raises:
        InvalidArtifact: not a sound config of either. IncompatibleArtifact: of the other.
    """
    kind = hub.check_config_file(folder)["kind"]
    other = "head" if part == "backbone" else "backbone"
    if kind in registry().entries[other]:
        raise IncompatibleArtifact(f"{folder}: holds the {other} {kind!r}, not a {part}; give it as {other}=")
    _class(folder, part, kind)


def bound_backbone(source: Any, target: Target) -> Any:
    """A backbone by name, folder or as a module, bound to its target."""
    backbone = source
    if isinstance(source, (str, Path)):
        name = target_name(target) if str(source) in registry().entries["backbone"] else ""
        backbone = load_backbone(source, target=name, device=target.device, dtype=target.dtype)
        _check_draft(backbone, target, str(source))
    else:
        refuse_no_backbone(source)  # before a head, say, is bound as if it were one
    if hasattr(backbone, "bind"):
        backbone.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    return backbone


def refuse_no_backbone(backbone: Any) -> None:
    """Raise ``InvalidInput`` for an object without what the loop calls."""
    lacking = [name for name in _BACKBONE if not hasattr(backbone, name)]
    if lacking or isinstance(backbone, type):
        is_class = isinstance(backbone, type)
        what = backbone.__name__ if is_class else type(backbone).__name__
        raise InvalidInput(
            f"the backbone is given as {what}, which {'is a class' if is_class else 'lacks ' + ', '.join(lacking)}: "
            "give a name, a folder, a Hub id, or an object with the members that docs/protocols.md lists"
        )


def located(backbone: Any, head: Any) -> tuple[Any, Any]:
    """Both with folders in the place of folders and Hub sources, so that each source is resolved once.

    Raises now, before anything is loaded, for a name, folder or repository that does not exist or holds something else.
    """

    def place(source: Any, part: str) -> Any:
        if isinstance(source, (list, tuple)):
            return [place(item, part) for item in source]
        if not isinstance(source, (str, Path)):
            return source
        if part == "head" and isinstance(source, str) and not _is_path(source):
            _names(source)
            return source
        if part == "backbone" and str(source) in registry().entries["backbone"]:
            return source
        folder = _folder(source, part)
        with hub.blaming(folder):
            _refuse_kind(folder, part)
        return folder

    return place(backbone, "backbone"), place(head, "head")


def _check_draft(backbone: Any, target: Target, where: str) -> None:
    """Hold a draft that states its target to the one in use; published drafts fit by shape (``bind``)."""
    published = getattr(getattr(backbone, "config", None), "published", None) or {}
    if statement.KEY in published:
        _fit(statement.common(backbone.config, backbone.kind), target, where=where)


def _fit(config: dict[str, Any], target: Target, where: str | Path, **more: Any) -> None:
    """``check_fit`` against a target; what it notes is a warning."""
    real, padded = target.output_weight.shape[0], target.vocab_size
    notes = check_fit(
        config,
        target_id=target.name,
        revision=target.revision,
        fingerprint=fingerprint(target.model),
        vocab_size=real,
        padded_vocab_size=max(real, padded),
        hidden_size=target.hidden_size,
        where=where,
        **more,
    )
    for note in notes:
        warnings.warn(note, stacklevel=5)


def _names(head: str) -> list[str]:
    """``"a+b"`` -> ``["a", "b"]``, all of them registered."""
    names = head.split("+")
    if not all(names):
        raise InvalidInput(f"head={head!r}: names joined by '+' must not be empty")
    if "none" in names and len(names) > 1:
        raise InvalidInput(f"head={head!r}: 'none' is the absence of a head and does not stack; leave it out")
    entries = [registry().get("head", name) for name in names]
    refuse_order(head, [isinstance(entry.load(), Expander) for entry in entries if len(entries) > 1])
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
        refuse_no_head(head)  # before a backbone, say, is bound as if it were one
        if hasattr(head, "bind"):
            head.bind(target.embedding, target.output_weight)
        yield head


def refuse_no_head(head: Any) -> None:
    """Raise ``InvalidInput`` for an object that is neither a corrector nor an expander."""
    if not (isinstance(head, Corrector) or hasattr(head, "expand")) or isinstance(head, type):
        what = head.__name__ if isinstance(head, type) else type(head).__name__
        raise InvalidInput(
            f"a head is given as {what}, which is neither a corrector (prepare, start, step) nor an expander (expand): "
            "give a name, a folder, a Hub id, or an object with the members that docs/protocols.md lists"
        )


def _bind_head(folder: Path, target: Target, backbone: Any) -> Any:
    with hub.blaming(folder):
        config = read_config(folder)
        _fit(
            config,
            target,
            folder / "config.json",
            backbone=getattr(backbone, "kind", None),
            block_size=backbone.slots + 1,
            mask_token_id=getattr(backbone, "mask_token_id", None),
            tapped_layers=backbone.tapped_layers,
        )
        head = _class(folder, "head", config["kind"]).load(folder).to(target.device)
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


def _head_folder(source: str, backbone: str, target: str) -> Path:
    known = registry()
    known.get("head", source)
    return _local(known.weights(known.pair(backbone, source, target), "head"))


def _is_path(source: str) -> bool:
    return source.startswith((HUB_PREFIX, ".", "~")) or "/" in source


def _folder(source: str | Path, kind: str, revision: str | None = None, **options: Any) -> Path:
    """The folder of a path or a Hub source; a bare name that is neither is told what names there are."""
    if not str(source):
        raise InvalidInput(f"{kind}='': give a name, a folder or a Hub id")
    if isinstance(source, str) and not _is_path(source) and not Path(source).is_dir():
        registry().get(kind, source)  # raises, naming the nearest
    return hub.locate(source, revision, **options)


def _local(source: str | Path) -> Path:
    """The folder of a pair's weights."""
    if isinstance(source, str):
        return hub.locate(source)
    if not source.is_dir():
        raise InvalidArtifact(f"{source}: there is no such folder; install repairzoo again")
    return source
