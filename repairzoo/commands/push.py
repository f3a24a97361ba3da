"""``repairzoo push``: publish an artifact, or every artifact of this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput


def push(
    folder: Annotated[Path | None, typer.Argument(help="The folder of a head or a backbone.")] = None,
    repo: Annotated[str | None, typer.Argument(help="owner/name; made if it does not exist.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Publish every backbone and head that this installation carries.")
    ] = False,
    namespace: Annotated[str | None, typer.Option(help="With --all: the owner of the repositories.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch; made if it does not exist.")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of new repositories.")] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list what would travel; send nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Publish on the Hub: checked first, one commit, allow-listed files only, with a model card.

    The access token is the Hub library's (hf auth login, or HF_TOKEN).
    """
    with reporting(as_json):
        from repairzoo import hub

        if everything == (folder is not None) or everything == (namespace is None):
            raise InvalidInput("give a folder and owner/name, or --all with --namespace OWNER")
        if everything:
            assert namespace is not None
            jobs = [(path, f"{namespace}/{name}") for name, path in hub.shipped()]
        else:
            if repo is None:
                raise InvalidInput("name the repository too: repairzoo push FOLDER owner/name")
            assert folder is not None
            jobs = [(folder, hub.full_id(repo))]
        done: list[dict[str, Any]] = []
        files = {repo_id: sorted(hub.prepared(path, repo_id)) for path, repo_id in jobs}  # all are sound, or none goes
        for path, repo_id in jobs:
            if dry_run:
                done.append({"repository": repo_id, "files": files[repo_id], "commit": None})
            else:
                made = hub.push(path, repo_id, revision=revision, private=private, commit_message=message)
                done.append({"repository": repo_id, "commit": made.oid, "url": made.commit_url})
            if not as_json:
                said = f"would send {', '.join(done[-1]['files'])}" if dry_run else done[-1]["url"]
                print(f"{path.parent.name}/{path.name} -> {repo_id}: {said}")
        if as_json:
            print_json({"pushed": done})
