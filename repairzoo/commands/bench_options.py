"""What bench and autotune read alike from the command line."""

from __future__ import annotations

from typing import Any

from repairzoo.commands.shared import listed, whole


def tree_budgets(text: str, best_first: bool = True) -> list[Any]:
    """``"chain,best-first,12"`` -> ``[None, "best-first", 12]``. Raises ``InvalidInput``."""
    named: dict[str, str | None] = {"chain": None, **({"best-first": "best-first"} if best_first else {})}
    return [named[t] if t in named else whole("--trees", t, also=", ".join(named)) for t in listed(text)]


def block_lengths(text: str) -> list[int | None]:
    """``"trained,4"`` -> ``[None, 4]``. Raises ``InvalidInput``."""
    return [None if b == "trained" else whole("--blocks", b, 2, "trained") for b in listed(text)]


def suite_names(text: str) -> list[str]:
    """``"all"`` is every packaged suite."""
    from repairzoo.bench.suites import SUITES

    return list(SUITES) if text == "all" else listed(text)


def target_options(device: str | None, dtype: Any) -> dict[str, Any]:
    """What a target is loaded with, as for ``build``."""
    return {"device": device, "dtype": None if dtype is None else dtype.value}
