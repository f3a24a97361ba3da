"""``repairzoo train``: hands over to the training commands."""

from __future__ import annotations

import typer

from repairzoo.commands.shared import reporting


def train(context: typer.Context) -> None:
    """Make a corpus, train a backbone or a head; `repairzoo train --help` lists the steps."""
    with reporting(False):
        from repairzoo.train.cli import main as forward

        forward(context.args)
