"""Triton kernels in the interpreter against the PyTorch versions that they replace, odd sizes included."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import causal_lm, generator, noisy, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st

import repairzoo
from repairzoo import decode, kernels
from repairzoo.block import make_pool
from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.tree import TokenTree, chain, from_candidates
from repairzoo.verify import target_first
from repairzoo.walk import walk

try:
    import triton  # noqa: F401

    REASON = "" if kernels.interpreted() else "TRITON_INTERPRET=1 is not set"
except ImportError:
    REASON = "triton cannot be installed on this platform (it has wheels for Linux)"
interpreter = pytest.mark.skipif(bool(REASON), reason=REASON)
seeds = st.integers(0, 2**31)
few = settings(deadline=None, max_examples=7)


def random_tree(seed: int, B: int, M: int, V: int) -> TokenTree:
    """Trees of 1 to M - 1 nodes, with siblings, padding, and a vocabulary so small that the target often agrees."""
    g = generator(seed)
    anchor = torch.randint(V, (B,), generator=g)
    width = 3
    tokens, parents, scores, above = [], [], [], 1
    for depth in range(1, M):
        here = min(width, V)
        tokens.append(torch.stack([torch.randperm(V, generator=g)[:here] for _ in range(B)]))
        parents.append(torch.randint(above, (B, 1), generator=g).expand(B, here))
        score = torch.rand(B, here, generator=g) - 2 * depth
        scores.append(torch.where(torch.rand(B, here, generator=g) < 0.2, float("-inf"), score))
        above = here
    return from_candidates(anchor, tokens, parents, scores, M - 1)


@interpreter
@given(
    seed=seeds, B=st.integers(1, 3), M=st.integers(2, 9), V=st.integers(2, 5),
    kind=st.sampled_from(["chain", "cut", "tree"]), eos=st.lists(st.integers(-1, 4), max_size=3),
)  # fmt: skip
@few
def test_accept_equals_settle(seed, B, M, V, kind, eos):
    """Every token, count and flag, for chains, cut chains and trees; rows that are done, at their budget, at an end."""
    from repairzoo.kernels.accept import accept

    g = generator(seed)
    if kind == "tree":
        tree = random_tree(seed, B, M, V)
    else:
        tokens = torch.randint(V, (B, M - 1), generator=g)
        tree = chain(tokens[:, 0], tokens, torch.rand(B, M - 1, generator=g) < 0.8 if kind == "cut" else None)
    choice = torch.randint(V, (B, M), generator=g)
    length = torch.randint(1, 20, (B,), generator=g)
    limit = length + torch.randint(-1, M + 2, (B,), generator=g)
    room = (length, limit, torch.rand(B, generator=g) < 0.2, torch.tensor(eos, dtype=torch.int64))
    ours, theirs = accept(choice, tree, *room), decode.settle(target_first(choice, tree), tree, *room)
    for name in ("count", "path", "bonus"):
        assert torch.equal(getattr(ours[0], name), getattr(theirs[0], name)), name
    for ours_, theirs_ in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(ours_, theirs_)


@interpreter
@given(
    seed=seeds, B=st.integers(1, 2), S=st.integers(1, 3), V=st.sampled_from([1, 2, 7, 16, 33, 100]),
    K=st.integers(1, 9), ties=st.booleans(), excluded=st.sampled_from([0.0, 0.5, 0.97]),
    block=st.sampled_from([16, 64, 4096]),
)  # fmt: skip
@few
def test_pool_equals_make_pool(seed, B, S, V, K, ties, excluded, block):
    """Values as of the reference; candidate 0 the argmax; no token twice; equals by id."""
    from repairzoo.kernels import pool as module

    K, g = min(K, V), generator(seed)
    logits = torch.randn(B, S, V, generator=g) * 3
    logits = logits.round() if ties else logits
    out = torch.rand(B, S, V, generator=g) < excluded
    out[..., 0] = False
    logits = logits.masked_fill(out, float("-inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        ours = module.pool(logits, K)
    theirs = make_pool(logits, K)
    assert torch.equal(ours.ids[..., 0], theirs.ids[..., 0])
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=1e-5)
    raw = logits.gather(-1, ours.ids)
    assert torch.equal(raw, logits.sort(-1, descending=True).values[..., :K])
    equal = raw[..., 1:] == raw[..., :-1]
    assert bool((~equal | (ours.ids[..., 1:] > ours.ids[..., :-1])).all())


def scenes(kind: str, seed: int, B: int, S: int, K: int, V: int = 13, excluded: float = 0.0, **options):
    from round_toys import loud

    from repairzoo.block import DraftBlock

    g, D = generator(seed), 6
    row = torch.randn(B, 64, D, generator=g)
    embedding = torch.randn(V, D, generator=g)
    logits = 2 * torch.randn(B, S, V, generator=g)
    if excluded:  # token 0 stays: a slot without any candidate is no slot
        out = torch.rand(B, S, V, generator=g) < excluded
        logits = logits.masked_fill(out & (torch.arange(V) > 0), float("-inf"))
    block = DraftBlock(
        torch.randn(B, S, D, generator=g), logits, torch.randint(V, (B,), generator=g), torch.full((B,), 70),
        row[:, -1], row, torch.ones(B, 64, dtype=torch.bool), embedding, embedding,
    )  # fmt: skip
    shape = {
        "block_size": S + 1, "hidden_size": D, "vocab_size": V, "padded_vocab_size": V, "target_id": "toy",
        "dtype": "float32", "pool_size": K,
    }  # fmt: skip
    if kind == "drelay":
        from repairzoo.heads.drelay import DRelay, DRelayConfig

        widths = {"ffn": 6, "residual": 5, "rank": 3, "history": 8} | options
        head = DRelay(DRelayConfig(**shape, **widths))
    else:
        from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig

        shape["pool_size"] = min(K, options.pop("candidates", K))
        widths = {
            "candidates": shape["pool_size"],
            "width": 6,
            "num_heads": 2,
            "factor_dim": 3,
            "num_layers": 1,
        } | options
        head = LiLiCorr(LiLiCorrConfig(**shape, **widths))
    head = loud(head, seed, 0.6)
    if getattr(head, "gamma", None) is not None:
        head.gamma.copy_(torch.randn(head.gamma.shape, generator=g))
    return head, block, make_pool(logits, K)


def check_walk(head, block, pool, tolerance: float) -> None:
    """The kernel's scores are the reference's along its own choices, so a tie that falls otherwise fails nothing."""
    base = pool.log_probs
    rank, scores = head.chain(block, pool, base)
    prepared, carry, previous = head.prepare(block, pool), head.start(block), block.anchor_ids[:, None]
    for slot in range(block.slots):
        expected, carry = head.step(prepared, carry, slot, previous, base[:, slot : slot + 1])
        # scores of 1e4 beside scores of 1 come from the same sums: float32 is as coarse for all of a row
        size = expected[:, 0].masked_fill(expected[:, 0].isinf(), 0).abs().amax(-1, keepdim=True).clamp_min(1)
        torch.testing.assert_close(scores[:, slot] / size, expected[:, 0] / size, atol=tolerance, rtol=tolerance)
        assert torch.equal(rank[:, slot], scores[:, slot].argmax(-1))
        previous = pool.ids[:, slot].gather(1, rank[:, slot, None])
    _, _, seen = walk(block, [head], pool)
    assert torch.equal(rank, seen["rank"]) or tolerance > 0


@interpreter
@given(
    seed=seeds, B=st.integers(1, 2), S=st.integers(1, 5), K=st.integers(1, 9), candidates=st.integers(1, 9),
    decision=st.sampled_from(["published", "identity_safe"]), excluded=st.sampled_from([0.0, 0.6]),
)  # fmt: skip
@few
def test_lilicorr_walk_equals_step(seed, B, S, K, candidates, decision, excluded):
    """Also a pool that is wider than what the head was trained on, and one with excluded tokens."""
    options = {"candidates": candidates, "decision": decision, "excluded": excluded}
    check_walk(*scenes("lilicorr", seed, B, S, K, **options), 1e-5)


@interpreter
@given(
    seed=seeds, B=st.integers(1, 2), S=st.integers(1, 5), K=st.integers(2, 9), heads=st.integers(1, 3),
    e=st.sampled_from([1, 3, 17]), gate=st.sampled_from([1, 7, 70]), excluded=st.sampled_from([0.0, 0.6]),
)  # fmt: skip
@few
def test_drelay_walk_equals_step(seed, B, S, K, heads, e, gate, excluded):
    """Prefix read, ranking, gate and renormalisation of every slot; widths that fill no tile."""
    check_walk(*scenes("drelay", seed, B, S, K, width=heads * e, heads=heads, gate=gate, excluded=excluded), 2e-4)


@interpreter
def test_control_another_gate_is_noticed(monkeypatch):
    """The comparison can fail: a kernel that is given another gate does not score as the head does."""
    head, block, pool = scenes("drelay", 1, 1, 3, 4, width=6, heads=2, gate=5)
    head.chain(block, pool, pool.log_probs)
    head.gate_in.weight.mul_(-1)
    check_walk(head, block, pool, 2e-4)  # made anew
    first, *rest = head._gate_weights()
    monkeypatch.setattr(head, "_gate_weights", lambda: (-first, *rest))
    with pytest.raises(AssertionError):
        check_walk(head, block, pool, 2e-4)


@interpreter
@pytest.mark.parametrize(
    ("head", "options", "fused"),
    [
        ("lilicorr", {}, {"accept": "triton", "pool": "triton", "walk": "triton"}),
        ("drelay", {}, {"accept": "triton", "pool": "triton", "walk": "triton"}),
        ("lilicorr+drelay", {"tree": 5}, {"accept": "triton", "pool": "triton", "walk": "torch"}),
        ("none", {}, {"accept": "triton", "pool": "torch", "walk": "torch"}),
    ],
)
def test_the_loop_with_kernels_gives_the_same_text(head, options, fused):
    from round_toys import backbone_for, head_for

    target = Target(causal_lm(seed=4, num_hidden_layers=2, dtype=torch.float32), None, name="toy")
    backbone, heads = backbone_for("dflash", target, 1), head_for(head, target, 3)
    plain = repairzoo.build(backbone, heads, target, **options)
    zoo = repairzoo.build(backbone, heads, target, kernels="triton", **options)
    assert zoo.fused == fused and set(plain.fused.values()) == {"torch"}
    for temperature in (0.0, 0.8):
        settings_ = {"max_new_tokens": 5, "temperature": temperature, "seed": 5, "eos_token_id": [3]}
        ours, theirs = zoo.generate(prompts(1, [5, 3]), **settings_), plain.generate(prompts(1, [5, 3]), **settings_)
        assert ours.token_ids == theirs.token_ids
        assert ours.stats.accepted == theirs.stats.accepted and ours.stats.repaired == theirs.stats.repaired


def test_kernels_are_chosen_and_never_replaced_in_silence(monkeypatch):
    with pytest.raises(InvalidInput, match=r"kernels='cuda'.*'torch', 'triton'"):
        repairzoo.build(noisy(0, 3), None, toy(), kernels="cuda")
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InvalidInput, match=r"run on a GPU.*cpu.*kernels='torch'"):
        repairzoo.build(noisy(0, 3), None, toy(), kernels="triton")
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    with pytest.raises(InvalidInput, match="float64"):
        repairzoo.build(noisy(0, 3), None, toy(), kernels="triton")
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"triton is not installed.*kernels='torch'"):
        repairzoo.build(noisy(0, 3), None, toy(), kernels="triton")


@pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be installed on this platform")
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_for_a_gpu(arch, tmp_path):
    """No GPU is needed to compile for one, and the interpreter accepts what a compiler does not."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    worker = [sys.executable, str(Path(__file__).parent / "kernel_worker.py"), str(arch)]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = [line.split()[0] for line in done.stdout.splitlines()]
    assert {name: compiled.count(name) for name in compiled} == {"_accept": 2, "_pool": 2, "_lilicorr": 3, "_drelay": 2}


def test_triton_is_optional():
    """Nothing but the kernels themselves imports it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import repairzoo.zoo, repairzoo.runner, repairzoo.kernels, repairzoo.heads.drelay, repairzoo.heads.lilicorr"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
