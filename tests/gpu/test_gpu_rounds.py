"""The captured loop where it belongs: CUDA graphs, compiled kernels, and a device that says when something waits.

The shapes are those of ``benchmarks/gpu.py --tiny``, whose target accepts as many draft tokens as a device tensor says.
Where there is no GPU, recorded rounds on a CPU stand in for some of the pairs, so that this file stays fit to run; what
only a device can tell is skipped.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generator, prompts
from test_kernels import check_walk, random_tree, scenes

import repairzoo
from repairzoo import decode
from repairzoo.block import make_pool
from repairzoo.capture import CudaGraphs, Recorder
from repairzoo.graph import Graphs
from repairzoo.runner import Static
from repairzoo.tree import chain
from repairzoo.verify import target_first
from repairzoo.zoo import Zoo

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
on_gpu = pytest.mark.skipif(not CUDA, reason="there is no GPU here")
compiled = pytest.mark.skipif(
    not CUDA or importlib.util.find_spec("triton") is None, reason="there is no GPU, or no triton, here"
)


@cache
def bench() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAIRS = [(b, h) for b in ("dflash", "domino", "dspark") for h in ("none", "drelay", "lilicorr", "dels", "cure")]
STAND_INS = [("dflash", "drelay"), ("domino", "cure")]


@cache
def target() -> Any:
    """Float32: rounds of other widths round otherwise, and in half precision that could decide between two tokens."""
    return bench().random_target(bench().TINY, DEVICE, torch.float32)


@cache
def parts(kind: str, head: str) -> tuple[Any, Any]:
    backbone = bench().random_backbone(kind, target(), True)
    return backbone, bench().random_head(head, backbone, target(), True)


def graphs(smallest: int = 64, ahead: int = 256) -> Graphs:
    return Graphs(CudaGraphs(DEVICE) if CUDA else Recorder(blank=False), smallest, ahead)


def both(zoo: Zoo, rows: list[list[int]], **options: Any) -> Any:
    """Captured and eager: the same tokens, rounds and marks."""
    alone = Zoo(zoo.target, zoo.backbone, zoo.heads, zoo.nodes, zoo.proposal)
    ours, theirs = zoo.generate(rows, **options), alone.generate(rows, **options)
    assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
    for name in ("accepted", "drafted", "agreed", "repaired", "repairs_accepted", "branches", "branches_accepted"):
        assert getattr(ours.stats, name) == getattr(theirs.stats, name), name
    return ours


@pytest.mark.parametrize(("kind", "head"), PAIRS if CUDA else STAND_INS)
def test_graphs_give_the_eager_tokens_under_forced_rejections(kind, head):
    """Every slot is the first that is rejected, in one captured round."""
    accept = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    backbone, heads = parts(kind, head)
    zoo = Zoo(bench().Forced(target(), accept, backbone.slots), backbone, heads, graphs=graphs())
    for length in range(backbone.slots + 1):
        accept.fill_(length)
        out = both(zoo, prompts(length, [9]), max_new_tokens=3 * (length + 1) + 1, eos_token_id=[])
        # a branch of CURE may happen to hold the token that refuses the chain
        assert out.stats.accepted == [[length + 1] * 3] or (head == "cure" and out.stats.tau > length + 1)
    (arena,) = zoo.graphs.free  # type: ignore[union-attr]
    assert len(arena.graphs) == 1


@pytest.mark.parametrize("options", [{}, {"nodes": 7}, {"proposal": "sampled"}])
def test_chains_trees_and_draws_of_batches(options):
    """Rows of three lengths, greedy and sampled in turn on one set of buffers; growth, ends, and rows that leave."""
    zoo = Zoo(target(), *parts("dflash", "dels"), **options, graphs=graphs(ahead=16))
    rows = prompts(5, [70, 4, 9])
    for at, temperature in enumerate((0.0, 1.0)):
        answers = both(zoo, rows, max_new_tokens=24, temperature=temperature, seed=at, eos_token_id=[]).token_ids
        both(zoo, rows, max_new_tokens=24, temperature=temperature, seed=at, eos_token_id=[answers[0][2]])
        if options.get("proposal") != "sampled":
            plain = repairzoo.autoregressive(
                target(), rows, max_new_tokens=24, temperature=temperature, seed=at, eos_token_id=[]
            )
            assert answers == plain.token_ids


def test_two_runs_at_once():
    zoo = Zoo(target(), *parts("dflash", "dels"), graphs=graphs())
    first, second = prompts(1, [5]), prompts(2, [11])
    expected = [both(zoo, rows, max_new_tokens=12, eos_token_id=[]).token_ids for rows in (first, second)]
    requests = [zoo._request(rows, None, None, {"max_new_tokens": 12, "eos_token_id": []}) for rows in (first, second)]
    runs = [zoo._run(request) for request in requests]
    seen: list[Any] = [None, None]
    for _ in range(13):
        for at, run in enumerate(runs):
            seen[at] = next(run, seen[at])
    assert [session.result().token_ids for session in seen] == expected


# --- what only a device can tell ------------------------------------------------------------------------------------
def around(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, check: Callable[[Callable[[], Any]], Any]) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: check(lambda: original(*args, **more)))


@on_gpu
@pytest.mark.parametrize(("kind", "head"), PAIRS)
def test_nothing_waits_inside_a_round(kind, head, monkeypatch):
    """Captured rounds, and eager ones too, in a mode in which torch raises where the host waits for the device."""
    zoo = Zoo(target(), *parts(kind, head), graphs=graphs())
    alone = Zoo(zoo.target, zoo.backbone, zoo.heads)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
    for each in (zoo, alone):
        each.generate(prompts(3, [9, 4]), **options)  # captures, and makes tables
    seen = []

    def strict(call: Callable[[], Any]) -> Any:
        seen.append(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    around(monkeypatch, Static, "launch", strict)
    around(monkeypatch, repairzoo.runner, "round", strict)
    for each in (zoo, alone):
        before = len(seen)
        each.generate(prompts(3, [9, 4]), **options)
        assert len(seen) > before


@on_gpu
def test_a_device_that_is_asked_says_so():
    """Control: the mode of the test above raises where a value is read."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device=DEVICE).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("head", ["none", "drelay", "lilicorr", "dels", "cure"])
def test_a_captured_round_allocates_nothing(head, monkeypatch):
    zoo = Zoo(target(), *parts("dflash", head), graphs=graphs())
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    zoo.generate(prompts(3, [9]), **options)
    taken = []

    def counted(call: Callable[[], Any]) -> Any:
        before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
        out = call()
        taken.append(torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] - before)
        return out

    around(monkeypatch, Static, "launch", counted)
    zoo.generate(prompts(4, [9]), **options)
    assert taken and not any(taken)


def moved(value: Any) -> Any:
    """A dataclass with its tensors on the device."""
    tensors = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dataclasses.replace(value, **{n: t.to(DEVICE) for n, t in tensors.items() if isinstance(t, torch.Tensor)})


@compiled
@pytest.mark.parametrize("seed", range(12))
def test_compiled_accept_equals_settle(seed):
    from repairzoo.kernels.accept import accept

    g, B, M, V = generator(seed), 1 + seed % 3, 2 + seed % 8, 2 + seed % 4
    tokens = torch.randint(V, (B, M - 1), generator=g)
    tree = moved(random_tree(seed, B, M, V) if seed % 2 else chain(tokens[:, 0], tokens))
    choice, length = torch.randint(V, (B, tree.size), generator=g), torch.randint(1, 20, (B,), generator=g)
    limit = length + torch.randint(-1, M + 2, (B,), generator=g)
    eos = torch.tensor([1, -1][: seed % 3], dtype=torch.int64)
    given = (choice, length, limit, torch.rand(B, generator=g) < 0.2, eos)
    choice, *room = (x.to(DEVICE) for x in given)
    ours, theirs = accept(choice, tree, *room), decode.settle(target_first(choice, tree), tree, *room)
    for name in ("count", "path", "bonus"):
        assert torch.equal(getattr(ours[0], name), getattr(theirs[0], name)), name
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


@compiled
@pytest.mark.parametrize(("V", "K"), [(7, 7), (4099, 8), (151936, 16)])
def test_compiled_pool_equals_make_pool(V, K):
    from repairzoo.kernels.pool import pool

    logits = torch.randn(2, 3, V, generator=generator(V)).to(DEVICE)
    ours, theirs = pool(logits, K), make_pool(logits, K)
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=1e-5)


@compiled
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["lilicorr", "drelay"])
def test_compiled_walks_equal_step(kind, seed):
    widths: dict[str, Any] = {"width": 34, "heads": 2, "gate": 70} if kind == "drelay" else {}
    head, block, pool = scenes(
        kind, seed, 1 + seed % 2, 2 + 3 * seed, 3 + 2 * seed, excluded=0.6 * (seed % 2), **widths
    )
    check_walk(head.to(DEVICE), moved(block), moved(pool), 5e-4)


@compiled
@pytest.mark.parametrize("head", ["none", "drelay", "lilicorr", "cure"])
def test_kernels_in_captured_rounds_leave_the_answer_as_it_is(head):
    zoo = Zoo(target(), *parts("dflash", head), graphs=graphs(), kernels="triton")
    rows, options = prompts(7, [12, 5]), {"max_new_tokens": 20, "eos_token_id": []}
    plain = repairzoo.autoregressive(target(), rows, **options)
    assert zoo.generate(rows, **options).token_ids == plain.token_ids
