"""Bring the cards of the shipped artifacts up to date: front matter, how to use them, what was measured.

python benchmarks/cards.py            # say which are not
python benchmarks/cards.py --write    # write them, and the target of backbones that were trained before it was stated

A card's own text stays as it is. Figures come from the raw file that the pair in registry.yaml names.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from repairzoo.card import CARD, refreshed
from repairzoo.hub import shipped
from repairzoo.load_parts import load_folder
from repairzoo.registry import Pair, registry
from repairzoo.safe_file import read_json, replacing
from repairzoo.statement import KEY, make

ROOT = Path(__file__).resolve().parent.parent


def pairs(folder: Path) -> list[Pair]:
    """Pairs that an artifact is part of; those where it is the last word come first."""
    known = registry()
    found = [p for p in known.pairs if folder in [known.weights(p, part) for part in p.weights]]
    return sorted(found, key=lambda p: (folder != known.weights(p, list(p.weights)[-1]), not p.figures))


def card(folder: Path) -> str:
    pair = pairs(folder)[0]
    cell = pair.backbone if pair.head == "none" else f"{pair.backbone}+{pair.head}"
    figures = (pair.figures["raw"], cell) if pair.figures else None
    return refreshed(folder, ROOT, figures=figures, licence=pair.licence)


def state_target(folder: Path) -> bool:
    """Write into a backbone's config what its training log says of the target; whether that was needed."""
    config = read_json(folder / "config.json")
    if "slot_convention" in config or KEY in config:
        return False
    log = sorted(folder.glob("train_log*.jsonl"))[-1]
    target = json.loads(log.read_text(encoding="utf-8").partition("\n")[0])["target"]
    backbone = load_folder(folder)
    backbone.config.published[KEY] = make(backbone.kind, backbone.first_slot, backbone.vocab_size, target)
    backbone.save(folder)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is not up to date")
    args = parser.parse_args()
    stale = []
    for name, folder in shipped():
        if args.write and state_target(folder):
            print(f"{name}: target stated")
        text, path = card(folder), folder / CARD
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if args.write:
                with replacing(path) as file:
                    file.write(text.encode())
    print(f"{'written' if args.write else 'not up to date'}: {', '.join(stale) or 'none'}")
    return 0 if args.write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
