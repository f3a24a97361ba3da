"""The token tree: its invariants, its mask, and the choice of its nodes."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from repairzoo.errors import InvalidInput
from repairzoo.tree import TokenTree, ancestor_mask, chain, check, from_candidates

seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(seed: int, B: int, M: int, V: int = 50, padded: bool = True) -> TokenTree:
    """Any valid tree: every node hangs from an earlier one, some nodes are padding, siblings differ."""
    g = generator(seed)
    tokens = torch.stack([torch.randperm(V, generator=g)[:M] for _ in range(B)])
    parents, depths = torch.full((B, M), -1), torch.zeros(B, M, dtype=torch.long)
    valid = torch.ones(B, M, dtype=torch.bool)
    for b in range(B):
        for m in range(1, M):
            if padded and torch.rand((), generator=g) < 0.2:
                valid[b, m] = False
                continue
            options = [i for i in range(m) if valid[b, i]]
            parent = options[int(torch.randint(len(options), (), generator=g))]
            parents[b, m], depths[b, m] = parent, depths[b, parent] + 1
    return TokenTree(tokens, parents, depths, valid)


def random_beams(seed: int, B: int, widths: list[int], ties: bool):
    """Per depth: siblings of different tokens, parents in the beam above, cumulative log-probabilities."""
    g = generator(seed)
    tokens, parents, scores, above = [], [], [], torch.zeros(B, 1)
    for width in widths:
        parent = torch.randint(above.shape[1], (B, width), generator=g)
        loss = torch.rand(B, width, generator=g)
        score = above.gather(1, parent) - ((loss * 3).floor() if ties else loss)
        tokens.append(torch.stack([torch.randperm(30, generator=g)[:width] for _ in range(B)]))
        parents.append(parent)
        scores.append(score)
        above = score
    return torch.full((B,), 31), tokens, parents, scores


@given(seed=seeds, S=st.integers(1, 8), B=st.integers(1, 3), cut=st.booleans())
@settings(deadline=None, max_examples=50)
def test_chain_is_the_unary_tree(seed, S, B, cut):
    g = generator(seed)
    anchor, tokens = torch.randint(9, (B,), generator=g), torch.randint(9, (B, S), generator=g)
    keep = torch.rand(B, S, generator=g) < 0.7 if cut else None
    tree = chain(anchor, tokens, keep)
    check(tree)
    for b in range(B):
        length = S if keep is None else ([*keep[b].tolist(), False]).index(False)  # what follows a cut is cut too
        assert tree.valid[b].tolist() == [m <= length for m in range(S + 1)]
        assert tree.tokens[b, : length + 1].tolist() == [int(anchor[b]), *tokens[b, :length].tolist()]
        assert tree.parents[b].tolist() == [m - 1 if m <= length else -1 for m in range(S + 1)]
        assert tree.depths[b].tolist() == [m if m <= length else 0 for m in range(S + 1)]
        causal = torch.eye(S + 1, dtype=torch.bool)
        causal[: length + 1, : length + 1] = torch.ones(length + 1, length + 1).tril().bool()
        assert torch.equal(ancestor_mask(tree)[b], causal)


@given(seed=seeds, M=st.integers(1, 20), B=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_ancestor_mask_equals_the_parent_pointers(seed, M, B):
    """sglang#29587: against an independent walk over parent pointers; deep and bushy trees, padding included."""
    tree = random_tree(seed, B, M)
    check(tree)
    tree.height = int(tree.depths.max())  # the tightest promise must still reach the root
    mask = ancestor_mask(tree)
    assert mask.dtype == torch.bool
    for b in range(B):
        for u in range(M):
            seen, node = {u}, int(tree.parents[b, u])
            while node >= 0:
                seen.add(node)
                node = int(tree.parents[b, node])
            assert set(mask[b, u].nonzero().flatten().tolist()) == seen


def heap_order(parents: list[list[int]], scores: list[list[float]], nodes: int) -> list[tuple[int, int]]:
    """Best-first by a heap, for one row: (depth, beam index) in the order in which they are taken."""

    def children(depth: int, index: int):
        if depth < len(parents):
            for child, parent in enumerate(parents[depth]):
                if depth == 0 or parent == index:
                    heapq.heappush(heap, (-scores[depth][child], depth + 1, child))

    heap, taken = [], []
    children(0, 0)
    while heap and len(taken) < nodes:
        _, depth, index = heapq.heappop(heap)
        taken.append((depth, index))
        children(depth, index)
    return taken


@given(
    seed=seeds,
    B=st.integers(1, 3),
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    nodes=st.integers(1, 14),
    ties=st.booleans(),
)
@settings(deadline=None, max_examples=120)
def test_from_candidates_equals_a_best_first_heap(seed, B, widths, nodes, ties):
    """Invariants 38 and 39: budget, ancestor closure, parents first; ties go to the shallower, then the lower index."""
    anchor, tokens, parents, scores = random_beams(seed, B, widths, ties)
    tree = from_candidates(anchor, tokens, parents, scores, nodes)
    check(tree)
    assert tree.tokens.shape == (B, nodes + 1)
    assert tree.height == min(len(widths), nodes)
    assert tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == torch.int64
    for b in range(B):
        order = heap_order([p[b].tolist() for p in parents], [s[b].tolist() for s in scores], nodes)
        assert int(tree.valid[b].sum()) == len(order) + 1 <= nodes + 1
        place = {(0, 0): 0}
        for node, (depth, index) in enumerate(order, start=1):
            place[depth, index] = node
            above = (depth - 1, int(parents[depth - 1][b, index]) if depth > 1 else 0)
            assert int(tree.tokens[b, node]) == int(tokens[depth - 1][b, index])
            assert int(tree.depths[b, node]) == depth
            assert int(tree.parents[b, node]) == place[above]


@given(seed=seeds, nodes=st.integers(1, 8), ties=st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_smaller_budget_is_a_prefix_of_a_larger_one(seed, nodes, ties):
    candidates = random_beams(seed, 2, [3, 4, 2], ties)
    small, large = (from_candidates(*candidates, n) for n in (nodes, nodes + 1))
    for name in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(small, name), getattr(large, name)[:, : nodes + 1])


def test_from_candidates_closes_over_ancestors_even_when_a_child_claims_more_mass():
    """Rounding, or a careless caller: the child is clamped to its parent, never orphaned."""
    anchor = torch.tensor([9])
    tokens = [torch.tensor([[1, 2]]), torch.tensor([[3]])]
    parents = [torch.tensor([[0, 0]]), torch.tensor([[1]])]
    tree = from_candidates(anchor, tokens, parents, [torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5]])], 2)
    check(tree)
    assert tree.tokens.tolist() == [[9, 1, 2]]


def test_impossible_candidates_become_padding():
    anchor = torch.tensor([9])
    tokens = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]])]
    parents = [torch.tensor([[0, 0]]), torch.tensor([[0, 1]])]
    scores = [torch.tensor([[-1.0, -torch.inf]]), torch.tensor([[-torch.inf, -3.0]])]
    tree = from_candidates(anchor, tokens, parents, scores, 6)
    check(tree)
    assert tree.valid.tolist() == [[True, True, False, False, False, False, False]]


def broken(**changes) -> TokenTree:
    """A sound little tree, 0 -> (1 -> 3, 2), and one padding node, with some places overwritten."""
    fields = {
        "tokens": torch.tensor([[7, 1, 2, 1, 0]]),
        "parents": torch.tensor([[-1, 0, 0, 1, -1]]),
        "depths": torch.tensor([[0, 1, 1, 2, 0]]),
        "valid": torch.tensor([[True, True, True, True, False]]),
    }
    for name, places in changes.items():
        for node, value in places.items():
            fields[name][0, node] = value
    return TokenTree(**fields)


def test_check_accepts_the_sound_tree():
    check(broken())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid": {0: False}}, "anchor"),
        ({"parents": {3: 3}}, "does not come before"),
        ({"parents": {3: -1}}, "does not come before"),
        ({"valid": {1: False}, "parents": {1: -1}, "depths": {1: 0}}, "parent 1 is padding"),
        ({"depths": {3: 1}}, "depth"),
        ({"tokens": {2: 1}}, "already a child"),
        ({"parents": {4: 2}}, "padding"),
    ],
)
def test_check_names_the_broken_invariant(changes, message):
    with pytest.raises(InvalidInput, match=message):
        check(broken(**changes))


def test_check_refuses_fields_of_another_shape():
    tree = broken()
    tree.depths = tree.depths[:, :3]
    with pytest.raises(InvalidInput, match="depths"):
        check(tree)


def test_trees_trace_without_a_host_read():
    anchor, tokens, parents, scores = random_beams(3, 2, [3, 4, 2], False)
    keep = torch.tensor([[True, False, True], [True, True, True]])

    def build(anchor, drafted, keep, *flat):
        n = len(flat) // 3
        a = chain(anchor, drafted, keep)
        b = from_candidates(anchor, flat[:n], flat[n : 2 * n], flat[2 * n :], 7)
        c = from_candidates(anchor, flat[:n], flat[n : 2 * n], flat[2 * n :], 12)
        return [x for t in (a, b, c) for x in (t.tokens, t.parents, t.depths, t.valid, ancestor_mask(t))]

    args = (anchor, tokens[0], keep, *tokens, *parents, *scores)
    traced = make_fx(build, tracing_mode="fake")(*args)
    for got, expected in zip(traced(*args), build(*args), strict=True):
        assert torch.equal(got, expected)
