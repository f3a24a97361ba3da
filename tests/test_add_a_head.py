"""docs/add-a-head.md is run as it stands: its folder, its registry entry, its checks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import dflash, toy

import repairzoo
import repairzoo.heads
from repairzoo import registry as registry_module
from repairzoo.registry import read_registry, registry_file

PAGE = (Path(__file__).parents[1] / "docs" / "add-a-head.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """The head's folder beside the others, and a registry that has its entry."""
    (code, entry), folder = [next(text for kind, text in BLOCKS if kind == k) for k in ("python", "yaml")], tmp_path
    (folder / "echo").mkdir()
    (folder / "echo" / "__init__.py").write_text(code)
    monkeypatch.setattr(repairzoo.heads, "__path__", [*repairzoo.heads.__path__, str(folder)])
    text = registry_file().read_text(encoding="utf-8").replace("\nheads:\n", f"\nheads:\n{entry}", 1)
    (folder / "registry.yaml").write_text(text, encoding="utf-8")
    known = read_registry(folder / "registry.yaml")
    for module in [m for m in sys.modules.values() if vars(m).get("registry") is registry_module.registry]:
        monkeypatch.setattr(module, "registry", lambda: known)
    yield code
    sys.modules.pop("repairzoo.heads.echo", None)


def test_page_runs(echo):
    assert len(echo.strip().splitlines()) < 60
    assert "echo" in repairzoo.list_heads() and repairzoo.info("echo")["title"] == "Echo"
    check = [text for kind, text in BLOCKS if kind == "python"][1]
    target = toy()
    backbone = dflash(target, 2, block_size=5)
    exec(compile(check, "add-a-head.md", "exec"), {"target": target, "backbone": backbone})


def test_page_names_what_exists():
    """Files and names that the page refers to."""
    root = Path(__file__).parents[1]
    for path in re.findall(r"`((?:tests|heads)/[\w/]+\.py)`", PAGE):
        if "echo" not in path:
            assert (root / path).is_file(), path
    from repairzoo.train.blocks import pool_blocks
    from repairzoo.train.heads import pool_job

    assert callable(pool_job) and callable(pool_blocks)
