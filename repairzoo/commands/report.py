"""``repairzoo report``: tables and a page with plots of a raw file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.shared import may_write, reporting
from repairzoo.errors import InvalidInput


def report(
    run: Annotated[Path, typer.Argument(help="Raw file of repairzoo bench.", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="Page to write.", show_default="RUN.html")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Only print the Markdown tables.")] = False,
) -> None:
    """Markdown tables on standard output, and one self-contained page with plots; equal bytes for an equal file."""
    with reporting(False):
        if not run.is_file():
            raise InvalidInput(f"{run}: there is no such file; repairzoo bench {run} measures one")
        place = html or run.with_suffix(".html")
        if not tables:
            may_write("--html", place)
            if place.resolve() == run.resolve():
                raise InvalidInput(f"--html {place}: that is the raw file itself; name another")
        from repairzoo.bench.report import markdown, overall

        print(overall(run), markdown(run), sep="\n\n", end="")
        if not tables:
            from repairzoo.bench.page import page
            from repairzoo.safe_file import replacing

            text = page(run)
            place.absolute().parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(text.encode("utf-8"))
            print(f"\nPlots: {place}")
