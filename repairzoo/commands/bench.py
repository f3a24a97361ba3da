"""``repairzoo bench``: measure backbones and heads on this machine, against plain decoding and against others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.bench_options import block_lengths, suite_names, target_options, tree_budgets
from repairzoo.commands.shared import (
    Device,
    Suites,
    TargetDtype,
    TargetName,
    Threads,
    listed,
    may_write,
    reporting,
    use_threads,
    whole,
)
from repairzoo.errors import InvalidInput


def bench(
    run: Annotated[Path, typer.Argument(help="Raw file to write, or to continue (.jsonl).", show_default=False)],
    backbones: Annotated[str, typer.Option(help="Names or folders, comma-separated; all.")] = "dflash",
    heads: Annotated[str, typer.Option(help="Heads (a+b stacks them), comma-separated; all; none.")] = "none",
    trees: Annotated[str, typer.Option(help="Node budgets: chain, best-first, numbers, comma-separated.")] = "chain",
    blocks: Annotated[str, typer.Option(help="Block lengths: trained, numbers, comma-separated.")] = "trained",
    cells: Annotated[
        str, typer.Option(help="Instead of a matrix: cells like dflash+dels@tree12@block4, comma-separated.")
    ] = "",
    others: Annotated[
        str,
        typer.Option(
            help="Also measure hf-greedy, hf-loop, hf-lookup, hf-dflash, dflash-package, flashspec-lookup; all."
        ),
    ] = "",
    suites: Suites = "all",
    count: Annotated[int | None, typer.Option(help="Prompts of each suite.", show_default="all")] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    max_new_tokens: Annotated[int, typer.Option(help="Budget of new tokens a prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    prefixes: Annotated[
        int, typer.Option(help="Prompts of each suite that are replayed for native, selected and oracle prefixes.")
    ] = 2,
    oracle: Annotated[int, typer.Option(help="Candidates a slot of the oracle.")] = 16,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Plain decoding beside every cell.")
    ] = True,
    target: TargetName = None,
    dtype: TargetDtype = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Measure cells on prompts, interleaved in one process; an interrupted run goes on where it stopped.

    `repairzoo report RUN` makes tables and a page with plots of the raw file.
    """
    with reporting(False, f"interrupted; the same command goes on with what {run} holds"):
        if run.suffix != ".jsonl":
            raise InvalidInput(f"{run}: name a file that ends in .jsonl")
        may_write("RUN", run)
        budgets, lengths = tree_budgets(trees), block_lengths(blocks)
        use_threads(threads)

        from repairzoo.bench.run import Plan
        from repairzoo.bench.run import run as measure

        plan = Plan(
            backbones=listed(backbones),
            heads=listed(heads),
            trees=budgets,
            blocks=lengths,
            cells=listed(cells),
            others=listed(others),
            suites=suite_names(suites),
            count=count,
            temperatures=[_real("--temperatures", t) for t in listed(temperatures)],
            batches=[whole("--batches", b) for b in listed(batches)],
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed,
            prefixes=prefixes,
            oracle=oracle,
            baseline=baseline,
        )
        measure(
            plan,
            target,
            run,
            say=lambda line: print(line, file=sys.stderr),
            **target_options(device, dtype),
        )
        print(f"{run}: measured. Tables and plots: repairzoo report {run}", file=sys.stderr)


def _real(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r}: give numbers, separated by commas") from None
