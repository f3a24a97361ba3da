"""The acceptance rules, against the exact law of one round.

No Monte Carlo: the result of a round is piecewise constant in every uniform number, with breaks where a cumulative sum
or p/q lies. One evaluation inside each piece, weighted by its length, gives the law of the committed tokens exactly.

Lemma A: a deterministic draft accepted iff it equals the target's draw is exact. B: min(1, p/q) with the residual
(p - q)+ is exact iff q is what was drawn from. C: one target draw per node of any tree, independent of it, is exact.
E: whether token i takes part may depend on tokens before it only.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from repairzoo.block import HISTORY, DraftBlock, make_pool
from repairzoo.sampling import Law, draw
from repairzoo.tree import TokenTree, chain, check, from_candidates
from repairzoo.verify import Acceptance, ratio, target_first
from repairzoo.walk import best_first, walk

GOLDEN = json.loads((Path(__file__).parent / "golden/equations/cases.json").read_text())
EXACT = 1e-12
F64 = torch.float64
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- a target over few tokens, known for every prefix ----------------------------------------------------------------


class Table:
    """p(next | prefix) for every prefix of up to S tokens over V; some entries are exactly 0."""

    def __init__(self, seed: int, V: int, S: int, law: Law | None = None):
        g = generator(seed)
        self.V, self.S, self.rows = V, S, []
        for depth in range(S + 1):
            if law is None:
                p = torch.rand(V**depth, V, generator=g, dtype=F64) ** 3 + 1e-3
                p = p * ((torch.rand(V**depth, V, generator=g) > 0.2) | (torch.arange(V) == depth % V))
            else:
                p = law.probs(3 * torch.randn(V**depth, V, generator=g, dtype=F64))
            self.rows.append(p / p.sum(-1, keepdim=True))

    def code(self, prefix: torch.Tensor) -> torch.Tensor:
        code = (
            torch.zeros_like(prefix[..., 0]) if prefix.shape[-1] else torch.zeros(prefix.shape[:-1], dtype=torch.long)
        )
        for i in range(prefix.shape[-1]):
            code = code * self.V + prefix[..., i]
        return code

    def after(self, prefix: torch.Tensor) -> torch.Tensor:
        """``[..., V]`` after prefixes ``[..., depth]``."""
        return self.rows[prefix.shape[-1]][self.code(prefix)]

    def along(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, S + 1, V]`` at the anchor and after every token of a chain."""
        return torch.stack([self.after(tokens[:, :i]) for i in range(tokens.shape[1] + 1)], 1)

    def strings(self, prefix: tuple[int, ...] = ()) -> torch.Tensor:
        """Law of the S + 1 tokens that autoregressive decoding gives, their beginning fixed: ``[V ** (S + 1)]``."""
        law, length = torch.ones(1, dtype=F64), 0
        strings = torch.zeros(1, 0, dtype=torch.long)
        while length <= self.S:
            step = self.after(strings)
            if length < len(prefix):
                step = torch.nn.functional.one_hot(torch.tensor(prefix[length]), self.V).to(F64).expand_as(step)
            law = (law[:, None] * step).flatten()
            strings = torch.cat(
                [strings.repeat_interleave(self.V, 0), torch.arange(self.V).repeat(len(strings))[:, None]], 1
            )
            length += 1
        return law


def committed_law(tree_tokens: torch.Tensor, result: Acceptance, weight: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Law of the committed string, bonus last."""
    along = tree_tokens.gather(1, result.path)
    law: dict[tuple[int, ...], float] = {}
    for row, count, bonus, w in zip(
        along.tolist(), result.count.tolist(), result.bonus.tolist(), weight.tolist(), strict=True
    ):
        string = (*row[1 : count + 1], bonus)
        law[string] = law.get(string, 0.0) + w
    return law


def deviation(table: Table, law: dict[tuple[int, ...], float]) -> float:
    """Total variation from the target over S + 1 tokens, what the round left open being decoded autoregressively.

    The next round starts from the committed string, so this is exactly what many rounds can show.
    """
    joint = sum(weight * table.strings(string) for string, weight in law.items())
    return 0.5 * (joint - table.strings()).abs().sum().item()


# --- pieces of uniform numbers ---------------------------------------------------------------------------------------


def pieces(breaks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Midpoints and lengths of [0, 1) cut at ``breaks [..., n]``: two tensors ``[..., n + 1]``."""
    edge = torch.zeros_like(breaks[..., :1])
    cuts = torch.cat([edge, breaks.clamp(0, 1), edge + 1], -1).sort(-1).values
    return (cuts[..., 1:] + cuts[..., :-1]) / 2, cuts[..., 1:] - cuts[..., :-1]


def cdf(p: torch.Tensor) -> torch.Tensor:
    p = p.double()
    return p.cumsum(-1) / p.sum(-1, keepdim=True)


def node_choices(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All draws at the nodes of one tree, ``p [M, V]``: choices ``[N, M]`` made by ``draw``, and weights ``[N]``."""
    u, length = pieces(cdf(p)[:, :-1])  # [M, V]
    each = [torch.arange(u.shape[1])] * len(p)
    index = torch.cartesian_prod(*each).reshape(-1, len(p))  # [N, M]
    weight = length.gather(1, index.T).prod(0)
    index, weight = index[weight > 0], weight[weight > 0]
    return draw(p.expand(len(index), *p.shape), u.gather(1, index.T).T), weight


def walk_tree(tree: TokenTree, row: int, p: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Exact law of the committed string of one row's tree with ``p [M, V]`` at its nodes."""
    choice, weight = node_choices(p)
    n = len(choice)
    fields = (getattr(tree, name)[row].expand(n, -1) for name in ("tokens", "parents", "depths", "valid"))
    wide = TokenTree(*fields, tree.height)
    return committed_law(wide.tokens, target_first(choice, wide), weight)


def tree_laws(table: Table, tree: TokenTree, row: int) -> torch.Tensor:
    """``[M, V]``: p after the path of every node; padding gets the anchor's."""
    strings: list[tuple[int, ...]] = []
    for m in range(tree.size):
        parent = int(tree.parents[row, m])
        strings.append(() if parent < 0 else (*strings[parent], int(tree.tokens[row, m])))
    return torch.stack([table.after(torch.tensor(s, dtype=torch.long)) for s in strings])


# --- drafts: a walk over random logits, corrected by what was chosen before ------------------------------------------


class Markov:
    def __init__(self, seed: int, V: int):
        self.table = 2 * torch.randn(V, V, generator=generator(seed), dtype=F64)

    def prepare(self, block, pool):
        B, S, V = block.logits.shape
        return torch.arange(V).expand(B, S, V) if pool is None else pool.ids

    def start(self, block):
        return None

    def step(self, prepared, carry, slot, previous, scores):
        ids = prepared[:, slot, None].expand(-1, previous.shape[1], -1)
        return scores + self.table[previous].gather(2, ids).to(scores.dtype), carry


def make_block(seed: int, B: int, S: int, V: int) -> DraftBlock:
    """``B`` equal rows."""
    logits = torch.randn(1, S, V, generator=generator(seed), dtype=F64).expand(B, S, V)
    nothing = torch.zeros(B, 1)
    return DraftBlock(
        hidden=nothing[:, None].expand(B, S, 1),
        logits=logits,
        anchor_ids=torch.zeros(B, dtype=torch.long),
        anchor_positions=torch.zeros(B, dtype=torch.long),
        context=nothing,
        history=torch.zeros(B, HISTORY, 1),
        history_mask=torch.zeros(B, HISTORY, dtype=torch.bool),
        embedding=torch.zeros(V, 1),
        output_weight=torch.zeros(V, 1),
    )


def sampled_walks(seed: int, S: int, V: int, pool_size: int | None, law: Law):
    """All drafts of a sampled walk: tokens ``[N, S]``, its own q ``[N, S, V]`` and weights ``[N]``."""
    u, weight = torch.full((1, S), 0.5, dtype=F64), torch.ones(1, dtype=F64)
    correctors = [Markov(seed + 1, V)]
    for slot in range(S + 1):
        block = make_block(seed, len(u), S, V)
        pool = make_pool(block.logits, pool_size) if pool_size else None
        tokens, q, _ = walk(block, correctors, pool, law=law, u=u)
        if slot == S:
            return tokens, q, weight
        middle, length = pieces(cdf(q[:, slot])[:, :-1])  # [N, V]
        u = u.repeat_interleave(V, 0)
        u[:, slot] = middle.flatten()
        weight = (weight[:, None] * length).flatten()
        u, weight = u[weight > 0], weight[weight > 0]


def ratio_law(p, q, tokens, weight, keep=None) -> dict[tuple[int, ...], float]:
    """Exact law of ``ratio`` over its own uniforms, for drafts ``tokens [N, S]`` of weight ``weight [N]``."""
    N, S = tokens.shape
    pn, qn = (x.double() / x.double().sum(-1, keepdim=True) for x in (p, q))
    bound = pn[:, :S].gather(2, tokens[..., None]) / qn.gather(2, tokens[..., None])  # [N, S, 1]
    u, length = pieces(bound)  # [N, S, 2]
    sides = torch.cartesian_prod(*[torch.arange(2)] * S).reshape(-1, S)  # [2^S, S]
    u = torch.stack([u[:, i, sides[:, i]] for i in range(S)], -1)  # [N, 2^S, S]
    weight = weight[:, None] * torch.stack([length[:, i, sides[:, i]] for i in range(S)], -1).prod(-1)
    # the last draw is from a row of p or from a residual: cut at the breaks of all of them
    residual = (pn[:, :S] - qn).clamp_min(0)
    breaks = torch.cat([cdf(pn), cdf(residual + (residual.sum(-1, keepdim=True) == 0))], 1).flatten(1)
    v, length = pieces(breaks)  # [N, R]
    A, R = len(sides), v.shape[1]
    weight = (weight[:, :, None] * length[:, None]).flatten()  # [N * 2^S * R]
    n = torch.arange(N).repeat_interleave(A * R)
    alive = weight > 0
    n, weight = n[alive], weight[alive]
    u = u[:, :, None].expand(N, A, R, S).reshape(-1, S)[alive]
    v = v[:, None].expand(N, A, R).flatten()[alive]
    result = ratio(p[n], q[n], tokens[n], None if keep is None else keep[n], u, v)
    return committed_law(torch.cat([tokens[:, :1], tokens], 1)[n], result, weight)


# --- golden values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["chain_ratio_rule"])
def test_golden_chain_ratio_rule(case):
    p, q = torch.tensor(case["p"], dtype=F64)[None], torch.tensor(case["q"], dtype=F64)[None]
    tokens = torch.tensor(case["drafted"])[None]
    law = ratio_law(p, q, tokens, torch.ones(1, dtype=F64))
    expected = {
        (*case["drafted"][:a], token): weight * mass
        for a, (weight, row) in enumerate(zip(case["p_accept_exactly"], case["next_token_law"], strict=True))
        for token, mass in enumerate(row)
        if weight * mass > 0
    }
    # a committed string tells how many were accepted: the residual gives no mass to the rejected token
    assert set(law) == set(expected)
    for string, mass in expected.items():
        assert law[string] == pytest.approx(mass, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("case", GOLDEN["tree_walk"])
def test_golden_tree_walk(case):
    tokens = torch.tensor([[0, *case["token"][1:]]])
    parents = torch.tensor([case["parent"]])
    depths = torch.zeros_like(parents)
    for m in range(1, parents.shape[1]):
        depths[0, m] = depths[0, parents[0, m]] + 1
    tree = TokenTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.bool))
    check(tree)
    law = walk_tree(tree, 0, torch.tensor(case["p"], dtype=F64))
    assert {",".join(map(str, string)) for string in law} == {s for s, mass in case["law"].items() if mass > 0}
    for string, mass in law.items():
        assert mass == pytest.approx(case["law"][",".join(map(str, string))], rel=EXACT, abs=EXACT)
    length = sum(mass * len(string) for string, mass in law.items())
    assert length == pytest.approx(case["expected_committed"], rel=EXACT)


# --- exact laws (Lemmas A, B, C, E) ----------------------------------------------------------------------------------

small = {"V": st.integers(2, 4), "S": st.integers(1, 3), "seed": seeds}
filtered = st.sampled_from([None, Law(1.0, top_k=2), Law(0.8, top_p=0.5), Law(0.0)])


@given(**small, pool=st.booleans(), law=filtered)
@settings(deadline=None, max_examples=30)
def test_argmax_chain_with_target_first_is_exact(seed, V, S, pool, law):
    """Lemma A, and pitfall z-lab#74: accept-if-equal is exact for a point mass. Pools may miss the argmax of p."""
    table = Table(seed, V, S, law)
    block = make_block(seed, 1, S, V)
    tokens, _, _ = walk(block, [Markov(seed, V)], make_pool(block.logits, 2) if pool else None)
    tree = chain(block.anchor_ids, tokens)
    assert deviation(table, walk_tree(tree, 0, tree_laws(table, tree, 0))) < EXACT


@given(**small, nodes=st.integers(1, 5), law=filtered)
@settings(deadline=None, max_examples=30)
def test_tree_with_target_first_is_exact(seed, V, S, nodes, law):
    """Lemma C, for trees with padding too; pitfall vllm#10198: what the processed law excludes is never committed."""
    table = Table(seed, V, S, law)
    block = make_block(seed, 1, S, V)
    tree = best_first(block, [Markov(seed, V)], make_pool(block.logits, 2), nodes)
    committed = walk_tree(tree, 0, tree_laws(table, tree, 0))
    assert deviation(table, committed) < EXACT
    for string in committed:
        for depth, token in enumerate(string):
            assert table.after(torch.tensor(string[:depth], dtype=torch.long))[token] > 0


def random_keep(seed: int, tokens: torch.Tensor, V: int) -> torch.Tensor:
    """A cut that looks at the tokens before the slot, and at nothing else."""
    g = generator(seed)
    columns, code = [], torch.zeros_like(tokens[:, 0])
    for i in range(tokens.shape[1]):
        columns.append((torch.rand(V**i, generator=g) < 0.7)[code])
        code = code * V + tokens[:, i]
    return torch.stack(columns, 1)


@given(
    **small,
    pool=st.booleans(),
    law=filtered,
    cut=st.booleans(),
    q_law=st.sampled_from([Law(1.0), Law(0.5, top_p=0.8), Law(0.0)]),
)
@settings(deadline=None, max_examples=40)
def test_sampled_chain_with_ratio_is_exact(seed, V, S, pool, law, cut, q_law):
    """Lemmas B and E; pitfalls transformers#47932 and vllm#10198: filtered p, pooled q, cuts that do not look ahead."""
    table = Table(seed, V, S, law)
    tokens, q, weight = sampled_walks(seed, S, V, 2 if pool else None, q_law)
    keep = random_keep(seed, tokens, V) if cut else None
    committed = ratio_law(table.along(tokens), q, tokens, weight, keep)
    assert deviation(table, committed) < EXACT
    if law is not None and law.greedy:  # pitfalls jaymody#9, litgpt: greedy whatever q was
        assert {t[0] for t in committed} == {int(table.after(torch.zeros(0, dtype=torch.long)).argmax())}


@given(**small, nodes=st.integers(1, 4))
@settings(deadline=None, max_examples=15)
def test_a_tree_sampled_from_its_own_stream_is_exact(seed, V, S, nodes):
    """Lemma C needs no q: any tree that the target's draws did not shape."""
    table, g = Table(seed, V, S), generator(seed)
    law: dict[tuple[int, ...], float] = {}
    for _ in range(3):
        block = make_block(int(torch.randint(1 << 30, (), generator=g)), 1, S, V)
        tree = best_first(block, [], None, nodes)
        for string, mass in walk_tree(tree, 0, tree_laws(table, tree, 0)).items():
            law[string] = law.get(string, 0.0) + mass / 3
    assert deviation(table, law) < EXACT


# --- what must fail --------------------------------------------------------------------------------------------------


def test_control_soft_q_with_argmax_drafts_is_biased():
    """The argmax was drafted, so q is a point mass; the backbone's soft marginal in its place is another law."""
    V, S = 4, 2
    worst = 0.0
    for seed in range(10):
        table, block = Table(seed, V, S), make_block(seed, 1, S, V)
        tokens, _, _ = walk(block, [], None)
        one = torch.ones(1, dtype=F64)
        soft, point = block.logits.softmax(-1), torch.nn.functional.one_hot(tokens, V).to(F64)
        worst = max(worst, deviation(table, ratio_law(table.along(tokens), soft, tokens, one)))
        assert deviation(table, ratio_law(table.along(tokens), point, tokens, one)) < EXACT
    assert worst > 0.2


def test_control_retrospective_cut_is_biased():
    """Pitfall DSpark confidence cut: p = (.7, .3), q = (.5, .5), cutting on the drawn token itself gives (.85, .15)."""
    p = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=F64).expand(2, 2, 2)
    q = torch.full((2, 1, 2), 0.5, dtype=F64)
    tokens, weight = torch.tensor([[0], [1]]), torch.full((2,), 0.5, dtype=F64)

    def first_token(keep):
        law = ratio_law(p, q, tokens, weight, keep)
        return [sum(mass for string, mass in law.items() if string[0] == t) for t in (0, 1)]

    assert first_token(torch.tensor([[True], [False]])) == pytest.approx([0.85, 0.15], abs=EXACT)
    assert first_token(torch.tensor([[False], [False]])) == pytest.approx([0.7, 0.3], abs=EXACT)
    assert first_token(None) == pytest.approx([0.7, 0.3], abs=EXACT)


def test_control_separate_draws_per_path_are_biased():
    """One draw per node; two chains judged by their own draws, the longer one kept, favour the drafted tokens."""
    table = Table(4, 3, 1)
    table.rows[0] = torch.tensor([[0.4, 0.35, 0.25]], dtype=F64)
    first, second = 0, 1
    anchor = torch.zeros(1, dtype=torch.long)
    laws = []
    for token in (first, second):
        tree = chain(anchor, torch.tensor([[token]]))
        laws.append(walk_tree(tree, 0, tree_laws(table, tree, 0)))
        assert deviation(table, laws[-1]) < EXACT  # each alone is exact
    best: dict[tuple[int, ...], float] = {}
    for (a, mass_a), (b, mass_b) in itertools.product(laws[0].items(), laws[1].items()):
        string = b if len(b) > len(a) else a
        best[string] = best.get(string, 0.0) + mass_a * mass_b
    assert sum(best.values()) == pytest.approx(1)
    assert deviation(table, best) > 0.05
    scores = torch.tensor([[-1.0, -2.0]])
    merged = from_candidates(anchor, [torch.tensor([[first, second]])], [torch.zeros(1, 2).long()], [scores], 2)
    assert deviation(table, walk_tree(merged, 0, tree_laws(table, merged, 0))) < EXACT


@pytest.mark.parametrize("shared", ["accept", "residual"])
def test_control_shared_noise_is_biased(shared):
    """Pitfall vllm#54282: one uniform draws the draft and judges it (or replaces it)."""
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], dtype=F64)
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=F64)
    residual = (p[:1] - q).clamp_min(0)
    breaks = torch.cat([cdf(q), cdf(residual), p[:1] / q, cdf(p)]).flatten()
    u, length = (x.flatten() for x in pieces(breaks[None]))
    n = len(u)
    draft = draw(q.expand(n, 4), u)[:, None]

    def bias(accept, replace, index, weight):
        size = len(index)
        drafts = draft[index]
        result = ratio(p.expand(size, 2, 4), q.expand(size, 1, 4), drafts, None, accept[:, None], replace)
        token = torch.where(result.count > 0, drafts[:, 0], result.bonus)
        law = torch.zeros(4, dtype=F64).index_add(0, token, weight)
        return 0.5 * (law - p[0]).abs().sum().item()

    i, j, k = torch.cartesian_prod(*[torch.arange(n)] * 3).T  # draft, accept, residual pieces
    assert bias(u[j], u[k], i, length[i] * length[j] * length[k]) < EXACT
    i, j = torch.cartesian_prod(*[torch.arange(n)] * 2).T
    args = (u[i], u[j]) if shared == "accept" else (u[j], u[i])
    assert bias(*args, i, length[i] * length[j]) > 0.05


def test_control_q_of_another_dtype_is_biased():
    """Pitfall DeepSpec#31: drawn in bfloat16, judged with the float32 q. The tensor that was drawn from is exact."""
    V, S = 4, 1
    worst = 0.0
    for seed in range(8):
        table = Table(seed, V, S)
        fine = torch.randn(1, S, V, generator=generator(seed)).softmax(-1)
        coarse = fine.bfloat16()
        tokens, weight = torch.arange(V)[:, None], coarse[0, 0].double()
        weight = weight / weight.sum()
        p = table.along(tokens)
        same = ratio_law(p, coarse.expand(V, S, V), tokens, weight)
        other = ratio_law(p, fine.expand(V, S, V), tokens, weight)
        assert deviation(table, same) < EXACT
        worst = max(worst, deviation(table, other))
    assert worst > 1e-4


# --- edges -----------------------------------------------------------------------------------------------------------


@given(seed=seeds, V=st.integers(2, 6), S=st.integers(1, 4), u0=st.sampled_from([0.0, 0.5, 1 - 2.0**-53]))
@settings(deadline=None, max_examples=60)
def test_ratio_never_accepts_what_the_target_excludes(seed, V, S, u0):
    """Invariant 4, pitfall vllm#10198: strict at u = 0, zero-mass rows without NaN, in float32."""
    g = generator(seed)
    law = Law(1.0, top_k=1 if V == 2 else 2)
    p = law.probs(torch.randn(3, S + 1, V, generator=g))
    q = torch.rand(3, S, V, generator=g).softmax(-1)
    tokens = p[:, :S].argmin(-1)  # always excluded
    u = torch.full((3, S), u0, dtype=F64)
    result = ratio(p, q, tokens, None, u, u[:, 0])
    assert not result.count.any() and not result.path.any()
    assert (p[:, 0].gather(1, result.bonus[:, None]) > 0).all()


@given(seed=seeds, V=st.integers(2, 6), S=st.integers(1, 4), u0=st.sampled_from([0.0, 0.5, 1 - 2.0**-53]))
@settings(deadline=None, max_examples=40)
def test_ratio_accepts_everything_when_p_equals_q(seed, V, S, u0):
    """Invariant 4: the residual has no mass, so the bonus comes from p."""
    p = torch.randn(2, S + 1, V, generator=generator(seed)).softmax(-1)
    tokens = p[:, :S].argmax(-1)
    u = torch.full((2, S), u0, dtype=F64)
    result = ratio(p, p[:, :S], tokens, None, u, u[:, 0])
    assert (result.count == S).all()
    assert torch.equal(result.path, torch.arange(S + 1).expand(2, -1))
    assert torch.equal(result.bonus, draw(p[:, S], u[:, 0]))


def test_a_cut_row_continues_from_p_and_a_rejected_one_from_the_residual():
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=F64).expand(2, 2, 2)
    q = torch.tensor([[[1.0, 0.0]]], dtype=F64).expand(2, 1, 2)
    tokens, keep = torch.zeros(2, 1, dtype=torch.long), torch.tensor([[True], [False]])
    result = ratio(p, q, tokens, keep, torch.full((2, 1), 0.9, dtype=F64), torch.full((2,), 0.1, dtype=F64))
    assert result.count.tolist() == [0, 0]
    assert result.bonus.tolist() == [1, 0]


def test_a_residual_without_mass_falls_back_to_p():
    """Invariant 4: p = q rejected by a rounding (forced here by u = 1); the token excluded by both must not appear."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    result = ratio(p, p[:, :1], torch.zeros(1, 1, dtype=torch.long), None, torch.ones(1, 1), torch.tensor([0.9]))
    assert result.count.tolist() == [0] and result.bonus.tolist() == [1]


@given(seed=seeds, S=st.integers(1, 4), nodes=st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_target_first_follows_the_greedy_string(seed, S, nodes):
    """Temperature 0: against a search over strings; a larger best-first tree never accepts less (invariant 40)."""
    V, B = 3, 3
    table = Table(seed, V, S)
    counts = []
    for budget in (nodes, nodes + 1):
        tree = best_first(make_block(seed, B, S, V), [Markov(seed, V)], None, budget)
        choice = torch.stack([tree_laws(table, tree, b).argmax(-1) for b in range(B)])
        result = target_first(choice, tree)
        strings = {(): 0}
        for m in range(1, tree.size):
            if tree.valid[0, m]:
                parent = next(s for s, node in strings.items() if node == int(tree.parents[0, m]))
                strings[(*parent, int(tree.tokens[0, m]))] = m
        greedy: tuple[int, ...] = ()
        for _ in range(S + 1):
            greedy += (int(table.after(torch.tensor(greedy, dtype=torch.long)).argmax()),)
        accepted = max(n for n in range(S + 1) if greedy[:n] in strings)
        path = [strings[greedy[: min(d, accepted)]] for d in range(tree.height + 1)]
        for b in range(B):
            assert int(result.count[b]) == accepted
            assert result.path[b].tolist() == path
            assert int(result.bonus[b]) == greedy[accepted]
        counts.append(accepted)
    assert counts[0] <= counts[1]


def test_target_first_descends_to_the_first_of_equal_siblings_and_never_into_padding():
    tokens = torch.tensor([[9, 1, 1, 2, 3], [9, 1, 4, 2, 3]])
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 0, 2, 2]])  # the padding node still names a parent
    depths = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 2, 2]])
    valid = torch.tensor([[True] * 5, [True, False, True, True, True]])
    result = target_first(
        torch.tensor([[1, 2, 3, 0, 0], [1, 2, 3, 0, 0]]), TokenTree(tokens, parents, depths, valid, 2)
    )
    assert result.count.tolist() == [2, 0]
    assert result.path.tolist() == [[0, 1, 3], [0, 0, 0]]
    assert result.bonus.tolist() == [0, 1]


@given(seed=seeds, S=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_point_mass_ratio_accepts_as_often_as_target_first(seed, S):
    """Lemma A, both ways: the same law of committed strings from either rule."""
    V = 3
    table, block = Table(seed, V, S), make_block(seed, 1, S, V)
    tokens, _, _ = walk(block, [Markov(seed, V)], None)
    tree = chain(block.anchor_ids, tokens)
    first = walk_tree(tree, 0, tree_laws(table, tree, 0))
    point = torch.nn.functional.one_hot(tokens, V).to(F64)
    second = ratio_law(table.along(tokens), point, tokens, torch.ones(1, dtype=F64))
    for string in set(first) | set(second):
        assert first.get(string, 0.0) == pytest.approx(second.get(string, 0.0), abs=EXACT)


@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_rows_of_a_batch_are_judged_alone(seed):
    g = generator(seed)
    B, S, V = 4, 3, 5
    p = torch.randn(B, S + 1, V, generator=g).softmax(-1)
    q = torch.randn(B, S, V, generator=g).softmax(-1)
    tokens, keep = torch.randint(V, (B, S), generator=g), torch.rand(B, S, generator=g) < 0.8
    u, v = torch.rand(B, S, generator=g, dtype=F64), torch.rand(B, generator=g, dtype=F64)
    together = ratio(p, q, tokens, keep, u, v)
    for b in range(B):
        alone = ratio(*(x[b : b + 1] for x in (p, q, tokens, keep, u, v)))
        for name in ("count", "path", "bonus"):
            assert torch.equal(getattr(together, name)[b], getattr(alone, name)[0])


def test_verification_traces_without_a_host_read():
    g = generator(0)
    B, S, V = 2, 3, 5
    p, q = torch.randn(B, S + 1, V, generator=g).softmax(-1), torch.randn(B, S, V, generator=g).softmax(-1)
    tokens, keep = torch.randint(V, (B, S), generator=g), torch.rand(B, S, generator=g) < 0.8
    u, v = torch.rand(B, S, generator=g, dtype=F64), torch.rand(B, generator=g, dtype=F64)

    def verify(p, q, tokens, keep, u, v):
        tree = chain(tokens[:, 0], tokens, keep)
        results = [ratio(p, q, tokens, keep, u, v), ratio(p, q, tokens, None, u, v), target_first(p.argmax(-1), tree)]
        return [x for r in results for x in (r.count, r.path, r.bonus)]

    args = (p, q, tokens, keep, u, v)
    traced = make_fx(verify, tracing_mode="fake")(*args)
    for got, expected in zip(traced(*args), verify(*args), strict=True):
        assert torch.equal(got, expected)
