"""``repairzoo pull``: fetch an artifact from the Hub, and load it once to be sure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput


def pull(
    source: Annotated[str, typer.Argument(help="owner/name, or hf:owner/name@revision.")],
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit.")] = None,
    out: Annotated[Path | None, typer.Option(help="Copy it into this new folder too.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch files that are in the cache again.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a head or a backbone from the Hub into the cache, at one commit, and check all of it."""
    with reporting(as_json):
        from repairzoo import hub
        from repairzoo.load_parts import load_folder

        place = hub.parse(source, revision)
        if out is not None and out.exists():
            raise InvalidInput(f"--out {out}: is there already; name a new folder")
        folder = hub.fetch(place, force_download=force)
        with hub.blaming(folder):
            load_folder(folder)
            kind = hub.check_config_file(folder)["kind"]
        if out is not None:
            hub.copy_to(folder, out)
        facts = {"repository": place.repo_id, "revision": place.revision, "commit": folder.name, "kind": kind}
        facts |= {"folder": str(out or folder), "files": hub.names(folder)}
        if as_json:
            print_json(facts)
        else:
            print(f"{place.repo_id} at commit {folder.name}: {kind}, checked\n{out or folder}")
