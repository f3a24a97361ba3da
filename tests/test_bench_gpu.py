"""benchmarks/gpu.py on tiny shapes and a CPU: every backbone with every head drafts, and the forced lengths are what
is accepted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pair_runs_and_writes_what_it_found(gpu, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    words = ["--tiny", "--device", "cpu", "--rounds", "3", "--prompt", "9", "--lengths", "0", "2", "--out", str(path)]
    result = gpu.main(words)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert len(result["cells"]) == 15 and not result["left_out"]
    for name, cell in result["cells"].items():
        assert "failed" not in cell, name
        assert {tau: x["tau"] for tau, x in cell["lengths"].items()} == {"1": 1.0, "3": 3.0}
        assert {"draft", "head", "verify", "accept", "commit", "host"} <= set(cell["stages_ms"])
        assert cell["floor_ms"] > 0 and ("head_share" in cell) == ("+" in name)
    assert "tokens/s at forced τ" in capsys.readouterr().out.splitlines()[-17]


def test_out_of_time_is_said(gpu, tmp_path):
    words = [
        "--tiny",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--prompt",
        "5",
        "--seconds",
        "0",
        "--out",
        str(tmp_path / "x"),
    ]
    result = gpu.main(words)
    assert not result["cells"] and len(result["left_out"]) == 15
    assert "out of time" in gpu.table(result)


def test_what_was_to_be_shown_is_judged(gpu):
    """The bounds of issue 7: a cell that misses one is called so."""
    good = {"of_floor": 0.9, "faster": 2.5, "host_reads": 0.0, "same_tokens": True}
    cells = {"dflash": good, "dflash+drelay": good | {"head_share": 0.05}, "dspark": {"failed": "why"}}
    claims = gpu.shown({"cells": cells})
    assert len(claims) == 7 and all(claim["holds"] for claim in claims)
    for change in ({"of_floor": 0.7}, {"faster": 1.5}, {"host_reads": 0.1}, {"same_tokens": False}):
        assert not all(claim["holds"] for claim in gpu.shown({"cells": cells | {"dflash": good | change}}))
    assert not gpu.shown({"cells": {"dflash": {"of_floor": 0.1}}})  # on a CPU nothing is captured


@pytest.mark.parametrize("accept", [0, 1, 3])
def test_forced_logits_follow_the_draft_as_long_as_they_should(gpu, accept):
    class Plain:
        def forward(self, ids, *rest):
            return torch.zeros(1, ids.shape[1], 2), None

        def logits(self, hidden):
            return torch.zeros(*hidden.shape[:-1], 8)

    forced = gpu.Forced(Plain(), torch.tensor([accept]), 3)
    ids = torch.tensor([[5, 7, 1, 7]])
    hidden, _ = forced.forward(ids)
    chosen = forced.logits(hidden).argmax(-1)[0].tolist()
    assert (
        chosen[3] == forced.logits(forced.forward(torch.cat([ids, ids[:, :2]], 1))[0]).argmax(-1)[0, 3]
    )  # empty nodes
    agreed = [a == b for a, b in zip(chosen, ids[0, 1:].tolist(), strict=False)]
    assert agreed == [i < accept for i in range(3)]
