"""``repairzoo info``: everything that is known about one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.registry import KINDS, info


def show_info(name: Annotated[str, typer.Argument(help="A target, backbone or head.")], as_json: Json = False) -> None:
    """Everything that is known about one name, and what it was trained with."""
    with reporting(as_json):
        facts = info(name)
        if as_json:
            print_json(facts)
            return
        pairs = facts.pop("pairs")
        width = max(map(len, facts))
        for key, value in facts.items():
            print(f"{key.ljust(width)}  {value}")
        for pair in pairs:
            print(f"\n{pair['backbone']} x {pair['head']} x {pair['target']}")
            for key, value in pair.items():
                if key not in KINDS:
                    print(f"  {key.ljust(width)}  {_inline(value)}")


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
