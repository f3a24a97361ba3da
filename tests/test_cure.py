"""CURE: its trees against a slow oracle, the invariants of any fork, and the loop that takes it as the last head.

Numbers in docstrings are those of the invariants that the method's description lists (37 to 47).
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import (
    VOCAB,
    Bigram,
    PooledBigram,
    Scripted,
    dels,
    dflash,
    generator,
    heads_for,
    knowing,
    noisy,
    prompts,
    toy,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_domino import drafts_for as domino
from test_dspark import drafts_for as dspark
from test_head_laws import random_head, telling_blocks
from test_trace import BOUND, flatten, restore, tiny, trace, without_values
from test_verify import EXACT, Table, deviation, tree_laws, walk_tree

import repairzoo
from repairzoo import decode
from repairzoo.bench.cost_curve import CostCurve
from repairzoo.block import HISTORY, DraftBlock, make_pool
from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.heads.cure import CURE, branch_budget, naive
from repairzoo.registry import read_registry, registry_file
from repairzoo.sampling import Law
from repairzoo.tree import TokenTree, chain, check
from repairzoo.verify import target_first
from repairzoo.walk import Stack, walk

GOLDEN = json.loads((Path(__file__).parent / "golden/equations/cases.json").read_text())["cure_budget"]
F64 = torch.float64
seeds = st.integers(0, 2**31)
WIDE = {"threshold": 9.0, "scale": 9.0, "b_max": 3, "cost": "free"}


def make_block(logits: torch.Tensor) -> DraftBlock:
    B = len(logits)
    row = torch.zeros(B, 1)
    return DraftBlock(
        hidden=row[:, None],
        logits=logits,
        anchor_ids=torch.arange(B) % logits.shape[-1],
        anchor_positions=torch.zeros(B, dtype=torch.long),
        context=row,
        history=torch.zeros(B, HISTORY, 1),
        history_mask=torch.zeros(B, HISTORY, dtype=torch.bool),
        embedding=torch.zeros(logits.shape[-1], 1),
        output_weight=torch.zeros(logits.shape[-1], 1),
    )


def expand(head: CURE, block: DraftBlock, correctors: list[Any], pool: Any, **options: Any) -> TokenTree:
    stack = Stack(block, correctors, pool)
    tokens, _, seen = walk(block, stack, pool)
    return head.expand(block, stack, pool, tokens, seen["scores"], **options)


def paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """Prefixes of a row's valid nodes, in order, the anchor left out."""
    found: list[tuple[int, ...]] = [()]
    for m in range(1, tree.size):
        parent = int(tree.parents[row, m])
        found.append((*found[parent], int(tree.tokens[row, m])) if tree.valid[row, m] else (-1,))
    return [p for p in found[1:] if p != (-1,)]


def oracle(head: CURE, block: DraftBlock, correctors: list[Any], pool: Any, row: int, kept: int | None = None):
    """The slow tree of one row: every prefix is walked from the anchor."""
    one = block
    if len(block.logits) > 1:
        one = make_block(block.logits[row : row + 1])
        one.anchor_ids = block.anchor_ids[row : row + 1]
    base = one.logits[0] if pool is None else pool.log_probs[row]
    ids = torch.arange(base.shape[-1]).expand_as(base) if pool is None else pool.ids[row]

    def scores(prefix: list[int]) -> list[float]:
        part = None if pool is None else make_pool(one.logits, pool.ids.shape[-1])
        stack, previous = Stack(one, correctors, part), one.anchor_ids[:, None]
        for slot in range(len(prefix) + 1):
            out = stack.step(slot, previous, base[None, None, slot])
            previous = torch.tensor([[prefix[slot]]]) if slot < len(prefix) else previous
        return out[0, 0].tolist()

    mass = [1.0] * block.slots if pool is None else [min(float(x), 1.0) for x in base.exp().sum(-1)]
    return naive.tree(head, block.slots, scores, ids.tolist(), mass, kept)


options = {
    "threshold": st.sampled_from([0.3, 1.0, 4.0]),
    "scale": st.sampled_from([0.5, 1.0, 4.0]),
    "b_min": st.integers(1, 2),
    "b_max": st.integers(2, 5),
    "repairs": st.integers(0, 3),
    "suffix": st.sampled_from(["head", "reuse"]),
}
blocks = {
    "seed": seeds,
    "S": st.integers(1, 5),
    "V": st.integers(3, 7),
    "pooled": st.booleans(),
    "correctors": st.integers(0, 2),
}


def scene(seed: int, S: int, V: int, pooled: bool, correctors: int, B: int = 2, ties: bool = False):
    g = generator(seed)
    logits = 2 * torch.randn(B, S, V, generator=g, dtype=F64)
    if ties:  # equal scores, and tokens that are excluded
        excluded = (torch.rand(B, S, V, generator=g) < 0.5) & (torch.arange(V) >= 3)  # three are left for a pool
        logits = logits.round().masked_fill(excluded, -math.inf)
    block = make_block(logits)
    pool = make_pool(logits, min(3, V)) if pooled else None
    return block, [Bigram(seed + 1 + i, V) for i in range(correctors)], pool


# --- budgets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", GOLDEN)
def test_golden_budgets(case):
    m = torch.tensor([case["margin"]], dtype=F64)
    assert branch_budget(m, case["scale"], case["b_min"], case["b_max"]).tolist() == [case["branches"]]
    assert naive.branches(case["margin"], case["scale"], case["b_min"], case["b_max"]) == case["branches"]
    assert (case["margin"] < case["threshold"]) == case["fragile"]


@given(seed=seeds, scale=st.floats(0.01, 100), low=st.integers(1, 5), more=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_budgets_stay_in_range_and_fall_with_the_margin(seed, scale, low, more):
    """41: b in [b_min, b_max], non-increasing in m; b_max at 0 and b_min from the scale on."""
    m = torch.cat([torch.tensor([0.0, scale, math.inf]), scale * 2 * torch.rand(20, generator=generator(seed))]).sort()[
        0
    ]
    b = branch_budget(m.double(), scale, low, low + more).tolist()
    assert all(low <= x <= low + more for x in b) and all(x >= y for x, y in pairwise(b))
    assert b[0] == low + more and b[-1] == low
    assert b == [naive.branches(x, scale, low, low + more) for x in m.tolist()]


# --- trees -----------------------------------------------------------------------------------------------------------
@given(
    **blocks,
    **options,
    extra=st.integers(0, 9),
    order=st.sampled_from(["gain", "margin"]),
    cost=st.sampled_from(["free", "rows", "curve"]),
    cut=st.booleans(),
)
@example(  # slots that a cut leaves unused are no room for branches
    seed=0, S=4, V=3, pooled=False, correctors=0, threshold=1.0, scale=0.5, b_min=2, b_max=2, repairs=1, suffix="head",
    extra=1, order="gain", cost="free", cut=True,
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_tree_equals_the_oracle(seed, S, V, pooled, correctors, extra, order, cost, cut, **chosen):
    """38, 39, 42: float64, node for node and in the same order; branch 0 first, within V_max, no duplicate siblings."""
    block, stack, pool = scene(seed, S, V, pooled, correctors)
    g = generator(seed)
    curve = (1 + torch.rand(S + 11, generator=g).cumsum(0)).tolist() if cost == "curve" else cost
    head = CURE(nodes=S + extra, order=order, cost=curve, overhead=[None, 0.0, 3.0][seed % 3], **chosen)
    keep = torch.rand(2, S, generator=g) < 0.8 if cut else None
    tree = expand(head, block, stack, pool, keep=keep)
    check(tree)
    assert tree.size <= 1 + head.budget(S) and tree.height <= S
    tokens = walk(block, stack, pool)[0].tolist()
    for row in range(2):
        kept = S if keep is None else ([*keep[row].tolist(), False]).index(False)
        expected = oracle(head, block, stack, pool, row, kept)
        assert paths(tree, row) == list(expected)
        assert paths(tree, row)[:kept] == [tuple(tokens[row][: i + 1]) for i in range(kept)]


@given(**blocks, **options, extra=st.integers(1, 9))
@example(  # fewer candidates than b_max: the best comes again at the end of a list, with its probability
    seed=1396, S=5, V=6, pooled=False, correctors=0, threshold=0.3, scale=0.5, b_min=1, b_max=5, repairs=1,
    suffix="head", extra=7,
)  # fmt: skip
@settings(deadline=None, max_examples=30)
def test_tree_equals_the_oracle_with_ties_and_excluded_tokens(seed, S, V, pooled, correctors, extra, **chosen):
    """Equal margins go to the earlier slot, equal scores to the first; what has no probability is never proposed."""
    block, _, pool = scene(seed, S, V, pooled, 0, ties=True)
    if pool is None:  # a whole vocabulary leaves the order of equals behind the first open
        block.logits = block.logits + torch.arange(V) / 100
    else:  # whole numbers, so that equal margins are equal
        pool.log_probs = block.logits.gather(-1, pool.ids) - 8
    chosen |= {"threshold": chosen["threshold"] + 0.17, "scale": chosen["scale"] + 0.13}  # no decision on a rounding
    head = CURE(nodes=S + extra, order="margin", cost="free", **chosen)
    tree = expand(head, block, [], pool)
    check(tree)
    for row in range(2):
        assert paths(tree, row) == list(oracle(head, block, [], pool, row))
        for path in paths(tree, row):
            assert block.logits[row, len(path) - 1, path[-1]] > -math.inf


@given(
    **blocks,
    identity=st.sampled_from([{"nodes": 0}, {"threshold": 0.0}, {"threshold": -1.0}, {"b_max": 1}, {"repairs": 0}]),
)
@settings(deadline=None, max_examples=20)
def test_no_budget_is_the_chain_bit_for_bit(seed, S, V, pooled, correctors, identity):
    """37: V_max = S, tau <= 0, only the native token, or no repair."""
    block, stack, pool = scene(seed, S, V, pooled, correctors)
    if "nodes" in identity:
        identity = {"nodes": S}
    tree = expand(CURE(**({"threshold": 9.0, "cost": "free"} | identity)), block, stack, pool)
    plain = chain(block.anchor_ids, walk(block, stack, pool)[0])
    assert tree.height == plain.height
    for name in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(tree, name), getattr(plain, name))


def test_a_pool_of_one_leaves_nothing_to_try():
    block, _, _ = scene(0, 3, 5, False, 0)
    assert expand(CURE(**WIDE), block, [], make_pool(block.logits, 1)).size == 4


@given(**blocks, order=st.sampled_from(["gain", "margin"]), repairs=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_forks_are_the_smallest_margins_below_the_threshold(seed, S, V, pooled, correctors, order, repairs):
    """42, and in either order: only fragile slots are forked, at most ``repairs`` of them, each with b - 1 others."""
    block, stack, pool = scene(seed, S, V, pooled, correctors, B=1)
    head = CURE(nodes=99, order=order, repairs=repairs, threshold=1.5, scale=1.5, cost="free")
    found, tokens = paths(expand(head, block, stack, pool), 0), walk(block, stack, pool)[0][0].tolist()
    scores = walk(block, stack, pool)[2]["scores"]
    margins = [naive.margin(s[0].tolist()) for s in scores]
    forks: dict[int, int] = {}
    for path in found:
        if path[:-1] == tuple(tokens[: len(path) - 1]) and path[-1] != tokens[len(path) - 1]:
            forks[len(path) - 1] = forks.get(len(path) - 1, 0) + 1
    budget = [min(naive.branches(m, 1.5, 1, 5), len(scores[0][0])) - 1 if m < 1.5 else 0 for m in margins]
    able = [i for i in range(S) if budget[i] > 0]
    assert all(forks[i] == budget[i] for i in forks) and len(forks) == min(repairs, len(able))
    if order == "margin":
        assert set(forks) == set(sorted(able, key=lambda i: margins[i])[:repairs])


@given(**blocks)
@settings(deadline=None, max_examples=15)
def test_peeking_saves_work_and_changes_no_node(seed, S, V, pooled, correctors):
    block, stack, pool = scene(seed, S, V, pooled, correctors)
    for order in ("gain", "margin"):
        head = CURE(threshold=0.7, repairs=2, order=order)
        static, peeked = (expand(head, block, stack, pool, peek=peek) for peek in (False, True))
        assert [paths(static, row) for row in range(2)] == [paths(peeked, row) for row in range(2)]


def test_walking_on_sees_the_substituted_token_and_nothing_else_does():
    block, stack, pool = scene(3, 5, 7, False, 1)
    walked, reused, bare = (
        [paths(expand(CURE(suffix=suffix, nodes=30, **WIDE), block, c, pool), row) for row in range(2)]
        for suffix, c in (("head", stack), ("reuse", stack), ("head", []))
    )
    assert walked != reused and [p for row in walked for p in row if len(p) == 1] == [
        p for row in reused for p in row if len(p) == 1
    ]
    assert bare == [paths(expand(CURE(suffix="reuse", nodes=30, **WIDE), block, [], pool), row) for row in range(2)]


# --- cost ------------------------------------------------------------------------------------------------------------
@given(**blocks, kind=st.sampled_from(["rows", "measured"]), overhead=st.sampled_from([0.0, 5.0]))
@settings(deadline=None, max_examples=25)
def test_branches_never_lower_expected_tokens_per_cost(seed, S, V, pooled, correctors, kind, overhead):
    """(1 + Phi + delta) / (C_d + C_v) is the highest there is, whatever the curve; a flatter one adds no fewer."""
    block, stack, pool = scene(seed, S, V, pooled, correctors, B=1)
    rows = list(range(1, S + 10))
    curve = (
        [float(r) for r in rows]
        if kind == "rows"
        else (1 + torch.rand(len(rows), generator=generator(seed)).cumsum(0)).tolist()
    )
    setup = {"threshold": 3.0, "scale": 3.0, "nodes": S + 8}
    head = CURE(cost=kind if kind == "rows" else curve, overhead=overhead, **setup)
    found = list(oracle(CURE(cost="free", **setup), block, stack, pool, 0).items())
    kept = paths(expand(head, block, stack, pool), 0)
    assert kept == [path for path, _ in found[: len(kept)]]

    def rate(nodes: int) -> float:
        return (1 + sum(value for _, value in found[:nodes])) / (overhead + curve[nodes])

    assert rate(len(kept)) == pytest.approx(max(rate(n) for n in range(S, len(found) + 1)), rel=1e-12)
    flatter = CURE(cost=kind if kind == "rows" else curve, overhead=overhead + 20, **setup)
    assert len(paths(expand(flatter, block, stack, pool), 0)) >= len(kept)


def test_cost_curves_decide():
    block, stack, pool = scene(5, 4, 7, False, 1)

    def count(cost: Any) -> list[int]:
        tree = expand(CURE(nodes=10, threshold=9.0, scale=9.0, cost=cost), block, stack, pool)
        return tree.valid[:, 1:].sum(1).tolist()

    assert count("free") == count([1.0] * 11) == [10, 10]
    assert count([1.0] * 5 + [9.0] * 6) == [4, 4]  # a wall right behind the chain
    assert count([1.0] * 7 + [9.0] * 4) == [6, 6]  # room for two
    assert count([1.0] * 5 + [1.0001] * 6) == [10, 10]  # a step that is worth crossing
    with pytest.raises(InvalidInput, match="cost states 5 numbers of rows; a round verifies up to 11"):
        count([1.0] * 5)


# --- acceptance ------------------------------------------------------------------------------------------------------
small = {"seed": seeds, "V": st.integers(2, 4), "S": st.integers(1, 3), "correctors": st.integers(0, 1)}


@given(**small, order=st.sampled_from(["gain", "margin"]), suffix=st.sampled_from(["head", "reuse"]))
@settings(deadline=None, max_examples=25)
def test_a_block_accepts_no_less_than_its_chain(seed, V, S, correctors, order, suffix):
    """40: from the same state, at temperature 0."""
    block, stack, pool = scene(seed, S, V, False, correctors, B=1)
    table = Table(seed, V, S)
    tree = expand(CURE(order=order, suffix=suffix, nodes=S + 4, **WIDE), block, stack, pool)
    plain = chain(block.anchor_ids, walk(block, stack, pool)[0])
    counts = [int(target_first(tree_laws(table, t, 0).argmax(-1)[None], t).count) for t in (tree, plain)]
    assert counts[0] >= counts[1]


@given(**small, pooled=st.booleans(), law=st.sampled_from([None, Law(0.8, top_p=0.6), Law(1.0, top_k=2), Law(0.0)]))
@settings(deadline=None, max_examples=20)
def test_law_is_exact_and_a_node_accepts_the_sum_of_its_children(seed, V, S, correctors, pooled, law):
    """46 and 47, all draws enumerated: one draw a merged prefix, acceptance at the anchor is its children's p."""
    block, stack, pool = scene(seed, S, V, pooled, correctors, B=1)
    table = Table(seed, V, S, law)
    tree = expand(CURE(nodes=S + 3, repairs=2, **WIDE), block, stack, pool)
    committed = walk_tree(tree, 0, tree_laws(table, tree, 0))
    assert deviation(table, committed) < EXACT
    children = [int(t) for t, p in zip(tree.tokens[0], tree.parents[0], strict=True) if p == 0]
    p = table.after(torch.zeros(0, dtype=torch.long))
    accepted = sum(w for string, w in committed.items() if len(string) > 1)
    assert accepted == pytest.approx(float(p[children].sum()), abs=EXACT)


@pytest.mark.parametrize("kind", ["drelay", "published", "identity_safe"])
@given(seed=seeds, V=st.integers(3, 5), S=st.integers(1, 3))
@settings(deadline=None, max_examples=4)
def test_learned_heads_are_walked_on_behind_a_substituted_token(kind, seed, V, S):
    """DRelay and both kinds of LiLiCorr, forked: the oracle's tree, and the exact law."""
    block = telling_blocks(seed, 1, S, V)
    pool, stack = make_pool(block.logits, 3), [random_head(kind, seed, S, V)]
    cure = CURE(nodes=S + 4, repairs=2, **(WIDE | {"threshold": 99.0, "scale": 99.0}))
    tree = expand(cure, block, stack, pool)
    check(tree)
    assert paths(tree, 0) == list(oracle(cure, block, stack, pool, 0)) and tree.size > 1 + S
    table = Table(seed, V, S)
    assert deviation(table, walk_tree(tree, 0, tree_laws(table, tree, 0))) < EXACT


def test_a_path_that_is_there_twice_changes_no_law_while_separate_draws_do():
    """46: the control draws once for every path and keeps the longest, which is biased."""
    table, anchor = Table(4, 3, 2), torch.tensor([0])
    tree = chain(anchor, torch.tensor([[1, 2]]))
    twice = TokenTree(
        torch.tensor([[0, 1, 2, 1, 2]]), torch.tensor([[-1, 0, 1, 0, 3]]), torch.tensor([[0, 1, 2, 1, 2]]),
        torch.ones(1, 5, dtype=torch.bool), 2,
    )  # fmt: skip
    once = walk_tree(tree, 0, tree_laws(table, tree, 0))
    double = walk_tree(twice, 0, tree_laws(table, twice, 0))
    assert set(once) == set(double) and all(double[s] == pytest.approx(w, abs=EXACT) for s, w in once.items())
    longest: dict[tuple[int, ...], float] = {}
    for a, wa in once.items():
        for b, wb in once.items():
            kept = max(a, b, key=len)
            longest[kept] = longest.get(kept, 0.0) + wa * wb
    assert deviation(table, longest) > 0.01


# --- the loop --------------------------------------------------------------------------------------------------------
HEADS = ["none", "dels", "bigram", "pooled", "stack"]


def with_cure(target: Any, kind: str, seed: int, cure: CURE) -> list[Any]:
    return [heads_for(target, kind, seed), cure]


@given(
    seed=seeds,
    kind=st.sampled_from(["dflash", "domino", "dspark", "noisy", "knowing"]),
    head=st.sampled_from(HEADS),
    cure=st.sampled_from([CURE(), CURE(repairs=3, nodes=20, **WIDE), CURE(order="margin", suffix="reuse", **WIDE)]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(deadline=None, max_examples=10)
def test_output_is_the_targets(seed, kind, head, cure, temperature):
    """Greedy output at temperature 0, the baseline's very draws above; ragged rows, random weights."""
    target, rows = toy(), prompts(seed, [1, 6, 3])
    run = {"max_new_tokens": 8, "temperature": temperature, "seed": seed}
    expected = repairzoo.autoregressive(target, rows, **run).token_ids
    known = [p + e for p, e in zip(rows, expected, strict=True)]
    backbone = {
        "dflash": lambda: dflash(target, seed),
        "domino": lambda: domino(seed % 50),
        "dspark": lambda: dspark(seed % 50, "rnn"),
        "noisy": lambda: noisy(seed, 3),
        "knowing": lambda: knowing(known, 4, wrong=0.3, seed=seed),
    }[kind]()
    if kind == "dspark":
        backbone.confidence_threshold = [0.0, 0.3, 1.0][seed % 3]
    out = repairzoo.build(backbone, with_cure(target, head, seed, cure), target).generate(rows, **run)
    assert out.token_ids == expected
    assert [1 + sum(a) for a in out.stats.accepted] == [8] * 3


@pytest.mark.parametrize("head", ["none", "bigram", "pooled"])
def test_one_path_is_the_chain_down_to_the_counters(head):
    """45."""
    target, rows = toy(), prompts(7, [4, 2])
    expected = repairzoo.autoregressive(target, rows, max_new_tokens=10).token_ids
    backbone = knowing([p + e for p, e in zip(rows, expected, strict=True)], 4, wrong=0.4, seed=2)
    plain = repairzoo.build(backbone, heads_for(target, head), target).generate(rows, max_new_tokens=10)
    ours = repairzoo.build(backbone, with_cure(target, head, 0, CURE(nodes=4)), target).generate(
        rows, max_new_tokens=10
    )
    a, b = plain.stats.as_dict(), ours.stats.as_dict()
    assert ours.token_ids == plain.token_ids == expected
    assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


def unsure(text: list[int], slots: int, every: int) -> Scripted:
    """Knows the text; at every n-th position a wrong token is a little ahead of the right one."""
    known = torch.tensor(text + [0] * (2 * slots))
    steps = torch.arange(1, slots + 1)

    def logits(ids, positions):
        at = positions[:, None] + steps
        right = torch.nn.functional.one_hot(known[at], VOCAB).to(F64)
        wrong = torch.nn.functional.one_hot((known[at] + 1) % VOCAB, VOCAB).to(F64)
        return 12 * right + torch.where(at % every == 0, 12.2, 0.0)[..., None] * wrong

    return Scripted(slots, logits)


@pytest.mark.parametrize("order", ["gain", "margin"])
def test_repairs_are_made_accepted_and_counted(order):
    """A wrong token that was hardly better costs the rest of a chain, and CURE one branch."""
    target, prompt = toy(), prompts(5, [5])[0]
    expected = repairzoo.autoregressive(target, prompt, max_new_tokens=17).token_ids[0]
    backbone = unsure(prompt + expected, 4, every=3)
    plain = repairzoo.build(backbone, None, target).generate(prompt, max_new_tokens=17)
    fixed = repairzoo.build(backbone, CURE(order=order, cost="free"), target).generate(prompt, max_new_tokens=17)
    assert plain.token_ids == fixed.token_ids == [expected]
    s = fixed.stats
    assert s.tau > 1.3 * plain.stats.tau and s.repaired == [0]
    assert 0 < s.branches_accepted[0] <= s.rounds <= s.branches[0] <= s.branch_nodes[0]
    assert s.drafted[0] == s.branch_nodes[0] + 4 * s.rounds
    assert plain.stats.branches == plain.stats.branches_accepted == plain.stats.branch_nodes == [0]
    with_all_rows_counted = CURE(
        order=order, cost="rows", overhead=0.0
    )  # no second-best token is worth an average row here
    idle = repairzoo.build(backbone, with_all_rows_counted, target).generate(prompt, max_new_tokens=17)
    assert idle.stats.branch_nodes == [0] and idle.stats.tau == plain.stats.tau
    half = CURE(order=order, cost="rows")  # a row counts half of the average one: it still pays
    cheap = repairzoo.build(backbone, half, target).generate(prompt, max_new_tokens=17)
    assert plain.stats.tau < cheap.stats.tau and cheap.stats.branch_nodes[0] < s.branch_nodes[0]


def engine_with(target: Any, backbone: Any, heads: list[Any], law: Law, **more: Any) -> decode.Engine:
    zoo = repairzoo.build(backbone, heads, target)
    pool = 3 if any(isinstance(h, PooledBigram) for h in heads) else None
    return decode.Engine(target, zoo.backbone, zoo.heads, law, torch.zeros(0, dtype=torch.int64), pool=pool, **more)


def test_caches_follow_the_accepted_path():
    """43: after repaired blocks, both caches and the next draft are those of a fresh read of the committed tokens.

    Without it acceptance collapses (the paper's ablation: 6.8 to 4.1).
    """
    target, rows = toy(), prompts(2, [5, 3])
    every = CURE(threshold=99.0, scale=1e9, b_max=VOCAB, nodes=4 * VOCAB, suffix="reuse", cost="free")  # any token fits
    engine = engine_with(target, dflash(target, 2, block_size=5), [every], Law(0.0))
    state, left = decode.start(engine, rows, [40, 40], [0, 0]), 0
    for _ in range(4):
        out = decode.round(engine, state, state.ids.shape[1])
        on = out.branches.gather(1, out.path - 1 + (out.path == 0).long()) & (out.path > 0)
        left += int(on.any(1).sum())
    assert left > 0, "no block left branch 0, so nothing was tested"
    committed = [state.ids[i, : state.length[i] - 1].tolist() for i in range(2)]
    fresh = decode.start(engine, committed, [40, 40], [0, 0], capacity=state.ids.shape[1])
    assert torch.equal(fresh.length, state.length)
    for i in range(2):
        n = int(state.length[i])
        assert torch.equal(fresh.ids[i, :n], state.ids[i, :n])
    position = state.length - 1
    anchor = state.ids.gather(1, position[:, None])[:, 0]
    a, b = (engine.backbone.draft(s.context, anchor, position, s.ids.shape[1]) for s in (state, fresh))
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-9, atol=1e-9)
    tree, *_ = decode.propose(engine, a, state.seed)
    entries = position[:, None] + torch.arange(tree.size)
    logits = []
    for s in (state, fresh):
        mask = decode.verify_mask(tree, position, s.ids.shape[1])
        hidden, _ = target.forward(tree.tokens, position[:, None] + tree.depths, entries, mask, s.kv, ())
        logits.append(target.logits(hidden))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


@given(seed=seeds, threshold=st.sampled_from([0.0, 0.4, 0.7]), temperature=st.sampled_from([0.0, 1.0]))
@settings(deadline=None, max_examples=6)
def test_rows_that_are_not_verified_change_nothing(seed, threshold, temperature):
    """A mask and a shorter tensor are the same round, cut by confidence or not."""
    target, outs = toy(), []
    for trim in (False, True):
        heads = [Bigram(seed), CURE(threshold=0.6, repairs=2)]
        more = {"confidence": threshold, "trim": trim}
        engine = engine_with(target, dspark(seed % 50, "vanilla"), heads, Law(temperature), **more)
        state = decode.start(engine, prompts(seed, [5, 3]), [40, 40], [1, 2])
        for _ in range(3):
            out = decode.round(engine, state, state.ids.shape[1])
            names = ("count", "accepted", "drafted", "added")
            outs.append(
                [getattr(out, n).tolist() for n in names] + [out.repaired.sum(1).tolist(), out.branches.sum(1).tolist()]
            )
        outs.append([state.ids[i, : state.length[i]].tolist() for i in range(2)])
    assert outs[:4] == outs[4:]


def test_the_tree_does_not_see_the_targets_choices():
    """44: other verify logits, same tree."""
    target, rows, seen = toy(), prompts(2, [5, 3]), []

    def spoilt(factor: float) -> Any:
        def process(logits, state, tree):
            if tree.size > 1:
                seen.append(tree)
            return factor * logits

        return process

    outs = []
    for factor in (1.0, -1.0):
        heads = [Bigram(1), CURE(repairs=2, **WIDE)]
        engine = engine_with(target, noisy(3, 4), heads, Law(0.0), processor=spoilt(factor))
        state = decode.start(engine_with(target, noisy(3, 4), heads, Law(0.0)), rows, [40, 40], [0, 0])
        outs.append(decode.round(engine, state, state.ids.shape[1]).emitted)
    a, b = seen
    assert not torch.equal(*outs)
    assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "parents", "depths", "valid"))


# --- measured costs ---------------------------------------------------------------------------------------------------
def costs(monkeypatch: pytest.MonkeyPatch, curve: list[float], draft: float = 0.0) -> None:
    given_curve = CostCurve(tuple(range(1, len(curve) + 1)), tuple(curve), 8)
    monkeypatch.setattr("repairzoo.bench.cost_curve.round_costs", lambda *_: (given_curve, draft))


def test_costs_are_measured_before_the_first_run():
    """A cost that is left open is that of this target on this machine, taken once; a given one is left alone."""
    target, backbone = tiny(), dflash(tiny(), 2, block_size=4)
    zoo = repairzoo.build(backbone, CURE(), target)
    assert zoo.expander == CURE()
    zoo.generate([[1, 2, 3]], max_new_tokens=3)
    fitted = zoo.expander
    assert fitted is zoo.heads[-1] and fitted.overhead > 0
    assert len(fitted.cost) == 1 + fitted.budget(3) and all(a <= b for a, b in pairwise(fitted.cost))
    zoo.generate([[1, 2, 3]], max_new_tokens=3)
    assert zoo.expander is fitted
    given_cost = CURE(cost=[1.0] * 12)
    zoo = repairzoo.build(backbone, given_cost, target)
    zoo.generate([[1, 2, 3]], max_new_tokens=3)
    assert zoo.expander is given_cost


def test_default_costs_no_more_than_its_chain(monkeypatch):
    """Where each row costs a whole chain nothing is added, where rows are free the budget is used. A row's cost beyond
    the chain's counts a little more than it was measured, and noise that makes more rows cheaper counts nothing."""
    target = toy()
    backbone = dflash(target, 3, block_size=4)
    costs(monkeypatch, [1.0] * 4 + [4.0 * r for r in range(2, 10)])
    walled = CURE(**(WIDE | {"cost": "measured"})).fit(target, backbone)
    costs(monkeypatch, [1.0, 1.0, 1.0, 1.0] + [0.5] * 8)
    free = CURE(**(WIDE | {"cost": "measured"})).fit(target, backbone)
    assert set(free.cost) == {1.0}
    block, stack, pool = scene(5, 3, 7, False, 1)
    assert expand(walled, block, stack, pool).valid[:, 1:].sum(1).tolist() == [3, 3]
    full = expand(CURE(**WIDE), block, stack, pool).valid[:, 1:].sum(1).tolist()
    assert expand(free, block, stack, pool).valid[:, 1:].sum(1).tolist() == full and min(full) > 3
    costs(monkeypatch, [1.0, 1.0, 1.0, 2.0, 3.0] + [4.0] * 7, draft=0.5)
    fitted = CURE().fit(target, backbone)
    assert fitted.cost[:6] == (1.0, 1.0, 1.0, 2.0, 3.25, 4.5) and fitted.overhead == 0.5
    assert CURE(overhead=2.0).fit(target, backbone).overhead == 2.0


def test_budget_where_unused_rows_cost_too(monkeypatch):
    """An accelerator verifies masked rows as well: a budget that is left open ends where rows stop being free."""
    target = toy()
    backbone = dflash(target, 3, block_size=4)
    far = SimpleNamespace(device=torch.device("cuda"))
    costs(monkeypatch, [1.0] * 6 + [1.01] + [2.0] * 5)
    fitted = CURE().fit(far, backbone)
    assert fitted.nodes == 6 and len(fitted.cost) == 7
    costs(monkeypatch, [1.0] * 4 + [2.0] * 8)
    assert CURE().fit(far, backbone).budget(3) == 3
    assert CURE(nodes=9).fit(far, backbone).budget(3) == 9  # as it was asked for


# --- a second draft ---------------------------------------------------------------------------------------------------
def redrafted(kind: str, seed: int) -> Any:
    return {
        "dflash": lambda: dflash(toy(), seed),
        "domino": lambda: domino(seed % 50),
        "dspark": lambda: dspark(seed % 50, "rnn"),
    }[kind]()


@pytest.mark.parametrize("kind", ["dflash", "domino", "dspark"])
def test_redraft_is_a_draft_with_the_prefix_in_its_block(kind):
    """Behind a fork every branch is what the backbone drafts with the chain so far and the substituted token known."""
    target, backbone = toy(), redrafted(kind, 3)
    heads = [CURE(suffix="redraft", repairs=1, nodes=3 * backbone.slots, **WIDE)]
    engine = engine_with(target, backbone, heads, Law(0.0))
    state = decode.start(engine, prompts(3, [6, 4]), [20, 20], [0, 0])
    position = state.length - 1
    anchor = state.ids.gather(1, position[:, None])[:, 0]

    def draft(known: Any = None) -> DraftBlock:
        return backbone.draft(state.context, anchor, position, state.ids.shape[1], known=known)

    block = draft()
    tree, *_ = decode.propose(engine, block, state.seed)
    check(tree)
    native = [] if block.native is None else [block.native]
    own = walk(block, native, None)[0]
    plain = draft(torch.full_like(own, -1))
    assert torch.equal(plain.logits, block.logits)  # nothing known is the draft itself
    branches, S = 0, block.slots
    for row in range(2):
        for path in paths(tree, row):
            fork = next((i for i, t in enumerate(path) if t != int(own[row, i])), None)
            if fork is None or len(path) < S:
                continue
            known = torch.full_like(own, -1)
            known[row, : fork + 1] = torch.tensor(path[: fork + 1])
            again = draft(known)
            previous, stack = anchor[:, None], Stack(again, native, None)
            for slot in range(S):
                scores = stack.step(slot, previous, again.logits[:, slot, None])
                if slot > fork:
                    assert int(scores[row].argmax()) == path[slot]
                previous = torch.full_like(previous, path[slot])
            branches += 1
    assert branches > 0


@pytest.mark.parametrize("kind", ["dflash", "domino", "dspark"])
def test_redraft_changes_no_answer(kind):
    target, rows = toy(), prompts(4, [3, 5])
    head = CURE(suffix="redraft", repairs=2, **WIDE)
    for temperature in (0.0, 1.0):
        run = {"max_new_tokens": 9, "temperature": temperature, "seed": 3}
        out = repairzoo.build(redrafted(kind, 4), head, target).generate(rows, **run)
        assert out.token_ids == repairzoo.autoregressive(target, rows, **run).token_ids
        assert sum(out.stats.branches) > 0


# --- a static round --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cure", "head"),
    [
        (CURE(), "none"),
        (CURE(repairs=2, order="margin"), "pooled"),
        (CURE(cost=[float(r) ** 0.5 for r in range(1, 30)]), "stack"),
        (CURE(suffix="redraft", repairs=2), "pooled"),
    ],
)
def test_round_looks_at_no_value(cure, head):
    target = tiny()
    backbone = dflash(target, 2, block_size=3)
    backbone.pack = False
    engine = engine_with(target, backbone, with_cure(target, head, 0, cure), Law(1.3, top_k=9))
    without_values(engine, decode.start(engine, prompts(1, [5, 2]), [20, 20], [1, 2], capacity=40))


def test_round_traces_and_the_graph_serves_other_states():
    target = tiny()
    backbone = dflash(target, 2, block_size=4)
    backbone.pack = False
    engine = engine_with(target, backbone, with_cure(target, "pooled", 0, CURE(**WIDE)), Law(0.0))
    state = decode.start(engine, prompts(1, [5, 2]), [20, 20], [1, 2], capacity=40)
    graph = trace(engine, state)
    other = decode.start(engine, prompts(2, [3, 8]), [3, 20], [5, 6], capacity=40)
    for _ in range(2):
        replayed = flatten(restore(other, [t.clone() for t in flatten(other)]))
        got = graph(*replayed)
        out = decode.round(engine, other, BOUND)
        for name, tensor in zip(decode.RoundOutput.__dataclass_fields__, got, strict=True):
            assert torch.equal(tensor, getattr(out, name)), name


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "more", "words"),
    [
        ([CURE(), CURE()], {}, r"head cure\+cure: two expanders"),
        (["cure", Bigram(0)], {}, r"head cure\+Bigram: an expander .* comes last"),
        ("cure", {"tree": 5}, r"an expander makes the tree itself: use it without tree="),
        ("cure", {"proposal": "sampled"}, r"deterministically: use proposal='argmax'"),
        (CURE(suffix="redraft"), {}, r"suffix='redraft' asks Scripted to draft a partly known block"),
        (CURE(nodes=2), {}, r"cure: nodes=2, but branch 0 is always proposed and has 3"),
        ("cure+cure", {}, "two expanders"),
    ],
)
def test_what_means_nothing_is_refused_when_it_is_built(heads, more, words):
    with pytest.raises(InvalidInput, match=words):
        repairzoo.build(noisy(0, 3), heads, toy(), **more)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"suffix": "beam"}, "suffix='beam'"),
        ({"order": "best"}, "order='best'"),
        ({"threshold": math.inf}, "threshold=inf"),
        ({"scale": 0}, "scale=0"),
        ({"b_min": 0}, "b_min=0"),
        ({"b_min": 3, "b_max": 2}, "b_max=2"),
        ({"repairs": -1}, "repairs=-1"),
        ({"nodes": True}, "nodes=True"),
        ({"cost": "cheap"}, "cost='cheap'"),
        ({"cost": []}, "cost="),
        ({"cost": [1.0, 0.0]}, "cost="),
        ({"cost": 3.0}, "cost=3.0"),
        ({"overhead": -1}, "overhead=-1"),
        ({"overhead": math.nan}, "overhead=nan"),
    ],
)
def test_bad_options_are_named(wrong, words):
    with pytest.raises(InvalidInput, match=words):
        CURE(**wrong)


def test_a_head_without_weights_needs_no_folder(tmp_path):
    assert repairzoo.load_head("cure") == CURE()
    assert "cure" in repairzoo.list_heads() and repairzoo.info("cure")["weightless"] is True
    zoo = repairzoo.build(noisy(0, 3), [dels(toy()), "cure"], toy())
    assert zoo.heads[-1] == zoo.expander == CURE()
    text = registry_file().read_text(encoding="utf-8")
    bad = tmp_path / "registry.yaml"
    bad.write_text(text.replace("weightless: true", "weightless: 1"), encoding="utf-8")
    with pytest.raises(InvalidArtifact, match="'weightless' of head 'cure' must be true"):
        read_registry(bad)
    pair = "\n  - {backbone: dflash, head: cure, target: smollm2-135m, weights: {backbone: smollm2-135m}, licence: x}\n"
    bad.write_text(text.rstrip() + pair, encoding="utf-8")
    assert read_registry(bad).pair("dflash", "cure", "smollm2-135m").trained is None
