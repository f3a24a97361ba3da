"""``repairzoo autotune``: measure this target here, and keep what is fastest for ``build(..., tune="auto")``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.shared import (
    Device,
    Json,
    Suites,
    TargetDtype,
    TargetName,
    Threads,
    listed,
    may_write,
    print_json,
    reporting,
    use_threads,
    whole,
)


def autotune(
    backbones: Annotated[str, typer.Option(help="Registry names, comma-separated; all.")] = "dflash",
    heads: Annotated[str, typer.Option(help="Heads to choose from, comma-separated; all.")] = "all",
    trees: Annotated[str, typer.Option(help="Node budgets: chain, numbers, comma-separated.")] = "chain,8,12",
    blocks: Annotated[str, typer.Option(help="Block lengths: all, trained, numbers, comma-separated.")] = "all",
    suites: Suites = "all",
    count: Annotated[int, typer.Option(help="Prompts of each suite.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Answer tokens of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the answers.")] = 0.0,
    target: TargetName = None,
    dtype: TargetDtype = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Calibration file.", show_default="in the cache")] = None,
    as_json: Json = False,
) -> None:
    """Choose block length, node budget and head by predicted tokens per second, check the choice, and keep it."""
    with reporting(as_json):
        lengths = None  # every length
        if blocks != "all":
            lengths = [None if b == "trained" else whole("--blocks", b, 2, "trained") for b in listed(blocks)]
        budgets = [None if t == "chain" else whole("--trees", t, also="chain") for t in listed(trees)]
        if out is not None:
            may_write("--out", out)
        use_threads(threads)

        from repairzoo.bench.suites import SUITES, load_suite
        from repairzoo.bench.tune import autotune as tune
        from repairzoo.bench.tune import calibration_path, save

        names = list(SUITES) if suites == "all" else listed(suites)
        prompts = [p for suite in names for p in load_suite(suite, count)]
        found = tune(
            target,
            prompts,
            backbones=listed(backbones),
            heads=listed(heads),
            trees=budgets,
            blocks=lengths,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            say=lambda line: print(line, file=sys.stderr),
            device=device,
            dtype=None if dtype is None else dtype.value,
        )
        place = save(found, out or calibration_path(found.place))
        if as_json:
            print_json({**found.as_dict(), "file": str(place)})
            return
        best = sorted(found.candidates, key=lambda c: -c.predicted)[:5]
        print(f"{'cell':32} {'τ':>5} {'predicted':>10} tokens/s")
        for candidate in best:
            print(f"{candidate.spec.name:32} {candidate.tau:5.2f} {candidate.predicted:10.1f}")
        ratios = found.chosen.predicted / found.plain, found.measured / found.plain_again
        print(
            f"\nchosen {found.chosen.spec.name}: predicted {ratios[0]:.2f} times plain decoding, measured "
            f"{ratios[1]:.2f} ({100 * found.error:+.1f} %)"
        )
        print(f'kept in {place}; build(..., tune="auto") uses it')
