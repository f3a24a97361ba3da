"""``repairzoo list``: what the registry holds, and what was trained together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput
from repairzoo.registry import KINDS, Registry, registry


def list_names(
    pattern: Annotated[str, typer.Argument(help="Wildcard pattern over the names.")] = "*",
    as_json: Json = False,
) -> None:
    """What exists: targets, backbones, heads; without a pattern also which have weights together."""
    with reporting(as_json):
        known = registry()
        if as_json:
            print_json({f"{kind}s": known.names(kind, pattern) for kind in KINDS})
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in ("kind", "name", "what"):
            table.add_column(column, no_wrap=column != "what")
        for kind in KINDS:
            for name in known.names(kind, pattern):
                fields = known.get(kind, name).fields
                table.add_row(kind, name, f"{fields['title']}: {fields['summary']}")
        if not table.row_count:
            raise InvalidInput(f"no name matches {pattern!r}; repairzoo list shows all")
        Console().print(table)
        if pattern == "*":
            for target in known.names("target"):
                _print_pairs(Console(), known, target)


def _print_pairs(console: Any, known: Registry, target: str) -> None:
    """A row a backbone, a column a head: figures of what has weights for ``target``."""
    from rich.table import Table

    pairs = {(pair.backbone, pair.head): pair for pair in known.pairs if pair.target == target}
    if not pairs:
        return
    heads = [name for name in known.names("head") if any(head == name for _, head in pairs)]
    table = Table(box=None, pad_edge=False)
    for column in ("backbone", *heads):
        table.add_column(column, no_wrap=True)
    for backbone in known.names("backbone"):
        found = [pairs.get((backbone, head)) for head in heads]
        if any(found):
            table.add_row(backbone, *("–" if pair is None else _figures(pair.figures) for pair in found))
    free = [name for name in known.names("head") if known.get("head", name).fields.get("weightless")]
    console.print(f"\nTrained for {target}: committed tokens per round, speed over plain decoding (– not trained)")
    console.print(table)
    if free:
        console.print(f"Without weights, for every backbone: {', '.join(free)}")


def _figures(figures: Mapping[str, Any]) -> str:
    parts = [
        f"{figures['tau']:.2f}" if "tau" in figures else "",
        f"×{figures['speedup']:.2f}" if "speedup" in figures else "",
    ]
    return " ".join(filter(None, parts)) or "yes"
