"""Which cells are measured: backbones x heads x trees x blocks, each a short name that can be typed.

A name is ``backbone[+head...][@treeN | @tree][@blockN][@sampled]``: ``dflash+dels@tree12``, ``dspark@block4``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.registry import HUB_PREFIX, registry
from repairzoo.target import Target

_OPTION = re.compile(r"tree(\d*)|block(\d+)|sampled")


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One way to draft.

    Attributes:
        backbone, head: as for ``build``; ``"none"`` is no head.
        tree: None for a chain, nodes of a best-first tree, or ``"best-first"``.
        block: rows of a block, anchor included; None as trained.
        sampled: draft by sampling (p/q rule above temperature 0).
    """

    backbone: str
    head: str = "none"
    tree: int | str | None = None
    block: int | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tree, int) and self.tree < 1:
            raise InvalidInput(f"cell {self.name!r}: a tree has at least 1 node")
        if self.block is not None and self.block < 2:
            raise InvalidInput(f"cell {self.name!r}: a block has at least 2 rows, the anchor included")
        if self.sampled and self.tree is not None:
            raise InvalidInput(f"cell {self.name!r}: a tree is proposed deterministically; leave one of them out")

    @property
    def name(self) -> str:
        parts = [self.backbone if self.head == "none" else f"{self.backbone}+{self.head}"]
        if self.tree is not None:
            parts.append("tree" if self.tree == "best-first" else f"tree{self.tree}")
        if self.block is not None:
            parts.append(f"block{self.block}")
        if self.sampled:
            parts.append("sampled")
        return "@".join(parts)

    @classmethod
    def parse(cls, name: str) -> CellSpec:
        """The inverse of ``name``. Raises ``InvalidInput``."""
        what, *options = name.split("@")
        backbone, _, head = what.partition("+")
        found: dict[str, Any] = {}
        for option in options:
            match = _OPTION.fullmatch(option)
            if match is None:
                raise InvalidInput(f"cell {name!r}: {option!r} is none of tree, treeN, blockN, sampled")
            if option == "sampled":
                key, value = "sampled", True
            elif option.startswith("tree"):
                key, value = "tree", int(match[1]) if match[1] else "best-first"
            else:
                key, value = "block", int(match[2])
            if key in found:
                raise InvalidInput(f"cell {name!r} gives {key!r} twice")
            found[key] = value
        if not backbone or (head == "" and "+" in what):
            raise InvalidInput(f"cell {name!r}: write backbone or backbone+head")
        return cls(backbone, head or "none", **found)

    def build(self, target: Any, **options: Any) -> Any:
        """The ``Zoo`` of this cell."""
        from repairzoo.zoo import build

        return build(
            self.backbone,
            head=None if self.head == "none" else self.head,
            target=target,
            tree=self.tree,
            block=self.block,
            proposal="sampled" if self.sampled else "argmax",
            **options,
        )


def cells_of(
    backbones: Sequence[str],
    heads: Sequence[str],
    trees: Sequence[int | str | None] = (None,),
    blocks: Sequence[int | None] = (None,),
    target: str = "smollm2-135m",
) -> tuple[list[CellSpec], list[str]]:
    """The matrix, and why each cell that was left out was.

    Args:
        backbones, heads: registry names, ``"all"`` of them, or anything ``build`` takes.
        trees, blocks: budgets; None is the chain and the trained block.

    Raises:
        InvalidInput: nothing is left.
    """
    known = registry()
    every = {"backbone": known.names("backbone"), "head": sorted(known.names("head"), key=lambda name: name != "none")}
    backbones = [name for given in backbones for name in (every["backbone"] if given == "all" else [given])]
    heads = [name for given in heads for name in (every["head"] if given == "all" else [given])]
    cells: list[CellSpec] = []
    missing: dict[str, None] = {}
    for backbone, head, tree, block in product(backbones, heads, trees, blocks):
        spec = CellSpec(backbone, head, tree, block)
        why = _lacking(spec, target)
        if why is None:
            cells.append(spec)
        else:
            missing[why] = None
    if not cells:
        raise InvalidInput("no cell of this matrix can be built: " + "; ".join(missing))
    return list(dict.fromkeys(cells)), list(missing)


def refuse_unbuildable(specs: Sequence[CellSpec], target: str) -> None:
    """Raise now, before a target is loaded, for a cell that cannot be built: ``InvalidInput`` or ``UnknownName``."""
    for spec in specs:
        why = _lacking(spec, target)
        if why is not None:
            raise InvalidInput(f"cell {spec.name!r} cannot be built: {why}")


def registry_name(target: Any) -> str:
    """The registry name of a target that is named, loaded, or the default (None); empty for any other."""
    if target is None:
        return registry().default_target().name
    entry = registry().target(target.name if isinstance(target, Target) else str(target))
    return entry.name if entry is not None else ""


def _lacking(spec: CellSpec, target: str) -> str | None:
    """Why a cell cannot be built, if it cannot."""
    known = registry()
    parts = _registered(spec)
    if spec.tree is not None and any(known.get("head", part).weightless for part in parts):
        return f"{spec.name}: an expander makes the tree itself"
    if spec.backbone not in known.entries["backbone"]:
        return None
    weighted = [part for part in parts if part != "none" and not known.get("head", part).weightless]
    for head in weighted or ["none"]:
        try:
            found = target and known.pair(spec.backbone, head, target)
        except IncompatibleArtifact:
            found = None
        if not found:
            return f"{spec.backbone} x {head}: no weights for {target or 'a target that the registry does not know'}"
    return None


def _registered(spec: CellSpec) -> list[str]:
    """A cell's heads by registry name. Raises ``UnknownName`` for a name that is neither there nor a place."""

    def place(source: str) -> bool:
        return "/" in source or source.startswith((HUB_PREFIX, ".", "~")) or Path(source).is_dir()

    known = registry()
    if not place(spec.backbone):
        known.get("backbone", spec.backbone)
    parts = [] if place(spec.head) else spec.head.split("+")
    for part in parts:
        known.get("head", part)
    return parts
