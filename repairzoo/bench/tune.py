"""Autotune: which head, block length and node budget decode fastest here, predicted from parts and then checked.

Plain decoding answers the prompts once. Every candidate is then *replayed* on those answers (``replay.py``), which
gives its accepted lengths exactly and the time of its drafts and heads, without running the target in rounds; the
target's share comes from the measured cost of verifying so many rows. Where rounds are captured into graphs, a round
is timed whole instead. The choice (and more candidates, if asked for) is then measured for real, interleaved with
plain decoding, and both figures are kept in a calibration file.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repairzoo.artifact import fingerprint
from repairzoo.bench.cost_curve import CostCurve, measure_cost_curve
from repairzoo.bench.machine import machine
from repairzoo.bench.matrix import CellSpec, cells_of, registry_name
from repairzoo.bench.measure import Cell, Setting, encoded, judged, plain_cell, zoo_cell
from repairzoo.bench.replay import KnownText, Replayed, read_text, replay
from repairzoo.bench.suites import Prompt
from repairzoo.default_target import cache_folder
from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.graph import Graphs
from repairzoo.load_parts import bound_heads
from repairzoo.registry import registry
from repairzoo.safe_file import parse_json, replacing
from repairzoo.sampling import Law
from repairzoo.target import Target
from repairzoo.zoo import Zoo, as_target, build, narrow_pool

SCHEMA = 2
_REST = ("accept", "commit", "host")


@dataclass(slots=True)
class Candidate:
    """What was predicted for one way to draft.

    Attributes:
        tau: committed tokens per round on the prompts. predicted: tokens per second after the prompt was read.
    """

    spec: CellSpec
    tau: float
    predicted: float


@dataclass(slots=True)
class Check:
    """One candidate measured for real.

    Attributes:
        runs: for every prompt and repeat, ``[tokens, seconds, tokens of plain decoding, its seconds]``, after the
            prompt was read; both runs follow one another.
        wrong: prompts whose tokens were not plain decoding's where the target was decided.
    """

    candidate: Candidate
    runs: list[list[float]]
    wrong: int = 0

    def __post_init__(self) -> None:
        if not self.runs or any(len(run) != 4 or not all(value > 0 for value in run) for run in self.runs):
            raise InvalidInput("a check needs runs of four numbers above 0")

    @property
    def measured(self) -> float:
        """Tokens per second."""
        return sum(run[0] for run in self.runs) / sum(run[1] for run in self.runs)

    @property
    def plain(self) -> float:
        """Tokens per second of plain decoding beside it."""
        return sum(run[2] for run in self.runs) / sum(run[3] for run in self.runs)

    def ratio(self) -> tuple[float, float, float]:
        """Measured over plain, with a bootstrap 95 % interval over runs."""
        from repairzoo.bench.report import interval

        return (_ratio(self.runs), *interval(self.runs, _ratio))


def _ratio(runs: Sequence[Sequence[float]]) -> float:
    tokens, seconds, plain_tokens, plain_seconds = (sum(column) for column in zip(*runs, strict=True))
    return tokens / seconds / (plain_tokens / plain_seconds)


@dataclass(slots=True)
class Calibration:
    """Everything that a calibration file holds.

    Attributes:
        place: what it is valid for: target, number format, device, threads.
        curve: cost of a verify pass by rows. rest: seconds of a round beside drafts, heads and that pass, for chains
            and for trees. overhead: seconds of a round beside that pass, of the chosen one's family (for CURE).
        plain: tokens per second of plain decoding when the parts were measured.
        checks: of the chosen one first, then of others if they were asked for.
    """

    place: dict[str, Any]
    curve: CostCurve
    rest: dict[str, float]
    overhead: float
    plain: float
    candidates: list[Candidate]
    checks: list[Check]
    prompts: dict[str, Any]
    machine: dict[str, Any]

    @property
    def chosen(self) -> Candidate:
        return self.checks[0].candidate

    def error(self, check: Check) -> float:
        """How much faster a candidate was than predicted, as a share; against plain decoding at either time, so that a
        machine that is busier then than now does not count."""
        return check.ratio()[0] / (check.candidate.predicted / self.plain) - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "place": self.place,
            "prompts": self.prompts,
            "curve": self.curve.as_dict(),
            "rest": self.rest,
            "overhead": self.overhead,
            "plain": self.plain,
            "candidates": [{"cell": c.spec.name, "tau": c.tau, "predicted": c.predicted} for c in self.candidates],
            "checks": [{"cell": c.candidate.spec.name, "runs": c.runs, "wrong": c.wrong} for c in self.checks],
            "machine": self.machine,
        }

    @classmethod
    def from_dict(cls, given: Any, where: str) -> Calibration:
        """Raises ``InvalidArtifact``: a key is missing or contradicts another."""
        try:
            if given["schema"] != SCHEMA:
                raise InvalidArtifact(f"{where}: schema {given['schema']!r}, this version reads {SCHEMA}")
            candidates = [
                Candidate(CellSpec.parse(c["cell"]), float(c["tau"]), float(c["predicted"]))
                for c in given["candidates"]
            ]
            named = {c.spec.name: c for c in candidates}
            checks = [
                Check(named[c["cell"]], [[float(x) for x in run] for run in c["runs"]], int(c["wrong"]))
                for c in given["checks"]
            ]
            if not checks:
                raise ValueError("no candidate was measured")
            return cls(
                place=dict(given["place"]),
                curve=CostCurve.from_dict(given["curve"]),
                rest={str(k): float(v) for k, v in given["rest"].items()},
                overhead=float(given["overhead"]),
                plain=float(given["plain"]),
                candidates=candidates,
                checks=checks,
                prompts=dict(given["prompts"]),
                machine=dict(given["machine"]),
            )
        except InvalidArtifact:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArtifact(
                f"{where}: not a calibration ({type(error).__name__}: {error}); run repairzoo autotune again"
            ) from error


# --- the search -------------------------------------------------------------------------------------------------------
def autotune(
    target: Any,
    prompts: Sequence[Prompt],
    *,
    backbones: Sequence[Any] = ("dflash",),
    heads: Sequence[Any] = ("all",),
    trees: Sequence[int | None] = (None, 8, 12),
    blocks: Sequence[int | None] | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    check: int = 1,
    repeats: int = 1,
    say: Callable[[str], None] = lambda line: None,
    build_options: dict[str, Any] | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Calibration:
    """Predict tokens per second of every candidate, measure the best and ``check - 1`` more, and return all of it.

    Args:
        target, device, dtype: as for ``build``.
        prompts: what to be fast on.
        backbones, heads: registry names, or ``"all"``.
        trees: node budgets of best-first trees; None is the chain. blocks: rows of a block; None for every length.
        check: candidates that are measured, ``repeats`` times on each prompt: the best, others evenly down the list.

    Raises:
        InvalidInput: no prompt, or nothing to choose from.
    """
    if not prompts:
        raise InvalidInput("autotune needs prompts")
    if max_new_tokens < 2:
        raise InvalidInput(f"max_new_tokens={max_new_tokens}: give at least 2, the first comes from reading the prompt")
    if check < 1 or repeats < 1:
        raise InvalidInput(f"check={check}, repeats={repeats}: give at least 1")
    Law(temperature)
    specs, missing = cells_of(backbones, heads, trees, (None,), registry_name(target))
    for why in missing:
        say(f"left out: {why}")
    target = as_target(target, device, dtype)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    ids = encoded(target, prompts)
    plain = plain_cell(target)
    plain.run(ids[:1], {**options, "max_new_tokens": min(8, max_new_tokens)})
    outcomes = [plain.run([row], options) for row in ids]
    answers = [out.tokens[0] for out in outcomes]
    if not _speed(outcomes):
        raise InvalidInput("all answers to these prompts end with their first token: there is no round to be fast in")
    context = sum(len(p) + len(a) // 2 for p, a in zip(ids, answers, strict=True)) // len(ids)

    drafters = {spec.backbone: build(spec.backbone, target=target, **(build_options or {})) for spec in specs}
    slots = max(zoo.backbone.slots for zoo in drafters.values())
    budget = max([slots, *(t for t in trees if t is not None)])
    widest = 1 + max(budget, slots + 8)  # CURE adds branches to the chain
    taps = next(iter(drafters.values())).backbone.tapped_layers
    curve = measure_cost_curve(target, range(1, widest + 1), context=context, taps=taps)
    say(f"verify pass: {1e3 * curve.at(1):.1f} ms for 1 row, {1e3 * curve.at(1 + slots):.1f} ms for {1 + slots}")

    texts: dict[tuple[int, ...], list[KnownText]] = {}
    rest: dict[str, float] = {}
    tried: list[tuple[CellSpec, Zoo, int | None, list[Replayed], float | str]] = []
    bound: dict[tuple[str, str], tuple[Any, ...]] = {}
    overhead = 0.0
    for spec in specs:
        base = drafters[spec.backbone]
        drafter, trained = base.backbone, getattr(base.backbone, "block_size", None)
        if drafter.tapped_layers not in texts:
            pairs = zip(ids, answers, strict=True)
            texts[drafter.tapped_layers] = [read_text(target, p, a, drafter.tapped_layers) for p, a in pairs]
        known = texts[drafter.tapped_layers]
        for length in _lengths(drafter, trained, blocks):
            with _block(drafter, length):
                if (spec.backbone, spec.head) not in bound:
                    named = None if spec.head == "none" else _calibrated(spec.head, curve, overhead)
                    bound[spec.backbone, spec.head] = bound_heads(named, target, drafter)
                assert spec.tree is None or isinstance(spec.tree, int)
                heads = bound[spec.backbone, spec.head]
                pool = narrow_pool(drafter, heads, spec.tree, target.output_weight.shape[0])
                zoo = Zoo(target, drafter, heads, spec.tree, graphs=_own(base.graphs), pool=pool)
                family = "chain" if zoo.nodes is None and zoo.expander is None else "tree"
                if family not in rest:
                    rest[family], overhead = _rest(zoo, ids, options)
                whole = None if zoo.graphs is None else _round_seconds(zoo, ids[0], options)
                seen = [
                    replay(zoo, p, a, temperature=temperature, seed=seed, text=t)
                    for p, a, t in zip(ids, answers, known, strict=True)
                ]
            named_length = length if length != trained else None
            full = CellSpec(spec.backbone, spec.head, spec.tree, named_length)
            say(f"{full.name}: τ {_tau(seen):.2f}")
            tried.append((full, zoo, length, seen, whole or family))
    # the target's share was measured before all of them; a machine that grew slower meanwhile would favour it
    curve = curve.mean(measure_cost_curve(target, curve.widths, context=context, taps=taps))
    plain_speed = _speed([*outcomes, *(plain.run([row], options) for row in ids)])
    scored: list[tuple[Candidate, Zoo, int | None]] = []
    for spec, zoo, length, seen, cost in tried:
        tau = _tau(seen)
        speed = predicted(seen, curve, rest[cost]) if isinstance(cost, str) else tau / cost
        scored.append((Candidate(spec, tau, speed), zoo, length))
    scored.sort(key=lambda x: -x[0].predicted)
    checks = _checks([scored[i] for i in _spread(len(scored), check)], target, plain, ids, options, repeats)
    if checks[0].plain > checks[0].measured:
        say(f"plain decoding is faster here: {checks[0].plain:.1f} against {checks[0].measured:.1f} tokens/s")
    return Calibration(
        place=place_of(target),
        curve=curve,
        rest=rest,
        overhead=overhead,
        plain=plain_speed,
        candidates=[c for c, _, _ in scored],
        checks=checks,
        prompts={"ids": [f"{p.suite}/{p.id}" for p in prompts], **options},
        machine=machine(target.device),
    )


def _spread(count: int, wanted: int) -> list[int]:
    """So many places of a list, evenly, the first included."""
    wanted = min(count, wanted)
    return [0] if wanted == 1 else [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def _checks(
    chosen: Sequence[tuple[Candidate, Zoo, int | None]],
    target: Target,
    plain: Cell,
    ids: list[list[int]],
    options: dict[str, Any],
    repeats: int,
) -> list[Check]:
    """Decode with every candidate, interleaved with plain decoding; answers that end with their first token say
    nothing of speed."""
    short = {**options, "max_new_tokens": min(8, options["max_new_tokens"])}
    setting = Setting(options["temperature"])
    cells = [zoo_cell(candidate.spec.name, zoo) for candidate, zoo, _ in chosen]
    runs: list[list[list[float]]] = [[] for _ in cells]
    wrong = [0] * len(cells)
    for cell, (_, zoo, length) in zip(cells, chosen, strict=True):
        with _block(zoo.backbone, length):
            cell.run(ids[:1], short)
    for repeat in range(repeats):
        for prompt in ids:
            for index, (cell, (_, zoo, length)) in enumerate(zip(cells, chosen, strict=True)):
                with _block(zoo.backbone, length):
                    out = cell.run([prompt], options)
                base = plain.run([prompt], options)
                told = (
                    None if repeat else judged(target, prompt, base.tokens[0], out.tokens[0], setting, options["seed"])
                )
                wrong[index] += told is not None and not told["tie"]
                counts = sum(out.accepted[0]), sum(base.accepted[0])
                if all(counts):
                    runs[index].append([counts[0], round(out.wall, 5), counts[1], round(base.wall, 5)])
    return [Check(c, r, d) for (c, _, _), r, d in zip(chosen, runs, wrong, strict=True)]


@contextmanager
def _block(drafter: Any, length: int | None) -> Iterator[None]:
    """A backbone that drafts blocks of another length for a while; None leaves it as it is."""
    if length is None:
        yield
        return
    trained = drafter.block_size
    drafter.block_size = length
    try:
        yield
    finally:
        drafter.block_size = trained


def predicted(seen: Sequence[Replayed], curve: CostCurve, rest: float) -> float:
    """Tokens per second: committed tokens over the sum of what the rounds take."""
    tokens = sum(sum(r.accepted) for r in seen)
    seconds = sum(
        draft + head + curve.at(rows) + rest
        for r in seen
        for draft, head, rows in zip(r.draft, r.head, r.rows, strict=True)
    )
    return tokens / seconds if seconds else 0.0


def _tau(seen: Sequence[Replayed]) -> float:
    rounds = sum(len(r.accepted) for r in seen)
    return sum(sum(r.accepted) for r in seen) / rounds if rounds else 0.0


def _speed(outcomes: Sequence[Any]) -> float:
    tokens = sum(sum(map(sum, out.accepted)) for out in outcomes)
    seconds = sum(out.wall for out in outcomes)
    return tokens / seconds if seconds else 0.0


def _own(graphs: Graphs | None) -> Graphs | None:
    """Graphs of another zoo on the same device."""
    return None if graphs is None else Graphs(graphs.backend, graphs.smallest, graphs.ahead, graphs.required)


def _round_seconds(zoo: Zoo, prompt: list[int], options: dict[str, Any]) -> float:
    """A captured round has no parts that could be timed: it is timed whole, in a short run."""
    cell = zoo_cell("round", zoo)
    short = {**options, "max_new_tokens": min(32, options["max_new_tokens"])}
    cell.run([prompt], short)  # captures
    out = cell.run([prompt], short)
    return out.wall / max(1, len(out.accepted[0]))


def _rest(zoo: Zoo, ids: list[list[int]], options: dict[str, Any]) -> tuple[float, float]:
    """Seconds a round of acceptance, commit and the host; and of everything beside the verify pass."""
    cell = zoo_cell("rest", zoo)
    cell.run(ids[:1], {**options, "max_new_tokens": min(8, options["max_new_tokens"])})
    outcomes = [cell.run([row], options) for row in ids[:3]]
    rounds = sum(len(out.accepted[0]) for out in outcomes)
    if not rounds:
        return 0.0, 0.0
    rest = sum(out.seconds.get(stage, 0.0) for out in outcomes for stage in _REST)
    beside = sum(value for out in outcomes for s, value in out.seconds.items() if s not in ("prefill", "verify"))
    return rest / rounds, beside / rounds


def _lengths(drafter: Any, trained: int | None, blocks: Sequence[int | None] | None) -> list[int | None]:
    """Block lengths that a backbone can draft, of those that were asked for."""
    if trained is None:
        return [None]
    least = trained - drafter.slots + 1
    if blocks is None:
        return list(range(trained, least - 1, -1))
    chosen = [trained if b is None else b for b in blocks]
    if bad := [b for b in chosen if not least <= b <= trained]:
        raise InvalidInput(f"block length {bad[0]}: this backbone drafts {least} to {trained} rows, anchor included")
    return list(dict.fromkeys(chosen))


def _calibrated(head: str, curve: CostCurve, overhead: float) -> list[Any]:
    """The names of a stack, CURE with the measured cost of its rows."""
    parts: list[Any] = []
    for name in head.split("+"):
        if name == "cure":
            widest = curve.widths[-1]
            parts.append(registry().get("head", name).load()(cost=curve.table(widest), overhead=overhead))
        else:
            parts.append(name)
    return parts


# --- the calibration file ---------------------------------------------------------------------------------------------
def place_of(target: Target) -> dict[str, Any]:
    """What a calibration is valid for."""
    facts = machine(target.device)
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.model),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "processor": facts["gpu"] or facts["cpu"],
        "threads": facts["threads"],
    }


def calibration_path(place: dict[str, Any]) -> Path:
    """Where the calibration of a target on this machine (:func:`place_of`) is kept."""
    name = "-".join([place["fingerprint"].split(":")[-1][:16], place["dtype"], place["device"], str(place["threads"])])
    return cache_folder() / "calibration" / f"{name}.json"


def save(calibration: Calibration, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(calibration.as_dict(), indent=1, allow_nan=False) + "\n").encode())
    return path


def load(path: str | os.PathLike[str], target: Target) -> Calibration:
    """A calibration, checked against the target and the machine.

    Raises:
        InvalidInput: no such file, or it was made for another target, number format or processor.
        InvalidArtifact: a file that is no calibration.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InvalidInput(f"{path}: there is no calibration for target {target.name!r} here; run repairzoo autotune")
    found = Calibration.from_dict(parse_json(path.read_bytes(), str(path)), str(path))
    here = place_of(target)
    for key in ("fingerprint", "dtype", "device", "processor"):
        if found.place.get(key) != here[key]:
            raise InvalidInput(
                f"{path} was measured with {key} {found.place.get(key)!r}, here it is {here[key]!r}: run repairzoo "
                "autotune again"
            )
    if found.place.get("threads") != here["threads"]:
        warnings.warn(
            f"{path} was measured with {found.place.get('threads')} threads, this process has {here['threads']}",
            stacklevel=3,
        )
    return found


def calibration_table(path: Path) -> str:
    """Markdown: what was predicted for the candidates that were measured, and what was measured; the same bytes for
    the same file."""
    found = Calibration.from_dict(parse_json(path.read_bytes(), str(path)), str(path))
    lines = [
        f"Speed against plain decoding, predicted by `repairzoo autotune` among {len(found.candidates)} candidates and "
        f"then measured on the same {len(found.prompts['ids'])} prompts:",
        "",
        "| candidate | place | τ | predicted | measured (95 %) | off by |",
        "|---|---|---|---|---|---|",
    ]
    ranked = sorted(found.candidates, key=lambda c: -c.predicted)
    for check in found.checks:
        c, (ratio, low, high) = check.candidate, check.ratio()
        place = f"{1 + ranked.index(c)} of {len(ranked)}"
        figures = f"{ratio:.2f} ({low:.2f}–{high:.2f}) | {100 * found.error(check):+.1f} %"
        if check.wrong:
            figures = "wrong answer | –"
        lines.append(f"| `{c.spec.name}` | {place} | {c.tau:.2f} | {c.predicted / found.plain:.2f} | {figures} |")
    return "\n".join(lines) + "\n"


def tuned(
    tune: Any, target: Target, backbone: Any, *, head: Any, tree: int | str | None, block: int | None
) -> tuple[Any, int | str | None, int | None]:
    """Head, tree and block for ``build`` of what :func:`fastest` finds; CURE with the measured cost of its rows."""
    found, spec = fastest(tune, target, backbone, head=head, tree=tree, block=block)
    parts = None if spec.head == "none" else _calibrated(spec.head, found.curve, found.overhead)
    return parts, spec.tree, spec.block


def fastest(
    tune: Any,
    target: Target,
    backbone: Any,
    *,
    head: Any = None,
    tree: int | str | None = None,
    block: int | None = None,
) -> tuple[Calibration, CellSpec]:
    """The fastest candidate of a calibration that agrees with what was given (None: open).

    Args:
        tune: ``"auto"`` for what is kept of this target on this machine, or the path of a calibration file.

    Raises:
        InvalidInput: no calibration, or none of its candidates agrees.
    """
    if tune != "auto" and not isinstance(tune, (str, os.PathLike)):
        raise InvalidInput(f"tune={tune!r}: give None, 'auto' or the path of a calibration file")
    found = load(calibration_path(place_of(target)) if tune == "auto" else tune, target)
    kind = str(backbone) if isinstance(backbone, (str, Path)) else getattr(backbone, "kind", "")
    if head is not None and not isinstance(head, (str, Path)):
        raise InvalidInput(f"tune={str(tune)!r} knows heads by name, not {head!r}: name it, or leave tune out")
    fitting = [
        c
        for c in found.candidates
        if c.spec.backbone == kind
        and (head is None or c.spec.head == str(head))
        and (tree is None or c.spec.tree == tree)
        and (block is None or c.spec.block == block)
    ]
    if not fitting:
        raise InvalidInput(
            f"tune={str(tune)!r}: the calibration has no candidate with backbone {kind!r}, head {head!r}, "
            f"tree {tree!r} and block {block!r}; it has {', '.join(c.spec.name for c in found.candidates)}"
        )
    return found, max(fitting, key=lambda c: c.predicted).spec
