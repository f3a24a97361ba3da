"""Model cards: what an artifact states about itself, where it was measured, and how it is used.

A card is the folder's ``README.md``: front matter that the Hub reads, and a text. The text is whoever's who wrote it,
but for two parts between marks, which are made from the artifact and from a raw result file:

    <!-- use -->  ...  <!-- end -->
    <!-- measured: benchmarks/results/FILE.jsonl CELL -->  ...  <!-- end -->
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repairzoo.errors import InvalidArtifact
from repairzoo.hub import CARD, check_config_file, read_info
from repairzoo.registry import registry
from repairzoo.safe_file import MAX_JSON, replacing

_FRONT = re.compile(r"\A---\r?\n.*?\r?\n---\r?\n", re.DOTALL)
_USE = re.compile(r"<!-- use -->\n.*?<!-- end -->", re.DOTALL)
_MADE = "<!-- made by repairzoo; remove this line to keep the text as it is -->"  # else a push may make it anew
_MEASURED = re.compile(r"<!-- measured: (\S+) (\S+) -->\n.*?<!-- end -->", re.DOTALL)
_CLIMBING = re.compile(r"\[([^\]\n]*)\]\((?:\.\./)+[^)\n]*\)")  # a link out of the folder leads nowhere on the Hub
TAU, SPEED = "tau", "speedup"


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one cell of a raw file at temperature 0 and batch 1.

    Attributes:
        raw: path of the file from the root of the repository. sha256: of its bytes. cell: backbone and heads.
        rows: ``(suite, prompts, tau, speedup)``, ``"all"`` last; tau pooled, speedup the median over prompts, or None
            where nothing was timed or an answer was wrong.
    """

    raw: str
    sha256: str
    cell: str
    rows: tuple[tuple[str, int, float, float | None], ...]


def measured(root: Path, raw: str, cell: str) -> Measured:
    """Compute a cell's figures from a raw file.

    Raises:
        InvalidArtifact: there is no such file or cell. InvalidInput: a file that does not add up.
    """
    from repairzoo.bench.report import pooled_tau, read_raw, speed_of

    path = root / raw
    if not path.is_file():
        raise InvalidArtifact(f"{path}: no such result file; figures come from raw files alone")
    _, rows = read_raw(path)
    rows = [row for row in rows if row.get("temperature", 0) == 0 and row.get("batch", 1) == 1]
    own = [row for row in rows if row["cell"] == cell]
    if not own:
        known = ", ".join(sorted({row["cell"] for row in rows}))
        raise InvalidArtifact(f"{path}: nothing was measured of {cell!r} at temperature 0; there are {known}")
    out = []
    for suite in [*sorted({row["suite"] for row in own}), "all"]:
        chosen = [row for row in rows if suite in ("all", row["suite"])]
        mine = [row for row in chosen if row["cell"] == cell]
        speed = speed_of(chosen, cell)
        out.append((suite, len({row["id"] for row in mine}), round(pooled_tau(mine), 3), speed and round(speed[0], 3)))
    return Measured(raw, hashlib.sha256(path.read_bytes()).hexdigest(), cell, tuple(out))


def refreshed(
    folder: Path,
    root: Path,
    text: str | None = None,
    figures: tuple[str, str] | None = None,
    licence: str | None = None,
) -> str:
    """The card of a folder with its front matter and marked parts made anew.

    Args:
        folder: an artifact. root: where raw files are found.
        text: the card so far; None for the one in the folder, or a new one where there is none.
        figures: ``(raw, cell)`` to measure where the text has no such mark; None for none.
        licence: where neither the config nor the card states one.
    """
    config, info = check_config_file(folder), read_info(folder)
    if text is None:
        path = folder / CARD
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    body = _new_body(folder, config, info) if text is None else _FRONT.sub("", text)
    if figures is not None and not _MEASURED.search(body):
        body = f"{body.rstrip()}\n\n## Measured\n\n<!-- measured: {figures[0]} {figures[1]} -->\n<!-- end -->\n"
    found = [measured(root, mark[1], mark[2]) for mark in _MEASURED.finditer(body)]
    tables = iter(found)
    body = _MEASURED.sub(lambda mark: _table(next(tables)), body)
    body = _USE.sub(lambda _: _use(config, None), body)
    return _front(config, info, found, _licence(info, text) or (licence and licence.lower())) + body


def write_card(folder: Path, text: str | None = None) -> None:
    """Write ``README.md``: this text, or a new card where none lies."""
    path = folder / CARD
    if text is None and path.is_file():
        return
    with replacing(path) as file:
        file.write((refreshed(folder, folder) if text is None else text).encode())


def for_repository(folder: Path, repo_id: str, there: str | None = None) -> str:
    """The card of a folder as it is published under an id: it says how to load that.

    A text without front matter gets what the config states. Where nobody wrote the folder's card, but somebody that of
    the repository (``there``), its text and licence stay; figures in it are of other weights and go.

    Raises:
        InvalidArtifact: no UTF-8, front matter that cannot be read, or that states another library or base model.
    """
    path = folder / CARD
    try:
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else refreshed(folder, folder)
    except UnicodeDecodeError as error:
        raise InvalidArtifact(f"{path}: is not UTF-8 ({error}): save it as UTF-8") from error
    config = check_config_file(folder)
    if there is not None and _MADE in text and _MADE not in there:
        own = _MEASURED.sub("", _FRONT.sub("", there))
        text = refreshed(folder, folder, own if own.strip() else text, licence=_licence({}, there))
    if not text.lstrip().startswith("---"):
        info = read_info(folder)
        text = _front(config, info, [], _licence(info, None)) + text
    data = _data(text, path)
    target = (config["target"] or {}).get("id")
    stated = {"library_name": ("repairzoo",), "base_model": (target, [target])}
    wrong = [
        f"{key} {data.get(key)!r} where the config says {expected[0]!r}"
        for key, expected in stated.items()
        if expected[0] is not None and data.get(key) not in expected
    ]
    if wrong:
        raise InvalidArtifact(
            f"{path}: its front matter states {'; '.join(wrong)}. Correct it there, or remove the front matter: then "
            "it is made from the config"
        )
    return _CLIMBING.sub(r"\1", _USE.sub(lambda _: _use(config, repo_id), text))


def read_card(folder: Path) -> dict[str, Any]:
    """What a card's front matter states: ``licence``, ``base_model``, ``figures``; empty where there is none."""
    path = folder / CARD
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_JSON else ""
        data = _data(text, path) if _FRONT.match(text) else None
    except (InvalidArtifact, OSError, UnicodeDecodeError):
        data = None  # a card is no part of what is computed
    if data is None:
        return {}
    known = {"licence": data.get("license"), "base_model": data.get("base_model")}
    out: dict[str, Any] = {key: value for key, value in known.items() if isinstance(value, str)}
    figures = []
    for r in data.eval_results or ():
        more = r.metric_args if isinstance(r.metric_args, dict) else {}
        figure = {"suite": r.dataset_type, "metric": r.metric_type, "value": r.metric_value, **more}
        if all(isinstance(value, (str, int, float)) for value in figure.values()):  # and no aliases of aliases
            figures.append({str(key): value for key, value in figure.items()})
    return out | ({"figures": figures} if figures else {})


def _data(text: str, path: Path) -> Any:
    """The front matter as the Hub library reads it, strictly."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text, ignore_metadata_errors=False).data
    except Exception as error:  # YAML errors and whatever wrong types in it lead to
        raise InvalidArtifact(f"{path}: the front matter cannot be read: {' '.join(str(error).split())}") from error


def _licence(info: Mapping[str, Any], text: str | None) -> str | None:
    """As the config states it, or else the card so far."""
    if isinstance(info.get("licence"), str):
        return info["licence"].lower()
    found = re.search(r"^license: *([A-Za-z0-9._-]+) *$", (_FRONT.match(text or "") or [""])[0], re.MULTILINE)
    return found[1].lower() if found else None


def _title(config: Mapping[str, Any]) -> str:
    name = next((e.fields["title"] for e in _entries(config)), config["kind"])
    target = (config["target"] or {}).get("id")
    return name if target is None else f"{name} for {target.rpartition('/')[2]}"


def _entries(config: Mapping[str, Any]) -> list[Any]:
    return [e for part in ("head", "backbone") if (e := registry().entries[part].get(config["kind"])) is not None]


def _front(config: Mapping[str, Any], info: Mapping[str, Any], found: list[Measured], licence: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    target = (config["target"] or {}).get("id")
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite,
            dataset_name=f"{suite}, {prompts} prompts",
            metric_type=metric,
            metric_name=name,
            metric_value=value,
            metric_args={"cell": m.cell, "raw": m.raw, "sha256": m.sha256, "temperature": 0.0},
        )
        for m in found
        for suite, prompts, tau, speed in m.rows
        for metric, name, value in (
            (TAU, "τ: committed tokens per round", tau),
            (SPEED, "speed over plain decoding, median over prompts", speed),
        )
        if value is not None
    ]
    tags = ["repairzoo", config["kind"], "speculative-decoding"]
    if target is not None:
        tags.append(f"base_model:adapter:{target}")
    data = ModelCardData(
        library_name="repairzoo",
        license=licence,
        base_model=target,
        base_model_relation="adapter" if target is not None else None,
        pipeline_tag="text-generation",
        tags=tags,
        model_name=_title(config) if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _use(config: Mapping[str, Any], repo_id: str | None) -> str:
    """How to load it: from the repository if it has an id, else from this package."""
    is_head = config["kind"] in registry().entries["head"]
    place = f"hf:{repo_id}" if repo_id else config["kind"]
    if is_head:
        backbone = (config.get("backbone") or {}).get("kind") or "dflash"
        call = f'repairzoo.build("{backbone}", head="{place}")'
    else:
        call = f'repairzoo.build("{place}")'
    target = (config["target"] or {}).get("id")
    at = f', target="{target}")' if target and target != registry().default_target().fields["hub"] else ")"
    lines = ["import repairzoo", "", f"zoo = {call[:-1]}{at}", 'print(zoo.generate("Why is the sky blue?").text[0])']
    pin = "\nA commit after the name, `hf:owner/name@commit`, gives the same weights for ever.\n" if repo_id else ""
    return "<!-- use -->\n```python\n" + "\n".join(lines) + f"\n```\n{pin}<!-- end -->"


def _table(m: Measured) -> str:
    lines = [
        f"<!-- measured: {m.raw} {m.cell} -->",
        "| suite | prompts | τ | speed over plain decoding |",
        "|---|---|---|---|",
    ]
    for suite, prompts, tau, speed in m.rows:
        lines.append(f"| {suite} | {prompts} | {tau:.2f} | {'–' if speed is None else f'{speed:.2f}×'} |")
    lines += [
        "",
        f"`{m.cell}`, temperature 0, one prompt at a time. τ: committed tokens per round, all prompts together. Speed: "
        "against a lean autoregressive loop on the same target in the same process, median over prompts. Raw file "
        f"`{m.raw}`, sha256 `{m.sha256}`.",
        "<!-- end -->",
    ]
    return "\n".join(lines)


def _new_body(folder: Path, config: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """The text of a card that nobody wrote yet."""
    entries, target = _entries(config), config["target"] or {}
    parts = [f"# {_title(config)}", "", _MADE, ""]
    for entry in entries:
        paper = f" ({entry.fields['paper']})" if "paper" in entry.fields else ""
        parts += [f"{entry.fields['title']}{paper}: {entry.fields['summary']}.", ""]
    parts += ["<!-- use -->", "<!-- end -->", "", "## What it fits", "", "| key | value |", "|---|---|"]
    rows = {
        "target": target.get("id"),
        "revision of the target": target.get("revision"),
        "fingerprint of its weights": target.get("fingerprint"),
        "backbone": (config.get("backbone") or {}).get("kind"),
        "block": f"{config['block_size']} tokens, anchor included",
        "candidates a slot": config["pool_size"],
        "tapped layers": config["tapped_layers"],
        "vocabulary": f"{config['vocab_size']} ({config['padded_vocab_size']} with padding)",
        "stored as": config["dtype"],
    }
    parts += [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    parts += ["", "Anything else is refused when it is loaded, with everything that does not fit.", ""]
    parts += ["## Training", "", *_training(folder, info), ""]
    return "\n".join(parts)


def _training(folder: Path, info: Mapping[str, Any]) -> list[str]:
    """What the files beside the weights say of how they came about."""
    lines = [f"Data: {info['training_data']}." if info.get("training_data") else ""]
    manifest = folder / "corpus_manifest.json"
    try:
        told = json.loads(manifest.read_bytes())
        lines.append(
            f"{told['train_answers']} answers of the target itself, {told['train_tokens']} tokens; "
            f"{told['held_answers']} more were held out ([`corpus_manifest.json`](corpus_manifest.json))."
        )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    beside = sorted(p.name for p in folder.glob("*") if p.name.startswith(("recipe", "train_log")))
    if beside:
        lines.append("Recipe and log: " + ", ".join(f"[`{name}`]({name})" for name in beside) + ".")
    if info.get("notes"):
        lines.append(str(info["notes"]))
    return [line for line in lines if line] or ["The artifact does not say how it was trained."]
