"""``repairzoo autotune``: measure this target here, and keep what is fastest for ``build(..., tune="auto")``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.bench_options import block_lengths, suite_names, target_options, tree_budgets
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
    check: Annotated[
        int, typer.Option(help="Candidates to measure against their predictions: the best, others down the list.")
    ] = 1,
    repeats: Annotated[int, typer.Option(help="Times that each of them is measured.")] = 1,
    target: TargetName = None,
    dtype: TargetDtype = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Calibration file.", show_default="in the cache")] = None,
    as_json: Json = False,
) -> None:
    """Choose block length, node budget and head by predicted tokens per second, check the choice, and keep it."""
    with reporting(as_json):
        lengths = None if blocks == "all" else block_lengths(blocks)
        budgets = tree_budgets(trees, best_first=False)
        if out is not None:
            may_write("--out", out)
        use_threads(threads)

        from repairzoo.bench.suites import load_suite
        from repairzoo.bench.tune import autotune as tune
        from repairzoo.bench.tune import calibration_path, save

        prompts = [p for suite in suite_names(suites) for p in load_suite(suite, count)]
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
            check=check,
            repeats=repeats,
            **target_options(device, dtype),
        )
        place = save(found, out or calibration_path(found.place))
        if as_json:
            print_json({**found.as_dict(), "file": str(place)})
            return
        print(f"{'cell':32} {'τ':>5} {'predicted':>10} tokens/s")
        for candidate in sorted(found.candidates, key=lambda c: -c.predicted)[:5]:
            print(f"{candidate.spec.name:32} {candidate.tau:5.2f} {candidate.predicted:10.1f}")
        print("\nmeasured, interleaved with plain decoding; times as fast as it (95 %):")
        for one in found.checks:
            ratio, low, high = one.ratio()
            measured = f"measured {ratio:.2f} ({low:.2f}–{high:.2f}): {100 * found.error(one):+.1f} %"
            print(
                f"{one.candidate.spec.name:32} predicted {one.candidate.predicted / found.plain:.2f}, "
                f"{'wrong answer' if one.wrong else measured}"
            )
        print(f'\nchosen {found.chosen.spec.name}, kept in {place}; build(..., tune="auto") uses it')
