"""Measure backbones and heads on the default target against plain decoding, interleaved in one process.

    python benchmarks/decode.py --out benchmarks/results/smollm2-135m-greedy.jsonl

The run can be interrupted; the same command continues. Tables of a raw file: python benchmarks/tables.py FILE
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import torch

import repairzoo
from repairzoo.bench.measure import BASELINE, Cell, measure

SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "aime25", "livecodebench", "mt-bench")


def load_suite(name: str, count: int | None) -> list[dict[str, str]]:
    lines = (files("repairzoo.bench") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    return [{"suite": name, "id": str(r["id"]), "prompt": r["prompt"]} for r in rows[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    parser.add_argument("--count", type=int, help="prompts of each suite (default: all)")
    parser.add_argument("--cells", nargs="+", default=["dflash", "dflash+dels"], help="backbone or backbone+head")
    parser.add_argument("--no-baseline", action="store_true", help="tokens per round only: no plain decoding beside it")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = repairzoo.load_target()
    cells = [] if args.no_baseline else [Cell(BASELINE, None)]
    for name in args.cells:
        backbone, _, head = name.partition("+")
        cells.append(Cell(name, repairzoo.build(backbone, head=head or None, target=target)))
    prompts = [row for suite in args.suites for row in load_suite(suite, args.count)]
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 0}
    measure(target, cells, prompts, args.out, options=options)


if __name__ == "__main__":
    main()
