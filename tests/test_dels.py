"""DeLS against the published reference (tests/golden/dels), its slow oracle, and the laws it promises.

Numbers in test docstrings refer to arXiv 2607.07409 or to the reports named there.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from repairzoo.backbones.dflash.backbone import DFlash
from repairzoo.block import Corrector, DraftBlock, Pool, make_pool
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.heads.dels import (
    DeLS,
    DeLSConfig,
    convert_published,
    gather_windows,
    load_counts,
    log_prior_from_counts,
    loss,
    naive,
)
from repairzoo.walk import best_first, walk

GOLDEN = Path(__file__).parent / "golden" / "dels"
CASES = json.loads((GOLDEN / "cases.json").read_text())
TENSORS = load_file(GOLDEN / "cases.safetensors")
HEADS = list(CASES["default_prefix_len"])  # the five that the published runtime runs
GRU_HEADS = [name for name in HEADS if name.startswith("gru")]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # the golden data's own tolerance


# ---------------------------------------------------------------- helpers


def target_tables() -> tuple[Tensor, Tensor]:
    """Input embedding and output head of the golden target, which ties them."""
    weight = load_file(GOLDEN.parent / "targets" / "trained_tied" / "model.safetensors")["model.embed_tokens.weight"]
    return weight, weight


def published(name: str, prefix: int = 1, anchor_input: bool | None = None, **options) -> DeLS:
    """A golden checkpoint. With a prefix the released loop's alignment is used: the GRU never sees the anchor."""
    head = convert_published(
        GOLDEN / "heads" / f"{name}.pt",
        **{
            "target_id": "trained_tied",
            "target_revision": None,
            "hidden_size": 64,
            "vocab_size": 128,
            "unigram": GOLDEN / "heads" / "loss_mask_unigram.pt",
            "pure_draft_prefix_len": prefix,
            "anchor_input": prefix == 0 if anchor_input is None else anchor_input,
        }
        | options,
    )
    head.bind(*target_tables())
    return head


def tune(head: DeLS, **values) -> DeLS:
    head.config = dataclasses.replace(head.config, **values)
    return head


def make_block(logits: Tensor, anchors: Tensor, embedding: Tensor, output_weight: Tensor) -> DraftBlock:
    rows, slots = logits.shape[:2]
    width = embedding.shape[1]
    return DraftBlock(
        hidden=torch.full((rows, slots, width), math.nan),  # DeLS reads none of these
        logits=logits,
        anchor_ids=anchors,
        anchor_positions=torch.zeros(rows, dtype=torch.long),
        context=torch.full((rows, width), math.nan),
        history=torch.full((rows, 64, width), math.nan),
        history_mask=torch.zeros(rows, 64, dtype=torch.bool),
        embedding=embedding,
        output_weight=output_weight,
    )


def run(head: Corrector, block: DraftBlock, tokens: Tensor | None, pool: Pool | None = None) -> tuple[Tensor, Tensor]:
    """Scores ``[B, S, K or V]`` and tokens ``[B, S]`` slot by slot; argmax, or along given ``tokens``."""
    prepared, carry = head.prepare(block, pool), head.start(block)
    previous, out, chosen = block.anchor_ids[:, None], [], []
    for slot in range(block.slots):
        base = block.logits if pool is None else pool.log_probs
        scores, carry = head.step(prepared, carry, slot, previous, base[:, slot : slot + 1])
        best = scores.argmax(-1)
        if pool is not None:
            best = pool.ids[:, slot].gather(-1, best)
        previous = best if tokens is None else tokens[:, slot : slot + 1]
        out.append(scores)
        chosen.append(previous)
    return torch.cat(out, 1), torch.cat(chosen, 1)


def random_head(seed: int, dtype: str = "float32", **options) -> tuple[DeLS, Tensor, Tensor]:
    """A head with no zero weights, and a target's tables with two padding rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    options = {
        "variant": "gru", "vocab_size": 19, "padded_vocab_size": 21, "hidden_size": 6, "hidden": 5, "rank": 4,
        "input_rank": 3, "block_size": 8, "dtype": dtype, "target_id": "toy", "alpha": 0.7, "beta": 0.4,
    } | options  # fmt: skip
    if options["variant"] == "markov":
        options |= {"hidden": None, "input_rank": options["rank"], "activation": "identity"}
    if options.get("input_table") == "target":
        options["input_rank"] = None
    config = DeLSConfig(**options)
    tensors = {n: normal(*shape).to(config.torch_dtype) for n, shape in config.shapes().items()}
    tensors["log_prior"] = normal(config.vocab_size).log_softmax(-1).float()
    head = DeLS.from_config_and_tensors(config, tensors)
    tables = normal(21, 6).to(config.torch_dtype), normal(21, 6).to(config.torch_dtype)
    head.bind(*tables)
    return head, *tables


def random_block(seed: int, tables: tuple[Tensor, Tensor], rows: int = 3, slots: int = 5, scale: float = 1.0):
    """A block with rounded logits (so that ties occur), and tokens for it."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, slots, 19, generator=generator) * 2).round() * scale
    anchors = torch.randint(19, (rows,), generator=generator)
    tokens = torch.randint(19, (rows, slots), generator=generator)
    return make_block(logits, anchors, *tables), tokens


LAYOUTS = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(["gru", "markov"]),
        "input_table": st.sampled_from(["target", "factored", "vocabulary"]),
        "output_table": st.sampled_from(["target", "vocabulary"]),
        "activation": st.sampled_from(["silu", "identity"]),
        "pure_draft_prefix_len": st.integers(0, 2),
        "anchor_input": st.booleans(),
    }
).map(
    lambda o: (
        o
        | ({"input_table": "factored"} if (o["variant"], o["input_table"]) == ("markov", "target") else {})
        | ({"anchor_input": True} if o["pure_draft_prefix_len"] == 0 else {})
    )
)
SEEDS = st.integers(0, 2**31)
quick = settings(max_examples=15, deadline=None)


def oracle(head: DeLS, tables: tuple[Tensor, Tensor], block: DraftBlock, tokens: Tensor) -> Tensor:
    """The fused scores ``[B, S, V]`` float64 of the naive implementation."""
    tensors = head.state_tensors()
    return torch.stack(
        [
            torch.stack(
                [
                    naive.fused(head.config, tensors, *tables, int(block.anchor_ids[b]), tokens[b, :s].tolist(),
                                block.logits[b, s])
                    for s in range(block.slots)
                ]
            )
            for b in range(len(tokens))
        ]
    )  # fmt: skip


# ---------------------------------------------------------------- golden data


@pytest.mark.parametrize("name", HEADS)
def test_golden_local_logits(name):
    """Teacher-forced logits of the training-side module (fixed.*), by scan and by step."""
    head = tune(published(name, prefix=0), alpha=1.0, beta=0.0)
    tokens = torch.tensor(CASES["fixed_tokens"])
    expected = TENSORS[f"fixed.{name}.short_logits"]
    torch.testing.assert_close(head.local_logits(tokens[:, :-1]), expected, **CLOSE)
    block = make_block(torch.zeros(3, 7, 128), tokens[:, 0], *target_tables())
    torch.testing.assert_close(run(head, block, tokens[:, 1:])[0], expected, **CLOSE)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("case", ["len7", "len23"])
def test_golden_fused_logits(case, name, prefix):
    """Fused logits along the rollout; with a prefix, the released loop (the anchor is never consumed)."""
    head = published(name, prefix)
    anchor = next(c["anchor_token"] for c in CASES["cases"] if c["name"] == case)
    base = TENSORS[f"{case}.base_logits"]
    block = make_block(base[None], torch.tensor([anchor]), *target_tables())
    scores, _ = run(head, block, None)
    assert torch.equal(scores[0, :prefix], base[:prefix])
    torch.testing.assert_close(scores[0, prefix:], TENSORS[f"{case}.{name}.prefix{prefix}.fused_logits"], **CLOSE)


@pytest.mark.parametrize("name", HEADS)
def test_golden_first_block_rollouts(name):
    """Every stored rollout: both alignments and both (alpha, beta) pairs, on the vocabulary and on a full pool."""
    for case in CASES["cases"]:
        base = TENSORS[f"{case['name']}.base_logits"][None]
        block = make_block(base, torch.tensor([case["anchor_token"]]), *target_tables())
        for prefix in (0, 1):
            head = published(name, prefix)
            for alpha, beta in CASES["alpha_beta"]:
                want = case["first_block_rollouts"][f"{name}.prefix{prefix}.a{alpha}_b{beta}"]["tokens"]
                tune(head, alpha=alpha, beta=beta)
                assert run(head, block, None)[1][0].tolist() == want
                assert run(head, block, None, make_pool(base, 128))[1][0].tolist() == want


@pytest.mark.parametrize("gamma", [4.0, 7.0, 0.0])
@pytest.mark.parametrize("name", GRU_HEADS)
def test_golden_window_loss(name, gamma):
    """Window loss of the public trainer, exp(-k / gamma) weights; columns = all ids (in any order) change nothing."""
    head = published(name)
    windows, mask = gather_windows(
        TENSORS["loss.input_ids"], TENSORS["loss.loss_mask"], TENSORS["loss.anchor_positions"], CASES["dims"]["B"]
    )
    mask = mask * TENSORS["loss.block_keep_mask"].reshape(-1, 1)
    want = CASES["losses"][name][f"gamma_{gamma}"]
    assert loss(head, windows, mask, gamma).item() == pytest.approx(want, rel=1e-4)
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    assert loss(head, windows, mask, gamma, columns=shuffled).item() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ["markov_unmerged", "markov_merged"])
def test_golden_markov_loss(name):
    ids, mask = TENSORS["loss.input_ids"], TENSORS["loss.loss_mask"]
    value = loss(published(name), ids, mask[:, 1:], gamma=None)
    assert value.item() == pytest.approx(CASES["losses"]["markov"]["dense"], rel=1e-4)


def test_golden_prior():
    """122 ids were counted, the vocabulary has 128: the others count 0."""
    counts = load_counts(GOLDEN / "heads" / "loss_mask_unigram.pt")
    assert len(counts) == CASES["counted_vocab"] == 122
    torch.testing.assert_close(log_prior_from_counts(counts, 128), TENSORS["log_prior"], **CLOSE)
    torch.testing.assert_close(log_prior_from_counts(counts, 128, 0.0), TENSORS["log_prior_smoothing0"], **CLOSE)
    torch.testing.assert_close(published("gru_v2_merged").log_prior, TENSORS["log_prior"], **CLOSE)
    with pytest.raises(InvalidInput, match="behind vocab_size 100"):
        log_prior_from_counts(counts, 100)


def test_golden_input_projection_layout():
    """The newer layout as trained, which the published runtime refuses, equals its merged file."""
    trained, merged = published("gru_v2_unmerged"), published("gru_v2_merged")
    tokens = torch.tensor(CASES["fixed_tokens"])
    torch.testing.assert_close(trained.local_logits(tokens), merged.local_logits(tokens), **CLOSE)
    assert trained.config.input_table == "factored" and merged.config.input_table == "vocabulary"


@pytest.fixture(scope="module")
def decoder():
    """The golden target (transformers' own forward) and draft."""
    transformers = pytest.importorskip("transformers")
    target = transformers.Qwen3ForCausalLM.from_pretrained(GOLDEN.parent / "targets" / "trained_tied").eval()
    draft = DFlash.load(GOLDEN.parent / "dflash" / "trained_b8" / "draft")
    return target, draft.bind(*target_tables())


@torch.no_grad()
def generate(decoder, head: DeLS | None, prompt: list[int], new: int) -> tuple[list[int], list[int], list[list[int]]]:
    """A plain greedy loop: the target reads everything again every round, the last block is not shortened."""
    target, draft = decoder
    ids, accepted, proposed = list(prompt), [], []
    cache = draft.new_cache(1, len(prompt) + new + 2 * draft.block_size)
    result = target(torch.tensor([ids]), output_hidden_states=True)
    ids.append(int(result.logits[0, -1].argmax()))
    while len(ids) - 1 < len(prompt) + new:
        anchor = len(ids) - 1
        features = torch.cat([result.hidden_states[layer + 1][:, :anchor] for layer in draft.tapped_layers], -1)
        draft.extend(cache, features, torch.arange(anchor)[None])
        block = draft.draft(cache, torch.tensor([ids[-1]]), torch.tensor([anchor]))
        tokens = walk(block, [] if head is None else [head], None)[0][0].tolist()
        proposed.append([ids[-1], *tokens])
        result = target(torch.tensor([ids + tokens]), output_hidden_states=True)
        greedy = result.logits[0, anchor:].argmax(-1).tolist()
        count = next((i for i, t in enumerate(tokens) if t != greedy[i]), len(tokens))
        ids += [*tokens[:count], greedy[count]]
        accepted.append(count + 1)
    return ids[: len(prompt) + new], accepted, proposed


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_golden_generations(case, decoder):
    """Whole greedy runs: accepted lengths and proposals of every round, for each head and both alignments."""
    for key, want in case["generations"].items():
        name, _, prefix = key.partition(".prefix")
        head = published(name, int(prefix)) if prefix else None
        ids, accepted, proposed = generate(decoder, head, case["prompt"], case["max_new_tokens"])
        assert ids == case["output_ids"], key
        assert accepted == want["acceptance_lengths"], key
        assert proposed == want["verify_ids"], key


# ---------------------------------------------------------------- against the oracle


@quick
@given(seed=SEEDS, layout=LAYOUTS, size=st.integers(1, 19), scale=st.sampled_from([1.0, 1e4]))
def test_step_equals_oracle(seed, layout, size, scale):
    """Every layout, on the vocabulary and on pools, with ties and extreme logits."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed + 1, tables, scale=scale)
    want = oracle(head, tables, block, tokens)
    tolerance = {"atol": 1e-4 + 1e-6 * scale, "rtol": 1e-5}
    torch.testing.assert_close(run(head, block, tokens)[0].double(), want, **tolerance)
    pool = make_pool(block.logits, size)
    got = run(head, block, tokens, pool)[0].double() + block.logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(got, want.gather(-1, pool.ids), **tolerance)


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_float64_step_equals_oracle_tightly(seed, layout):
    head, *tables = random_head(seed, "float64", **layout)
    block, tokens = random_block(seed + 1, tables)
    block.logits = block.logits.double()
    torch.testing.assert_close(
        run(head, block, tokens)[0], oracle(head, tables, block, tokens), atol=1e-11, rtol=1e-11
    )  # fmt: skip


@quick
@given(seed=SEEDS, layout=LAYOUTS, gamma=st.sampled_from([None, 0.0, 2.0, 7.0]))
def test_loss_equals_oracle(seed, layout, gamma):
    head, *tables = random_head(seed, "float64", **layout)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(19, (3, 5), generator=generator)
    mask = torch.randint(2, (3, 4), generator=generator).float()
    want = naive.loss(head.config, head.state_tensors(), *tables, windows.tolist(), mask.tolist(), gamma)
    assert loss(head, windows, mask, gamma).item() == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_loss_columns():
    """A subset is a softmax over that subset; a supervised label outside is refused, a masked one is not."""
    head, *_ = random_head(3)
    windows, mask = torch.tensor([[1, 5, 2, 7]]), torch.tensor([[1.0, 1.0, 0.0]])
    columns = torch.tensor([9, 5, 2])
    logits = head.local_logits(windows[:, :-1])[0][:, columns]
    want = nn.functional.cross_entropy(logits[:2], torch.tensor([1, 2]))
    torch.testing.assert_close(loss(head, windows, mask, None, columns), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(InvalidInput, match="token 7"):
        loss(head, windows, torch.ones(1, 3), None, columns)
    with pytest.raises(InvalidInput, match="mask"):
        loss(head, windows, torch.ones(1, 4))


@quick
@given(seed=SEEDS)
def test_gru_equals_torch(seed):
    """The hand-written cell is ``nn.GRU`` without biases, gates in the order r, z, n."""
    head, *tables = random_head(seed, input_table="target", output_table="vocabulary", activation="identity")
    gru = nn.GRU(6, 5, bias=False, batch_first=True)
    gru.load_state_dict({"weight_ih_l0": head.gru_input.detach(), "weight_hh_l0": head.gru_hidden.detach()})
    tokens = torch.randint(19, (2, 6), generator=torch.Generator().manual_seed(seed))
    states = gru(tables[0][tokens])[0]
    want = states @ head.rank_proj.T @ head.readout.T
    torch.testing.assert_close(head.local_logits(tokens), want, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- invariants


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_identity_bit_for_bit(seed, layout):
    """Invariants 6, 31: a new head with beta 0, and any head with alpha = beta = 0, returns the very scores."""
    trained, *tables = random_head(seed, **layout)
    fresh = DeLS(dataclasses.replace(trained.config, beta=0.0), torch.Generator().manual_seed(seed))
    tune(trained, alpha=0.0, beta=0.0)
    block, tokens = random_block(seed, tables)
    block.logits[0, 0, :4] = torch.tensor([-0.0, 0.0, -math.inf, 3e38])
    block.logits[1] *= -0.0
    pool = make_pool(block.logits, 7)
    for head in (fresh, trained):
        assert torch.equal(bits(run(head, block, tokens)[0]), bits(block.logits))
        assert torch.equal(bits(run(head, block, tokens, pool)[0]), bits(pool.log_probs))


@quick
@given(seed=SEEDS, layout=LAYOUTS, shift=st.floats(-20, 20))
def test_prior_constant_is_inert(seed, layout, shift):
    """Invariant 32: a constant added to the log prior moves all scores of a slot alike."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed, tables)
    before = run(head, block, tokens)[0].log_softmax(-1)
    head.log_prior += shift
    after = run(head, block, tokens)[0].log_softmax(-1)
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)


@quick
@given(seed=SEEDS, layout=LAYOUTS, slot=st.integers(0, 4))
def test_only_the_past_counts(seed, layout, slot):
    """Invariant 33: slot i depends on the anchor and earlier tokens; later tokens and logits change nothing."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed, tables)
    before = run(head, block, tokens)[0]
    later = tokens.clone()
    later[:, slot:] = (later[:, slot:] + 1) % 19
    block.logits[:, slot + 1 :] += 1
    assert torch.equal(run(head, block, later)[0][:, : slot + 1], before[:, : slot + 1])


@pytest.mark.parametrize("variant", ["gru", "markov"])
def test_the_past_does_count(variant):
    """The counterpart of invariant 33: slot 1 sees slot 0; a GRU's slot 2 sees slot 0 too, a Markov head's doesn't."""
    head, *tables = random_head(5, variant=variant)
    block, tokens = random_block(5, tables)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 19
    changed = (run(head, block, tokens)[0] != run(head, block, other)[0]).any(-1).all(0)
    assert changed.tolist() == [False, True] + [variant == "gru"] * 3


def test_anchor_input():
    """The released loop's GRU never sees the anchor; by default it is the first token consumed."""
    for anchor_input in (True, False):
        head, *tables = random_head(6, pure_draft_prefix_len=1, anchor_input=anchor_input)
        block, tokens = random_block(6, tables)
        before = run(head, block, tokens)[0]
        block.anchor_ids = (block.anchor_ids + 1) % 19
        assert torch.equal(before, run(head, block, tokens)[0]) is not anchor_input


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_state_is_reset_every_block(seed, layout):
    """Invariant 33: a second block gives what a fresh head gives."""
    head, *tables = random_head(seed, **layout)
    first, tokens = random_block(seed, tables)
    second, others = random_block(seed + 1, tables)
    run(head, first, tokens)
    again, *_ = random_head(seed, **layout)
    assert torch.equal(run(head, second, others)[0], run(again, second, others)[0])


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_step_equals_scan(seed, layout):
    """Invariants 18, 33: serving scores along a path are the teacher-forced ones of that path."""
    head, *tables = random_head(seed, **(layout | {"pure_draft_prefix_len": 0, "anchor_input": True}))
    block, tokens = random_block(seed, tables)
    path = torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], 1)
    want = block.logits + 0.7 * head.local_logits(path) - 0.4 * head.log_prior
    torch.testing.assert_close(run(head, block, tokens)[0], want, atol=1e-4, rtol=1e-4)


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_merged_equals_two_steps(seed, layout):
    """Invariant 34: the V x R export equals rank -> hidden -> frozen output head."""
    head, *tables = random_head(seed, **layout)
    merged = head.merged(*tables)
    merged.bind(*tables)
    assert merged.config.output_table == "vocabulary" and merged.config.input_table != "factored"
    tokens = torch.randint(19, (2, 4), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(merged.local_logits(tokens), head.local_logits(tokens), atol=1e-4, rtol=1e-4)
    block, tokens = random_block(seed, tables)
    torch.testing.assert_close(run(merged, block, tokens)[0], run(head, block, tokens)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_one_head_many_backbones(name):
    """Invariant 35: the contract is of shapes only. Blocks of 8 and of 16, two drafts and two targets."""
    head = published(name, prefix=0)
    for folder, target in (("trained_b8", "trained_tied"), ("random_b16", "random_untied")):
        path = GOLDEN.parent / "dflash" / folder / "cases.safetensors"
        weights = load_file(GOLDEN.parent / "targets" / target / "model.safetensors")
        embedding = weights["model.embed_tokens.weight"]
        output = weights.get("lm_head.weight", embedding)
        logits = load_file(path)["len7.block_logits"][None]
        block = make_block(logits, torch.tensor([9]), embedding, output)
        scores, tokens = run(head, block, None)
        assert scores.shape == logits.shape and tokens.shape[1] == (7 if folder == "trained_b8" else 15)
        torch.testing.assert_close(scores.double(), oracle(head, (embedding, output), block, tokens), **CLOSE)


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_prefix_stays_native(seed, layout):
    """Invariant 36: slots before ``pure_draft_prefix_len`` keep their scores bit for bit, later ones don't."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed, tables)
    scores, _ = run(head, block, tokens)
    prefix = layout["pure_draft_prefix_len"]
    assert torch.equal(bits(scores[:, :prefix]), bits(block.logits[:, :prefix]))
    assert (scores[:, prefix:] != block.logits[:, prefix:]).any(-1).all()


@quick
@given(seed=SEEDS, layout=LAYOUTS, size=st.integers(1, 19))
def test_pool_rows_equal_gathered_vocabulary(seed, layout, size):
    """Restricting to a pool is a gather of the full correction, whatever the pool and its order."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed, tables)
    ids = torch.stack([torch.randperm(19, generator=torch.Generator().manual_seed(seed + i)) for i in range(15)])
    ids = ids.reshape(3, 5, 19)[..., :size]
    pool = Pool(ids, block.logits.gather(-1, ids))
    want = run(head, block, tokens)[0].gather(-1, ids)
    torch.testing.assert_close(run(head, block, tokens, pool)[0], want, atol=1e-5, rtol=1e-5)


@quick
@given(seed=SEEDS, layout=LAYOUTS, pooled=st.booleans())
def test_rows_are_independent(seed, layout, pooled):
    """Invariant 6: row i of a batch is not touched by the others."""
    head, *tables = random_head(seed, **layout)
    block, tokens = random_block(seed, tables)
    pool = make_pool(block.logits, 6) if pooled else None
    before = run(head, block, tokens, pool)[0]
    block.logits[1:] = 1e30
    block.anchor_ids[1:] = 0
    tokens[1:] = 18
    pool = make_pool(block.logits, 6) if pooled else None
    assert torch.equal(run(head, block, tokens, pool)[0][0], before[0])
    alone = dataclasses.replace(block, logits=block.logits[:1], anchor_ids=block.anchor_ids[:1])
    pool = make_pool(alone.logits, 6) if pooled else None
    torch.testing.assert_close(run(head, alone, tokens[:1], pool)[0][0], before[0], atol=1e-5, rtol=1e-5)


def test_packed_weights_follow_the_head_and_change_nothing():
    """A packed recurrent matrix is made anew with the weights, and neither copied nor pickled."""
    head, *tables = random_head(4, hidden=16)
    block, tokens = random_block(4, tables)
    packed = run(head, block, tokens)[0]
    plain = copy.deepcopy(head)
    plain.pack = False
    for _ in range(2):
        torch.testing.assert_close(run(head, block, tokens)[0], run(plain, block, tokens)[0], atol=1e-5, rtol=1e-5)
        for each in (head, plain):
            each.gru_hidden.data = each.gru_hidden.data * -2
    assert not torch.allclose(run(head, block, tokens)[0], packed)


@quick
@given(seed=SEEDS, layout=LAYOUTS, pooled=st.booleans())
def test_prefixes_are_independent(seed, layout, pooled):
    """W prefixes of a row at once equal W rows: what lets a walk be forked at any slot."""
    head, *tables = random_head(seed, **layout)
    block, _ = random_block(seed, tables, rows=2, slots=3)
    pool = make_pool(block.logits, 6) if pooled else None
    base = (block.logits if pool is None else pool.log_probs)[:, :, None]  # [B, S, 1, K]
    paths = torch.randint(19, (2, 4, 3), generator=torch.Generator().manual_seed(seed))  # [B, W, S]
    paths[:, :, 0] = block.anchor_ids[:, None]
    prepared = head.prepare(block, pool)
    carry = head.start(block).expand(-1, 4, -1)
    wide = []
    for slot in range(3):
        scores, carry = head.step(prepared, carry, slot, paths[:, :, slot], base[:, slot].expand(-1, 4, -1))
        wide.append(scores)
    for w in range(4):
        single = head.start(block)
        for slot in range(3):
            scores, single = head.step(prepared, single, slot, paths[:, w : w + 1, slot], base[:, slot])
            torch.testing.assert_close(wide[slot][:, w : w + 1], scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["gru", "markov"])
def test_walk_and_tree(variant):
    """The shared walk picks what the slot loop picks; a forked walk finds the 12 likeliest of all prefixes, which the
    oracle scores one by one."""
    head, *tables = random_head(9, variant=variant)
    block, _ = random_block(9, tables, rows=2, slots=3)
    pool = make_pool(block.logits, 3)
    assert torch.equal(walk(block, [head], None)[0], run(head, block, None)[1])
    assert torch.equal(walk(block, [head], pool)[0], run(head, block, None, pool)[1])
    tree = best_first(block, [head], pool, nodes=12)
    for row in range(2):
        anchor, found = int(block.anchor_ids[row]), {(): 0.0}
        for slot in range(3):
            ids, mass = pool.ids[row, slot], float(pool.log_probs[row, slot].logsumexp(0))
            for prefix in [p for p in found if len(p) == slot]:
                scores = naive.fused(
                    head.config, head.state_tensors(), *tables, anchor, prefix, block.logits[row, slot]
                )
                for token, value in zip(ids.tolist(), (scores[ids].log_softmax(0) + mass).tolist(), strict=True):
                    found[(*prefix, token)] = found[prefix] + value
        want = sorted((p for p in found if p), key=lambda p: -found[p])[:12]
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, tree.size):
            paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        assert paths[1:] == want


def test_is_a_corrector():
    assert isinstance(random_head(0)[0], Corrector)


# ---------------------------------------------------------------- binding, precision, training


def test_binding_follows_weights_and_target():
    """Tables are made once per target, and anew when the head's weights or the target change."""
    head, *tables = random_head(1)
    first = head.bind(*tables)
    assert head.bind(*tables) is first
    assert first.fold is None and first.readout.shape == (19, 4)
    block, tokens = random_block(1, tables)
    with torch.no_grad():
        head.up.mul_(2)
        head.down.mul_(0.5)
    assert head.bind(*tables) is not first
    other = tuple(table.flip(0) for table in tables)
    for pair in (tables, other):
        block.embedding, block.output_weight = pair
        torch.testing.assert_close(
            run(head, block, tokens)[0].double(), oracle(head, pair, block, tokens), atol=1e-4, rtol=1e-4
        )


def test_large_vocabulary_needs_no_gate_table(monkeypatch):
    """The [V, 3G] table is a cache: without it the same numbers come from the folded input projection."""
    for input_table in ("target", "factored", "vocabulary"):
        head, *tables = random_head(2, input_table=input_table)
        block, tokens = random_block(2, tables)
        want = run(head, block, tokens)[0]
        with monkeypatch.context() as patch:
            patch.setattr("repairzoo.heads.dels.head.TABLE_BYTES", 0)
            again, *_ = random_head(2, input_table=input_table)
            assert again.bind(*tables).fold is not None
            torch.testing.assert_close(run(again, block, tokens)[0], want, atol=1e-5, rtol=1e-5)


def test_target_tensors_are_only_read():
    """speculators#184: loading or running a head never changes the target."""
    head, *tables = random_head(4)
    head.requires_grad_(True)
    before = [table.clone() for table in tables]
    block, tokens = random_block(4, tables)
    run(head, block, tokens)
    loss(head, tokens, torch.ones(3, 4)).backward()
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(before, tables, strict=True))


@pytest.mark.parametrize("variant", ["gru", "markov"])
def test_bfloat16_weights_give_float32_scores(variant):
    head, *tables = random_head(7, "bfloat16", variant=variant)
    block, tokens = random_block(7, tables)
    scores, _ = run(head, block, tokens)
    assert scores.dtype == torch.float32 and head.log_prior.dtype == torch.float32
    want = oracle(head, tables, block, tokens)
    assert ((scores - want).abs() / (1 + want.abs())).max() < 0.1
    head.to(torch.float16)
    assert head.log_prior.dtype == torch.float32  # halves would round the prior


@pytest.mark.parametrize("layout", [
    {}, {"input_table": "target"}, {"input_table": "vocabulary", "output_table": "vocabulary"}, {"variant": "markov"},
])  # fmt: skip
def test_training_lowers_the_loss(layout):
    """From the zero readout (loss log V exactly) every tensor is reached by a gradient, and the loss falls."""
    config = random_head(8, **layout)[0].config
    head = DeLS(config, torch.Generator().manual_seed(8))
    tables = random_head(8, **layout)[1:]
    head.bind(*tables)
    windows = torch.arange(4).repeat_interleave(5).reshape(4, 5).cumsum(1) % 19
    mask = torch.ones(4, 4)
    first = loss(head, windows, mask)
    assert first.item() == pytest.approx(math.log(19), rel=1e-5)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(head, windows, mask)
        value.backward()
        optimizer.step()
    assert value.item() < 0.5 * first.item()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_windows_behind_the_end_weigh_nothing():
    ids = torch.arange(10)[None]
    windows, mask = gather_windows(ids, torch.ones(1, 10), torch.tensor([[0, 8]]), 4)
    assert windows[0].tolist() == [0, 1, 2, 3] and mask[0].tolist() == [1, 1, 1]
    assert windows[1, :2].tolist() == [8, 9] and mask[1].tolist() == [1, 0, 0]


# ---------------------------------------------------------------- artifacts


def test_config_round_trip():
    for name in HEADS:
        config = published(name).config
        data = json.loads(json.dumps(config.to_dict()))
        assert DeLSConfig.from_dict(data) == config
        assert (
            data["target"] == {"id": "trained_tied", "revision": None, "fingerprint": None} and data["kind"] == "dels"
        )


@pytest.mark.parametrize("name", HEADS)
def test_saved_head_is_the_same(name, tmp_path):
    head = published(name, prefix=0)
    head.save(tmp_path / "head", "a card")
    again = DeLS.load(tmp_path / "head")
    assert again.config == head.config
    tokens = torch.tensor(CASES["fixed_tokens"])
    again.bind(*target_tables())
    assert torch.equal(again.local_logits(tokens), head.local_logits(tokens))
    assert torch.equal(again.log_prior, head.log_prior)


def test_saved_head_with_another_config_is_refused(tmp_path):
    """A head whose config was edited after training (another prefix, say) is an error, not a lower τ."""
    head = published("markov_merged")
    head.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"alpha": 0.3', '"alpha": 3.0'))
    with pytest.raises(InvalidArtifact, match="config_sha256"):
        DeLS.load(tmp_path)


def test_config_keys_are_strict():
    """z-lab#156, sglang#37475: a missing key is named, never guessed; so is an unknown one."""
    good = random_head(0)[0].config.to_dict()
    for key in good:  # the fingerprint alone may be left out
        with pytest.raises(InvalidArtifact, match=rf"here.json: missing keys \['{key}'\]"):
            DeLSConfig.from_dict({k: v for k, v in good.items() if k != key}, "here.json")
    with pytest.raises(InvalidArtifact, match=r"unknown keys \['colour'\]"):
        DeLSConfig.from_dict(good | {"colour": 1})


@pytest.mark.parametrize("key, value", [
    ("schema_version", 2), ("kind", "cure"), ("variant", "lstm"), ("rank", 0), ("rank", True), ("hidden", None),
    ("input_table", "both"), ("input_rank", None), ("output_table", None), ("activation", "relu"),
    ("alpha", math.nan), ("beta", "0.3"), ("pure_draft_prefix_len", -1), ("anchor_input", 1),
    ("anchor_input", False), ("block_size", 1), ("slot_convention", "shifted"), ("mask_token_id", -1),
    ("tapped_layers", [1]), ("pool_size", 0), ("vocab_size", 0), ("padded_vocab_size", 18), ("hidden_size", 0),
    ("dtype", "int8"), ("target", {"id": "a"}), ("target", {"id": "", "revision": None}),
])  # fmt: skip
def test_config_values_are_checked(key, value):
    """z-lab#37 kind: a contradiction is an error that names the key, not a silent collapse."""
    good = random_head(0)[0].config.to_dict()
    with pytest.raises(InvalidArtifact, match=key):
        DeLSConfig.from_dict(good | {key: value})


@quick
@given(seed=SEEDS, layout=LAYOUTS)
def test_tensors_round_trip(seed, layout):
    head, *tables = random_head(seed, **layout)
    again = DeLS.from_config_and_tensors(head.config.to_dict(), head.state_tensors())
    block, tokens = random_block(seed, tables)
    assert torch.equal(run(again, block, tokens)[0], run(head, block, tokens)[0])


def test_tensors_are_strict():
    """speculators#184, sglang#39362: nothing missing, nothing unknown, no wrong shape or dtype, all finite."""
    head, *_ = random_head(0)
    config, good = head.config, head.state_tensors()
    for bad, message in (
        ({n: t for n, t in good.items() if n != "up"}, ".*missing 'up'"),
        ({n: t for n, t in good.items() if n != "log_prior"}, ".*missing 'log_prior'"),
        (good | {"extra": torch.zeros(1)}, ".*unknown 'extra'"),
        (good | {"up": good["up"].T}, ".*'up' is"),
        (good | {"up": good["up"].double()}, "up is torch.float64"),
        (good | {"log_prior": good["log_prior"] - math.inf}, ".*log_prior"),
    ):
        with pytest.raises(InvalidArtifact, match=f"file: {message}"):
            DeLS.from_config_and_tensors(config, bad, "file")


def test_wrong_target_is_refused():
    """vllm#5203, sglang#23838: padded rows are cut, any other vocabulary or width is refused by name."""
    head, embedding, output = random_head(0)
    block, tokens = random_block(0, (embedding, output))
    padded = run(head, block, tokens)[0]
    block.embedding, block.output_weight = embedding[:19], output[:19]
    assert torch.equal(run(head, block, tokens)[0], padded)
    for tables in ((embedding[:20], output), (embedding, output[:, :5])):
        with pytest.raises(IncompatibleArtifact, match=r"vocab_size 19 .padded 21. and hidden_size 6"):
            head.bind(*tables)
    block.logits = block.logits[..., :18]
    with pytest.raises(IncompatibleArtifact, match="18 logits"):
        head.prepare(block, None)


def test_convert_states_what_is_missing(tmp_path):
    with pytest.raises(InvalidInput, match="pure_draft_prefix_len"):  # Markov files don't state it
        published("markov_merged", pure_draft_prefix_len=None)
    assert published("gru_v1_low_rank", pure_draft_prefix_len=None).config.pure_draft_prefix_len == 1
    assert published("gru_v2_merged", pure_draft_prefix_len=None, anchor_input=True).config.pure_draft_prefix_len == 0
    with pytest.raises(InvalidInput, match="unigram"):
        published("markov_merged", unigram=None)
    with pytest.raises(InvalidArtifact, match="128 tokens"):
        published("gru_v2_merged", vocab_size=129)
    with pytest.raises(InvalidArtifact, match="'down' is"):
        published("gru_v2_unmerged", hidden_size=65)
    with pytest.raises(InvalidArtifact, match="neither a GRU nor a Markov"):
        convert_published(
            GOLDEN / "heads" / "loss_mask_unigram.pt", target_id="t", target_revision=None, hidden_size=64,
            vocab_size=128,
        )  # fmt: skip
    bad = tmp_path / "bad.pt"
    for content in (b"", b"PK\x03\x04", (GOLDEN / "heads" / "markov_merged.pt").read_bytes()[:5000]):
        bad.write_bytes(content)
        with pytest.raises(InvalidArtifact, match=r"bad\.pt"):
            load_counts(bad)


def test_convert_never_unpickles_code(tmp_path):
    """A pickle that would run code is refused (weights_only)."""
    path, proof = tmp_path / "evil.pt", tmp_path / "proof"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (proof,))

    torch.save({"model_state_dict": Evil()}, path)
    with pytest.raises(InvalidArtifact, match=r"evil\.pt"):
        load_counts(path)
    assert not proof.exists()


def test_convert_cuts_padding():
    """A published head for the padded vocabulary serves the real one: rows behind it are dropped."""
    head = published("gru_v2_merged", vocab_size=122, beta=0.3)
    assert head.readout.shape[0] == 122 and head.config.padded_vocab_size == 128
    full = published("gru_v2_merged")
    tokens = torch.tensor([[3, 7, 11]])
    torch.testing.assert_close(head.local_logits(tokens), full.local_logits(tokens)[..., :122], **CLOSE)


def test_shipped_weights_keep_their_bytes(tmp_path):
    """What is in the repository loads, and saving it again writes the same config and the same weights."""
    shipped = Path(__file__).parents[1] / "heads" / "dels" / "smollm2-135m"
    DeLS.load(shipped).save(tmp_path)
    for name in ("config.json", "head.safetensors"):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes(), name
