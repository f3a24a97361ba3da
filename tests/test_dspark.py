"""DSpark against its reference's numbers, its two ways of computing against one another, cuts that keep the law, and
what it must refuse."""

import copy
import itertools
import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_verify
import torch
from conftest import Scripted, dflash, greedy, heads_for, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_verify import EXACT, Table, deviation, ratio_law
from transformers import Qwen3ForCausalLM

import repairzoo
from repairzoo import decode
from repairzoo.artifact import tensors_hash
from repairzoo.backbones.dspark import DSpark, DSparkConfig, new_config
from repairzoo.backbones.dspark.calibrate import expected_error, fit, observe
from repairzoo.backbones.dspark.train import DSparkObjective
from repairzoo.block import DraftBlock, make_pool
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.sampling import Law, Stream
from repairzoo.train.data import Batch
from repairzoo.tree import chain
from repairzoo.walk import walk

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ("random_vanilla_b7", "trained_vanilla_b7", "trained_gated_b7", "trained_rnn_b7")
TRAINED = FOLDERS[1:]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # the golden README's
F64 = torch.float64
SEEDS = st.integers(0, 2**31)


@cache
def described(folder: str) -> dict:
    return json.loads((GOLDEN / "dspark" / folder / "cases.json").read_text())


@cache
def stored(folder: str, name: str = "cases") -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "dspark" / folder / f"{name}.safetensors")


@cache
def target(folder: str) -> Qwen3ForCausalLM:
    path = GOLDEN / "dspark" / folder / described(folder)["target"]
    return Qwen3ForCausalLM.from_pretrained(path.resolve(), dtype=torch.float32).eval().requires_grad_(False)


def tables(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    return target(folder).get_input_embeddings().weight, target(folder).get_output_embeddings().weight


@cache
def draft(folder: str) -> DSpark:
    return DSpark.load(GOLDEN / "dspark" / folder / "draft").bind(*tables(folder), num_layers=8)


@cache
@torch.no_grad()
def features(folder: str, ids: tuple[int, ...]) -> torch.Tensor:
    """The target's features ``[T, F*D]``, from scratch."""
    out = target(folder).model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[layer + 1] for layer in draft(folder).tapped_layers], -1)[0]


def block_at(folder: str, ids: list[int], start: int) -> DraftBlock:
    """The block drafted after the anchor ``ids[start]``."""
    backbone = draft(folder)
    context = backbone.new_cache(1, start + backbone.block_size)
    backbone.extend(context, features(folder, tuple(ids))[None, :start], torch.arange(start)[None])
    return backbone.draft(context, torch.tensor([ids[start]]), torch.tensor([start]))


def case_of(folder: str, name: str) -> dict:
    return next(case for case in described(folder)["cases"] if case["name"] == name)


def with_threshold(folder: str, threshold: float) -> DSpark:
    backbone = copy.copy(draft(folder))
    backbone.confidence_threshold = threshold
    return backbone


def engine(backbone, law: Law | None = None, **options) -> decode.Engine:
    eos = torch.zeros(0, dtype=torch.int64)
    return decode.Engine(None, backbone, (), law or Law(0.0), eos, **options)


CASES = [(folder, case["name"]) for folder in FOLDERS for case in described(folder)["cases"]]
WITH_TENSORS = [(folder, case["name"]) for folder in FOLDERS for case in described(folder)["cases"] if case["tensors"]]


# --- golden -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("folder", "name"), WITH_TENSORS)
def test_first_block_equals_the_reference(folder, name):
    case, t, backbone = case_of(folder, name), stored(folder), draft(folder)
    n = case["n"]
    torch.testing.assert_close(features(folder, tuple(case["output_ids"]))[:n], t[f"{name}.features"], **CLOSE)
    block = block_at(folder, case["output_ids"], n)
    assert block.slots == backbone.slots == backbone.block_size == 7
    torch.testing.assert_close(block.hidden[0], t[f"{name}.block_hidden"], **CLOSE)
    torch.testing.assert_close(block.logits[0], t[f"{name}.base_logits"], **CLOSE)
    tokens, _, seen = walk(block, [block.native], None)
    torch.testing.assert_close(torch.cat(seen["scores"]), t[f"{name}.corrected_logits"], **CLOSE)
    previous = torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], 1)
    expected = t[f"{name}.confidence_logits"]
    torch.testing.assert_close(backbone.confidence_logits(block.hidden, previous)[0], expected, **CLOSE)
    torch.testing.assert_close(decode.confidences(block, previous)[0], expected.sigmoid(), **CLOSE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_path_that_is_not_the_argmax_equals_the_reference(folder):
    backbone, t = draft(folder), stored(folder)
    hidden = t["len23.block_hidden"][None]
    previous = torch.tensor([described(folder)["fixed_path"]["token_ids"][:7]])
    logits = backbone.corrected_logits(hidden, previous)[0]
    torch.testing.assert_close(logits, t["fixed.corrected_logits"], **CLOSE)
    torch.testing.assert_close(Law(0.7).probs(logits), t["fixed.draft_probs_t07"], atol=1e-6, rtol=1e-4)
    judged = backbone.confidence_logits(hidden, previous)[0]
    torch.testing.assert_close(judged, t["fixed.confidence_logits"], **CLOSE)
    torch.testing.assert_close(judged.sigmoid(), t["fixed.confidence"], **CLOSE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_targets_law_on_a_fixed_path_equals_the_reference(folder):
    case = case_of(folder, "len23")
    ids = case["prompt"] + described(folder)["fixed_path"]["token_ids"]
    with torch.no_grad():
        logits = target(folder)(torch.tensor([ids])).logits[0, case["n"] :]
    torch.testing.assert_close(Law(0.7).probs(logits), stored(folder)["fixed.target_probs_t07"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_proposals_of_every_round_equal_the_reference(folder, name):
    """Cut proposals included: the reference drops the slots from the first confidence below the threshold on."""
    case, backbone = case_of(folder, name), draft(folder)
    setup = engine(backbone, confidence=case["confidence_threshold"])
    hidden, judged = [], []
    for start, proposal in zip(case["round_starts"], case["verify_ids"], strict=True):
        block = block_at(folder, case["output_ids"], start)
        tree, _, _ = decode.propose(setup, block, torch.zeros(1, dtype=torch.int64))
        ours = tree.tokens[0, tree.valid[0]].tolist()
        # a stop token among the drafts cut the reference's last proposal
        assert ours[: len(proposal)] == proposal
        assert len(ours) == len(proposal) or proposal[-1] in (case["stop_token_ids"] or [])
        hidden.append(block.hidden[0])
        judged.append(backbone.confidence_logits(block.hidden, tree.tokens[:, :-1])[0])
    if "rounds_full" in case:
        t = stored(folder)
        torch.testing.assert_close(torch.stack(hidden), t[f"{name}.rounds_block_hidden"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.stack(judged), t[f"{name}.rounds_confidence_logits"], atol=1e-4, rtol=1e-4)


def clipped(lengths: list[int], room: int) -> list[int]:
    """Lengths of rounds that commit ``room`` tokens in all: what overruns is cut, and empty rounds are not run."""
    out = []
    for length in lengths:
        if room > 0:
            out.append(min(length, room))
            room -= out[-1]
    return out


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_generation_equals_the_reference(folder, name):
    """The reference overruns the budget in its last round and cuts afterwards, and drafts a round even when the token
    of the prefill was all that was asked for (golden README, items 3 and 5). Here a round's length is what it
    committed."""
    case = case_of(folder, name)
    zoo = repairzoo.build(with_threshold(folder, case["confidence_threshold"]), target=target(folder))
    out = zoo.generate(case["prompt"], max_new_tokens=case["max_new_tokens"], eos_token_id=case["stop_token_ids"] or [])
    assert case["prompt"] + out.token_ids[0] == case["output_ids"]
    accepted = out.stats.accepted[0]
    assert accepted == clipped(case["acceptance_lengths"], len(out.token_ids[0]) - 1)
    if not case["stop_token_ids"]:
        assert out.stats.drafted[0] == sum(case["proposal_lengths"][: len(accepted)])


def golden_batch(folder: str) -> tuple[Batch, dict[str, torch.Tensor]]:
    t = stored(folder, "train")
    mask, keep = t["loss_mask"].bool(), t["block_keep_mask"].bool()
    return Batch(t["input_ids"], mask, t["features"], t["anchor_positions"], keep), t


@pytest.mark.parametrize("folder", TRAINED)
def test_training_forward_equals_the_reference_and_decoding(folder):
    backbone, (batch, t) = draft(folder), golden_batch(folder)
    with torch.no_grad():
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)
    kept = batch.keep
    torch.testing.assert_close(hidden[kept], t["block_hidden"][kept], **CLOSE)
    anchors = batch.input_ids.gather(1, batch.anchors)[..., None]
    previous = torch.cat((anchors, t["target_ids"][..., :-1]), -1)
    torch.testing.assert_close(
        backbone.corrected_logits(hidden, previous)[kept], t["draft_logits"][kept], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        backbone.confidence_logits(hidden, previous)[kept], t["confidence_logits"][kept], atol=1e-4, rtol=1e-4
    )
    length = t["input_ids"].shape[1]
    for row in range(2):
        for index, anchor in enumerate(batch.anchors[row].tolist()):
            context = backbone.new_cache(1, length + backbone.block_size)
            backbone.extend(context, batch.features[row : row + 1, :anchor], torch.arange(anchor)[None])
            block = backbone.draft(context, batch.input_ids[row, anchor][None], torch.tensor([anchor]))
            torch.testing.assert_close(block.hidden[0], hidden[row, index], **CLOSE)


LOSSES = [(folder, name) for folder in TRAINED for name in ("all", "ce", "l1", "confidence")]


@pytest.mark.parametrize(("folder", "name"), LOSSES)
@pytest.mark.parametrize("detach", [False, True])
def test_losses_and_gradients_equal_the_reference(folder, name, detach):
    """The reference lets the confidence term through to the trunk; detached (our default, speculators#848), the losses
    are the same and only the head learns from that term."""
    backbone, (batch, t) = copy.deepcopy(draft(folder)).requires_grad_(True), golden_batch(folder)
    known = json.loads((GOLDEN / "dspark" / folder / "train.json").read_text())
    loss = known["losses"][name]
    weights = [loss[f"{key}_alpha"] for key in ("ce_loss", "l1_loss", "confidence_head")]
    objective = DSparkObjective(
        backbone, tables(folder)[1], lambda batch: t["target_last_hidden"], *weights, loss["loss_decay_gamma"], detach
    )
    terms = objective.terms(backbone, batch, 0.5)
    total = sum(above / below for above, below in terms.values())
    assert total.item() == pytest.approx(loss["loss"], rel=1e-4)
    total.backward()
    gradients = {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}
    norm = sum(g.square().sum() for g in gradients.values()).sqrt().item()
    if detach and weights[2]:
        assert norm < 0.95 * loss["grad_norm"]
        if name == "confidence":
            assert {n for n, g in gradients.items() if g.any()} == {
                "confidence_head.proj.weight",
                "confidence_head.proj.bias",
            }
        return
    assert norm == pytest.approx(loss["grad_norm"], rel=1e-3)
    if name == known["grad_loss"]:
        close = {"atol": 1e-5, "rtol": 1e-3}
        torch.testing.assert_close(gradients["fc.weight"], t[f"{name}.grad_fc_weight"], **close)
        torch.testing.assert_close(gradients["markov_head.markov_w1.weight"], t[f"{name}.grad_markov_w1"], **close)


def test_training_over_columns_and_the_verdict_on_slots():
    folder = "trained_rnn_b7"
    backbone, (batch, t) = draft(folder), golden_batch(folder)
    teacher = lambda batch: t["target_last_hidden"]  # noqa: E731
    everything = DSparkObjective(backbone, tables(folder)[1], teacher)
    with torch.no_grad():
        full = everything.terms(backbone, batch, 0.0)
        same = DSparkObjective(backbone, tables(folder)[1], teacher, columns=torch.arange(128)).terms(
            backbone, batch, 0
        )
    for key in full:
        torch.testing.assert_close(same[key], full[key])
    right, valid = everything.evaluate(batch)
    assert torch.equal(valid, t["eval_mask"].bool().flatten(0, 1))
    picks = (t["draft_logits"].argmax(-1) == t["target_ids"]).flatten(0, 1)
    assert torch.equal(right[valid], picks[valid])


# --- two ways of computing --------------------------------------------------------------------------------------------
def published(folder: str = "trained_vanilla_b7") -> dict:
    return json.loads((GOLDEN / "dspark" / folder / "draft" / "config.json").read_text())


KINDS = st.sampled_from(["vanilla", "gated", "rnn", "none"])


def tiny(seed: int, kind: str = "rnn", vocab: int = 19, block: int = 5, with_markov: bool = True) -> DSpark:
    """A random draft in float64, bound to random tables."""
    rank = 0 if kind == "none" else 3
    config = published() | {
        "block_size": block,
        "vocab_size": vocab,
        "hidden_size": 12,
        "intermediate_size": 10,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_target_layers": 6,
        "target_layer_ids": [1, -1],
        "mask_token_id": vocab - 1,
        "markov_rank": rank,
        "markov_head_type": "vanilla" if kind == "none" else kind,
        "confidence_head_with_markov": with_markov and rank > 0,
        "dtype": "float64",
    }
    backbone = DSpark(DSparkConfig.from_dict(config), seed=seed).double().requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in backbone.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) * 0.6)
    pair = torch.randn(2, vocab, 12, generator=generator, dtype=F64)
    return backbone.bind(pair[0], pair[1])


def random_block(backbone: DSpark, seed: int, rows: int = 2) -> DraftBlock:
    generator = torch.Generator().manual_seed(seed)
    context = backbone.new_cache(rows, 12)
    features = torch.randn(rows, 6, 24, generator=generator, dtype=F64)
    backbone.extend(context, features, torch.arange(6).expand(rows, -1))
    vocab = backbone.vocab_size
    return backbone.draft(context, torch.randint(0, vocab, (rows,), generator=generator), torch.tensor([6, 3])[:rows])


@settings(deadline=None, max_examples=20)
@given(SEEDS, KINDS)
def test_stepwise_equals_teacher_forced_and_the_equations(seed, kind):
    """Spec sections 1.3 and 7, test 5; concatenation orders are [z; w] (gated) and [s; w; z] (rnn)."""
    backbone = tiny(seed, kind)
    block, head = random_block(backbone, seed), backbone.markov_head
    path = torch.randint(0, 19, (2, block.slots), generator=torch.Generator().manual_seed(seed))
    previous = torch.cat([block.anchor_ids[:, None], path[:, :-1]], 1)
    forced = backbone.corrected_logits(block.hidden, previous)
    native, carry = block.native, block.native.start(block)
    prepared = native.prepare(block, None)
    state = torch.zeros(2, 3, dtype=F64)
    for slot in range(block.slots):
        base = block.logits[:, slot, None]
        scores, carry = native.step(prepared, carry, slot, previous[:, slot, None], base)
        torch.testing.assert_close(scores[:, 0], forced[:, slot], atol=1e-9, rtol=1e-9)
        if kind == "none":
            assert torch.equal(scores, base)
            continue
        z, w = block.hidden[:, slot], head.markov_w1.weight[previous[:, slot]]
        if kind == "gated":
            w = torch.sigmoid(head.gate_proj(torch.cat([z, w], -1))) * w
        elif kind == "rnn":
            gate, candidate, out = head.joint_proj(torch.cat([state, w, z], -1)).chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            w = out.tanh()
        torch.testing.assert_close(scores[:, 0], base[:, 0] + head.markov_w2(w), atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=15)
@given(SEEDS, KINDS, st.integers(1, 19), st.integers(1, 3))
def test_pool_rows_equal_the_gathered_full_vocabulary(seed, kind, size, width):
    backbone = tiny(seed, kind)
    block = random_block(backbone, seed)
    pool, native = make_pool(block.logits, size), block.native
    prepared = [native.prepare(block, p) for p in (None, pool)]
    start = native.start(block)
    carries = [None if start is None else start.expand(-1, width, -1) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    for slot in range(block.slots):
        previous = torch.randint(0, 19, (2, width), generator=generator)
        full = block.logits[:, slot, None].expand(-1, width, -1)
        ids = pool.ids[:, slot, None].expand(-1, width, -1)
        scores, carries[0] = native.step(prepared[0], carries[0], slot, previous, full)
        some, carries[1] = native.step(prepared[1], carries[1], slot, previous, full.gather(2, ids))
        torch.testing.assert_close(some, scores.gather(2, ids), atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=10)
@given(SEEDS, KINDS, st.booleans())
def test_train_forward_equals_draft(seed, kind, with_markov):
    backbone = tiny(seed, kind, with_markov=with_markov)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 9, 24, generator=generator, dtype=F64)
    ids, anchors = (torch.randint(0, high, (1, n), generator=generator) for high, n in ((18, 9), (9, 3)))
    hidden = backbone(features, ids, anchors)
    for index, anchor in enumerate(anchors[0].tolist()):
        context = backbone.new_cache(1, 15)
        backbone.extend(context, features[:, :anchor], torch.arange(anchor)[None])
        block = backbone.draft(context, ids[:, anchor], torch.tensor([anchor]))
        torch.testing.assert_close(block.hidden[0], hidden[0, index], atol=1e-9, rtol=1e-9)


def test_a_new_draft_drafts_as_its_trunk():
    """DESIGN section 3, identity: a zero-initialised output changes no choice, bit for bit."""
    backbone = DSpark(DSparkConfig.from_dict(published("trained_rnn_b7")), seed=3)
    backbone.bind(torch.randn(128, 64), torch.randn(128, 64))
    context = backbone.new_cache(1, 20)
    backbone.extend(context, torch.randn(1, 5, 128), torch.arange(5)[None])
    block = backbone.draft(context, torch.tensor([3]), torch.tensor([5]))
    assert torch.equal(torch.stack(walk(block, [block.native], None)[2]["scores"], 1), block.logits)


# --- confidence -------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=15)
@given(SEEDS, KINDS, st.booleans(), st.integers(0, 4))
def test_the_decision_on_a_slot_sees_only_tokens_before_it(seed, kind, with_markov, slot):
    """Paper, Appendix A: what looks at the token itself, or at later ones, is not lossless."""
    backbone = tiny(seed, kind, with_markov=with_markov)
    block = random_block(backbone, seed)
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randint(0, 19, (2, 2, 5), generator=generator)
    other[:, :slot] = one[:, :slot]  # tokens 0 .. slot - 1 agree
    seen = [decode.confidences(block, torch.cat([block.anchor_ids[:, None], t[:, :-1]], 1)) for t in (one, other)]
    torch.testing.assert_close(seen[0][:, : slot + 1], seen[1][:, : slot + 1], atol=0, rtol=1e-12)
    backbone.calibrate([2.0] * 5)
    calm = decode.confidences(block, torch.cat([block.anchor_ids[:, None], one[:, :-1]], 1))
    torch.testing.assert_close(calm.logit(), seen[0].logit() / 2, atol=1e-9, rtol=1e-7)


class Uniforms:
    """Stands in for ``repairzoo.decode.uniform``: the numbers of each stream are given."""

    def __init__(self, **streams: torch.Tensor) -> None:
        self.streams = {Stream[name.upper()]: values for name, values in streams.items()}

    def __call__(self, seed: torch.Tensor, counter: torch.Tensor, stream: Stream) -> torch.Tensor:
        assert self.streams[stream].shape == counter.shape
        return self.streams[stream]


def all_paths(backbone: DSpark, block: DraftBlock, S: int, V: int, law: Law):
    """Every path a sampled block can take: a block of as many rows, the paths, their weights, and numbers that draw
    them."""
    paths = torch.tensor(list(itertools.product(range(V), repeat=S)))
    N = len(paths)
    rows = {name: getattr(block, name).expand(N, *getattr(block, name).shape[1:]) for name in ("hidden", "logits")}
    ids, positions = block.anchor_ids.expand(N), block.anchor_positions.expand(N)
    wide = DraftBlock(
        **rows,
        anchor_ids=ids,
        anchor_positions=positions,
        context=block.context,
        history=block.history,
        history_mask=block.history_mask,
        embedding=block.embedding,
        output_weight=block.output_weight,
        native=block.native,
    )
    q = law.probs(backbone.corrected_logits(wide.hidden, torch.cat([ids[:, None], paths[:, :-1]], 1)))
    mass = q.gather(2, paths[..., None])[..., 0]
    u = q.cumsum(-1).gather(2, paths[..., None])[..., 0] - mass / 2
    return wide, paths, mass.prod(1), u


def varied(seed: int, kind: str, V: int, S: int) -> tuple[DSpark, DraftBlock]:
    """A draft whose confidence hangs on the token before more than on the slot, surest after the anchor: thresholds
    then cut paths at different slots."""
    backbone = tiny(seed, kind, vocab=V, block=S)
    backbone.confidence_head.proj.weight[:, :12] *= 0.02
    block = random_block(backbone, seed, rows=1)
    judged = backbone.confidence_logits(block.hidden[0, :1].expand(V, -1), torch.arange(V))
    block.anchor_ids = judged.argmax()[None]
    return backbone, block


def law_of_a_round(backbone, block, table, threshold: float, retrospective: bool = False):
    """Exact law of what ``propose`` and ``_accept`` commit, over all drafts and all numbers that judge them."""
    S, V, law = table.S, table.V, Law(1.0)
    wide, paths, weight, u = all_paths(backbone, block, S, V, law)
    setup = engine(backbone, law, sampled=True, confidence=threshold)
    seed = torch.zeros(len(paths), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "uniform", Uniforms(draft=u))
        tree, q, _ = decode.propose(setup, wide, seed)
    assert torch.equal(tree.tokens[:, 1:], paths)
    keep = tree.valid[:, 1:]
    if retrospective:
        keep = decode.confidences(wide, paths) >= threshold  # judged with the slot's own token: must be biased

    def accept(p, q, tokens, keep, u_accept, u_residual):
        state = SimpleNamespace(seed=torch.zeros(len(p), dtype=torch.int64))
        tree = chain(torch.zeros(len(p), dtype=torch.int64), tokens, keep)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "uniform", Uniforms(accept=u_accept, residual=u_residual))
            return decode._accept(setup, state, tree, q, p.log(), torch.zeros(len(p), dtype=torch.int64))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_verify, "ratio", accept)
        return ratio_law(table.along(paths), q, paths, weight, keep), keep, weight


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sampled_round_has_the_targets_law_at_every_threshold(kind, seed):
    """Issue: sampled mode exact by enumeration with a scripted DSpark, confidence truncation at every threshold."""
    V, S = 3, 3
    (backbone, block), table = varied(seed, kind, V, S), Table(seed, V, S)
    wide, paths, *_ = all_paths(backbone, block, S, V, Law(1.0))
    judged = decode.confidences(wide, torch.cat([wide.anchor_ids[:, None], paths[:, :-1]], 1)).unique()
    kept = []
    for threshold in [0.0, *((judged[1:] + judged[:-1]) / 2).tolist(), 1.0]:
        law, keep, weight = law_of_a_round(backbone, block, table, threshold)
        assert deviation(table, law) < 1e-9
        kept.append(float((keep.sum(1) * weight).sum()))
    assert kept[0] == pytest.approx(S) and kept[-1] == 0 and kept == sorted(kept, reverse=True) and len(set(kept)) > 3


def test_control_a_cut_that_looks_at_its_own_token_is_biased():
    """Paper, Appendix A."""
    worst = 0.0
    for seed in range(4):
        (backbone, block), table = varied(seed, "vanilla", 3, 2), Table(seed, 3, 2)
        threshold = float(decode.confidences(block, torch.tensor([[0, 1]])).median())
        assert deviation(table, law_of_a_round(backbone, block, table, threshold)[0]) < 1e-9
        worst = max(worst, deviation(table, law_of_a_round(backbone, block, table, threshold, True)[0]))
    assert worst > 0.01
    assert EXACT < 1e-9


def test_calibration_error_by_hand():
    p = torch.tensor([0.05, 0.15, 0.15, 0.95])
    outcome = torch.tensor([False, True, False, True])
    # bins: 0.05 against 0, 0.15 against 0.5 (two), 0.95 against 1
    assert expected_error(p, outcome) == pytest.approx((0.05 + 2 * 0.35 + 0.05) / 4)
    assert expected_error(torch.ones(3), torch.ones(3, dtype=torch.bool)) == 0


@pytest.mark.parametrize("true", [(0.5, 0.5, 0.5), (2.0, 1.0, 4.0)])
def test_temperatures_are_found_slot_by_slot(true):
    """Outcomes drawn with known temperatures; the prefix's product is what is calibrated (paper 3.2)."""
    g = torch.Generator().manual_seed(1)
    logits = 1.5 + 2 * torch.randn(20_000, 3, generator=g)
    chance = (logits / torch.tensor(true)).sigmoid()
    accepted = (torch.rand(chance.shape, generator=g) < chance).long().cumprod(1).sum(1)
    report = fit(logits, accepted)
    assert report.temperatures == pytest.approx(true, rel=0.25)
    assert all(b > 2 * a for a, b, t in zip(report.after, report.before, true, strict=True) if t != 1)
    assert max(report.after) < 0.02
    assert report.survived == tuple(sorted(report.survived, reverse=True))
    assert fit(logits, accepted).temperatures == report.temperatures
    for wrong in ((logits[:0], accepted[:0]), (logits, accepted[:5]), (logits[0], accepted)):
        with pytest.raises(InvalidInput, match="accepted drafts"):
            fit(*wrong)


def test_observed_rounds_are_those_of_the_run_and_the_fit_is_kept(tmp_path):
    folder = "trained_gated_b7"
    backbone = DSpark.load(GOLDEN / "dspark" / folder / "draft")
    zoo = repairzoo.build(backbone, target=target(folder))
    rows = [case_of(folder, name)["prompt"] for name in ("len7", "len23b")]
    logits, accepted = observe(zoo, rows, max_new_tokens=20, eos_token_id=[])
    out = zoo.generate(rows, max_new_tokens=20, eos_token_id=[])
    assert len(logits) == len(accepted) == sum(map(len, out.stats.accepted))
    assert int(accepted.sum()) == sum(out.stats.agreed)
    report = fit(logits, accepted)
    assert all(a <= b for a, b in zip(report.after, report.before, strict=True))
    backbone.calibrate(report.temperatures)
    backbone.save(tmp_path)
    again = DSpark.load(tmp_path).bind(*tables(folder))
    assert torch.equal(again.confidence_temperatures, backbone.confidence_temperatures)
    again.calibrate(None)
    again.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == published(folder)
    for wrong in ([1.0], [0.0] * 7, "many"):
        refuses(published() | {"confidence_temperatures": wrong}, "confidence_temperatures")


# --- whole runs -------------------------------------------------------------------------------------------------------
def drafts_for(seed: int, kind: str) -> DSpark:
    """A random DSpark for the toy target."""
    base = dflash(toy(), seed)
    rank = 0 if kind == "none" else 4
    config = new_config(base.config, markov_rank=rank, markov_head_type="rnn" if kind == "none" else kind)
    backbone = DSpark(config).to(F64).requires_grad_(False).eval()
    backbone.load_state_dict(base.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in backbone.named_parameters():
        if name.startswith(("markov_head", "confidence_head")):
            p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) * 1.5)
    return backbone


@settings(deadline=None, max_examples=12)
@given(SEEDS, KINDS, st.sampled_from([0.0, 0.3, 0.6, 1.0]), st.sampled_from([None, "bigram"]), st.integers(1, 9))
def test_greedy_output_is_the_targets(seed, kind, threshold, head, new):
    backbone = drafts_for(seed % 50, kind)
    backbone.confidence_threshold = threshold
    rows = prompts(seed, [3, 7])
    zoo = repairzoo.build(backbone, head and heads_for(toy(), head, seed), toy())
    out = zoo.generate(rows, max_new_tokens=new, eos_token_id=[])
    assert out.token_ids == [greedy(toy().model, row, new) for row in rows]
    if threshold == 1.0:
        assert out.stats.drafted == [0, 0]


@settings(deadline=None, max_examples=10)
@given(SEEDS, KINDS, st.sampled_from([0.3, 0.6, 1.0]), st.sampled_from(["argmax", "sampled"]))
def test_rows_that_are_not_verified_change_nothing(seed, kind, threshold, proposal):
    """A mask and a shorter tensor are the same round: on a processor the cut rows are saved (sglang#30204)."""
    backbone = drafts_for(seed % 50, kind)
    backbone.confidence_threshold = threshold
    rows, runs, sizes = prompts(seed, [2, 5]), [], []
    zoo = repairzoo.build(backbone, target=toy(), proposal=proposal)
    shorten = decode.shorten
    for saved in (True, False):

        def cut(tree, q, repaired, saved=saved):
            out = shorten(tree, q, repaired) if saved else (tree, q, repaired)
            sizes.append((saved, out[0].size))
            return out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "shorten", cut)
            out = zoo.generate(rows, max_new_tokens=7, temperature=1.0, seed=seed, eos_token_id=[])
        runs.append((out.token_ids, out.stats.accepted, out.stats.drafted))
    assert runs[0] == runs[1]
    least = 2 if proposal == "sampled" else 1
    if threshold == 1.0:
        assert {size for saved, size in sizes if saved} == {least}


def test_thresholds_are_checked():
    backbone = tiny(0)
    for wrong in (-0.1, 1.1, True, "half"):
        with pytest.raises(InvalidInput, match="confidence_threshold"):
            backbone.confidence_threshold = wrong
    config = published() | {"enable_confidence_head": False}
    bare = DSpark(DSparkConfig.from_dict(config), seed=0)
    with pytest.raises(InvalidInput, match="no confidence head"):
        bare.confidence_threshold = 0.5
    with pytest.raises(InvalidInput, match="tree"):
        engine(backbone, nodes=3, confidence=0.5)
    plain = Scripted(2, lambda ids, positions: torch.zeros(1, 2, 4))
    plain.bind(torch.zeros(4, 2), torch.zeros(4, 2))
    block = plain.draft(None, torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(InvalidInput, match="confidence head"):
        decode.propose(engine(plain, confidence=0.5), block, torch.tensor([0]))
    for wrong in ([1.0], [1.0, 0.0, 1.0, 1.0, 1.0]):
        with pytest.raises(InvalidInput, match="one a slot"):
            backbone.calibrate(wrong)


# --- config -----------------------------------------------------------------------------------------------------------
def refuses(config: dict, *words: str) -> None:
    with pytest.raises(InvalidArtifact) as caught:
        DSparkConfig.from_dict(config, "some/config.json")
    for word in ("some/config.json: ", *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "num_anchors",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
    ],
)
def test_each_missing_key_is_named(key):
    config = published()
    del config[key]
    refuses(config, repr(key), "missing", "add it")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_rank": -1}, "markov_rank"),
        ({"markov_rank": True}, "markov_rank"),
        ({"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"enable_confidence_head": 1}, "enable_confidence_head"),
        ({"num_anchors": 0}, "num_anchors"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures"),
        ({"architectures": ["Lfm2DSparkDraftModel"]}, "architectures"),
        ({"model_type": "gemma4_text"}, "model_type"),
        ({"model_type": "qwen3_5"}, "model_type"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type"),
        ({"dflash_config": {"novelty": 1}}, "dflash_config.novelty"),
        ({"dflash_config": {"markov_rank": 8}}, "markov_rank"),
        ({"gru_hidden_dim": 8}, "Domino"),
        ({"selector_rank": 8}, "DFlash 2"),
        ({"speculators_model_type": "dspark"}, "speculators"),
        ({"dspark_block_size": 5}, "DeepSeek-V4"),
        ({"draft_vocab_size": 64}, "vocabulary"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"rope_is_neox_style": False}, "rotary"),
        ({"partial_rotary_factor": 0.25}, "rotary"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {}}, "quantised"),
    ],
)
def test_contradictions_and_other_kinds_are_refused(changes, words):
    refuses(published() | changes, words)


def test_nested_layout_reads_the_same():
    """SpecForge's packaging: the same draft in ``dflash_config``, without DeepSpec's tables and num_anchors."""
    flat = published()
    inner = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    nested = {key: value for key, value in flat.items() if key not in (*inner, "num_anchors")}
    nested["dflash_config"] = {key: flat[key] for key in inner} | {
        "projector_type": "dspark",
        "confidence_head_with_markov": nested.pop("confidence_head_with_markov"),
        "confidence_head_alpha": 1.0,
        "attention_mode": "full",
    }
    nested["architectures"] = ["DSparkDraftModel"]
    read = [DSparkConfig.from_dict(config) for config in (flat, nested)]
    assert read[1].to_dict() == nested
    for config in read:
        config.published = {}
    assert read[0] == read[1]


def test_published_qwen3_8b_layout_has_64_tensors():
    """Spec section 2.3; 4.74 GB in bfloat16."""
    config = published() | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": 36,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "markov_rank": 256,
        "dtype": "bfloat16",
    }
    with torch.device("meta"):
        model = DSpark(DSparkConfig.from_dict(config))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()} | model._own_tables()
    assert len(shapes) == 64
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 4352) and shapes["confidence_head.proj.bias"] == (1,)
    size = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert round(2 * size / 1e7) == 474


# --- files ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a published folder."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "dspark" / "trained_vanilla_b7" / "draft" / name, tmp_path / name)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def no_tables(t: dict) -> None:
    del t["embed_tokens.weight"], t["lm_head.weight"]


def no_bias(t: dict) -> None:
    del t["confidence_head.proj.bias"]


def with_prefix(t: dict) -> None:
    for name in [n for n in t if n.startswith(("markov_head", "confidence_head"))]:
        t[f"logit_head.{name}"] = t.pop(name)


@pytest.mark.parametrize(
    "change", [lambda t: None, no_tables, no_bias, with_prefix], ids=["all", "bare", "bias", "old"]
)
@pytest.mark.parametrize("bound", [False, True])
def test_save_writes_back_what_was_loaded(folder, tmp_path, change, bound):
    """Also without the tables (SpecForge) and without the confidence's bias (TRT-LLM#16813: it is optional)."""
    if change:
        rewrite(folder, change)
    loaded = DSpark.load(folder)
    if bound:
        loaded.bind(*tables("trained_vanilla_b7"), num_layers=8)
    loaded.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text().split() == (folder / "config.json").read_text().split()
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    assert tensors_hash(before) == tensors_hash(after)


def test_a_confidence_without_bias_is_read_as_zero(folder):
    rewrite(folder, no_bias)
    loaded, other = (m.bind(*tables("trained_vanilla_b7")) for m in (DSpark.load(folder), draft("trained_vanilla_b7")))
    hidden, previous = torch.randn(1, 7, 64), torch.arange(7)[None]
    difference = other.confidence_logits(hidden, previous) - loaded.confidence_logits(hidden, previous)
    torch.testing.assert_close(difference, other.confidence_head.proj.bias.expand(1, 7), atol=1e-5, rtol=1e-5)


def test_equal_tables_are_shared_and_others_are_refused_unless_wanted(folder):
    embedding, output = tables("trained_vanilla_b7")
    loaded = DSpark.load(folder).bind(embedding, output)
    assert loaded._own == {} and loaded._tables.embedding.data_ptr() == embedding.data_ptr()
    loaded.bind(embedding.bfloat16(), output.bfloat16())  # the same tables, coarser: drafted with the target's
    assert loaded._tables.embedding.dtype == torch.bfloat16
    other = output + 1e-3
    for pair, names in (((embedding, other), "'lm_head.weight'"), ((other, output), "'embed_tokens.weight'")):
        with pytest.raises(IncompatibleArtifact, match=names):
            loaded.bind(*pair)
    loaded.own_tables = True
    loaded.bind(embedding, other)
    hidden = torch.randn(1, 7, 64)
    torch.testing.assert_close(loaded.logits(hidden), hidden @ output.T, atol=1e-4, rtol=1e-4)
    assert loaded._bound.output_weight.data_ptr() == other.data_ptr()  # heads still see the target's
    wrong = DSpark.load(folder)
    with pytest.raises(IncompatibleArtifact, match="another target"):
        repairzoo.build(wrong, target=target("random_vanilla_b7"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("markov_head.markov_w2.weight"), "missing"),
        (lambda t: t.pop("lm_head.weight"), "'embed_tokens.weight' but not 'lm_head.weight'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(120, 64)}), "expected (128, 64)"),
        (lambda t: t.update({"embed_tokens.weight": torch.full((128, 64), float("nan"))}), "non-finite"),
        (lambda t: t.update({"markov_head.gate_proj.weight": torch.zeros(16, 80)}), "unknown"),
        (lambda t: t.update({"d2t": torch.zeros(128)}), "unknown"),
        (lambda t: t.update({"confidence_head.proj.weight": torch.zeros(1, 64)}), "expected (1, 80)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, words):
    rewrite(folder, change)
    with pytest.raises(InvalidArtifact) as caught:
        DSpark.load(folder)
    assert words in str(caught.value), str(caught.value)


def test_new_config_takes_over_the_trunk():
    made = new_config(DSparkConfig.from_dict(published()), markov_head_type="gated", markov_rank=5, block_size=4)
    assert (made.block_size, made.markov_rank, made.markov_head_type, made.confidence_with_markov) == (
        4,
        5,
        "gated",
        True,
    )
