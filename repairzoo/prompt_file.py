"""Prompts in a file of JSON lines: what corpora are answered from, and what benchmarks measure on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from repairzoo.errors import InvalidInput


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Objects with a non-empty ``prompt`` and whatever else they hold; ``line`` is added, counted from 1.

    Raises:
        InvalidInput: no such file, a line that is no JSON object with a prompt, or no line at all.
    """
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file; prompts are JSON lines with the key 'prompt'")
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from error
    prompts = []
    # split at newlines only: splitlines() would also cut at U+2028 inside a JSON string
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}, line {number}: no JSON ({error})") from error
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput(f"{path}, line {number}: give an object with a non-empty string under the key 'prompt'")
        if not isinstance(row.get("source", ""), str):
            raise InvalidInput(f"{path}, line {number}: 'source' names where the prompt is from: give a string")
        prompts.append({**row, "line": number})
    if not prompts:
        raise InvalidInput(f"{path} holds no prompts")
    return prompts
