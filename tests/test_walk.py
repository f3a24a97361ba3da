"""The walk through stacked correctors, as a chain and as a tree."""

import itertools
import operator
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from repairzoo.block import HISTORY, Corrector, DraftBlock, Pool, make_pool
from repairzoo.errors import InvalidInput
from repairzoo.sampling import Law, draw
from repairzoo.tree import ancestor_mask, chain, check
from repairzoo.walk import best_first, fork, walk

seeds = st.integers(0, 2**31)
Carry = namedtuple("Carry", ["state", "count"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_block(seed: int, B: int, S: int, V: int, dtype=torch.float64, ties: bool = False, D: int = 3) -> DraftBlock:
    g = generator(seed)
    logits = 2 * torch.randn(B, S, V, generator=g, dtype=dtype)
    return DraftBlock(
        hidden=torch.randn(B, S, D, generator=g),
        logits=logits.round() if ties else logits,
        anchor_ids=torch.randint(V, (B,), generator=g),
        anchor_positions=torch.randint(100, (B,), generator=g),
        context=torch.zeros(B, D),
        history=torch.zeros(B, HISTORY, D),
        history_mask=torch.zeros(B, HISTORY, dtype=torch.bool),
        embedding=torch.randn(V, D, generator=g),
        output_weight=torch.randn(V, D, generator=g),
    )


def rows(block: DraftBlock, index: torch.Tensor) -> DraftBlock:
    per_row = ("hidden", "logits", "anchor_ids", "anchor_positions", "context", "history", "history_mask")
    kept = {name: getattr(block, name)[index] for name in per_row}
    return DraftBlock(**kept, embedding=block.embedding, output_weight=block.output_weight)


class Markov:
    """First order: a table of (previous, next) is added to the scores."""

    def __init__(self, seed: int, V: int, scale: float = 1.0):
        self.table = scale * torch.randn(V, V, generator=generator(seed), dtype=torch.float64)

    def prepare(self, block, pool):
        B, S, V = block.logits.shape
        return torch.arange(V).expand(B, S, V) if pool is None else pool.ids

    def start(self, block):
        return None

    def step(self, prepared, carry, slot, previous, scores):
        ids = prepared[:, slot, None].expand(-1, previous.shape[1], -1)  # [B, W, K]
        return scores + self.table[previous].gather(2, ids).to(scores.dtype), carry


class Recurrent(Markov):
    """Infinite order: a decaying sum of the chosen tokens' rows; its carry is a nested pytree."""

    def start(self, block):
        B, _, V = block.logits.shape
        state = torch.zeros(B, 1, V, dtype=torch.float64)
        return Carry(state, {"count": [torch.zeros(B, 1, dtype=torch.long)]})

    def step(self, prepared, carry, slot, previous, scores):
        state = torch.tanh(0.7 * carry.state + self.table[previous])  # [B, W, V]
        count = carry.count["count"][0] + 1
        assert count.shape == previous.shape
        ids = prepared[:, slot, None].expand(-1, previous.shape[1], -1)
        scores = scores + (state.gather(2, ids) * count[..., None]).to(scores.dtype)
        return scores, Carry(state, {"count": [count]})


def stacks(V: int) -> dict[str, list]:
    return {
        "none": [],
        "markov": [Markov(1, V)],
        "recurrent": [Recurrent(2, V)],
        "stacked": [Recurrent(2, V), Markov(1, V)],
        "zero": [Markov(1, V, 0.0)],
    }


stack_names = st.sampled_from(sorted(stacks(1)))
pool_sizes = st.sampled_from([None, 1, 3])


def conditional(block: DraftBlock, correctors, pool: Pool | None, prefix: tuple[int, ...]) -> torch.Tensor:
    """Scores after ``prefix`` for a block of one row, replayed from the start with a single prefix."""
    carries = [c.start(block) for c in correctors]
    prepared = [c.prepare(block, pool) for c in correctors]
    base = block.logits if pool is None else pool.log_probs
    for slot, previous in enumerate([int(block.anchor_ids), *prefix]):
        scores = base[:, slot : slot + 1]
        for i, corrector in enumerate(correctors):
            previous_token = torch.tensor([[previous]])
            scores, carries[i] = corrector.step(prepared[i], carries[i], slot, previous_token, scores)
    return scores[0, 0]


def ids_of(pool: Pool | None, slot: int, V: int) -> torch.Tensor:
    return torch.arange(V) if pool is None else pool.ids[0, slot]


def test_the_test_correctors_keep_the_protocol():
    assert isinstance(Markov(0, 4), Corrector) and isinstance(Recurrent(0, 4), Corrector)


@given(seed=seeds, stack=stack_names, size=pool_sizes, S=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_walk_takes_the_best_score_slot_by_slot(seed, stack, size, S):
    V = 6
    block = make_block(seed, 3, S, V)
    correctors = stacks(V)[stack]
    tokens, q, diagnostics = walk(block, correctors, make_pool(block.logits, size) if size else None)
    assert q is None and tokens.dtype == torch.int64
    for b in range(3):
        one = rows(block, torch.tensor([b]))  # alone in its batch: rows do not see each other
        pool = make_pool(one.logits, size) if size else None
        prefix: tuple[int, ...] = ()
        for slot in range(S):
            scores = conditional(one, correctors, pool, prefix)
            assert torch.allclose(diagnostics["scores"][slot][b], scores)
            assert int(diagnostics["rank"][b, slot]) == int(scores.argmax())
            prefix += (int(ids_of(pool, slot, V)[scores.argmax()]),)
        assert tokens[b].tolist() == list(prefix)


@given(
    seed=seeds,
    size=st.sampled_from([None, 1, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    zero=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_identity_is_bit_exact_with_ties(seed, size, dtype, zero):
    """Invariants 5 and 6: no corrector, or one that adds zero, gives the backbone's own argmax, first of equals."""
    block = make_block(seed, 2, 5, 9, torch.float32, ties=True)
    block.logits = block.logits.to(dtype)
    pool = make_pool(block.logits, size) if size else None
    tokens, _, diagnostics = walk(block, stacks(9)["zero"] if zero else [], pool)
    assert torch.equal(tokens, block.logits.argmax(-1))
    assert pool is None or not diagnostics["rank"].any()


@given(seed=seeds, stack=stack_names, slot=st.integers(1, 3), sampled=st.booleans())
@settings(deadline=None, max_examples=25)
def test_a_slot_never_sees_later_slots(seed, stack, slot, sampled):
    """Invariants 13, 25 and 33: corrupt everything from ``slot`` on; earlier tokens and laws stay bit for bit."""
    V, S = 6, 4
    block, other = make_block(seed, 2, S, V), make_block(seed, 2, S, V)
    noise = make_block(seed + 1, 2, S, V)
    other.logits[:, slot:], other.hidden[:, slot:] = noise.logits[:, slot:], noise.hidden[:, slot:]
    u = torch.rand(2, S, generator=generator(seed), dtype=torch.float64) if sampled else None
    v = None if u is None else torch.cat([u[:, :slot], 1 - u[:, slot:]], 1)
    a, qa, _ = walk(block, stacks(V)[stack], make_pool(block.logits, 3), u=u)
    b, qb, _ = walk(other, stacks(V)[stack], make_pool(other.logits, 3), u=v)
    assert torch.equal(a[:, :slot], b[:, :slot])
    assert u is None or torch.equal(qa[:, :slot], qb[:, :slot])


@given(seed=seeds, stack=stack_names, size=pool_sizes, dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=25)
def test_sampled_walk_reports_the_law_it_drew_from(seed, stack, size, dtype):
    """Pitfalls transformers#47932 and DeepSpec#31; invariant 3: q redraws the same tokens and is the processed law."""
    V, S, B = 6, 3, 2
    block = make_block(seed, B, S, V, dtype)
    pool = make_pool(block.logits, size) if size else None
    if pool is not None:
        pool.log_probs = pool.log_probs.to(dtype)
    law = Law(0.7, top_p=0.95)
    u = torch.rand(B, S, generator=generator(seed), dtype=torch.float64)
    tokens, q, diagnostics = walk(block, stacks(V)[stack], pool, law=law, u=u)
    assert q.shape == (B, S, V) and q.dtype == dtype
    assert torch.equal(draw(q, u), tokens)
    assert torch.allclose(q.sum(-1), torch.ones(B, S, dtype=dtype))
    for slot in range(S):
        p = law.probs(diagnostics["scores"][slot])
        if pool is None:
            assert torch.equal(q[:, slot], p)
        else:
            assert torch.equal(q[:, slot].gather(1, pool.ids[:, slot]), p)
            off = torch.ones(B, V, dtype=torch.bool).scatter(1, pool.ids[:, slot], False)
            assert not q[:, slot][off].any()
            assert torch.equal(pool.ids[:, slot].gather(1, diagnostics["rank"][:, slot, None])[:, 0], tokens[:, slot])
    greedy, one_hot, _ = walk(block, stacks(V)[stack], pool, law=Law(0.0), u=u)
    assert torch.equal(greedy, walk(block, stacks(V)[stack], pool)[0])
    assert torch.equal(one_hot, torch.nn.functional.one_hot(greedy, V).to(dtype))


def all_prefixes(block, correctors, pool, V):
    """Every prefix of a one-row block with its cumulative log-probability, by replaying each one alone."""
    found = {(): 0.0}
    for slot in range(block.slots):
        ids = ids_of(pool, slot, V)
        mass = 0.0 if pool is None else min(0.0, pool.log_probs[0, slot].logsumexp(-1).item())
        for prefix in [p for p in found if len(p) == slot]:
            log_probs = conditional(block, correctors, pool, prefix).log_softmax(-1)
            for rank, token in enumerate(ids.tolist()):
                found[(*prefix, token)] = found[prefix] + log_probs[rank].item() + mass
    del found[()]
    return found


def paths(tree, b: int) -> list[tuple[int, ...]]:
    """The token string of every valid node below the anchor."""
    out: list[tuple[int, ...]] = [()]
    for m in range(1, tree.size):
        if tree.valid[b, m]:
            out.append((*out[int(tree.parents[b, m])], int(tree.tokens[b, m])))
    return out[1:]


@given(seed=seeds, stack=stack_names, size=pool_sizes, S=st.integers(1, 3), nodes=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_best_first_equals_brute_force_over_all_prefixes(seed, stack, size, S, nodes):
    """Carries forked with their prefixes, pool mass in the scores, ancestor closure, budget (invariants 38 and 39)."""
    V, B = 4, 2
    block = make_block(seed, B, S, V)
    correctors = stacks(V)[stack]
    pool = make_pool(block.logits, size) if size else None
    tree = best_first(block, correctors, pool, nodes)
    check(tree)
    assert tree.tokens.shape == (B, nodes + 1) and tree.height == min(S, nodes)
    assert torch.equal(tree.tokens[:, 0], block.anchor_ids)
    for b in range(B):
        one = rows(block, torch.tensor([b]))
        everything = all_prefixes(one, correctors, make_pool(one.logits, size) if size else None, V)
        got = paths(tree, b)
        assert len(got) == len(set(got)) == min(nodes, len(everything))
        best = sorted(everything.values(), reverse=True)[: len(got)]
        # a pool is float32; its equal-mass prefixes may swap, their scores may not
        assert torch.allclose(torch.tensor([everything[p] for p in got]), torch.tensor(best), atol=1e-5)


@given(seed=seeds, stack=stack_names, size=pool_sizes, nodes=st.integers(1, 6), ties=st.booleans())
@settings(deadline=None, max_examples=25)
def test_a_tree_of_width_one_is_the_chain(seed, stack, size, nodes, ties):
    """Invariants 37 and 45: one path, the walk's own, byte for byte; surplus budget is padding."""
    V, S, B = 6, 3, 2
    block = make_block(seed, B, S, V, torch.float32, ties)
    pool = make_pool(block.logits, size) if size else None
    tree = best_first(block, stacks(V)[stack], pool, nodes, width=1)
    check(tree)
    n = min(nodes, S)
    expected = chain(block.anchor_ids, walk(block, stacks(V)[stack], pool)[0][:, :n])
    for name in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(tree, name)[:, : n + 1], getattr(expected, name))
    assert not tree.valid[:, n + 1 :].any()
    assert torch.equal(ancestor_mask(tree)[:, : n + 1, : n + 1], ancestor_mask(expected))


@given(seed=seeds, branch=st.integers(1, 3), width=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_width_and_branch_bound_the_tree(seed, branch, width):
    block = make_block(seed, 2, 3, 6)
    tree = best_first(block, stacks(6)["stacked"], make_pool(block.logits, 4), 12, width, branch)
    check(tree)
    for b, depth in itertools.product(range(2), range(1, 4)):
        assert int(((tree.depths[b] == depth) & tree.valid[b]).sum()) <= width
    assert max(int((tree.parents == m).sum(1).max()) for m in range(tree.size)) <= branch


def test_a_pool_that_misses_mass_makes_its_slot_less_certain():
    """Slot 1's pool holds half of its mass: a second try at slot 0 (.4) beats the child (.6 x .45), not .6 x .83."""
    block = make_block(0, 1, 2, 8)
    block.logits[0, 0] = torch.tensor([0.6, 0.4, *[1e-9] * 6], dtype=torch.float64).log()
    block.logits[0, 1] = torch.tensor([0.45, *[0.55 / 7] * 7], dtype=torch.float64).log()
    assert paths(best_first(block, stacks(8)["zero"], make_pool(block.logits, 2), 2), 0) == [(0,), (1,)]


@pytest.mark.parametrize("token", range(5))
def test_excluded_tokens_do_not_return_as_twin_siblings(token):
    """Fewer finite scores than the budget: topk may repeat the best token, and a twin would be drafted twice."""
    block = make_block(0, 1, 2, 5)
    block.logits[:] = float("-inf")
    block.logits[..., token] = 0.0
    tree = best_first(block, [], None, 4)
    check(tree)
    assert paths(tree, 0) == [(token,), (token, token)]


@pytest.mark.parametrize("name", ["nodes", "width", "branch"])
def test_an_empty_budget_is_named(name):
    with pytest.raises(InvalidInput, match=f"^{name}=0"):
        best_first(make_block(0, 1, 2, 4), [], None, **{"nodes": 2, name: 0})


def test_fork_gathers_every_leaf_and_keeps_the_containers():
    g = generator(5)
    index = torch.tensor([[2, 0, 2, 1], [1, 1, 0, 2]])
    leaf = [torch.randn(2, 3, *shape, generator=g) for shape in ((), (4,), (4, 2))]
    forked = fork({"a": (leaf[0], None), "b": [Carry(leaf[1], leaf[2])]}, index)
    assert isinstance(forked["b"][0], Carry) and isinstance(forked["a"], tuple) and forked["a"][1] is None
    for got, before in zip((forked["a"][0], *forked["b"][0]), leaf, strict=True):
        for b, w in itertools.product(range(2), range(4)):
            assert torch.equal(got[b, w], before[b, index[b, w]])
    with pytest.raises(TypeError, match="set"):
        fork({1, 2}, index)


@pytest.mark.parametrize("stack", ["none", "stacked"])
@pytest.mark.parametrize("size", [None, 3])
def test_walks_trace_without_a_host_read(stack, size):
    block = make_block(1, 2, 3, 6)
    u = torch.rand(2, 3, generator=generator(1), dtype=torch.float64)

    def run(logits, anchor_ids, u, *tables):
        other = rows(block, torch.arange(2))
        other.logits, other.anchor_ids = logits, anchor_ids
        correctors = stacks(6)[stack]
        for corrector, table in zip(correctors, tables, strict=True):
            corrector.table = table  # a constant would not be traced
        pool = make_pool(logits, size) if size else None
        tree = best_first(other, correctors, pool, 7)
        sampled, q, _ = walk(other, correctors, pool, law=Law(0.8), u=u)
        return walk(other, correctors, pool)[0], sampled, q, tree.tokens, tree.parents, tree.depths, tree.valid

    args = (block.logits, block.anchor_ids, u, *(c.table for c in stacks(6)[stack]))
    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    for got, expected in zip(traced(*args), run(*args), strict=True):
        assert torch.equal(got, expected)


def test_without_correctors_the_graph_does_not_grow_with_the_slots():
    """The plain backbone pays no loop over slots."""

    def size(S: int, sampled: bool) -> int:
        block = make_block(1, 2, S, 6)
        u = torch.rand(2, S, dtype=torch.float64)

        def run(logits, u):
            block.logits = logits
            tokens, q, _ = walk(block, [], None, u=u if sampled else None)
            return tokens, q

        nodes = make_fx(run)(block.logits, u).graph.nodes
        # the diagnostics hold one view per slot, which is no kernel
        return len([n for n in nodes if n.op == "call_function" and n.target is not operator.getitem])

    assert size(2, False) == size(9, False)
    assert size(2, True) == size(9, True)


@settings(max_examples=30, deadline=None)
@given(
    seed=seeds, size=st.integers(1, 3), levels=st.sampled_from([1, 3, 10**6]), excluded=st.sampled_from([0.0, 0.999])
)
def test_pool_of_a_large_vocabulary_is_that_of_a_sort(seed, size, levels, excluded):
    """Few blocks of it are looked at closely; candidate 0 is the first of equals, no token comes twice."""
    g = generator(seed)
    logits = torch.randint(levels, (2, 2, 64 * 12 + 7), generator=g) / 64
    logits = logits.masked_fill(torch.rand(logits.shape, generator=g) < excluded, float("-inf"))
    logits[..., 3] = 0.0  # a row needs a finite logit
    pool = make_pool(logits, size)
    assert torch.equal(pool.ids[..., 0], logits.argmax(-1))
    assert all(len(set(ids)) == size for row in pool.ids.tolist() for ids in row)
    assert torch.equal(logits.gather(-1, pool.ids), logits.sort(dim=-1, descending=True).values[..., :size])
    torch.testing.assert_close(pool.log_probs, logits.log_softmax(-1).gather(-1, pool.ids))


def test_a_pool_holds_no_token_twice_even_among_excluded_ones():
    logits = torch.full((1, 1, 6), float("-inf"))
    logits[0, 0, 4] = 1.0
    pool = make_pool(logits, 6)
    assert pool.ids[0, 0, 0] == 4
    assert sorted(pool.ids[0, 0].tolist()) == list(range(6))
