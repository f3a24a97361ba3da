"""``repairzoo list``: what the registry holds."""

from __future__ import annotations

from typing import Annotated

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput
from repairzoo.registry import KINDS, registry


def list_names(
    pattern: Annotated[str, typer.Argument(help="Wildcard pattern over the names.")] = "*",
    as_json: Json = False,
) -> None:
    """What exists: targets, backbones, heads."""
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
