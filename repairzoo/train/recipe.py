"""Recipes: YAML files that say what is trained and how, strictly read.

kind: dflash        a method: its ``train`` module knows the keys of ``model`` and ``objective``
model: {...}        what is trained
objective: {...}    what it is trained for
run: {...}          the numbers of :class:`repairzoo.train.trainer.Recipe`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml

from repairzoo.errors import InvalidInput
from repairzoo.registry import _StrictLoader
from repairzoo.train.data import Corpus
from repairzoo.train.trainer import Objective, Recipe

Section = TypeVar("Section")
_SECTIONS = ("kind", "model", "objective", "run")


@dataclass(slots=True)
class Job:
    """What a method makes of a recipe.

    Attributes:
        objective: what is trained. corpus: what on. held: whose held-out answers evaluate (None: the corpus).
        save: writes the loadable artifact into a folder.
        finish: called after the last step; may choose options of the artifact on held-out answers; returns log lines.
        facts: for the log's first line.
    """

    objective: Objective
    corpus: Corpus
    save: Callable[[Path], None]
    facts: dict[str, Any]
    held: Corpus | None = None
    finish: Callable[[Recipe], list[dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True)
class RunRecipe:
    """A recipe file: ``model`` and ``objective`` are read by the method (:func:`read_section`). ``changed``: its whole
    content, where it isn't what the file says."""

    path: Path
    kind: str
    model: Mapping[str, Any]
    objective: Mapping[str, Any]
    run: Recipe
    changed: Mapping[str, Any] | None = None

    def write(self, path: Path) -> None:
        """The recipe that was followed, comments and all where nothing was changed."""
        text = self.path.read_text(encoding="utf-8")
        path.write_text(
            text if self.changed is None else yaml.safe_dump(self.changed, sort_keys=False), encoding="utf-8"
        )


def read_recipe(path: Path, changes: Sequence[str] = ()) -> RunRecipe:
    """Read a recipe.

    Args:
        changes: ``"objective.credit=false"``: keys that take another value, written as in YAML.

    Raises:
        InvalidInput: no such file, no YAML, a missing or unknown key, a value of another type; names file and key.
    """
    if not path.is_file():
        raise InvalidInput(f"{path}: no such recipe; a recipe is a YAML file such as backbones/dflash/recipe.yaml")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: a recipe maps the keys {', '.join(_SECTIONS)} to values")
    _refuse(path, "", data, _SECTIONS, _SECTIONS)
    for key in _SECTIONS[1:]:
        if not isinstance(data[key], dict):
            raise InvalidInput(f"{path}: key {key!r} holds keys and values, not {data[key]!r}")
    for change in changes:
        place, equals, text = change.partition("=")
        section, _, key = place.partition(".")
        if not equals or section not in _SECTIONS[1:] or not key:
            raise InvalidInput(f"--set {change!r}: give SECTION.KEY=VALUE with one of {', '.join(_SECTIONS[1:])}")
        try:
            data[section][key] = yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            raise InvalidInput(f"--set {change!r}: the value is no YAML: {error}") from error
    run = read_section(Recipe, data["run"], path, "run")
    return RunRecipe(path, data["kind"], data["model"], data["objective"], run, data if changes else None)


def read_section(kind: type[Section], values: Mapping[str, Any], path: Path, name: str) -> Section:
    """A section of a recipe as the dataclass that states its keys, types and defaults.

    Raises:
        InvalidInput: a missing or unknown key, a value of another type.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    needed = [n for n, f in known.items() if f.default is MISSING]
    _refuse(path, f"{name}.", values, tuple(known), needed)
    read = {key: _value(value, str(known[key].type), f"{path}: key '{name}.{key}'") for key, value in values.items()}
    try:
        return kind(**read)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: section {name!r}: {error}") from error


def _refuse(path: Path, prefix: str, values: Mapping[str, Any], known: tuple[str, ...], needed: Any) -> None:
    for key in values:
        if key not in known:
            raise InvalidInput(f"{path}: unknown key '{prefix}{key}'; known are {', '.join(known)}")
    for key in needed:
        if key not in values:
            raise InvalidInput(f"{path}: the key '{prefix}{key}' is missing; nothing is guessed")


def _value(value: Any, annotation: str, where: str) -> Any:
    """``value`` checked against an annotation such as ``"float | None"`` or ``"tuple[int, ...]"``."""
    for kind in annotation.split(" | "):
        if kind == "None" and value is None:
            return None
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "str" and isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            if kind == "float":
                return float(value)
            if kind == "int" and isinstance(value, int):
                return value
        if kind.startswith("tuple[") and isinstance(value, list) and value:
            return tuple(_value(v, kind[6:].split(",")[0], where) for v in value)
    hint = ""
    if isinstance(value, str) and "float" in annotation:
        hint = " (YAML reads 2e-3 as text: write 2.0e-3)"
    raise InvalidInput(f"{where} is {value!r}, expected {annotation}{hint}")


def method(kind: str, group: str) -> Any:
    """The training module of a method: ``repairzoo.<group>.<kind>.train``, which has ``plan``.

    Raises:
        InvalidInput: there is none.
    """
    name = f"repairzoo.{group}.{kind}"
    found = isinstance(kind, str) and kind.isidentifier() and find_spec(name) is not None
    if not found or find_spec(f"{name}.train") is None:
        raise InvalidInput(f"kind {kind!r} is no method of {group} that can be trained; see repairzoo list")
    module = import_module(f"{name}.train")
    if not hasattr(module, "plan"):
        raise InvalidInput(f"{group} {kind!r} cannot be trained from a recipe: {name}.train has no plan()")
    return module
