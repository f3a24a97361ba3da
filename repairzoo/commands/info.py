"""``repairzoo info``: everything that is known about one name, and what a round of a pair costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import Json, print_json, reporting
from repairzoo.errors import InvalidInput
from repairzoo.registry import HUB_PREFIX, KINDS, info, registry

_NAME = (
    "A target, backbone or head; hf:owner/name@revision or a folder; or BACKBONE/HEAD for what a round costs (or a "
    "backbone alone, with one of the options below)."
)
_STAGES = {"draft": "draft", "head": "heads", "verify": "verification", "step": "(a plain step)"}


def show_info(
    name: Annotated[str, typer.Argument(help=_NAME)],
    target: Annotated[str | None, typer.Option(help="Costs: on this target.", show_default="smollm2-135m")] = None,
    context: Annotated[
        int | None, typer.Option(help="Costs: committed positions before the block.", show_default="256")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Costs: rows decoded at once.", show_default="1")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Costs: also time a short run.")] = False,
    as_json: Json = False,
) -> None:
    """Everything that is known about one name, and what it was trained with; or the costs of a round of a pair."""
    with reporting(as_json):
        pair = "/" in name and not _is_artifact(name)
        if not pair and (measure or target is not None or context is not None or batch is not None):
            known = next((kind for kind in KINDS if name in registry().entries[kind]), "backbone")
            if known != "backbone":
                raise InvalidInput(f"{name!r} is a {known}: costs are of a pair, repairzoo info BACKBONE/HEAD")
            name, pair = f"{name}/none", True
        if pair:
            positions, rows = 256 if context is None else context, 1 if batch is None else batch
            _show_costs(name, target, positions, rows, measure, as_json)
            return
        facts = info(name)
        if as_json:
            print_json(facts)
            return
        trained = facts.pop("pairs")
        width = max(map(len, facts))
        for key, value in facts.items():
            print(f"{key.ljust(width)}  {_printable(value)}")
        for one in trained:
            print(f"\n{one['backbone']} x {one['head']} x {one['target']}")
            for key, value in one.items():
                if key not in KINDS:
                    print(f"  {key.ljust(width)}  {_inline(value)}")


def _is_artifact(name: str) -> bool:
    """One folder or repository, and no pair: a revision may hold slashes, and a pair ends in the name of a head."""
    if Path(name).is_dir():
        return True
    place, _, last = name.rpartition("/")
    pair = last in registry().entries["head"] and (place.count("/") == 1 or "@" in place)
    return name.startswith(HUB_PREFIX) and not pair


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
    print("\nbytes: its own weights'; moved: operands and results of every operation, the target's tables included;")
    print("at least: what lay there before the round (weights, keys and values), once")
    print(f"\nbeside the weights a run holds {memory}")


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(int(value))


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else _printable(value)


def _printable(value: Any) -> str:
    """Text without what a terminal would obey; a stranger's config or card may hold it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
