"""``repairzoo info``: everything that is known about one name, and what a round of a pair costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.registry import HUB_PREFIX, KINDS, info

_NAME = "A target, backbone or head; hf:owner/name@revision or a folder; or BACKBONE/HEAD for what a round costs."
_STAGES = {"draft": "draft", "head": "heads", "verify": "verification", "step": "(a plain step)"}


def show_info(
    name: Annotated[str, typer.Argument(help=_NAME)],
    target: Annotated[
        str | None, typer.Option(help="With BACKBONE/HEAD: the target.", show_default="smollm2-135m")
    ] = None,
    context: Annotated[int, typer.Option(help="With BACKBONE/HEAD: committed positions before the block.")] = 256,
    batch: Annotated[int, typer.Option(help="With BACKBONE/HEAD: rows decoded at once.")] = 1,
    measure: Annotated[bool, typer.Option("--measure", help="With BACKBONE/HEAD: also time a short run.")] = False,
    as_json: Json = False,
) -> None:
    """Everything that is known about one name, and what it was trained with; or the costs of a round of a pair."""
    with reporting(as_json):
        artifact = (name.startswith(HUB_PREFIX) and name.count("/") == 1) or Path(name).is_dir()
        if "/" in name and not artifact:
            _show_costs(name, target, context, batch, measure, as_json)
            return
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


def _show_costs(name: str, target: str | None, context: int, batch: int, measure: bool, as_json: bool) -> None:
    backbone, _, head = name.rpartition("/")
    from repairzoo.costs import costs, measured
    from repairzoo.zoo import build

    zoo = build(backbone, head, target)
    table, memory = costs(zoo, context=context, batch=batch), zoo.memory(batch, context)
    if measure:
        prompt: Any = "Explain why the sky is blue." if zoo.target.tokenizer is not None else [[1, 2, 3]]
        table = measured(zoo, table, prompt)
    if as_json:
        where = {"target": zoo.target.name, "dtype": str(zoo.target.dtype).removeprefix("torch."), "context": context}
        parts, plan = [c.as_dict() for c in table], memory.as_dict()
        print_json({"backbone": backbone, "head": head, **where, "batch": batch, "parts": parts, "memory": plan})
        return
    print(f"{backbone} x {head} on {zoo.target.name}, {context} positions of context, {batch} row(s), a round:\n")
    heads = ["part", "parameters", "bytes", "operations", "bytes moved", "at least"]
    heads += ["milliseconds"] if measure else []
    lines = [heads]
    for cost in table:
        counts = (cost.parameters, cost.bytes, cost.operations, cost.moved, cost.least)
        cells = [_STAGES[cost.part], *map(_short, counts)]
        if measure:
            cells.append("" if cost.seconds is None else f"{1000 * cost.seconds:.1f}")
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))
    print(f"\nbeside the weights a run holds {memory}")


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(int(value))


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
