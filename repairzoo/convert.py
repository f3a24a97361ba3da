"""Published drafts and heads in this project's strict form, and back. A result appears whole or not at all.

The strict form of a draft is its own published config with the object ``repairzoo`` (:mod:`repairzoo.statement`), and
weights that carry the hashes of both. What the source had and the strict form has no place for (other names of tensors,
speculators' config) is kept under the key ``converted_from``, so that the way back gives the same file.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repairzoo import statement
from repairzoo.artifact import config_hash, fingerprint, read_config, tensors_hash
from repairzoo.draft_files import CONFIG, WEIGHTS, read_all, write_weights
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.registry import registry, unknown
from repairzoo.resolve import LAYOUTS, Packaging, resolve, resolve_config
from repairzoo.safe_file import read_json, replacing, write_safetensors
from repairzoo.speculators import DOMINO_PREFIX, MAPS, NEST, VERIFIER, is_speculators, native, packed
from repairzoo.speculators import tensors as speculators_tensors
from repairzoo.zoo import as_target

STRICT = "repairzoo"
HEADS = ("lilicorr", "dels")
FORMATS = {name.lower(): name for name in (STRICT, *LAYOUTS, *HEADS)}
ORIGIN = "converted_from"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
_KEPT = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_SPARK = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read and what was written.

    Attributes:
        kind: of the draft or head. source, to: formats. first_slot: block row of slot 0 in the file; None for a head.
        target: id that the result states, or None. notes: what the new format has no place for, in words.
    """

    kind: str
    source: str
    to: str
    path: Path
    first_slot: int | None
    target: str | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "path": str(self.path),
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class _Draft:
    """A draft under its backbone's own names; ``tables`` are its copies of the target's."""

    packaging: Packaging
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tables: dict[str, Tensor]
    stored: dict[str, str]
    backbone: Any
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str = STRICT,
    target: Any = None,
    target_id: str | None = None,
    target_revision: str | None = None,
    part: str | None = None,
    draft: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Converted:
    """Read a draft or head in any known format and write it in another.

    Args:
        source: a folder, or the ``.pt`` file of a DeLS head (read with ``weights_only=True``; nothing else is).
        destination: a folder that does not exist yet.
        to: ``"repairzoo"`` (strict), a draft's packaging (:data:`repairzoo.resolve.LAYOUTS`), or ``"lilicorr"``.
        target: the target, loaded to be compared and stated: a name, a folder, a Hub id or a ``Target``. Copies of its
            embedding and output head in the source are compared with it, and needed from it by DeepSpec's packaging.
        target_id, target_revision: state the target without loading it.
        part: ``"backbone"`` or ``"head"`` of a folder that holds both (LiLiCorr's).
        draft: with ``to="lilicorr"``: the folder of the draft whose config the head is written beside.
        options: what a published head does not state (``alpha``, ``unigram``, ``pool_size`` ...).

    Raises:
        UnknownName: an unknown format. InvalidInput: a destination that exists, an option that is missing or unknown.
        InvalidArtifact, IncompatibleArtifact: the source is damaged or does not fit; names the key, the file, the fix.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if to.lower() not in FORMATS:
        raise unknown("format", to, FORMATS.values())
    to = FORMATS[to.lower()]
    if part not in (None, "backbone", "head"):
        raise InvalidInput(f"part={part!r}: give 'backbone' or 'head'")
    if not source.exists():
        raise InvalidArtifact(f"{source}: no such file or folder")
    if destination.exists():
        raise InvalidInput(f"{destination} exists: name a new folder, nothing is overwritten")
    named = (target_id, target_revision)
    if source.is_file():
        return _dels(source, destination, to, _target(target), named, options)
    config = read_json(source / CONFIG) if (source / CONFIG).is_file() else None
    if isinstance(config, dict) and config.get("kind") in registry().entries["head"]:
        return _export_head(source, destination, to, draft)
    inner = config.get(NEST) if isinstance(config, dict) else None
    if isinstance(inner, dict) and inner.get("projector_type") == "lilicorr":
        if part is None:
            raise InvalidInput(f"{source} holds a draft and a LiLiCorr head: say part='backbone' or part='head'")
        if part == "head":
            return _lilicorr(source, destination, to, _target(target), named, options)
    elif part == "head":
        raise InvalidInput(f"part='head': {source} holds a draft alone")
    if options:
        raise InvalidInput(f"options {sorted(options)}: a draft states everything; they are for published heads")
    return _convert_draft(source, destination, to, target, named)


# --- drafts -----------------------------------------------------------------------------------------------------------
def _convert_draft(source: Path, destination: Path, to: str, target: Any, named: tuple[str | None, str | None]) -> Any:
    if to in HEADS:
        raise InvalidInput(f"to={to!r} is a format of heads, {source} holds a draft")
    with _new_folder(destination) as place:
        draft, loaded = _read(source, place, target)
        origin = draft.config.pop(ORIGIN, None) or {}
        stated = draft.config.pop(statement.KEY, None)
        current = resolve_config(draft.config, str(source)).layout
        named_id = named[0] or ((stated or {}).get("target") or {}).get("id") or _verifier(origin)
        named_id = named_id or (None if loaded is None else loaded.name)
        if to == STRICT:
            stated = _statement(draft, stated, loaded, (named_id, named[1]), source)
            if draft.packaging.layout == "speculators" or draft.stored:
                origin = origin | {"layout": draft.packaging.layout, "names": draft.stored}
            config = draft.config | {statement.KEY: stated} | ({ORIGIN: origin} if origin else {})
            tensors, metadata = draft.tensors | draft.tables, statement.metadata(config)
            write_weights(place / WEIGHTS, tensors, metadata)
        else:
            config, tensors = _published(draft, origin, current, to, loaded, named_id)
            write_safetensors(place / WEIGHTS, tensors, {"format": "pt"})
        with replacing(place / CONFIG) as file:
            file.write((json.dumps(config, indent=2, allow_nan=False) + "\n").encode())
        _check(place, draft, loaded)
        for name in _KEPT:
            if (source / name).is_file():
                shutil.copyfile(source / name, place / name)
    p = draft.packaging
    was = STRICT if stated is not None and to != STRICT else p.layout
    made_for = (config.get(statement.KEY) or {}).get("target") or {}
    return Converted(p.kind, was, to, destination, p.first_slot, made_for.get("id") or named_id, tuple(draft.notes))


def _read(source: Path, place: Path, target: Any) -> tuple[_Draft, Any]:
    """The draft in ``source`` and the loaded target or None; ``place`` may be used for scratch."""
    packaging, notes = resolve_anyhow(source), []
    folder, origin = source, {}
    tables: dict[str, Tensor] = {}
    raw = read_json(source / CONFIG)
    inner = raw.get(NEST) or {}
    embedded = isinstance(inner, dict) and inner.get("projector_type") == "lilicorr"
    if embedded or is_speculators(raw):
        found, _, where = read_all(source)
        if embedded:
            raw = copy.deepcopy(raw)
            raw[NEST] = {k: v for k, v in inner.items() if k != "projector_type" and not k.startswith("lilicorr_")}
            found = {name: tensor for name, tensor in found.items() if not name.startswith("lilicorr.")}
            notes.append("the LiLiCorr head was left out: convert it with --part head")
        else:
            dropped = [name for name in found if name in VERIFIER]
            if dropped:
                notes.append(f"dropped {', '.join(dropped)}: the target's, for training only")
            maps = {name: str(found[name].dtype).removeprefix("torch.") for name in MAPS if name in found}
            origin = {"maps": maps, "tables": [name for name in (EMBEDDING, OUTPUT) if name in found]}
            found = speculators_tensors(found, str(where))
            try:
                raw = native(raw)
            except InvalidArtifact as error:
                raise InvalidArtifact(f"{source / CONFIG}: {error}") from error
            tables = {name: found.pop(name) for name in (EMBEDDING, OUTPUT) if name in found}
            raw[ORIGIN] |= {key: value for key, value in origin.items() if value}
        folder = place / ".native"
        folder.mkdir()
        write_safetensors(folder / WEIGHTS, found, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(raw), encoding="utf-8")
    backbone = registry().get("backbone", packaging.kind).load().load(folder, pack=False)
    if folder is not source:
        shutil.rmtree(folder)
    config = backbone.config
    loaded = _target(target, config.dtype)
    tensors = {name: tensor.detach() for name, tensor in backbone.state_dict().items()}
    own = dict(getattr(backbone, "_own", {}))
    if loaded is not None:
        backbone.bind(loaded.embedding, loaded.output_weight, num_layers=loaded.num_layers)
        for name, tensor in tables.items():
            _same(name, tensor, loaded, source)
    elif tables:
        raise InvalidInput(
            f"{source} brings its own {' and '.join(tables)}: give target= (--target), so that they can be compared "
            "with the target's and left out"
        )
    published = config.to_dict()
    if loaded is not None and config.num_target_layers is None:
        published["num_target_layers"] = loaded.num_layers
    return _Draft(packaging, published, tensors, own, dict(backbone._stored_names), backbone, notes), loaded


def resolve_anyhow(folder: Path) -> Packaging:
    """:func:`resolve`, but a folder that embeds a LiLiCorr head is the DFlash draft in it."""
    raw = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    inner = raw.get(NEST) if isinstance(raw, dict) else None
    if isinstance(inner, dict) and inner.get("projector_type") == "lilicorr":
        return Packaging("dflash", "z-lab", 1, NEST)
    return resolve(folder)


def _statement(
    draft: _Draft, stated: Any, loaded: Any, named: tuple[str | None, str | None], source: Path
) -> dict[str, Any]:
    p = draft.packaging
    if loaded is not None:
        draft.backbone.state_target(loaded)
        return draft.backbone.config.published[statement.KEY]
    if stated is not None:
        return stated
    if named[0] is None:
        raise InvalidInput(
            f"{source} does not say which target it was trained for, and the strict form must: give target= "
            "(--target; it is loaded, compared and stated) or target_id= (--target-id; stated unseen)"
        )
    made_for = {"id": named[0], "revision": named[1]}
    return statement.make(p.kind, p.first_slot, draft.backbone.config.vocab_size, made_for)


def _published(
    draft: _Draft, origin: Mapping[str, Any], current: str, to: str, loaded: Any, target_id: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a published packaging."""
    config, tensors, p = draft.config, dict(draft.tensors), draft.packaging
    names = origin.get("names", {}) if to == origin.get("layout") else {}
    names = names or (draft.stored if to == p.layout else {})
    tables = dict(draft.tables) if to == current else {}
    if to == "speculators":
        config = _speculators_config(draft, origin, target_id)
        names = {name: DOMINO_PREFIX + name for name in tensors if name.startswith(("prefix_gru.", "embed_proj."))}
        for name, dtype in (origin.get("maps") or {}).items():
            tensors[name] = torch.full((draft.backbone.config.vocab_size,), name == "t2d", dtype=getattr(torch, dtype))
        if origin.get("tables"):
            tables = _tables(draft, loaded, "the source had copies of the target's tables", origin["tables"])
    elif to != current:
        if p.kind != "dspark" or {to, current} - {"DeepSpec", "SpecForge"}:
            other = {"dspark": ", DeepSpec, SpecForge"}.get(p.kind, "")
            raise InvalidInput(f"to={to!r}: a {p.kind} draft in {current}'s form can be written as {current}{other}, "
                               "speculators or repairzoo")  # fmt: skip
        config = _flat(config) if to == "DeepSpec" else _nested(config)
        if to == "DeepSpec":
            tables = _tables(draft, loaded, "DeepSpec's files hold copies of the target's tables")
        elif draft.tables and loaded is None:
            raise InvalidInput(
                "SpecForge's files borrow the target's tables: give target= (--target), so that the draft's own can be "
                "compared with them and left out"
            )
    return config, {names.get(name, name): tensor for name, tensor in (tensors | tables).items()}


def _speculators_config(draft: _Draft, origin: Mapping[str, Any], target_id: str | None) -> dict[str, Any]:
    """The original, if it still says what the draft is; else a new one."""
    p, stated = draft.packaging, origin.get("config")
    if origin.get("layout") == "speculators" and isinstance(stated, Mapping):
        again = native(stated)
        again.pop(ORIGIN)
        ours = {key: value for key, value in draft.config.items() if key in again or key != "num_target_layers"}
        if config_hash(again) == config_hash(ours):
            return copy.deepcopy(dict(stated))
    if target_id is None:
        raise InvalidInput("speculators' packaging names its target: give target= (--target) or target_id=")
    try:
        return packed(draft.config, p.kind, p.first_slot, target_id)
    except InvalidArtifact as error:
        raise InvalidArtifact(f"this draft has no form in speculators' packaging: {error}") from error


def _tables(draft: _Draft, loaded: Any, why: str, names: Any = (EMBEDDING, OUTPUT)) -> dict[str, Tensor]:
    if draft.tables:
        return draft.tables
    if loaded is None:
        raise InvalidInput(f"{why}: give target= (--target), from which they are copied")
    c, found = draft.backbone.config, {EMBEDDING: loaded.embedding, OUTPUT: loaded.output_weight}
    for name in names:
        if found[name].shape[0] != c.vocab_size:
            raise IncompatibleArtifact(f"{name} of the target has {found[name].shape[0]} rows, not {c.vocab_size}")
    return {name: found[name].detach().to("cpu", c.dtype).clone() for name in names}


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's flat config as SpecForge's."""
    inner = {key: config[key] for key in _SPARK if key in config} | {"projector_type": "dspark"}
    rest = {key: value for key, value in config.items() if key not in (*_SPARK, "num_anchors")}
    return rest | {"architectures": ["DSparkDraftModel"], NEST: inner}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """SpecForge's nested config as DeepSpec's, which also states a number of its training, 512 in every release."""
    inner = {k: v for k, v in config[NEST].items() if k not in ("projector_type", "attention_mode")}
    rest = {key: value for key, value in config.items() if key not in (NEST, "auto_map")}
    more = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "tie_word_embeddings": False}
    return {"num_anchors": 512} | rest | inner | more


def _same(name: str, own: Tensor, loaded: Any, source: Path) -> None:
    theirs = loaded.embedding if name == EMBEDDING else loaded.output_weight
    theirs = theirs.to("cpu", own.dtype)
    if own.shape[0] < theirs.shape[0] or not torch.equal(own[: theirs.shape[0]], theirs):
        raise IncompatibleArtifact(
            f"{source}: the draft's own {name!r} is not the target's: it was trained for another target, or this one "
            "was quantised or fine-tuned; give the target it was trained for"
        )


def _verifier(origin: Mapping[str, Any]) -> str | None:
    inner = (origin.get("config") or {}).get("speculators_config") or {}
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def _check(place: Path, draft: _Draft, loaded: Any) -> None:
    """Read what was written as a stranger would: the same draft, before it gets its name."""
    again, _ = _read(place, place, loaded)
    was, now = draft.packaging, again.packaging
    same = tensors_hash(again.tensors) == tensors_hash(draft.tensors)
    if not same or (now.kind, now.first_slot) != (was.kind, was.first_slot):
        raise InvalidArtifact(f"{place}: what was written does not read back as what was read; please report this")


# --- heads ------------------------------------------------------------------------------------------------------------
def _module(head: str) -> Any:
    location = registry().get("head", head).location or ""
    return import_module(location.partition(":")[0] + ".convert")


def _dels(
    source: Path, destination: Path, to: str, loaded: Any, named: tuple[str | None, str | None], options: Any
) -> Converted:
    if to != STRICT:
        raise InvalidInput(f"to={to!r}: a published head becomes {STRICT!r}")
    if source.suffix not in _PICKLES:
        raise InvalidInput(f"{source}: expected the folder of a draft or head, or a .pt file of a DeLS head")
    if loaded is None:
        raise InvalidInput(f"{source} does not state its target's sizes: give target= (--target)")
    function = _module("dels").convert_published
    given = _options(function, options, target_id=named[0] or loaded.name, target_revision=named[1] or loaded.revision)
    rows = loaded.output_weight.shape[0]
    sizes = {"hidden_size": loaded.hidden_size, "vocab_size": rows, "padded_vocab_size": max(rows, loaded.vocab_size)}
    head = function(source, **(sizes | given))
    head.save(destination)
    return Converted("dels", "DeLS .pt", to, destination, None, given["target_id"])


def _lilicorr(
    source: Path, destination: Path, to: str, loaded: Any, named: tuple[str | None, str | None], options: Any
) -> Converted:
    if to != STRICT:
        raise InvalidInput(f"to={to!r}: a published head becomes {STRICT!r}")
    if loaded is None and named[0] is None:
        raise InvalidInput(f"{source} does not name its target: give target= (--target) or target_id= (--target-id)")
    function = _module("lilicorr").convert_published
    stated: dict[str, Any] = {"target_id": named[0], "target_revision": named[1]}
    if loaded is not None:
        stated["target_id"] = named[0] or loaded.name
        stated |= {"target_revision": named[1] or loaded.revision, "target_fingerprint": fingerprint(loaded.model)}
        stated |= {"padded_vocab_size": loaded.vocab_size}
    given = _options(function, options, **stated)
    function(source, **given).save(destination)
    return Converted("lilicorr", "lilicorr", to, destination, None, given["target_id"])


def _export_head(source: Path, destination: Path, to: str, draft: str | Path | None) -> Converted:
    config = read_config(source)
    kind = config["kind"]
    module = None
    if kind in HEADS and to == kind:
        module = _module(kind)
    if module is None or not hasattr(module, "save_published"):
        raise InvalidInput(
            f"to={to!r}: {source} is a {kind} head in the strict form already, and lilicorr heads alone have a way "
            "back to a published one (to='lilicorr')"
        )
    if draft is None:
        raise InvalidInput(f"to={to!r}: the published format lies beside a draft's config: give draft= (--draft)")
    path = Path(draft) / CONFIG
    head = registry().get("head", kind).load().load(source)
    with _new_folder(destination) as place:
        module.save_published(head, place, read_json(path))
    return Converted(kind, STRICT, to, destination, None, config["target"]["id"])


def _options(function: Any, options: Mapping[str, Any] | None, **stated: Any) -> dict[str, Any]:
    """``options`` that ``function`` takes, beside what is known anyway."""
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(set(options or {}) - set(known))
    if unknown:
        raise InvalidInput(f"options {unknown}: this head takes {', '.join(known)}")
    return {**stated, **(options or {})}


# --- shared -----------------------------------------------------------------------------------------------------------
def _target(target: Any, dtype: torch.dtype | None = None) -> Any:
    if target is None:
        return None
    return as_target(target, dtype=dtype if isinstance(target, (str, Path)) else None)


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends well, and vanishes when it does not."""
    place = destination.with_name(f".{destination.name}.{secrets.token_hex(6)}.tmp")
    try:
        place.mkdir(parents=True)
        yield place
        os.replace(place, destination)
    finally:
        shutil.rmtree(place, ignore_errors=True)
