"""DRelay against its equations (tests/golden/equations), its slow oracle, and the laws it promises.

Numbers in docstrings are the invariants of the project's list for DRelay (10 to 21) and those common to all heads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import Bigram, dflash, heads_for, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import repairzoo
from repairzoo.block import Corrector, DraftBlock, Pool, make_pool
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.heads.drelay import (
    DRelay,
    DRelayConfig,
    candidate_read,
    credit,
    credit_weights,
    loss_terms,
    naive,
    new_config,
    ramp,
    repaired_scores,
    selection,
)
from repairzoo.walk import best_first, walk

EQUATIONS = json.loads((Path(__file__).parent / "golden" / "equations" / "cases.json").read_text())
F64 = torch.float64
SEEDS = st.integers(0, 2**31)
quick = settings(max_examples=6, deadline=None)
V, D, S, K = 19, 6, 4, 4


# ---------------------------------------------------------------- helpers


def config(**options) -> DRelayConfig:
    return DRelayConfig(**{
        "block_size": S + 1, "pool_size": K, "hidden_size": D, "vocab_size": V, "padded_vocab_size": V,
        "target_id": "toy", "width": 8, "heads": 2, "ffn": 6, "residual": 5, "rank": 3, "gate": 7,
        "slot_layers": 1, "history": 8,
    } | options)  # fmt: skip


def random_head(seed: int, dtype: str = "float64", **options) -> DRelay:
    """A head with no zero weights."""
    head = DRelay(config(dtype=dtype, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=F64))
    return head.requires_grad_(False).eval()


def random_block(seed: int, rows: int = 2, slots: int = S, dtype=F64, scale: float = 1.0) -> DraftBlock:
    """Rounded logits, so that ties occur; row 0 has three verified features, row 1 none."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=F64).to(dtype)

    mask = torch.zeros(rows, 64, dtype=torch.bool)
    mask[0, -3:] = True
    history = normal(rows, 64, D)
    embedding = normal(V, D)
    return DraftBlock(
        hidden=normal(rows, slots, D),
        logits=(2 * normal(rows, slots, V)).round() * scale,
        anchor_ids=torch.randint(V, (rows,), generator=g),
        anchor_positions=torch.full((rows,), 3),
        context=history[:, -1] * mask[:, -1:],
        history=history.masked_fill(~mask[..., None], 0),
        history_mask=mask,
        embedding=embedding,
        output_weight=embedding,
    )


def exact_pool(block: DraftBlock, size: int = K) -> Pool:
    """A pool whose log-probabilities keep the logits' precision."""
    pool = make_pool(block.logits, size)
    return Pool(pool.ids, block.logits.log_softmax(-1).gather(-1, pool.ids))


def along(head: DRelay, block: DraftBlock, pool: Pool, ranks: Tensor, scores: Tensor | None = None, prepared=None):
    """Scores ``[B, S, K]`` along given ranks ``[B, S]``."""
    prepared = head.prepare(block, pool) if prepared is None else prepared
    carry, previous, out = head.start(block), block.anchor_ids[:, None], []
    scores = pool.log_probs if scores is None else scores
    for s in range(block.slots):
        new, carry = head.step(prepared, carry, s, previous, scores[:, None, s])
        previous = pool.ids[:, s].gather(1, ranks[:, s : s + 1])
        out.append(new)
    return torch.cat(out, 1)


def random_ranks(seed: int, size: int = K, slots: int = S) -> Tensor:
    return torch.randint(size, (2, slots), generator=torch.Generator().manual_seed(seed))


@quick
@given(seed=SEEDS, layers=st.integers(0, 2), history=st.sampled_from([0, 8]), slots=st.integers(1, S))
def test_tables_of_serving_change_nothing(seed, layers, history, slots):
    """What is multiplied out once for a vocabulary gives what ``encode`` computes for every block."""
    head, block = random_head(seed, slot_layers=layers, history=history), random_block(seed + 1, slots=slots)
    pool = exact_pool(block)
    served, encoded = head.prepare(block, pool), head.encode(block, pool)
    for name, a, b in zip(served._fields, served, encoded, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_tables_follow_weights_and_target(monkeypatch):
    """They are made once, anew when a weight or the embedding changes, and not at all where they are too large."""
    head, block = random_head(3), random_block(3)
    pool = exact_pool(block)
    head.bind(block.embedding, block.output_weight)
    made = head._served
    head.prepare(block, pool)
    assert made is not None and head._served is made
    head.prefix_token.weight.mul_(2)
    torch.testing.assert_close(head.prepare(block, pool).entry_token, head.encode(block, pool).entry_token)
    assert head._served is not made
    block.embedding = block.embedding.flip(0)
    torch.testing.assert_close(head.prepare(block, pool).static, head.encode(block, pool).static)
    monkeypatch.setattr("repairzoo.heads.drelay.head.TABLE_BYTES", 0)
    other = random_head(3)
    assert torch.equal(other.prepare(block, pool).last, other.encode(block, pool).last) and other._served is None


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


# ---------------------------------------------------------------- golden equations


def test_golden_gate():
    """Eq. 2 and 6, invariants 10 to 12: softmax of the scores is p_act, their argmax the decision, ties keep."""
    for case in EQUATIONS["drelay_gate"]:
        q = torch.tensor(case["q"], dtype=F64).log()
        score, delta = torch.tensor(case["score"], dtype=F64), torch.tensor(case["delta_g"], dtype=F64)
        if len(score) < len(q):  # only alternatives have a score
            score = torch.cat((q[:1], score))
        got = repaired_scores(q, score - q, delta, torch.tensor([0]))
        torch.testing.assert_close(got.softmax(-1), torch.tensor(case["p_act"], dtype=F64), atol=1e-12, rtol=1e-11)
        g, p_act, chosen = naive.gate(case["q"], score.tolist(), case["delta_g"])
        assert g == pytest.approx(case["gate"], rel=1e-12, abs=1e-12) and chosen == case["chosen"]
        assert p_act == pytest.approx(case["p_act"], rel=1e-11)
        if abs(g) > 1e-9:
            assert int(got.argmax()) == case["chosen"]


def test_golden_candidate_read():
    """Eq. 1: joint normalisation with a zero key and value, log q prior, bias by relative slot."""
    for case in EQUATIONS["drelay_candidate_read"]:
        q, k, v, prior = (torch.tensor(case[n], dtype=F64) for n in ("query", "key", "value", "prior"))
        bias = torch.tensor(case["bias_by_offset_from_minus_H_plus_1"], dtype=F64)
        read, null = candidate_read(q, k, v, prior.log(), bias)
        torch.testing.assert_close(read, torch.tensor(case["read"], dtype=F64), atol=1e-12, rtol=1e-12)
        assert ((null > 0) & (null < 1)).all()


def test_golden_credit():
    """Eq. 5, invariant 20: a miss has no credit and ends it."""
    for case in EQUATIONS["drelay_credit"]:
        p, covered = torch.tensor(case["p_act_of_label"], dtype=F64), torch.tensor(case["covered"])
        torch.testing.assert_close(credit(p, covered), torch.tensor(case["credit"], dtype=F64), atol=1e-12, rtol=1e-12)
        assert naive.credit(p.tolist(), covered.tolist()) == pytest.approx(case["credit"], rel=1e-12)


# ---------------------------------------------------------------- against the oracle


@quick
@given(
    seed=SEEDS,
    size=st.integers(2, K),
    slots=st.integers(1, S),
    layers=st.integers(0, 1),
    history=st.sampled_from([0, 2, 64]),
    scale=st.sampled_from([1.0, 1e3]),
    stacked=st.booleans(),
)
def test_step_equals_oracle(seed, size, slots, layers, history, scale, stacked):
    """Every shape, ties and extreme logits, blocks shorter than trained, incoming scores that differ from log q."""
    head = random_head(seed, slot_layers=layers, history=history)
    block = random_block(seed + 1, slots=slots, scale=scale)
    pool, ranks = exact_pool(block, size), random_ranks(seed, size, slots)
    incoming = pool.log_probs
    if stacked:
        incoming = incoming + torch.randn(incoming.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    got = along(head, block, pool, ranks, incoming)
    for b in range(2):
        want = naive.scores(
            head.config, head.state_dict(), block.embedding, pool.ids[b].tolist(), pool.log_probs[b], block.hidden[b],
            block.context[b], block.history[b], block.history_mask[b].tolist(), int(block.anchor_ids[b]),
            pool.ids[b].gather(-1, ranks[b, :, None])[:, 0].tolist(), incoming[b].tolist(),
        )  # fmt: skip
        torch.testing.assert_close(got[b], torch.tensor(want, dtype=F64), atol=1e-8, rtol=1e-8)


@quick
@given(seed=SEEDS)
def test_forced_scores_are_the_served_ones(seed):
    """Invariant 18: batched over all slots with labels as the prefix, equal to the walk along the same tokens."""
    head, block = random_head(seed), random_block(seed)
    pool, ranks = exact_pool(block), random_ranks(seed)
    labels = pool.ids.gather(-1, ranks[..., None])[..., 0]
    incoming = pool.log_probs + 0.3
    forced = head.forced(head.prepare(block, pool), labels, block.embedding, incoming)
    torch.testing.assert_close(forced, along(head, block, pool, ranks, incoming), atol=1e-10, rtol=1e-10)


def test_forced_prefix_may_leave_the_pool():
    """A label that the pool misses is a prefix of the slots after it all the same, as the oracle has it."""
    head, block = random_head(2), random_block(2)
    pool = exact_pool(block)
    missing = (torch.arange(V) != pool.ids[..., None, :].transpose(-1, -2)).all(-2).to(torch.uint8).argmax(-1)  # [B, S]
    forced = head.forced(head.prepare(block, pool), missing, block.embedding, pool.log_probs)
    for b in range(2):
        want = naive.scores(
            head.config, head.state_dict(), block.embedding, pool.ids[b].tolist(), pool.log_probs[b], block.hidden[b],
            block.context[b], block.history[b], block.history_mask[b].tolist(), int(block.anchor_ids[b]),
            missing[b].tolist(), pool.log_probs[b].tolist(),
        )  # fmt: skip
        torch.testing.assert_close(forced[b], torch.tensor(want, dtype=F64), atol=1e-8, rtol=1e-8)


# ---------------------------------------------------------------- invariants


@quick
@given(seed=SEEDS, k=st.integers(2, 6))
def test_gate_laws(seed, k):
    """Invariants 10 to 12, for any native candidate: argmax == gate rule, softmax == p_act, no delta == native law."""
    g = torch.Generator().manual_seed(seed)
    q, change, delta = (torch.randn(n, generator=g, dtype=F64) for n in (k, k, 1))
    native = int(q.argmax())
    order = [native, *(i for i in range(k) if i != native)]
    got = repaired_scores(q, change, delta[0], torch.tensor([native]))
    assert got[native] == q[native]
    _, p_act, chosen = naive.gate(q.exp()[order].tolist(), (q + change)[order].tolist(), float(delta))
    assert got.softmax(-1)[order].tolist() == pytest.approx(p_act, rel=1e-9)
    assert int(got.argmax()) == order[chosen]
    same = repaired_scores(q, torch.zeros_like(q), torch.zeros(()), torch.tensor([native]))
    torch.testing.assert_close(same.softmax(-1), q.softmax(-1))


def test_ties_keep_and_infinities_stay():
    """Invariant 10: g + log r = 0 keeps. Candidates that cannot be chosen (-inf) stay so, and nothing becomes NaN."""
    tie = torch.tensor([0.0, -1.0, -1.0], dtype=F64)
    assert int(repaired_scores(tie, torch.tensor([0.0, 1.0, 1.0], dtype=F64), torch.tensor(1.0, dtype=F64),
                               torch.tensor([0])).argmax()) == 0  # fmt: skip
    none = torch.tensor([-0.5, -math.inf, -math.inf])
    got = repaired_scores(none, torch.ones(3), torch.tensor(3.0), torch.tensor([0]))
    assert torch.equal(got, none)
    head, block = random_head(1, "float32"), random_block(1, dtype=torch.float32)
    pool = make_pool(block.logits, K)
    pool.log_probs[:, :, 2:] = -math.inf
    got = along(head, block, pool, torch.zeros(2, S, dtype=torch.int64))
    assert got[..., :2].isfinite().all() and got[..., 2:].isneginf().all()


@quick
@given(seed=SEEDS)
def test_new_head_is_no_head_bit_for_bit(seed):
    """Invariants 6 and 11: zero output layers return the very scores, whatever came before."""
    head, block = DRelay(config(), torch.Generator().manual_seed(seed)), random_block(seed, dtype=torch.float32)
    pool = make_pool(block.logits, K)
    scores = torch.randn(2, S, K, generator=torch.Generator().manual_seed(seed)) * 20
    scores[0, 0] = torch.tensor([-0.0, 0.0, -math.inf, 1e30])
    for incoming in (scores, pool.log_probs):
        got = along(head, block, pool, random_ranks(seed), incoming)
        assert torch.equal(bits(got), bits(incoming))


@quick
@given(seed=SEEDS)
def test_walk_is_causal_once_the_block_was_read(seed):
    """Invariants 13 and 14: entries of later slots, and of candidates that were not chosen, change nothing."""
    head, block = random_head(seed), random_block(seed)
    pool, ranks = exact_pool(block), random_ranks(seed)
    prepared = head.prepare(block, pool)
    want = along(head, block, pool, ranks, prepared=prepared)
    slot = 1 + seed % (S - 1)
    later = prepared._replace(
        entry_slot=prepared.entry_slot.clone(), entry_token=prepared.entry_token.clone(), query=prepared.query.clone()
    )
    later.entry_slot[:, slot:] += 5
    later.entry_token[:, slot:] += 5
    later.query[:, slot + 1 :] += 5
    assert torch.equal(along(head, block, pool, ranks, prepared=later)[:, : slot + 1], want[:, : slot + 1])
    chosen = torch.zeros(2, S, K, dtype=torch.bool).scatter(-1, ranks[..., None], True)
    unseen = prepared._replace(
        entry_token=prepared.entry_token.masked_fill(~chosen[..., None], math.nan),
        last=prepared.last.masked_fill(~chosen[..., None], math.nan),
    )
    assert torch.equal(along(head, block, pool, ranks, prepared=unseen), want)


def test_every_part_is_alive():
    """Invariant 13's counterpart: a later slot's hidden state (global read), an earlier choice (prefix), the history
    and the anchor feature each change some score."""
    head, ranks = random_head(3), torch.zeros(2, S, dtype=torch.int64)
    block = random_block(3)
    pool = exact_pool(block)
    want = along(head, block, pool, ranks)
    no_mixing = random_head(3, slot_layers=0)
    plain = along(no_mixing, block, pool, ranks)
    block.hidden[:, -1] += 1
    assert not torch.equal(along(head, block, pool, ranks)[:, 0], want[:, 0])
    assert not torch.equal(along(no_mixing, block, pool, ranks)[:, 0], plain[:, 0])
    block = random_block(3)
    other = ranks.clone()
    other[:, 0] = 1
    changed = (along(head, block, pool, other) != want).any(-1)
    assert not changed[:, 0].any() and changed[:, 1:].all()
    block.history[0, -1] += 1
    assert (along(head, block, pool, ranks) != want).any(-1)[0].all()
    block = random_block(3)
    block.context += 1
    assert (along(head, block, pool, ranks) != want).any()


def test_unverified_history_is_never_seen():
    """Invariant 15: rows that are masked, or older than the head reads, change nothing; row 1 has none at all."""
    head, block, ranks = random_head(4, history=2), random_block(4), random_ranks(4)
    pool = exact_pool(block)
    want = along(head, block, pool, ranks)
    block.history[0, :-2] = math.nan  # the third verified row is older than history = 2
    assert torch.equal(along(head, block, pool, ranks)[0], want[0])
    block = random_block(4)
    block.history[~block.history_mask] = 1e3
    torch.testing.assert_close(along(head, block, pool, ranks), want)
    assert want.isfinite().all()


@quick
@given(seed=SEEDS)
def test_no_rank_leaks(seed):
    """Invariant 16: permuting alternatives permutes their scores."""
    head, block = random_head(seed), random_block(seed)
    pool = exact_pool(block)
    order = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(K - 1)))
    other = Pool(pool.ids[..., order], pool.log_probs[..., order])
    ranks = torch.zeros(2, S, dtype=torch.int64)
    torch.testing.assert_close(
        along(head, block, other, ranks), along(head, block, pool, ranks)[..., order], atol=1e-9, rtol=1e-9
    )


def test_null_takes_all_when_nothing_is_likely():
    """Invariant 17: all real logits at minus infinity read 0."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    read, null = candidate_read(x, x, x, torch.full((2, 3), -math.inf), torch.zeros(3))
    assert (read == 0).all() and (null == 1).all()


@quick
@given(seed=SEEDS)
def test_prefixes_and_rows_are_independent(seed):
    """Invariant 6 for rows; W prefixes at once equal single ones, so the walk can be forked."""
    head, block = random_head(seed), random_block(seed)
    pool, paths = exact_pool(block), torch.stack([random_ranks(seed + w) for w in range(3)], 1)  # [B, 3, S]
    prepared, carry = head.prepare(block, pool), head.start(block).expand(-1, 3, -1)
    previous, got = block.anchor_ids[:, None].expand(-1, 3), []
    for s in range(S):
        new, carry = head.step(prepared, carry, s, previous, pool.log_probs[:, None, s].expand(-1, 3, -1))
        previous = pool.ids[:, s].gather(1, paths[:, :, s])
        got.append(new)
    for w in range(3):
        want = along(head, block, pool, paths[:, w])
        torch.testing.assert_close(torch.stack([x[:, w] for x in got], 1), want, atol=1e-10, rtol=1e-10)
    other = random_block(seed)
    other.hidden[1], other.logits[1], other.anchor_ids[1] = 1e3, -other.logits[1], 0
    torch.testing.assert_close(
        along(head, other, exact_pool(other), paths[:, 0])[0], along(head, block, pool, paths[:, 0])[0]
    )


# ---------------------------------------------------------------- training


@quick
@given(seed=SEEDS, slots=st.integers(1, 15))
def test_credit_is_the_derivative_of_the_accepted_length(seed, slots):
    """Invariant 20: finite differences of sum_t prod_{j<=t} s_j; weights have mean 1 and at most 4."""
    g = torch.Generator().manual_seed(seed)
    p, covered = torch.rand(slots, generator=g, dtype=F64), torch.rand(slots, generator=g) < 0.8
    survive = covered * (1 + p) / 2
    value = credit(p, covered)
    for i in range(slots):
        up, down = survive.clone(), survive.clone()
        up[i] += 1e-6
        down[i] -= 1e-6
        slope = (up.cumprod(0).sum() - down.cumprod(0).sum()) / 2e-6
        assert value[i].item() == pytest.approx(float(slope) * bool(covered[i]), abs=1e-6)
    missed = (~covered).nonzero()[:, 0]
    if len(missed):
        assert (value[missed[0] :] == 0).all()
    mask = torch.rand(slots, generator=g) < 0.9
    mask[0] = True
    weight = credit_weights(value, mask)
    assert weight[mask].mean().item() == pytest.approx(1) and weight.max() <= 4 + 1e-9 and (weight[~mask] == 0).all()
    assert weight[mask].min() > 0


def test_selection_loss_is_the_gates():
    """BCE(g, 0); BCE(g, 1) - log r_k; 0 on a miss: the negative log-likelihood under p_act."""
    q, change, delta = torch.tensor([-0.2, -2.0, -3.0], dtype=F64), torch.tensor([0.0, 1.0, 2.0], dtype=F64), 0.4
    scores = repaired_scores(q, change, torch.tensor(delta, dtype=F64), torch.tensor([0]))[None].expand(3, 3)
    ids = torch.tensor([[5, 6, 7]] * 3)
    loss, covered, p = selection(scores, ids, torch.tensor([5, 7, 9]))
    g, p_act, _ = naive.gate(q.exp().tolist(), (q + change).tolist(), delta)
    r = math.log(p_act[2] * (1 + math.exp(-g)))
    want = [math.log1p(math.exp(g)), math.log1p(math.exp(-g)) - r, 0.0]
    assert loss.tolist() == pytest.approx(want) and covered.tolist() == [True, True, False]
    assert p.tolist() == pytest.approx([p_act[0], p_act[2], 0.0])


def test_gradients_reach_what_they_should():
    """Invariants 19 and 21: none through the weights, none from teacher tokens into the block's reading, none at alpha
    0; every tensor of the head gets one after the output layers have left zero."""
    head = random_head(6).requires_grad_(True)
    block = random_block(6)
    pool, labels = exact_pool(block), exact_pool(block).ids.gather(-1, random_ranks(6)[..., None])[..., 0]
    mask = torch.ones(2, S, dtype=torch.bool)
    prepared = head.encode(block, pool)
    scores = head.forced(prepared, labels, block.embedding, pool.log_probs)
    numerator, denominator = loss_terms(scores, pool.ids, labels, mask)
    assert denominator.item() == 2 * S
    numerator.backward()
    assert [n for n, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    nothing, _ = loss_terms(scores.detach(), pool.ids, labels, mask, alpha=0.0)
    assert nothing.item() == 0
    before = head.encode(block, pool)
    assert all(torch.equal(a, b) for a, b in zip(before, prepared, strict=True))  # no label enters it
    fresh = DRelay(config(), torch.Generator().manual_seed(0))
    block32 = random_block(6, dtype=torch.float32)
    out = fresh.forced(fresh.encode(block32, make_pool(block32.logits, K)), labels, block32.embedding,
                       make_pool(block32.logits, K).log_probs)  # fmt: skip
    loss_terms(out, pool.ids, labels, mask)[0].backward()
    for name in ("residual_out", "prefix_rank", "global_rank", "gate_out"):
        assert fresh.get_parameter(f"{name}.weight").grad.abs().sum() > 0, name


def test_schedule():
    assert [round(ramp(x, 0.05, 1.0), 3) for x in (0.0, 0.15, 0.3, 1.0)] == [0.05, 0.525, 1.0, 1.0]
    scores, ids = torch.zeros(1, 2, 3), torch.tensor([[[1, 2, 3], [1, 2, 3]]])
    uniform, _ = loss_terms(scores, ids, torch.tensor([[1, 9]]), torch.ones(1, 2), mix=0.0)
    assert uniform.item() == pytest.approx(math.log(3))  # a miss adds nothing


# ---------------------------------------------------------------- configs and artifacts


@pytest.mark.parametrize(("preset", "hidden", "millions"), [("small", 576, (1.5, 4)), ("full", 2560, (33, 36))])
def test_presets(preset, hidden, millions):
    """Section 4.3 of the paper: 35.06 M at (probably) D = 2560."""
    values = {"block_size": 16, "pool_size": 16, "hidden_size": hidden, "vocab_size": 9, "padded_vocab_size": 9}
    with torch.device("meta"):
        head = DRelay(new_config(preset, target_id="x", **values))
    count = sum(p.numel() for p in head.parameters()) / 1e6
    assert millions[0] < count < millions[1], count
    with pytest.raises(InvalidInput, match="huge"):
        new_config("huge")


def test_artifact_is_strict_and_the_same(tmp_path):
    head = random_head(1, "bfloat16", backbone="dflash", tapped_layers=(1, 3))
    head.save(tmp_path / "head", "a card")
    again = DRelay.load(tmp_path / "head")
    assert again.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True))
    data = head.config.to_dict()
    for broken in ({k: v for k, v in data.items() if k != "gate"}, data | {"extra": 1}, data | {"heads": 3},
                   data | {"pool_size": 1}, data | {"backbone": "dflash"}):  # fmt: skip
        with pytest.raises(InvalidArtifact):
            DRelayConfig.from_dict(broken)


def test_needs_a_pool_and_a_block_that_fits():
    head, block = random_head(1), random_block(1, slots=S + 1)
    with pytest.raises(InvalidInput, match="pool"):
        head.prepare(block, None)
    with pytest.raises(IncompatibleArtifact, match="5 slots"):
        head.prepare(block, make_pool(block.logits, K))
    with pytest.raises(InvalidInput, match="1 candidate"):
        head.prepare(random_block(1), make_pool(random_block(1).logits, 1))
    with pytest.raises(IncompatibleArtifact, match="vocab_size 19"):
        head.bind(torch.zeros(20, D), torch.zeros(20, D))
    assert isinstance(head, Corrector) and head.pool_size == K


def test_bfloat16_weights_give_float32_scores_and_diagnostics():
    head, block = random_head(7, "bfloat16"), random_block(7, dtype=torch.bfloat16)
    pool = make_pool(block.logits, K)
    assert along(head, block, pool, random_ranks(7)).dtype == torch.float32
    seen = head.diagnostics(block, pool)
    assert seen["fusion_histogram"].sum() == 2 * S and seen["null_mass"].shape == (2, S)
    assert ((seen["null_mass"] > 0) & (seen["null_mass"] < 1)).all()


# ---------------------------------------------------------------- in the loop


def test_traces_without_a_look_at_values():
    head = random_head(2, "float32")

    def function(logits, hidden, history):
        block = random_block(1, dtype=torch.float32)
        block.logits, block.hidden, block.history = logits, hidden, history
        pool = make_pool(logits, K)
        tree = best_first(block, [head], pool, 5)
        return walk(block, [head], pool)[0], tree.tokens, tree.parents

    first, second = random_block(1, dtype=torch.float32), random_block(2, dtype=torch.float32)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(
        first.logits, first.hidden, first.history
    )
    inputs = second.logits, second.hidden, second.history
    for ours, theirs in zip(graph(*inputs), function(*inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tree", [None, 5])
@pytest.mark.parametrize("stack", [False, True])
def test_random_head_changes_no_token(stack, tree):
    """Invariants 1, 2, 8: greedy equals plain greedy; target-first above 0 draws the very tokens of plain decoding."""
    target = toy()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": 32, "padded_vocab_size": 32, "block_size": 4}
    head = random_head(3, **sizes)
    zoo = repairzoo.build(dflash(target, 1), [heads_for(target, "dels"), head] if stack else head, target, tree=tree)
    rows = prompts(2, [1, 6])
    for options in ({}, {"temperature": 0.9, "seed": 5}):
        out = zoo.generate(rows, max_new_tokens=16, **options)
        assert out.token_ids == repairzoo.autoregressive(target, rows, max_new_tokens=16, **options).token_ids


def test_new_head_drafts_what_the_backbone_drafts():
    """Invariant 6 through the whole loop: same accepted lengths as without a head."""
    target = toy()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": 32, "padded_vocab_size": 32, "block_size": 4}
    rows, runs = prompts(3, [3, 6]), []
    for head in (None, DRelay(config(**sizes))):
        zoo = repairzoo.build(dflash(target, 1), head, target)
        runs.append(zoo.generate(rows, max_new_tokens=12).stats.as_dict()["accepted"])
    assert runs[0] == runs[1]


def test_sampled_proposal_reports_the_law_it_drew_from():
    """Invariant 3: q is softmax(score / T) on the pool, 0 off it; also behind another corrector."""
    head, block = random_head(9, "float32"), random_block(9, dtype=torch.float32)
    pool = make_pool(block.logits, K)
    u = torch.rand(2, S, generator=torch.Generator().manual_seed(1), dtype=F64)
    tokens, q, seen = walk(block, [Bigram(1, V), head], pool, law=repairzoo.sampling.Law(0.7), u=u)
    assert q is not None
    torch.testing.assert_close(q.sum(-1), torch.ones_like(q.sum(-1)))
    want = (torch.stack(seen["scores"], 1) / 0.7).softmax(-1)
    torch.testing.assert_close(q.gather(-1, pool.ids), want.to(q.dtype))
    assert (q.gather(-1, tokens[..., None]) > 0).all()
