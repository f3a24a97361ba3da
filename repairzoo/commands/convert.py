"""``repairzoo convert``: published drafts and heads in the strict form, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a draft or head, or a DeLS .pt file.", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(help="repairzoo, z-lab, Domino, DeepSpec, SpecForge, ModelOpt, speculators or lilicorr."),
    ] = "repairzoo",
    target: Annotated[
        str | None, typer.Option(help="Load this target, compare and state it: a name, a folder or a Hub id.")
    ] = None,
    target_id: Annotated[str | None, typer.Option(help="State this target without loading it.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Its commit.")] = None,
    part: Annotated[str | None, typer.Option(help="backbone or head, of a folder that holds both.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft beside which a LiLiCorr head is published.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="What a published head does not state: alpha=0.3, unigram=FILE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a draft or head between published formats and the strict form; nothing is overwritten."""
    with reporting(as_json):
        options = dict(_setting(text) for text in settings or ())
        from repairzoo.convert import convert as run

        done = run(
            source,
            destination,
            to=to,
            target=target,
            target_id=target_id,
            target_revision=target_revision,
            part=part,
            draft=draft,
            options=options,
        )
        if as_json:
            print_json(done.as_dict())
            return
        print(f"{done.kind}: {done.source} -> {done.to}, {done.path}")
        if done.first_slot is not None:
            print(f"slot 0 is block row {done.first_slot}; target: {done.target or 'not stated'}")
        for note in done.notes:
            print(f"note: {note}")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--set {text!r}: give NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a path, say
