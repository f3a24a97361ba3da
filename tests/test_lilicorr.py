"""LiLiCorr against the published reference (tests/golden/lilicorr), its slow oracle, and the laws it promises.

Numbers in docstrings are the invariants of the project's list for LiLiCorr (22 to 30) and those common to all heads.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Bigram, dflash, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import repairzoo
from repairzoo.backbones.dflash.backbone import DFlash
from repairzoo.block import Corrector, DraftBlock, Pool, make_pool
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.heads.lilicorr import (
    BASE,
    MARGIN,
    LiLiCorr,
    LiLiCorrConfig,
    convert_published,
    naive,
    rows_after,
    save_published,
    supervision,
    terms,
)
from repairzoo.walk import best_first, walk

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = {"head_w64_b8": "head", "head_w48_b8": "draft"}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SEEDS = st.integers(0, 2**31)
quick = settings(max_examples=6, deadline=None)
V, D = 19, 6


# ---------------------------------------------------------------- helpers


def golden(name: str) -> tuple[LiLiCorr, dict, dict[str, Tensor], Tensor]:
    folder = GOLDEN / "lilicorr" / name
    head = convert_published(folder / FOLDERS[name], target_id="trained_tied")
    embedding = load_file(GOLDEN / "targets" / "trained_tied" / "model.safetensors")["model.embed_tokens.weight"]
    return head, json.loads((folder / "cases.json").read_text()), load_file(folder / "cases.safetensors"), embedding


def make_block(logits: Tensor, hidden: Tensor, context: Tensor, embedding: Tensor, valid: Tensor | None = None):
    rows, width = len(logits), hidden.shape[-1]
    history = torch.zeros(rows, 64, width, dtype=context.dtype)
    history[:, -1] = context
    mask = torch.zeros(rows, 64, dtype=torch.bool)
    mask[:, -1] = True if valid is None else valid
    return DraftBlock(
        hidden, logits, torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 7), context, history, mask, embedding,
        embedding,
    )  # fmt: skip


def random_head(seed: int, dtype: str = "float32", **options) -> LiLiCorr:
    """A head with no zero weights."""
    values = {
        "block_size": 5, "candidates": 4, "pool_size": 4, "hidden_size": D, "vocab_size": V, "padded_vocab_size": V,
        "width": 8, "num_heads": 2, "num_layers": 1, "factor_dim": 5, "target_id": "toy", "dtype": dtype,
    } | options  # fmt: skip
    head = LiLiCorr(LiLiCorrConfig(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return head.requires_grad_(False).eval()


def random_block(seed: int, rows: int = 2, slots: int = 4, dtype=torch.float64, scale: float = 1.0) -> DraftBlock:
    """Rounded logits, so that ties occur; the second row has no context."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    valid = torch.arange(rows) != 1
    context = normal(rows, D) * valid[:, None]
    return make_block(
        (2 * normal(rows, slots, V)).round() * scale, normal(rows, slots, D), context, normal(V, D), valid
    )


def along(head: Corrector, block: DraftBlock, pool: Pool, ranks: Tensor) -> Tensor:
    """Scores ``[B, S, K]`` along given ranks ``[B, S]``."""
    prepared, carry, previous, out = head.prepare(block, pool), head.start(block), block.anchor_ids[:, None], []
    for s in range(block.slots):
        scores, carry = head.step(prepared, carry, s, previous, pool.log_probs[:, None, s])
        previous = pool.ids[:, s].gather(1, ranks[:, s : s + 1])
        out.append(scores)
    return torch.cat(out, 1)


def expected(head: LiLiCorr, block: DraftBlock, pool: Pool, ranks: Tensor) -> Tensor:
    """The same from the oracle's tables."""
    rows = []
    for b in range(len(ranks)):
        start, pairs = naive.tables(
            head.config, head.state_dict(), block.embedding, pool.ids[b].tolist(), pool.log_probs[b], block.hidden[b],
            block.context[b], bool(block.history_mask[b, -1]),
        )  # fmt: skip
        psi = [start] + [table[int(r)] for table, r in zip(pairs, ranks[b], strict=False)]
        if head.config.decision == "identity_safe":
            gamma = head.gamma.double()
            psi = [pool.log_probs[b, s] + gamma[s] * (p - p.mean()) for s, p in enumerate(psi)]
        rows.append(torch.stack(psi))
    return torch.stack(rows)


# ---------------------------------------------------------------- golden data


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_lattices(name):
    """Start and pair factors of random lattices, invalid anchors included; the greedy walk over them."""
    head, _, t, embedding = golden(name)
    flat = {key: t[f"lattice.{key}"].flatten(0, 1) for key in ("candidate_ids", "candidate_log_probs", "pass_hidden")}
    anchor, valid = t["lattice.anchor_hidden"].flatten(0, 1), t["lattice.anchor_valid"].flatten().bool()
    embedded = embedding[flat["candidate_ids"]]
    start, pair = head.scores(embedded, flat["candidate_log_probs"], flat["pass_hidden"], anchor, valid)
    torch.testing.assert_close(start, t["lattice.log_start"].flatten(0, 1), **CLOSE)
    torch.testing.assert_close(pair, t["lattice.log_pair"].flatten(0, 1), **CLOSE)
    for i, want in enumerate(t["lattice.selected_index"].flatten(0, 1).tolist()):
        assert naive.greedy(start[i], list(pair[i])) == want


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_walks(name):
    """Pools, factors and chosen tokens of real blocks at k = 8, at k = 4 (fewer than trained), without an anchor."""
    head, cases, t, embedding = golden(name)
    for case in cases["cases"]:
        n = case["name"]
        for key, size, valid in (("k8", 8, True), ("k4", 4, True), ("k8_no_anchor", 8, False)):
            logits, hidden = t[f"{n}.block_logits"][None], t[f"{n}.block_hidden"][None, 1:]
            block = make_block(logits, hidden, t[f"{n}.anchor_hidden"][None], embedding, torch.tensor([valid]))
            pool = make_pool(logits, size)
            assert torch.equal(pool.ids[0], t[f"{n}.{key}.candidate_ids"])
            torch.testing.assert_close(pool.log_probs[0], t[f"{n}.{key}.candidate_log_probs"], atol=5e-5, rtol=1e-4)
            start, pair, *_ = head.prepare(block, pool)
            torch.testing.assert_close(start[0], t[f"{n}.{key}.log_start"], **CLOSE)
            torch.testing.assert_close(pair[0], t[f"{n}.{key}.log_pair"], **CLOSE)
            tokens, _, seen = walk(block, [head], pool)
            assert torch.equal(tokens[0], t[f"{n}.{key}.selected_ids"]), (n, key)
            assert torch.equal(seen["rank"][0], t[f"{n}.{key}.selected_index"])


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_losses_and_gradients(name):
    """Invariant 28 and the losses of both recipes, with gradients to the draft's logits and hidden states."""
    head, cases, t, embedding = golden(name)
    head.requires_grad_(True)
    draft = DFlash.load(GOLDEN / "dflash" / "trained_b8" / "draft")
    context = draft._fuse(t["loss.features"], draft._products(False))
    anchors, b = t["loss.anchor_positions"], cases["dims"]["B"]
    before = (anchors - 1).clamp_min(0)
    context = context.gather(1, before[..., None].expand(-1, -1, context.shape[-1])).flatten(0, 1).detach()
    blocks = anchors.numel()
    labels = t["loss.target_ids"].flatten(0, 1)[:, 1:]
    places = (anchors[..., None] + torch.arange(b - 1)).clamp_max(t["loss.input_ids"].shape[1] - 1)
    teacher = torch.stack([row[p] for row, p in zip(t["loss.target_logits"], places, strict=True)]).flatten(0, 1)
    for kind, weights in (("base", BASE), ("margin", MARGIN)):
        head.zero_grad()
        logits = t["loss.draft_logits"].clone().requires_grad_(True)
        hidden = t["loss.draft_hidden"].clone().requires_grad_(True)
        slots = logits.reshape(blocks, b, -1)[:, 1:]
        pool = make_pool(slots, 8)
        assert torch.equal(pool.ids, t["loss.candidate_ids"])
        start, pair = head.scores(
            embedding[pool.ids], pool.log_probs, hidden.reshape(blocks, b, -1)[:, 1:], context, anchors.flatten() > 0
        )
        torch.testing.assert_close(start, t["loss.log_start"], **CLOSE)
        supervised, rank = supervision(pool.ids, labels, t["loss.slot_mask"].flatten(0, 1))
        assert torch.equal(supervised.long(), t["loss.supervised"])
        assert torch.equal(rank * supervised, t["loss.gt_indices"] * supervised)
        parts = terms(rows_after(start, pair, rank), rank, supervised, teacher.gather(-1, pool.ids), weights)
        want = cases["losses"][kind]
        for part, (numerator, denominator) in parts.items():
            weight = getattr(weights, part)
            assert (numerator / denominator).item() == pytest.approx(weight * want[part], rel=1e-4), part
        total = sum((n / d for n, d in parts.values()), torch.zeros(()))
        assert total.item() == pytest.approx(want["loss"], rel=1e-4)
        total.backward()
        close = {"atol": 1e-5, "rtol": 1e-3}
        torch.testing.assert_close(logits.grad, t[f"loss.{kind}.grad_logits"], **close)
        torch.testing.assert_close(hidden.grad, t[f"loss.{kind}.grad_draft_hidden"], **close)
        torch.testing.assert_close(head.out_head.weight.grad, t[f"loss.{kind}.grad_out_head_weight"], **close)
        torch.testing.assert_close(head.rank_embedding.grad, t[f"loss.{kind}.grad_rank_embedding"], **close)


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_checkpoint_is_written_back_as_it_was(name, tmp_path):
    """Names, shapes, bytes and config keys of the published format; token_proj is absent where the head is as wide."""
    head, *_ = golden(name)
    source = GOLDEN / "lilicorr" / name / FOLDERS[name]
    config = json.loads((source / "config.json").read_text())
    save_published(head, tmp_path / "out", config)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    mine = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {n: t for n, t in load_file(source / "model.safetensors").items() if n.startswith("lilicorr.")}
    assert sorted(mine) == sorted(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert ("lilicorr.token_proj.weight" in mine) is (name == "head_w48_b8")
    head.save(tmp_path / "artifact", "a card")
    again = LiLiCorr.load(tmp_path / "artifact")
    assert again.config == head.config and all(
        torch.equal(a, b) for a, b in zip(again.state_tensors().values(), head.state_tensors().values(), strict=True)
    )


def test_golden_pair_walks():
    """tests/golden/equations: the greedy walk; invariant 23, its score never beats the best path."""
    for case in json.loads((GOLDEN / "equations" / "cases.json").read_text())["pair_walk"]:
        start = torch.tensor(case["start"], dtype=torch.float64)
        pairs = [torch.tensor(p, dtype=torch.float64) for p in case["pair"]]
        assert naive.greedy(start, pairs) == case["greedy"]
        k, s = len(start), len(pairs) + 1
        head = random_head(0, "float64", candidates=k, pool_size=k, block_size=s + 1, vocab_size=k, padded_vocab_size=k)
        ids = torch.arange(k).expand(1, s, k)
        prepared = (start[None], torch.stack(pairs)[None] if pairs else start.new_zeros(1, 0, k, k), ids,
                    start.new_zeros(1, s, k))  # fmt: skip
        previous, path = torch.zeros(1, 1, dtype=torch.int64), []
        for slot in range(s):
            scores, _ = head.step(prepared, (), slot, previous, start.new_zeros(1, 1, k))
            previous = scores.argmax(-1)
            path.append(int(previous))
        assert path == case["greedy"]
        assert case["greedy_score"] <= case["best_score"] + 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].pop("lilicorr_factor_dim"), "lilicorr_factor_dim"),
        (lambda c: c["dflash_config"].update(lilicorr_new=1), "lilicorr_new"),
        (lambda c: c["dflash_config"].update(lilicorr_num_layers=1), "layers.1"),
        (lambda c: c["dflash_config"].update(lilicorr_candidate_topk=4), "rank_embedding"),
        (lambda c: c["dflash_config"].update(lilicorr_num_heads=5), "num_heads"),
        (lambda c: c["dflash_config"].update(projector_type="dflash2"), "projector_type"),
        (lambda c: c.update(block_size=16), "slot_embedding"),
        (lambda c: c.update(dtype="bfloat16"), "bfloat16"),
    ],
)
def test_published_config_that_does_not_fit_is_refused(change, message, tmp_path):
    source = GOLDEN / "lilicorr" / "head_w48_b8" / "draft"
    config = json.loads((source / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(InvalidArtifact, match=message):
        convert_published(tmp_path, target_id="x")


# ---------------------------------------------------------------- against the oracle


@quick
@given(
    seed=SEEDS,
    size=st.integers(1, 4),
    slots=st.integers(1, 4),
    layers=st.integers(0, 2),
    width=st.sampled_from([D, 8]),
    decision=st.sampled_from(["published", "identity_safe"]),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_step_equals_oracle(seed, size, slots, layers, width, decision, scale):
    """Every shape, K trained >= k served, blocks shorter than trained (invariant 26), ties, extreme logits."""
    head = random_head(seed, "float64", num_layers=layers, width=width, decision=decision)
    block = random_block(seed + 1, slots=slots, scale=scale)
    pool = make_pool(block.logits, size)
    pool.log_probs = (block.logits.log_softmax(-1)).gather(-1, pool.ids)  # in float64
    ranks = torch.randint(size, (2, slots), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        along(head, block, pool, ranks), expected(head, block, pool, ranks), atol=1e-9, rtol=1e-9
    )


def test_tables_of_serving_follow_weights_target_and_shape(monkeypatch):
    """They give what is computed for every block, are made anew when a weight or the embedding changes, and there are
    none of the vocabulary where they are too large."""
    head, block = random_head(3, "float64"), random_block(3)
    pool = make_pool(block.logits, 4)

    def check(head: LiLiCorr, block: DraftBlock, pool: Pool) -> None:
        embedded, valid = block.embedding[pool.ids], block.history_mask[:, -1]
        want = head.scores(embedded, pool.log_probs, block.hidden, block.context, valid)
        for got, expected in zip(head.tables(block, pool), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-10)

    check(head, random_block(4, slots=2), Pool(pool.ids[:, :2, :3], pool.log_probs[:, :2, :3]))
    head.bind(block.embedding, block.output_weight)
    made = head._served
    check(head, block, pool)
    assert made is not None and made.tokens is not None and head._served is made
    for weight in (head.token_proj.weight, head.in_head.weight, head.slot_embedding):
        weight.mul_(2)
        check(head, block, pool)
        assert head._served is not made
    block.embedding = block.embedding.flip(0)
    check(head, block, pool)
    monkeypatch.setattr("repairzoo.heads.lilicorr.head.TABLE_BYTES", 0)
    other = random_head(5, "float64")
    check(other, block, pool)
    assert other._served is not None and other._served.tokens is None


@quick
@given(seed=SEEDS, weights=st.sampled_from([BASE, MARGIN]))
def test_loss_equals_oracle(seed, weights):
    """Invariants 28 and 30: forced prefixes only, whole blocks only; hinge and penalty as the slow loop has them."""
    head, block = random_head(seed, "float64"), random_block(seed, rows=3)
    pool = make_pool(block.logits, 4)
    g = torch.Generator().manual_seed(seed)
    labels = pool.ids.gather(-1, torch.randint(4, (3, 4, 1), generator=g))[..., 0]
    labels = torch.where(torch.rand(3, 4, generator=g) < 0.2, (labels + 1) % V, labels)
    mask = torch.rand(3, 4, generator=g) < 0.9
    teacher = torch.randn(3, 4, V, generator=g, dtype=torch.float64)
    start, pair, *_ = head.prepare(block, pool)
    supervised, rank = supervision(pool.ids, labels, mask)
    got = terms(rows_after(start, pair, rank), rank, supervised, teacher.gather(-1, pool.ids), weights)
    sums = torch.zeros(4, dtype=torch.float64)
    for b in range(3):
        found = naive.loss(
            start[b], list(pair[b]), pool.ids[b].tolist(), labels[b].tolist(), mask[b].tolist(), teacher[b]
        )
        sums += torch.tensor(found, dtype=torch.float64)
    for i, name in enumerate(("ce", "margin", "penalty")):
        if name in got:
            numerator, denominator = got[name]
            assert denominator.item() == sums[3]
            assert numerator.item() == pytest.approx(getattr(weights, name) * sums[i].item(), abs=1e-9)
            assert numerator.item() >= 0


def test_hinge_and_penalty_vanish_where_they_should():
    """Invariant 30: the hinge is 0 iff the margin is at least 2; the penalty is 0 iff no likelier mass is misplaced."""
    rank, one = torch.tensor([[0]]), torch.tensor([[True]])
    for start, teacher, hinge, penalty in (
        ([3.0, 1.0, 0.0], [0.0, 0.0, 1.0], False, False),
        ([2.9, 1.0, 0.0], [0.0, -1.0, 0.0], True, True),
    ):
        got = terms(torch.tensor([[start]]), rank, one, torch.tensor([[teacher]]), MARGIN)
        assert (got["margin"][0].item() > 0) is hinge and (got["penalty"][0].item() > 0) is penalty
    with pytest.raises(InvalidInput, match="target's logits"):
        terms(torch.zeros(1, 1, 3), rank, one)


# ---------------------------------------------------------------- invariants


@quick
@given(seed=SEEDS)
def test_bounded_and_better_paths_exist(seed):
    """Invariants 22 and 23: |psi| <= scale; the walk is the greedy one, and brute force never scores below it."""
    head, block = random_head(seed), random_block(seed, dtype=torch.float32)
    pool = make_pool(block.logits, 3)
    start, pair, *_ = head.prepare(block, pool)
    assert max(start.abs().max(), pair.abs().max()) <= head.config.logit_scale * (1 + 1e-6)
    _, _, seen = walk(block, [head], pool)
    for b in range(2):
        path = naive.greedy(start[b], list(pair[b]))
        assert seen["rank"][b].tolist() == path

        def score(p, b=b):
            return float(start[b, p[0]]) + sum(float(pair[b, s, p[s], p[s + 1]]) for s in range(3))

        assert score(path) <= max(score(p) for p in itertools.product(range(3), repeat=4))


@quick
@given(seed=SEEDS)
def test_without_coupling_every_slot_decides_alone(seed):
    """Invariant 24: pair tables that are constant in the predecessor make walk, best path and slot argmax agree."""
    head, block = random_head(seed), random_block(seed, dtype=torch.float32)
    head.out_head.weight.zero_()  # every candidate has the same out vector: its bias
    start, pair, *_ = head.prepare(block, make_pool(block.logits, 4))
    _, _, seen = walk(block, [head], make_pool(block.logits, 4))
    assert torch.equal(seen["rank"], torch.cat((start.argmax(-1)[:, None], pair[:, :, 0].argmax(-1)), 1))


@quick
@given(seed=SEEDS)
def test_sees_the_whole_lattice_and_walks_first_order(seed):
    """Invariant 25: a later slot changes the tables of earlier ones; given those, only the last pick matters."""
    head, block = random_head(seed), random_block(seed, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    ranks = torch.randint(4, (2, 4), generator=torch.Generator().manual_seed(seed))
    scores = along(head, block, pool, ranks)
    other = ranks.clone()
    other[:, 0] = (other[:, 0] + 1) % 4
    assert torch.equal(along(head, block, pool, other)[:, 2:], scores[:, 2:])
    block.hidden[:, 3] += 3
    assert not torch.equal(head.prepare(block, pool)[0], head.prepare(random_block(seed, dtype=torch.float32), pool)[0])


@quick
@given(seed=SEEDS)
def test_no_anchor_equals_zero_anchor_after_projection(seed):
    """Invariant 27: what an invalid row holds is never seen, and it is as if the projection had given zero."""
    head, block = random_head(seed), random_block(seed, dtype=torch.float32)
    block.history_mask[:] = False
    pool = make_pool(block.logits, 4)
    before = head.prepare(block, pool)
    block.context = torch.full_like(block.context, 1e6)
    after = head.prepare(block, pool)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    head.context_proj.weight.zero_()
    head.context_proj.bias.zero_()
    block.history_mask[:] = True
    torch.testing.assert_close(head.prepare(block, pool)[0], before[0])


@quick
@given(seed=SEEDS, decision=st.sampled_from(["published", "identity_safe"]), lift=st.booleans())
def test_excluded_candidates_are_never_chosen(seed, decision, lift):
    """A draft that excludes tokens (minus infinity) leaves pools with fewer real candidates: no NaN, no gradient of
    one, and no correction before the head brings an excluded token back."""
    head, block = random_head(seed, decision=decision), random_block(seed, dtype=torch.float32)
    keep = torch.rand(block.logits.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1) < 2
    block.logits = block.logits.masked_fill(~keep, float("-inf"))
    pool = make_pool(block.logits, 4)
    correctors = [Bigram(seed, V), head] if lift else [head]
    tokens, _, seen = walk(block, correctors, pool)
    scores = torch.stack(seen["scores"], 1)
    assert not scores.isnan().any() and torch.equal(scores.isinf(), pool.log_probs.isinf())
    assert keep.gather(-1, tokens[..., None]).all()
    head.requires_grad_(True)
    psi = torch.zeros_like(scores, requires_grad=True)
    chosen = head.decide(psi, pool.log_probs, pool.log_probs, slice(0, 4))
    chosen.masked_fill(chosen.isinf(), 0).sum().backward()
    assert psi.grad is not None and psi.grad.isfinite().all()


def test_new_head_is_no_dead_saddle():
    """Invariant 29: out and in vectors start away from zero, candidates differ, and a gradient reaches them."""
    head = LiLiCorr(random_head(0).config, torch.Generator().manual_seed(0))
    block = random_block(3, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    assert head.diagnostics(block, pool)["factor_spread"][0].min() > 0  # row 1 has no anchor, and so no start yet
    start, pair = head.scores(block.embedding[pool.ids], pool.log_probs, block.hidden, block.context,
                              block.history_mask[:, -1])  # fmt: skip
    supervised, rank = supervision(pool.ids, pool.ids[..., 1], torch.ones(2, 4))
    got = terms(rows_after(start, pair, rank), rank, supervised, torch.zeros(2, 4, 4), BASE)
    sum(n / d for n, d in got.values()).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in head.named_parameters() if "_head" in n)
    collapsed = random_head(0)
    collapsed.in_head.weight.zero_()
    assert collapsed.diagnostics(block, pool)["factor_spread"].max() < 1e-6


@quick
@given(seed=SEEDS)
def test_identity_safe_head_starts_as_no_head(seed):
    """Invariant 6: bit for bit the scores that came in, whatever they are."""
    head = random_head(seed, decision="identity_safe")
    head.gamma.zero_()
    block = random_block(seed, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    pool.log_probs[0, 0, :2] = torch.tensor([-0.0, float("-inf")])
    got = along(head, block, pool, torch.zeros(2, 4, dtype=torch.int64))
    assert torch.equal(got.contiguous().view(torch.int32), pool.log_probs.view(torch.int32))


def test_stacks_on_a_causal_corrector():
    """What came before (a backbone's causal part) is added to psi; without it psi is unchanged bit for bit."""
    head, block = random_head(4), random_block(4, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    start, *_ = head.prepare(block, pool)
    alone, _ = head.step(head.prepare(block, pool), (), 0, block.anchor_ids[:, None], pool.log_probs[:, None, 0])
    assert torch.equal(alone[:, 0], start)
    bigram = Bigram(1, V)
    prior, _ = bigram.step(bigram.prepare(block, pool), bigram.start(block), 0, block.anchor_ids[:, None],
                           pool.log_probs[:, None, 0])  # fmt: skip
    both = walk(block, [bigram, head], pool)[2]["scores"][0]
    torch.testing.assert_close(both, start + (prior[:, 0] - pool.log_probs[:, 0]))


def test_larger_pool_is_served_in_its_first_ranks():
    """A pool made larger for another head: the trained ranks score as on their own, the others cannot be chosen."""
    head, block = random_head(5), random_block(5, dtype=torch.float32)
    ranks = torch.tensor([[0, 3, 2, 1], [1, 1, 0, 3]])
    pool = make_pool(block.logits, 7)
    small = along(head, block, Pool(pool.ids[..., :4], pool.log_probs[..., :4]), ranks)
    large = along(head, block, pool, ranks)
    torch.testing.assert_close(large[..., :4], small)
    assert large[..., 4:].isneginf().all()
    assert best_first(block, [head], make_pool(block.logits, 7), 6).tokens.shape == (2, 7)


@quick
@given(seed=SEEDS)
def test_prefixes_and_rows_are_independent(seed):
    """Invariant 6 for rows; W prefixes at once equal W single ones, so the walk can be forked."""
    head, block = random_head(seed), random_block(seed, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    prepared, all_ranks = head.prepare(block, pool), torch.arange(4)
    previous = pool.ids[:, 1, all_ranks]  # [B, 4]
    scores, _ = head.step(prepared, (), 2, previous, pool.log_probs[:, None, 2].expand(-1, 4, -1))
    torch.testing.assert_close(scores, prepared[1][:, 1])
    alone = random_block(seed, dtype=torch.float32)
    alone.hidden[1] = 1e3
    alone.logits[1] = -alone.logits[1]
    again = head.prepare(alone, make_pool(alone.logits, 4))
    assert torch.equal(again[0][0], prepared[0][0]) and torch.equal(again[1][0], prepared[1][0])


def test_needs_a_pool_and_a_block_that_fits():
    head, block = random_head(1), random_block(1, slots=5)
    with pytest.raises(InvalidInput, match="pool"):
        head.prepare(block, None)
    with pytest.raises(IncompatibleArtifact, match="5 slots"):
        head.prepare(block, make_pool(block.logits, 4))
    with pytest.raises(IncompatibleArtifact, match="vocab_size 19"):
        head.bind(torch.zeros(20, D), torch.zeros(20, D))
    with pytest.raises(InvalidArtifact, match="pool_size"):
        random_head(1, pool_size=5)
    assert isinstance(head, Corrector) and head.pool_size == 4


def test_artifact_config_is_strict(tmp_path):
    data = random_head(1).config.to_dict()
    assert LiLiCorrConfig.from_dict(json.loads(json.dumps(data))) == random_head(1).config
    for broken in ({k: v for k, v in data.items() if k != "factor_dim"}, data | {"extra": 1}, data | {"decision": "x"}):
        with pytest.raises(InvalidArtifact):
            LiLiCorrConfig.from_dict(broken)


def test_bfloat16_weights_give_float32_scores():
    head, block = random_head(7, "bfloat16"), random_block(7, dtype=torch.bfloat16)
    pool = make_pool(block.logits, 4)
    scores = along(head, block, pool, torch.zeros(2, 4, dtype=torch.int64))
    assert scores.dtype == torch.float32
    want = expected(head, block, pool, torch.zeros(2, 4, dtype=torch.int64))
    assert (scores - want).abs().max() < 1.0  # of a range of 16


def test_traces_without_a_look_at_values():
    head = random_head(2)

    def function(logits, hidden, context):
        block = make_block(logits, hidden, context, embedding)
        return walk(block, [head], make_pool(logits, 4))[0]

    first, second = random_block(1, dtype=torch.float32), random_block(2, dtype=torch.float32)
    embedding = first.embedding
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(
        first.logits, first.hidden, first.context
    )
    inputs = second.logits, second.hidden, second.context
    assert torch.equal(graph(*inputs), function(*inputs))


# ---------------------------------------------------------------- lossless, whatever the weights


@pytest.mark.parametrize("tree", [None, 5])
@pytest.mark.parametrize("decision", ["published", "identity_safe"])
def test_random_head_changes_no_token(decision, tree):
    """Invariants 1, 2, 8: greedy equals plain greedy; target-first above 0 draws the very tokens of plain decoding."""
    target = toy()
    sizes = {"hidden_size": target.hidden_size, "vocab_size": 32, "padded_vocab_size": 32, "block_size": 4}
    head = random_head(3, decision=decision, **sizes)
    zoo = repairzoo.build(dflash(target, 1), head, target, tree=tree)
    rows = prompts(2, [1, 6])
    for options in ({}, {"temperature": 0.9, "seed": 5}):
        out = zoo.generate(rows, max_new_tokens=16, **options)
        assert out.token_ids == repairzoo.autoregressive(target, rows, max_new_tokens=16, **options).token_ids
    assert sum(out.stats.repaired) > 0 if tree is None and isinstance(out.stats.repaired, list) else True


def test_sampled_proposal_reports_the_law_it_drew_from():
    """Invariant 3: q sums to 1, is 0 off the pool, and is softmax(psi / T) on it."""
    head, block = random_head(9), random_block(9, dtype=torch.float32)
    pool = make_pool(block.logits, 4)
    u = torch.rand(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, q, seen = walk(block, [head], pool, law=repairzoo.sampling.Law(0.7), u=u)
    assert q is not None
    torch.testing.assert_close(q.sum(-1), torch.ones_like(q.sum(-1)))
    torch.testing.assert_close(q.gather(-1, pool.ids), F.softmax(torch.stack(seen["scores"], 1) / 0.7, -1).to(q.dtype))
    assert (q.gather(-1, tokens[..., None]) > 0).all()


def test_binding_widens_but_never_narrows():
    """A head in bfloat16 on a float32 target computes in float32 (and is stored as it was); the reverse stays."""
    for stored, table, want in (("bfloat16", torch.float32, torch.float32), ("float32", torch.bfloat16, torch.float32)):
        head = random_head(1, stored)
        before = head.state_tensors()
        head.bind(torch.zeros(V, D, dtype=table), torch.zeros(V, D, dtype=table))
        assert {p.dtype for p in head.parameters()} == {want}
        assert all(torch.equal(a, b) for a, b in zip(before.values(), head.state_tensors().values(), strict=True))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_head(0).config.width = 3
