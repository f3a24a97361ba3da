"""Write the tables of raw result files between the markers of a Markdown file, or print one file's tables.

python benchmarks/tables.py benchmarks/results/FILE.jsonl      # print; repairzoo report makes the page with plots
python benchmarks/tables.py benchmarks/results/FILE.json       # a calibration of repairzoo autotune
python benchmarks/tables.py --write README.md                  # every <!-- results: FILE --> ... <!-- end --> of it
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from repairzoo.bench.report import markdown
from repairzoo.bench.tune import calibration_table

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(raw: Path) -> str:
    return calibration_table(raw) if raw.suffix == ".json" else markdown(raw)


def filled(text: str) -> str:
    """``text`` with every marked block replaced by the tables of its file."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{tables(ROOT / m[2])}\n{m[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="?", help="print the tables of this file")
    parser.add_argument("--write", type=Path, help="fill the marked blocks of this Markdown file")
    args = parser.parse_args()
    if args.raw is not None:
        print(tables(args.raw), end="")
    if args.write is not None:
        args.write.write_text(filled(args.write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
