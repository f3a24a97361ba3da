"""From names to a measurement: builds the target, the cells and the others, and measures them in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repairzoo.bench.machine import measured_rates, weights_hash
from repairzoo.bench.matrix import CellSpec, cells_of, refuse_unbuildable, registry_name
from repairzoo.bench.measure import Cell, Setting, encoded, measure, plain_cell, read_lines, zoo_cell
from repairzoo.bench.others import OTHERS, other, published_folder
from repairzoo.bench.overhead import overhead
from repairzoo.bench.roofline import round_cost
from repairzoo.bench.suites import SUITES, load_suite
from repairzoo.errors import InvalidInput
from repairzoo.registry import unknown
from repairzoo.target import Target

Say = Callable[[str], None]


@dataclass(slots=True)
class Plan:
    """What to measure.

    Attributes:
        backbones, heads, trees, blocks: the matrix; ``cells`` instead names cells one by one.
        others: names of ``bench.others.OTHERS``; ``"all"`` takes those that run here.
        suites: names, JSONL files or ``datasets:...``; count: prompts of each.
        temperatures, batches: every pair is a setting.
        overhead: rounds in which every cell's parts are timed alone, to tell what a round costs beside them.
        rates: measure bandwidth and rate for the roofline.
    """

    backbones: Sequence[str] = ("dflash",)
    heads: Sequence[str] = ("none",)
    trees: Sequence[int | str | None] = (None,)
    blocks: Sequence[int | None] = (None,)
    cells: Sequence[str] = ()
    others: Sequence[str] = ()
    suites: Sequence[str] = SUITES
    count: int | None = None
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    max_new_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    prefixes: int = 2
    oracle: int = 16
    baseline: bool = True
    overhead: int = 12
    rates: bool = True
    build: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 1, "repeats": 1, "prefixes": 0, "oracle": 1, "overhead": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InvalidInput(f"{name}={getattr(self, name)}: give at least {value}")
        if not 0 <= self.seed < 2**62:
            raise InvalidInput(f"seed={self.seed}: give a number from 0 to 2**62 - 1")
        for name in self.others:
            if name != "all" and name not in OTHERS:
                raise unknown("other decoder", name, ["all", *OTHERS])
        if not self.suites or not self.temperatures or not self.batches:
            raise InvalidInput("a measurement needs suites, temperatures and batches: give at least one of each")


def run(
    plan: Plan,
    target: Any,
    path: Path,
    say: Say = lambda line: None,
    *,
    device: Any = None,
    dtype: Any = None,
) -> None:
    """Measure a plan, or what a file lacks of it.

    Args:
        target, device, dtype: as for ``build``.
        say: gets a line for each part of the plan that is left out, and why.

    Raises:
        InvalidInput: nothing to measure, or a file that was begun with another plan, or that is no raw file.
    """
    from repairzoo.zoo import as_target

    read_lines(path)  # a file of somebody else is refused before hours of work, and before it is written to
    prompts = [p for suite in dict.fromkeys(plan.suites) for p in load_suite(suite, plan.count)]
    settings = list(dict.fromkeys(Setting(t, b) for t in plan.temperatures for b in plan.batches))
    named = registry_name(target)
    if plan.cells:
        specs, missing = list(dict.fromkeys(CellSpec.parse(name) for name in plan.cells)), []
        refuse_unbuildable(specs, named)
    else:
        specs, missing = cells_of(plan.backbones, plan.heads, plan.trees, plan.blocks, named)
    for why in missing:
        say(f"left out: {why}")
    verifier = as_target(target, device, dtype)
    rows = verifier.output_weight.shape[0]
    if plan.oracle > rows:
        raise InvalidInput(f"oracle={plan.oracle}: the target's vocabulary has {rows} tokens; give fewer candidates")
    with ExitStack() as stack:
        cells: list[Cell] = [plain_cell(verifier)] if plan.baseline else []
        zoos = {}
        for spec in specs:
            zoos[spec.name] = spec.build(verifier, **plan.build)
            cells.append(zoo_cell(spec.name, zoos[spec.name]))
        cells += _others(plan, verifier, zoos, stack, say, missing)
        context = min(256, verifier.max_context // 2)
        beside = {}
        if plan.overhead and not path.exists():
            first = encoded(verifier, prompts[:1])[0]
            beside = {name: overhead(zoo, first, rounds=plan.overhead).as_dict() for name, zoo in zoos.items()}
        manifest = {
            "left_out": missing,
            "artifacts": {name: _hashes(zoo) for name, zoo in zoos.items()},
            "cost": {c.name: round_cost(c.zoo, verifier, context) for c in cells if not c.greedy_only},
            "cost_context": context,
            "overhead": beside,
            "rates": measured_rates(verifier.device, verifier.dtype) if plan.rates else None,
        }
        measure(
            verifier,
            cells,
            prompts,
            path,
            settings=settings,
            max_new_tokens=plan.max_new_tokens,
            seed=plan.seed,
            repeats=plan.repeats,
            prefixes=plan.prefixes,
            oracle=plan.oracle,
            manifest=manifest,
        )


def _others(
    plan: Plan, target: Target, zoos: dict[str, Any], stack: ExitStack, say: Say, missing: list[str]
) -> list[Cell]:
    every = list(plan.others) == ["all"]
    trained = [z for name, z in zoos.items() if CellSpec.parse(name).block is None]  # others draft whole blocks
    draft = next((z.backbone for z in trained if getattr(z.backbone, "kind", "") == "dflash"), None)
    folder = None if draft is None or not hasattr(draft, "save") else Path(stack.enter_context(published_folder(draft)))
    cells = []
    for name in OTHERS if every else plan.others:
        try:
            cells.append(Cell(name, other(name, target, folder), greedy_only=True))
        except InvalidInput as error:
            if not every:
                raise
            missing.append(f"{name}: {error}")
            say(f"left out: {missing[-1]}")
    return cells


def _hashes(zoo: Any) -> dict[str, Any]:
    heads = {getattr(h, "kind", type(h).__name__): weights_hash(h) for h in zoo.heads}
    return {"backbone": weights_hash(zoo.backbone), "heads": heads}
