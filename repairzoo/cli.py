"""The console script ``repairzoo``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from repairzoo.commands.autotune import autotune
from repairzoo.commands.bench import bench
from repairzoo.commands.convert import convert
from repairzoo.commands.doctor import doctor
from repairzoo.commands.generate import generate
from repairzoo.commands.info import show_info
from repairzoo.commands.list import list_names
from repairzoo.commands.pull import pull
from repairzoo.commands.push import push
from repairzoo.commands.report import report
from repairzoo.train.cli import app as train

app = typer.Typer(
    help="Repair heads for block-parallel speculative decoding: the same text, in fewer passes of the target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command("list")(list_names)
app.command("info")(show_info)
app.add_typer(train, name="train")
app.command()(push)
app.command()(pull)

app.command()(bench)
app.command()(report)
app.command()(autotune)

app.command()(convert)
app.command()(doctor)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or pipe that has no τ shows its number
            stream.reconfigure(errors="backslashreplace")
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"repairzoo {version('repairzoo')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
