"""Heads on a backbone in training: the blocks they see are those of the loop, and training does what it should."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_toys import TAPS, VOCAB, draft, make_corpus, target, write_recipe
from typer.testing import CliRunner

import repairzoo
from repairzoo.backbones.domino import Domino
from repairzoo.backbones.domino import new_config as domino_config
from repairzoo.block import make_pool
from repairzoo.errors import InvalidInput
from repairzoo.heads.drelay import DRelay, DRelayConfig
from repairzoo.heads.drelay import objective as drelay
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig, Weights
from repairzoo.heads.lilicorr import objective as lilicorr
from repairzoo.train.blocks import pool_blocks, prefixes, target_scores
from repairzoo.train.cli import app
from repairzoo.train.commands import run_training
from repairzoo.train.data import Batch, scouted
from repairzoo.train.recipe import read_recipe
from repairzoo.train.trainer import total_loss

ROOT = Path(__file__).parents[1]
SIZES = {
    "block_size": 4, "hidden_size": 16, "vocab_size": VOCAB, "padded_vocab_size": VOCAB, "target_id": "toy/target",
}  # fmt: skip


@torch.no_grad()
def batch(seed: int = 0, rows: int = 3, length: int = 12) -> Batch:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB - 1, (rows, length), generator=g)
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[1, 9:] = False
    anchors = torch.tensor([[0, 3, 8], [1, 5, 8], [10, 4, 2]])
    keep = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    cache = target().new_cache(rows, length)
    _, features = target().prefill(ids, torch.full((rows,), length), cache, TAPS)
    assert features is not None
    return Batch(ids, mask, features, anchors, keep)


def domino(seed: int = 0) -> Domino:
    config = domino_config(draft().config, emb_dim=6, gru_hidden_dim=5)
    backbone = Domino(config, seed=seed)
    return backbone.bind(target().embedding, target().output_weight, num_layers=3)


def relay(**options) -> DRelay:
    widths = {"width": 16, "heads": 2, "ffn": 16, "residual": 16, "rank": 8, "gate": 8}
    return DRelay(DRelayConfig(**SIZES, **widths, pool_size=6, **options), torch.Generator().manual_seed(0))


def lattice(**options) -> LiLiCorr:
    values = {"candidates": 6, "pool_size": 6, "width": 16, "num_heads": 2, "num_layers": 1, "factor_dim": 8} | options
    return LiLiCorr(LiLiCorrConfig(**SIZES, **values), torch.Generator().manual_seed(0))


def everything(head: str, joint: bool, **options):
    backbone = draft(2).requires_grad_(joint)
    if head == "drelay":
        return drelay.DRelayObjective(relay(), backbone, joint=joint, until=0.0, **options)
    weights = Weights(0.125, 0.125, 0.25)
    made = lattice(decision="identity_safe" if head == "identity_safe" else "published")
    return lilicorr.LiLiCorrObjective(made, backbone, target(), weights, joint=joint, **options)


@torch.no_grad()
def test_blocks_are_those_of_the_loop():
    """Hidden states, anchor feature, history, pool: at every anchor what a draft after the same prefix gives."""
    backbone, b = draft(2), batch()
    blocks = pool_blocks(backbone, b, 5)
    assert len(blocks.labels) == 8 - 1  # the anchor at 8 of row 1 has no supervised successor
    for i, (row, position) in enumerate(zip(blocks.rows.tolist(), blocks.positions.tolist(), strict=True)):
        cache = backbone.new_cache(1, 24, torch.float32, b.features.device)
        if position:
            backbone.extend(cache, b.features[row : row + 1, :position], torch.arange(position)[None])
        want = backbone.draft(cache, b.input_ids[row, position][None], torch.tensor([position]))
        for name in ("hidden", "context", "history", "history_mask", "anchor_ids"):
            got = getattr(blocks.block, name)[i : i + 1]
            torch.testing.assert_close(got, getattr(want, name), atol=1e-5, rtol=1e-4)
        pool = make_pool(want.logits, 5)
        assert torch.equal(blocks.pool.ids[i], pool.ids[0])
        torch.testing.assert_close(blocks.pool.log_probs[i], pool.log_probs[0], atol=1e-5, rtol=1e-4)
        inside = min(3, 12 - 1 - position)
        assert blocks.labels[i, :inside].tolist() == b.input_ids[row, position + 1 : position + 1 + inside].tolist()


@torch.no_grad()
def test_incoming_scores_are_those_of_a_causal_backbone():
    """On Domino a head is given the scores that its corrector gives after the true tokens."""
    backbone, b = domino(), batch()
    for p in backbone.parameters():
        p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    blocks = pool_blocks(backbone, b, 5)
    previous = torch.cat((blocks.block.anchor_ids[:, None], blocks.labels[:, :-1]), 1)
    want = backbone.corrected_logits(blocks.block.hidden, previous).gather(-1, blocks.pool.ids)
    torch.testing.assert_close(blocks.scores.log_softmax(-1), want.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert (blocks.scores - blocks.pool.log_probs).abs().max() > 1e-3
    with pytest.raises(InvalidInput, match="joint: false"):
        pool_blocks(backbone, b, 5, joint=True)
    with pytest.raises(InvalidInput, match="5 candidates of the 4 ids"):
        pool_blocks(draft(2), b, 5, joint=True, columns=torch.arange(4))


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: draft(2), domino])
def test_pools_of_some_ids(make):
    """A frozen backbone's pools over the ids of a corpus are the best of those, normalised over those."""
    backbone, b, columns = make(), batch(), torch.arange(1, VOCAB, 2)
    few, every = pool_blocks(backbone, b, 5, columns=columns), pool_blocks(backbone, b, VOCAB)
    logits = torch.full((*every.labels.shape, VOCAB), float("-inf")).scatter(-1, every.pool.ids, every.pool.log_probs)
    want = make_pool(logits[..., columns], 5)
    torch.testing.assert_close(few.pool.log_probs, want.log_probs, atol=1e-5, rtol=1e-4)
    assert torch.equal(few.pool.ids, columns[want.ids])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("head", ["drelay", "published"])
def test_what_is_measured_is_measured_over_all_ids(head, joint):
    """Training sees pools of the corpus' ids, evaluation the pools that decoding will see."""
    b, columns = batch(), torch.arange(1, VOCAB, 2)
    module = everything(head, joint, columns=columns).module
    assert torch.isin(module(b)[0].pool.ids, columns).all()
    with torch.no_grad():
        assert torch.equal(
            module(b)[0].pool.ids, pool_blocks(module.backbone, b, module(b)[0].pool.ids.shape[-1]).pool.ids
        )
        assert not torch.isin(module(b)[0].pool.ids, columns).all()


@torch.no_grad()
def test_target_scores_are_the_targets():
    b = batch()
    blocks = pool_blocks(draft(2), b, 5)
    logits = target().model(b.input_ids).logits
    got = target_scores(target(), b, blocks)
    for i, (row, position) in enumerate(zip(blocks.rows.tolist(), blocks.positions.tolist(), strict=True)):
        for s in range(min(3, 12 - position)):
            want = logits[row, position + s][blocks.pool.ids[i, s]]
            torch.testing.assert_close(got[i, s], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["drelay", "published", "identity_safe"])
@pytest.mark.parametrize("joint", [False, True])
def test_training_improves_the_choice(head, joint):
    """Loss falls, right choices rise; the backbone moves in joint training only."""
    objective, b = everything(head, joint), batch()
    before = copy.deepcopy(objective.backbone.state_dict())
    trained = [p for p in objective.module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    first, start = None, objective.diagnose([b])
    if head != "published":
        assert start["selected"] == start["native"] and start["fixed"] == start["broken"] == 0
    for _ in range(40):
        loss = total_loss(objective.terms(objective.module, b, 1.0))
        first = loss.item() if first is None else first
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.8 * first
    end = objective.diagnose([b])
    # an untrained published decision may choose well by chance
    assert end["selected"] > start["selected"] or (head == "published" and end["fixed"] > end["broken"])
    assert end["selected"] <= end["oracle"] + 1e-6
    right, valid = objective.evaluate(b)
    assert right.shape == valid.shape == (7, 3)
    moved = any(
        not torch.equal(a, b) for a, b in zip(before.values(), objective.backbone.state_dict().values(), strict=True)
    )
    assert moved is joint


def test_new_drelay_learns_from_its_first_step():
    """What makes a new head exact must not cut its gradient: the first step moves every output layer."""
    objective = everything("drelay", False)
    total_loss(objective.terms(objective.module, batch(), 1.0)).backward()
    for name in ("residual_out", "global_rank", "history_rank", "prefix_rank", "gate_out"):
        assert objective.head.get_parameter(f"{name}.weight").grad.abs().sum() > 0, name


def test_joint_gradients_equal_those_of_the_parts():
    """Joint training at alpha 0 is the draft's cross entropy alone (invariant 21), restricted to all ids or not."""
    b = batch()
    grads: list[Tensor] = []
    for columns in (None, torch.arange(VOCAB)):
        objective = everything("drelay", True, alpha=(0.0, 0.0), columns=columns)
        total_loss(objective.terms(objective.module, b, 1.0)).backward()
        grads.append(objective.backbone.fc.weight.grad)
    from repairzoo.backbones.dflash.train import DFlashObjective

    plain = DFlashObjective(draft(2), target().output_weight, gamma=None)
    blocks = pool_blocks(plain.module, b, 5)
    hidden = plain.module(b.features, b.input_ids, b.anchors)[:, :, 1:].flatten(0, 1)
    labels, mask = b.labels(3)
    keep = mask[..., 0].flatten()
    logits = (hidden[keep] @ target().output_weight.T).flatten(0, 1)
    entropy = torch.nn.functional.cross_entropy(logits, labels.flatten(0, 1)[keep].flatten(), reduction="none")
    ((entropy * blocks.mask.flatten()).sum() / blocks.mask.sum()).backward()
    for grad in grads:
        torch.testing.assert_close(grad, plain.module.fc.weight.grad, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_prefix_diagnostics_count_by_hand():
    blocks = pool_blocks(draft(2), batch(), 4)
    blocks.mask[:] = True
    blocks.labels[:] = blocks.pool.ids[..., 1]  # native is wrong everywhere, the oracle always right
    scores = blocks.scores.clone()
    scores[:, :2, 1] = 1e3
    found = prefixes(blocks, scores)
    want = {"native": 0.0, "selected": 2.0, "oracle": 3.0, "fixed": 14, "broken": 0, "slots": 21}
    assert found == want


@pytest.mark.parametrize("kind", ["drelay", "lilicorr"])
def test_recipes_plan_train_and_save_what_loads(kind, tmp_path):
    """The shipped recipe is sound; a tiny one makes an artifact that drafts, losslessly, in the loop."""
    shipped = read_recipe(ROOT / "heads" / kind / "recipe.yaml")
    assert shipped.kind == kind
    model = {
        "drelay": {"preset": "small", "width": 16, "ffn": 16, "residual": 16, "rank": 8, "gate": 8, "pool_size": 6},
        "lilicorr": {"width": 16, "factor_dim": 8, "candidates": 6, "num_heads": 2, "num_layers": 1},
    }[kind] | {"dtype": "float32"}
    run = {"steps": 2, "batch": 4, "anchors": 4, "precision": "fp32", "eval_sequences": 4}
    path = write_recipe(tmp_path / "recipe.yaml", {"kind": kind, "model": model, "objective": {}, "run": run})
    folder = make_corpus(tmp_path / "corpus", 60)
    module = {"drelay": drelay, "lilicorr": lilicorr}[kind]
    with pytest.raises(InvalidInput, match="give the backbone"):
        module.plan(read_recipe(path), target(), [folder])
    backbone = draft(2)
    job = module.plan(read_recipe(path), target(), [folder], backbone=backbone)
    b = job.corpus.training_batch(0, 4, 4, 0)
    assert total_loss(job.objective.terms(job.objective.module, b, 0.5)).isfinite()
    job.save(tmp_path / "artifact")
    head = {"drelay": DRelay, "lilicorr": LiLiCorr}[kind].load(tmp_path / "artifact")
    assert head.config.backbone == "dflash" and json.dumps(job.facts)
    assert job.finish is not None and job.finish(read_recipe(path).run)[0]["prefixes"]["slots"] > 0
    zoo = repairzoo.build(backbone, head, target())
    rows = [[1, 2, 3]]
    want = repairzoo.autoregressive(target(), rows, max_new_tokens=8).token_ids
    assert zoo.generate(rows, max_new_tokens=8).token_ids == want
    again = module.plan(read_recipe(path), target(), [folder], backbone=backbone, init=tmp_path / "artifact")
    assert all(torch.equal(v, head.state_dict()[n]) for n, v in again.objective.head.state_dict().items())


# ---------------------------------------------------------------- ablations, scout, control

MODELS = {
    "drelay": {"preset": "small", "width": 16, "ffn": 16, "residual": 16, "rank": 8, "gate": 8, "pool_size": 6},
    "lilicorr": {"width": 16, "factor_dim": 8, "candidates": 6, "num_heads": 2, "num_layers": 1},
}
RUN = {"steps": 2, "batch": 4, "anchors": 4, "precision": "fp32", "eval_sequences": 4}


def planned(tmp_path: Path, kind: str, changes: tuple[str, ...], objective: dict | None = None, **options):
    folder = tmp_path / "corpus"
    if not folder.exists():
        make_corpus(folder, 60)
    recipe = {"kind": kind, "model": MODELS[kind] | {"dtype": "float32"}, "objective": objective or {}, "run": RUN}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    module = {"drelay": drelay, "lilicorr": lilicorr}[kind]
    return module.plan(read_recipe(path, changes), target(), [folder], backbone=draft(2), **options)


def test_identity_safe_training_does_not_begin_on_a_saddle(tmp_path):
    """A new head's gamma is 0 (bit for bit no head) and its scores hardly differ: each would scale the other's
    gradient. Training begins with 1; a head that is gone on with keeps its own."""
    job = planned(tmp_path, "lilicorr", ("model.decision=identity_safe",))
    assert torch.equal(job.objective.head.gamma, torch.ones(3))
    total_loss(job.objective.terms(job.objective.module, job.corpus.training_batch(0, 4, 4, 0), 0.5)).backward()
    assert all(job.objective.head.get_parameter(f"{n}_head.weight").grad.abs().sum() > 0 for n in ("in", "out"))
    with torch.no_grad():
        job.objective.head.gamma.fill_(0.25)
    job.save(tmp_path / "kept")
    again = planned(tmp_path, "lilicorr", ("model.decision=identity_safe",), init=tmp_path / "kept")
    assert torch.equal(again.objective.head.gamma, torch.full((3,), 0.25))


def trained_for(job, steps: int = 3) -> None:
    """A few large steps with weight decay, so that whatever is trained has moved."""
    free = [p for p in job.objective.module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(free, lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        total_loss(job.objective.terms(job.objective.module, batch(), 1.0)).backward()
        optimiser.step()


@torch.no_grad()
def corrected(head, seed: int = 0, other: int = 0) -> Tensor:
    """Scores ``[N, S, K]`` after the true prefix; ``other`` disturbs the last slot's candidates."""
    blocks = pool_blocks(draft(2), batch(seed), 6)
    if other:
        blocks.block.hidden[:, -1] += other
    if isinstance(head, DRelay):
        return head.forced(head.encode(blocks.block, blocks.pool), blocks.labels, blocks.block.embedding, blocks.scores)
    start, pair, *_ = head.prepare(blocks.block, blocks.pool)
    return torch.cat((start[:, None, None].expand(-1, 1, pair.shape[2], -1), pair), 1)  # [N, S, K, K]


def test_ablation_without_global_read(tmp_path):
    """A trained head whose candidate read is taken out does not see later slots through it, nor does its artifact."""
    for flag, seen in (("true", True), ("false", False)):
        changes = (f"model.global_read={flag}", "model.slot_layers=0")  # slot mixing sees later slots, too
        job = planned(tmp_path, "drelay", changes)
        trained_for(job)
        job.save(tmp_path / flag)
        head = DRelay.load(tmp_path / flag)
        assert bool(head.read_out.weight.any()) is seen
        changed = (corrected(head) != corrected(head, other=1))[:, :-1].any()
        assert bool(changed) is seen
        assert job.facts["model"]["global_read"] is seen


def test_ablation_of_credit_and_support(tmp_path):
    """Uniform credit weighs all supervised slots alike; no support leaves the draft to the selection alone."""
    b, every = batch(), (f"model.pool_size={VOCAB}",)
    terms = {}
    for credit in ("true", "false"):
        # all tokens are candidates: a block without credit (a miss at its first slot) would get uniform weights
        changes = (f"objective.credit={credit}", "objective.joint=true", "objective.least_count=null", *every)
        job = planned(tmp_path, "drelay", changes)
        terms[credit] = job.objective.terms(job.objective.module, b, 1.0)
    blocks, scores = job.objective.module(b)
    by_hand = torch.where(
        (blocks.pool.ids == blocks.labels[..., None]).any(-1),
        -(scores.log_softmax(-1).exp() * (blocks.pool.ids == blocks.labels[..., None])).sum(-1).clamp_min(1e-30).log(),
        0.0,
    )
    torch.testing.assert_close(terms["false"]["selection"][0], (by_hand * blocks.mask).sum(), atol=1e-3, rtol=1e-4)
    assert not torch.allclose(terms["true"]["selection"][0], terms["false"]["selection"][0])
    none = planned(tmp_path, "drelay", ("objective.support=0.0", "objective.joint=true"))
    assert float(none.objective.terms(none.objective.module, b, 1.0)["draft"][0]) == 0
    assert float(terms["true"]["draft"][0]) > 0


def test_ablations_of_lilicorr(tmp_path):
    """No anchor: the feature before the block changes nothing. No pairs: no row of a pair table differs from another.
    No penalty: the target is not asked."""
    blocks = pool_blocks(draft(2), batch(), 6)
    for changes, by_anchor, by_pair in (
        ((), True, True), (("model.anchor=false",), False, True), (("model.pairwise=false",), True, False),
    ):  # fmt: skip
        job = planned(tmp_path, "lilicorr", changes)
        trained_for(job)
        job.save(tmp_path / "artifact")
        head = LiLiCorr.load(tmp_path / "artifact")
        start, pair, *_ = head.prepare(blocks.block, blocks.pool)
        blocks.block.context += 1
        moved, _, *_ = head.prepare(blocks.block, blocks.pool)
        blocks.block.context -= 1
        assert bool((start - moved).abs().max() > 1e-6) is by_anchor
        assert bool((pair - pair[:, :, :1]).abs().max() > 1e-6) is by_pair
        assert start.std(-1).max() > 1e-6 and pair.std(-1).max() > 1e-6  # what is left still chooses
    job = planned(tmp_path, "lilicorr", ("objective.penalty=0.0",))
    assert set(job.objective.terms(job.objective.module, batch(), 1.0)) == {"ce"}


@torch.no_grad()
def test_scout_stands_where_rounds_begin():
    """Every anchor that the scout adds is one that decoding reaches from a uniform one: by A + 1 along the text."""
    objective, b = everything("drelay", False), batch()

    accepted = objective._accepted
    length = accepted(b)
    assert (length[b.labels(3)[1][..., 0]] >= 0).all() and (length[~b.keep] == -1).all()
    found = scouted(b, 2 / 3, accepted, hops=1)
    assert torch.equal(found.anchors[:, 0], b.anchors[:, 0])
    for row in range(3):
        for place in (0, 1):
            start, reached = int(b.anchors[row, place]), int(found.anchors[row, 1 + place])
            goal = start + int(length[row, place]) + 1
            if length[row, place] >= 0 and goal + 1 < 12 and b.loss_mask[row, goal + 1]:
                assert reached == goal and found.keep[row, 1 + place]
            else:
                assert reached == int(b.anchors[row, 1 + place])
    assert torch.equal(scouted(b, 0.0, accepted).anchors, b.anchors)
    # a perfect draft goes a whole block at a time
    far = scouted(b, 1 / 3, lambda hop: torch.where(hop.keep, 3, -1), hops=1)
    assert int(far.anchors[0, 2]) == int(b.anchors[0, 0]) + 4
    with pytest.raises(InvalidInput, match="scout"):
        everything("drelay", False, scout=(0.5, 1.5))


def test_scouted_training_is_a_function_of_the_step():
    """The same batch and weights give the same terms: a resumed run sees what an uninterrupted one sees."""
    objective, b = everything("drelay", True, scout=(0.5, 0.5)), batch()
    one, two = (objective.terms(objective.module, b, 0.7)["selection"][0] for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["drelay", "lilicorr"])
def test_control_trains_the_backbone_alone(kind, tmp_path):
    """Same blocks, same cross entropy, no head: what the head's gain is measured against."""
    job = planned(tmp_path, kind, (), {"joint": True}, control=True)
    beside = planned(tmp_path, kind, (), {"joint": True})
    b = batch()
    terms = job.objective.terms(job.objective.module, b, 1.0)
    assert set(terms) == {"draft"} and job.facts["control"] is True
    want = beside.objective.terms(beside.objective.module, b, 1.0)["draft"]
    torch.testing.assert_close(terms["draft"], want)
    before = copy.deepcopy(job.objective.head.state_dict())
    trained_for(job)
    assert all(torch.equal(v, job.objective.head.state_dict()[n]) for n, v in before.items())
    found = job.objective.diagnose([b])
    assert found["selected"] == found["native"]
    job.save(tmp_path / "control")
    zoo = repairzoo.build(str(tmp_path / "control"), None, target())
    rows = [[1, 2, 3]]
    want = repairzoo.autoregressive(target(), rows, max_new_tokens=6).token_ids
    assert zoo.generate(rows, max_new_tokens=6).token_ids == want


def test_a_folder_is_continued_by_its_own_run(tmp_path):
    """Another ablation in the same folder is refused by key; the recipe beside the artifact is the one followed."""
    make_corpus(tmp_path / "corpus", 60)
    draft(2).state_target(target()).save(tmp_path / "draft")
    recipe = {"kind": "drelay", "model": MODELS["drelay"] | {"dtype": "float32"}, "objective": {}, "run": RUN}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    args = ("heads", path, [tmp_path / "corpus"], tmp_path / "run")
    more = {"target": target(), "backbone": str(tmp_path / "draft")}
    assert run_training(*args, **more, changes=["objective.credit=false"])
    assert "credit: false" in (tmp_path / "run" / "artifact" / "recipe.yaml").read_text()
    with pytest.raises(InvalidInput, match=r"objective\.credit=False"):
        run_training(*args, **more)
    with pytest.raises(InvalidInput, match="control"):
        run_training(*args, **more, changes=["objective.credit=false"], control=True)
    for wrong in ("credit=false", "objective.credit", "kind=dels"):
        with pytest.raises(InvalidInput, match="--set"):
            read_recipe(path, [wrong])
    arguments = ["head", path, "--corpus", tmp_path / "corpus", "--out", tmp_path / "o", "--control", "--set", "a=1"]
    assert "--set 'a=1'" in CliRunner().invoke(app, [str(a) for a in arguments]).output
    with pytest.raises(InvalidInput, match="colour"):
        run_training(*args[:3], tmp_path / "other", **more, changes=["objective.colour=1"])
