"""What exists: ``registry.yaml`` and the entry points of other packages, read without importing any of it.

Nothing here imports torch, so that listing is quick. A method is imported when its class is asked for, not before.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, UnknownName

SCHEMA = 1
KINDS = ("target", "backbone", "head")
ENTRY_POINTS = {"backbone": "repairzoo.backbones", "head": "repairzoo.heads"}
HUB_PREFIX = "hf:"
_ENTRY_KEYS = {
    "target": ({"title", "summary", "hub", "licence"}, {"package", "default"}),
    "backbone": ({"title", "summary", "class"}, {"paper"}),
    "head": ({"title", "summary"}, {"class", "paper", "weightless"}),
}
_PAIR_KEYS = ({"backbone", "head", "target", "weights", "licence"}, {"trained", "parameters", "figures"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One target, backbone or head.

    Attributes:
        kind: ``"target"``, ``"backbone"`` or ``"head"``.
        name: the name that users type.
        location: ``"module:Class"``, or None (targets, and the head ``none``).
        source: the file or distribution that registered it.
        fields: everything else that was written about it.
    """

    kind: str
    name: str
    location: str | None
    source: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import the class.

        Raises:
            InvalidArtifact: there is no such module or class, or the entry has none.
        """
        if self.location is None:
            raise InvalidArtifact(f"the {self.kind} {self.name!r} of {self.source} has no class to load")
        module, _, attribute = self.location.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise InvalidArtifact(
                f"the {self.kind} {self.name!r} of {self.source} cannot be imported from {self.location!r}: {error}"
            ) from error

    @property
    def weightless(self) -> bool:
        """Nothing is trained: its class is called without arguments, and any backbone and target will do."""
        return self.fields.get("weightless", False)

    def folder(self) -> Path:
        """The folder of the method's package, found without importing the method."""
        module = (self.location or "").partition(":")[0]
        try:
            spec = find_spec(module) if module else None
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise InvalidArtifact(f"the {self.kind} {self.name!r} of {self.source} has no folder: no module {module!r}")
        return Path(spec.origin).parent


@dataclass(frozen=True, slots=True)
class Pair:
    """A backbone and a head with weights for one target.

    Attributes:
        weights: for ``"backbone"`` and, unless the head is ``none`` or weightless, ``"head"``: the name of a folder
            inside the method's own, or ``hf:owner/name@revision``.
        trained: ``"frozen"``, ``"joint"`` or None without a head.
        parameters: number of parameters of each.
        figures: measured values with ``raw``, the result file they come from.
    """

    backbone: str
    head: str
    target: str
    weights: Mapping[str, str]
    licence: str
    trained: str | None = None
    parameters: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> str:
        return f"{self.backbone} x {self.head} x {self.target}"

    def as_dict(self) -> dict[str, Any]:
        keys = ("backbone", "head", "target", "trained", "licence", "weights", "parameters", "figures")
        return {key: _plain(getattr(self, key)) for key in keys if getattr(self, key) not in (None, {})}


@dataclass(frozen=True, slots=True)
class Registry:
    """Entries by kind and name, and the pairs."""

    entries: Mapping[str, Mapping[str, Entry]]
    pairs: tuple[Pair, ...]

    def names(self, kind: str, pattern: str = "*") -> list[str]:
        return [name for name in self.entries[kind] if fnmatchcase(name, pattern)]

    def get(self, kind: str, name: str) -> Entry:
        """The entry of one kind.

        Raises:
            UnknownName: with the nearest name and all there are.
        """
        entry = self.entries[kind].get(name)
        if entry is None:
            raise unknown(kind, name, self.entries[kind])
        return entry

    def default_target(self) -> Entry:
        return next(entry for entry in self.entries["target"].values() if entry.fields.get("default"))

    def target(self, source: str) -> Entry | None:
        """The target of this name or Hub id; None for anything else (a folder, another Hub id)."""
        for entry in self.entries["target"].values():
            if source in (entry.name, entry.fields["hub"]):
                return entry
        return None

    def pair(self, backbone: str, head: str, target: str) -> Pair:
        """The weights for a combination.

        Raises:
            UnknownName: one of the names does not exist.
            IncompatibleArtifact: all exist, but nobody trained them together; the message lists what there is.
        """
        for kind, name in (("backbone", backbone), ("head", head), ("target", target)):
            self.get(kind, name)
        for pair in self.pairs:
            if (pair.backbone, pair.head, pair.target) == (backbone, head, target):
                return pair
        known = "; ".join(pair.names() for pair in self.pairs if pair.target == target) or "none"
        raise IncompatibleArtifact(
            f"no weights for backbone {backbone!r} with head {head!r} and target {target!r}. "
            f"Combinations with weights for this target: {known}. "
            "Train it (repairzoo train), or give folders instead of names"
        )

    def weights(self, pair: Pair, kind: str) -> Path | str:
        """Where the weights of a pair's ``"backbone"`` or ``"head"`` are: a folder, or ``hf:owner/name@revision``."""
        source = pair.weights[kind]
        return source if source.startswith(HUB_PREFIX) else self.get(kind, getattr(pair, kind)).folder() / source


def unknown(kind: str, name: str, names: Iterable[str]) -> UnknownName:
    """The error for a name that does not exist: the nearest one, and all."""
    names = list(names)
    near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    hint = f"did you mean {next(n for n in names if n.lower() == near[0])!r}? " if near else ""
    return UnknownName(f"unknown {kind} {name!r}: {hint}choose from {', '.join(names) or 'nothing'}")


def registry_file() -> Path:
    """``registry.yaml``: inside an installed package, at the root of the repository in an editable install.

    Raises:
        InvalidArtifact: it is in neither place, so the installation is broken.
    """
    package = Path(__file__).parent
    for path in (package / "registry.yaml", package.parent / "registry.yaml"):
        if path.is_file():
            return path
    raise InvalidArtifact(f"registry.yaml is neither in {package} nor beside it; install repairzoo again")


@lru_cache(maxsize=1)
def registry() -> Registry:
    """The registry of this installation: the file, then what other packages registered under ``repairzoo.backbones``
    and ``repairzoo.heads``."""
    own = read_registry(registry_file())
    found = [(kind, point) for kind, group in ENTRY_POINTS.items() for point in entry_points(group=group)]
    return with_entry_points(own, found)


def read_registry(path: str | Path) -> Registry:
    """Read a registry file strictly.

    Raises:
        InvalidArtifact: a duplicate name, an unknown or missing key, a pair that names what does not exist, figures
            without a raw file, or not exactly one default target.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InvalidArtifact(f"{path}: {error}") from error
    _keys(path, "the file", data, {"schema", "targets", "backbones", "heads", "pairs"}, set())
    if data["schema"] != SCHEMA:
        raise InvalidArtifact(
            f"{path}: key 'schema' is {data['schema']!r}, this version reads {SCHEMA}; update repairzoo"
        )
    entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        section = data[f"{kind}s"]
        if not isinstance(section, dict):
            raise InvalidArtifact(f"{path}: key '{kind}s' must map names to entries")
        for name, value in section.items():
            _keys(path, f"{kind} {name!r}", value, *_ENTRY_KEYS[kind])
            weightless = value.get("weightless", False)
            if not isinstance(weightless, bool) or (weightless and "class" not in value):
                raise InvalidArtifact(f"{path}: 'weightless' of {kind} {name!r} must be true with a class, or false")
            fields = {key: item for key, item in value.items() if key != "class"}
            _add(entries, Entry(kind, name, value.get("class"), path.name, fields))
    if sum(bool(entry.fields.get("default")) for entry in entries["target"].values()) != 1:
        raise InvalidArtifact(f"{path}: exactly one target must say 'default: true'")
    if not isinstance(data["pairs"], list):
        raise InvalidArtifact(f"{path}: key 'pairs' must be a list")
    pairs: dict[tuple[str, str, str], Pair] = {}
    for value in data["pairs"]:
        pair = _pair(path, value, entries)
        if pairs.setdefault((pair.backbone, pair.head, pair.target), pair) is not pair:
            raise InvalidArtifact(f"{path}: the pair {pair.names()} is there twice; keep one")
    return Registry(entries, tuple(pairs.values()))


def with_entry_points(own: Registry, found: Iterable[tuple[str, EntryPoint]]) -> Registry:
    """``own`` and what other packages registered: ``(kind, entry point)`` with the value ``module:Class``.

    Raises:
        InvalidArtifact: a name that is taken, whoever came first.
    """
    entries = {kind: dict(names) for kind, names in own.entries.items()}
    for kind, point in found:
        source = point.dist.name if point.dist else "an entry point"
        fields = {"title": point.name, "summary": f"provided by {source}"}
        _add(entries, Entry(kind, point.name, point.value, source, fields))
    return Registry(entries, own.pairs)


def list_targets(pattern: str = "*") -> list[str]:
    """Names of the targets that match a wildcard pattern, in the order of the registry."""
    return registry().names("target", pattern)


def list_backbones(pattern: str = "*") -> list[str]:
    """Names of the backbones that match a wildcard pattern, in the order of the registry."""
    return registry().names("backbone", pattern)


def list_heads(pattern: str = "*") -> list[str]:
    """Names of the heads that match a wildcard pattern, in the order of the registry."""
    return registry().names("head", pattern)


def info(name: str) -> dict[str, Any]:
    """Everything that is known about a target, backbone or head, and the pairs it is part of.

    ``hf:owner/name@revision`` or a folder (with a slash in it) is told by its config and card alone
    (:func:`repairzoo.hub.describe`).

    Returns:
        plain values, ready for JSON: ``kind``, ``name``, ``class`` (backbones and heads), the entry's own fields,
        ``source`` and ``pairs``; a pair whose weights are a folder says whether it is ``installed``.

    Raises:
        UnknownName: with the nearest name and all there are.
    """
    if name.startswith(HUB_PREFIX) or "/" in name or Path(name, "config.json").is_file():
        from repairzoo.hub import describe

        return describe(name)
    known = registry()
    entry = next((known.entries[kind][name] for kind in KINDS if name in known.entries[kind]), None)
    if entry is None:
        raise unknown("name", name, (n for kind in KINDS for n in known.entries[kind]))
    out = {"kind": entry.kind, "name": entry.name, **_plain(entry.fields), "source": entry.source}
    if entry.location:
        out["class"] = entry.location
    out["pairs"] = [
        {**pair.as_dict(), "installed": all(_installed(known, pair, kind) for kind in pair.weights)}
        for pair in known.pairs
        if getattr(pair, entry.kind) == name
    ]
    return out


def _installed(known: Registry, pair: Pair, kind: str) -> bool:
    where = known.weights(pair, kind)
    return isinstance(where, Path) and (where / "config.json").is_file()


def _add(entries: dict[str, dict[str, Entry]], entry: Entry) -> None:
    """Register a name; it is unique over all kinds, since ``info`` takes a bare name."""
    if not isinstance(entry.name, str) or not entry.name or set(entry.name) & set("+:/@* "):
        raise InvalidArtifact(f"{entry.source}: {entry.name!r} is no usable {entry.kind} name (no + : / @ * or spaces)")
    for kind in KINDS:
        taken = entries[kind].get(entry.name)
        if taken is not None:
            raise InvalidArtifact(
                f"the name {entry.name!r} is registered twice: as {kind} by {taken.source} and as {entry.kind} by "
                f"{entry.source}; rename one or uninstall its package"
            )
    entries[entry.kind][entry.name] = entry


def _pair(path: Path, value: object, entries: Mapping[str, Mapping[str, Entry]]) -> Pair:
    _keys(path, "a pair", value, *_PAIR_KEYS)
    assert isinstance(value, dict)
    pair = Pair(**value)
    where = f"{path}: pair {pair.names()}"
    for kind in KINDS:
        if getattr(pair, kind) not in entries[kind]:
            raise InvalidArtifact(f"{where}: there is no {kind} {getattr(pair, kind)!r} in this file")
    head = entries["head"][pair.head]
    has_head = head.location is not None and not head.weightless
    needed = {"backbone", "head"} if has_head else {"backbone"}
    _keys(path, f"weights of {pair.names()}", pair.weights, needed, set())
    if has_head != (pair.trained in ("frozen", "joint")):
        raise InvalidArtifact(f"{where}: key 'trained' must be 'frozen' or 'joint' with a head, and absent without")
    if pair.figures and not str(pair.figures.get("raw", "")).startswith("benchmarks/results/"):
        raise InvalidArtifact(f"{where}: figures need 'raw', the file under benchmarks/results/ that they come from")
    return pair


def _keys(path: Path, what: str, value: object, required: set[str], optional: set[str]) -> None:
    if not isinstance(value, dict):
        raise InvalidArtifact(f"{path}: {what} must be a mapping, not {type(value).__name__}")
    missing, extra = sorted(required - set(value)), sorted(map(str, set(value) - required - optional))
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown {', '.join(extra)}"] if extra else []
        raise InvalidArtifact(f"{path}: {what} {' and '.join(parts)}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice; PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = list(self._key_values(node))
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)

    @staticmethod
    def _key_values(node: yaml.MappingNode) -> Iterator[str]:
        for key, _ in node.value:
            yield str(key.value)
