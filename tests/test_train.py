"""Losses and blocks against the reference's numbers; the loop, its resumption and its processes; the commands."""

import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_toys as toys
from safetensors.torch import load_file
from torch import nn
from training_toys import MASK, TAPS, VOCAB, draft, make_corpus, objective, read, target, write_recipe
from typer.testing import CliRunner

from repairzoo.backbones.dflash import DFlash
from repairzoo.backbones.dflash.train import DFlashObjective
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.heads.dels import DeLS
from repairzoo.train import commands
from repairzoo.train.cli import app
from repairzoo.train.data import Batch, prefix
from repairzoo.train.held import accepted, estimated_tau, walked_taus
from repairzoo.train.losses import block_cross_entropy, dpace_weights
from repairzoo.train.recipe import read_recipe
from repairzoo.train.teacher import teacher
from repairzoo.train.trainer import Recipe, total_loss, train

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ("sliding_b8", "trained_b8")
PARTS = {
    "dpace": "dpace",
    "dpace-cumulative-confidence-only": "confidence",
    "dpace-continuation-value-only": "continuation",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


# --- golden ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=FOLDERS)
def golden(request):
    place = GOLDEN / "dflash" / request.param
    weights = load_file(GOLDEN / "targets" / "trained_tied" / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    backbone = DFlash.load(place / "draft").bind(table, table).requires_grad_(True)
    stored = load_file(place / "train.safetensors")
    batch = Batch(
        stored["input_ids"],
        stored["loss_mask"].bool(),
        stored["features"],
        stored["anchor_positions"],
        stored["block_keep_mask"].bool(),
    )
    return backbone, batch, stored, json.loads((place / "train.json").read_text())


def test_blocks_and_losses_equal_the_reference(golden):
    backbone, batch, stored, facts = golden
    hidden = backbone(batch.features, batch.input_ids, batch.anchors)
    kept = hidden * batch.keep[:, :, None, None]
    torch.testing.assert_close(kept, stored["block_hidden"], atol=5e-5, rtol=1e-4)
    for name, expected in facts["losses"].items():
        options = {"dpace": PARTS[name]} if name in PARTS else {"gamma": None if "None" in name else float(name[12:])}
        trained = DFlashObjective(backbone, backbone._bound.output_weight, **{"gamma": None, **options})
        loss = total_loss(trained.terms(backbone, batch, 0.0))
        torch.testing.assert_close(loss.item(), expected["loss"], rtol=1e-4, atol=0)
        parameters = list(backbone.parameters())
        squares = [g.square().sum() for g in torch.autograd.grad(loss, parameters)]
        torch.testing.assert_close(torch.stack(squares).sum().sqrt().item(), expected["grad_norm"], rtol=1e-3, atol=0)


def test_gradient_equals_the_reference(golden):
    backbone, batch, stored, facts = golden
    name = facts["grad_loss"]
    trained = DFlashObjective(backbone, backbone._bound.output_weight, gamma=float(name[12:]))
    (gradient,) = torch.autograd.grad(total_loss(trained.terms(backbone, batch, 0.0)), [backbone.fc.weight])
    torch.testing.assert_close(gradient, stored[f"{name}.grad_fc_weight"], atol=1e-5, rtol=1e-3)


def test_weights_of_slots_behind_a_gap():
    """A slot without supervision neither ends a block nor weighs: the golden batches hold such gaps."""
    p, mask = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([True, False, True])
    w = dpace_weights(p, mask)
    torch.testing.assert_close(w[0], torch.tensor(0.6 + 0.6 * 0.8))
    torch.testing.assert_close(w[2], torch.tensor(0.6 * 0.8))
    assert prefix(mask).tolist() == [True, False, False]


def test_columns_leave_out_what_never_occurs():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 2, 3, 8, generator=g), torch.randn(20, 8, generator=g)
    labels, mask = torch.tensor([[[1, 5, 9], [5, 3, 1]]]), torch.ones(1, 2, 3, dtype=torch.bool)
    columns = torch.tensor([1, 5, 9])
    numerator, denominator = block_cross_entropy(hidden, weight, labels, mask, columns=columns)
    logits = hidden @ weight[columns].T
    place = torch.tensor([[[0, 1, 2], [1, 0, 0]]])
    entropy = nn.functional.cross_entropy(logits.flatten(0, 2), place.flatten(), reduction="none").view(1, 2, 3)
    known = mask & (labels != 3)
    torch.testing.assert_close(numerator, (entropy * known).sum())
    assert denominator == 5


def test_distilling_learns_the_targets_law():
    """Cross entropy with (1 - d) of the token and d of the law, renormalised to the columns; d = 0 is the paper's."""
    g = torch.Generator().manual_seed(0)
    hidden, true = (torch.randn(2, 2, 3, 8, generator=g) for _ in range(2))
    weight = torch.randn(20, 8, generator=g)
    columns = torch.arange(1, 20, 2)
    labels = columns[torch.randint(10, (2, 2, 3), generator=g)]
    mask = torch.rand(2, 2, 3, generator=g) < 0.7
    for d in (0.0, 0.3, 1.0):
        for some in (None, columns):
            rows = weight if some is None else weight[some]
            place = labels if some is None else torch.searchsorted(some, labels)
            token = nn.functional.one_hot(place, len(rows)).float()
            law = (1 - d) * token + d * (true @ rows.T).softmax(-1)
            want = -(law * (hidden @ rows.T).log_softmax(-1)).sum(-1) * torch.tensor([1.0, 0.5, 0.25])
            numerator, denominator = block_cross_entropy(
                hidden, weight, labels, mask, gamma=1 / math.log(2), columns=some, true=true, distill=d
            )
            torch.testing.assert_close(numerator, (want * mask).sum())
            torch.testing.assert_close(denominator, (mask * torch.tensor([1.0, 0.5, 0.25])).sum())


def test_a_distilled_draft_learns_what_the_target_says_after_the_true_tokens(folder):
    """The law of slot i is the target's after anchor + i: rows of its own pass over the same texts."""
    corpus, backbone = read(folder), draft(4)
    batch = corpus.training_batch(0, 6, 5, 0)
    last = target().model(batch.input_ids, output_hidden_states=True).hidden_states[-1]
    rows = batch.at_labels(last, backbone.slots)
    for row, n, slot in itertools.product(range(6), range(5), range(backbone.slots)):
        position = int(batch.anchors[row, n]) + slot
        if position < batch.input_ids.shape[1]:
            torch.testing.assert_close(rows[row, n, slot], last[row, position])
    trained = DFlashObjective(backbone, target().output_weight, distill=1.0, teacher=teacher(target()))
    loss = total_loss(trained.terms(backbone, batch, 0.0))
    hidden = backbone(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]
    labels, mask = batch.labels(backbone.slots)
    want = block_cross_entropy(hidden, target().output_weight, labels, mask, gamma=4.0, true=rows, distill=1.0)
    torch.testing.assert_close(loss, want[0] / want[1])
    with pytest.raises(InvalidInput, match="teacher"):
        DFlashObjective(backbone, target().output_weight, distill=0.5)


def test_estimated_tau_counts_right_prefixes():
    right = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    tau, accuracy = estimated_tau(right, valid)
    assert tau == pytest.approx(1 + (2 + 0 + 2) / 3)
    assert accuracy == pytest.approx([2 / 3, 1.0, 0.5, 1.0])


@torch.no_grad()
def test_walked_tau_is_that_of_decoding(folder, backbone_run):
    """Held-out greedy answers are what the loop commits, and its rounds are those that the walk follows."""
    import repairzoo

    corpus = read(folder)
    zoo = repairzoo.build(str(backbone_run / "artifact"), target=target(), draft_int8=False)
    held, tokens, rounds = corpus.held[:6], 0, 0
    for s in held:
        run = zoo.generate(s.ids[: s.prompt].long()[None], max_new_tokens=len(s) - s.prompt)
        assert run.token_ids[0] == s.ids[s.prompt :].tolist()
        tokens, rounds = tokens + sum(run.stats.accepted[0]), rounds + len(run.stats.accepted[0])
    judge = DFlashObjective(zoo.backbone, target().output_weight).evaluate
    batches = [corpus.batch(held[:4], 2, [0] * 4), corpus.batch(held[4:], 2, [0] * 2)]
    for chunk in (3, 50):
        found = walked_taus(lambda hop: [accepted(hop, *judge(hop)), 0 * hop.anchors], batches, chunk)
        assert found == pytest.approx([tokens / rounds, 1.0])
    assert tokens > rounds


# --- training is what decoding does ---------------------------------------------------------------------------------
@torch.no_grad()
def test_training_forward_equals_the_block_that_is_drafted(folder):
    corpus, backbone = read(folder), draft(4)
    batch = corpus.training_batch(0, 6, 5, 0)
    hidden = backbone(batch.features, batch.input_ids, batch.anchors)
    for row in range(6):
        for n in range(5):
            anchor = int(batch.anchors[row, n])
            if not batch.keep[row, n]:
                continue
            cache = backbone.new_cache(1, anchor + backbone.block_size)
            backbone.extend(cache, batch.features[row : row + 1, :anchor], torch.arange(anchor)[None])
            block = backbone.draft(cache, batch.input_ids[row, anchor][None], torch.tensor([anchor]))
            torch.testing.assert_close(block.hidden[0], hidden[row, n, 1:], atol=1e-5, rtol=1e-4)


# --- the loop -------------------------------------------------------------------------------------------------------
def recipe(steps: int = 6, **changes) -> Recipe:
    numbers = {"batch": 4, "anchors": 6, "lr": 1e-2, "log_every": 1, "eval_every": 3, "save_every": 2}
    return Recipe(steps, **(numbers | changes))


def lines(run: Path) -> list[dict]:
    return [json.loads(text) for text in (run / "log.jsonl").read_text().split("\n") if text]


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(left: dict, right: dict, **tolerance) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **({"atol": 0, "rtol": 0} | tolerance))


def test_loss_falls_and_the_log_says_what_was_learnt(folder, tmp_path):
    trained = objective(gamma=4.0)
    assert train(trained, read(folder), recipe(60, eval_every=30, log_every=10, batch=8), tmp_path)
    head, *rest = lines(tmp_path)
    assert head["recipe"]["steps"] == 60
    assert head["train_tokens"] == read(folder).tokens
    first, last = rest[0], rest[-1]
    assert last["loss"] < 0.9 * first["loss"]
    judged = [line for line in rest if "held_tau" in line]
    assert [line["step"] for line in judged] == [30, 60]
    assert all(len(line["held_accuracy"]) == 3 and 1 <= line["held_tau"] <= 4 for line in judged)
    assert judged[-1]["held_tau"] > 1.08  # an untrained draft is right once in 35 times
    assert [line["step"] for line in rest if "held_walked_tau" in line] == [60]


def test_resumed_run_equals_the_uninterrupted_one(folder, tmp_path):
    """Killed after step 5, between checkpoints: steps 5 and on are done again, and logged once."""

    class Killed(Exception):
        pass

    class Dying(DFlashObjective):
        def terms(self, module, batch, progress):
            if round(progress * 8) == 5:
                raise Killed
            return super().terms(module, batch, progress)

    straight = objective()
    train(straight, read(folder), recipe(8), tmp_path / "straight")
    victim = objective()
    with pytest.raises(Killed):
        train(Dying(victim.module, victim.output_weight), read(folder), recipe(8), tmp_path / "killed")
    resumed = objective(seed=9)  # other weights: those of the checkpoint must win
    train(resumed, read(folder), recipe(8), tmp_path / "killed")
    assert_same(weights(resumed.module), weights(straight.module))

    def told(run):
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(run)]

    assert told(tmp_path / "killed") == told(tmp_path / "straight")
    with pytest.raises(InvalidInput, match="lr="):
        train(objective(), read(folder), recipe(8, lr=3e-3), tmp_path / "killed")


def test_interrupt_ends_with_a_checkpoint(folder, tmp_path):
    class Signalled(DFlashObjective):
        def terms(self, module, batch, progress):
            if round(progress * 8) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().terms(module, batch, progress)

    base = objective()
    before = signal.getsignal(signal.SIGINT)
    finished = train(Signalled(base.module, base.output_weight), read(folder), recipe(8, save_every=8), tmp_path)
    assert not finished
    assert signal.getsignal(signal.SIGINT) is before
    resumed, straight = objective(seed=9), objective()
    assert train(resumed, read(folder), recipe(8, save_every=8), tmp_path)
    train(straight, read(folder), recipe(8), tmp_path / "straight")
    assert_same(weights(resumed.module), weights(straight.module))


def test_bf16_autocast_trains_float32_weights(folder, tmp_path):
    trained = objective()
    before = weights(trained.module)
    train(trained, read(folder), recipe(3, precision="bf16"), tmp_path)
    after = weights(trained.module)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(0 < line["loss"] < 20 for line in lines(tmp_path)[1:])


WORKER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import training_toys as toys
from repairzoo.train.trainer import Recipe, train
trained = toys.objective(gamma=4.0)
corpus = toys.read(Path(sys.argv[1]))
recipe = Recipe(2, batch=2, anchors=12, lr=1e-2, clip=1e9, save_every=2, seed=int(sys.argv[3]))
train(trained, corpus, recipe, Path(sys.argv[2]))
"""
SEED = 3


def test_two_processes_equal_one_with_the_same_batch(folder, tmp_path):
    """Ranks with other numbers of labels: denominators are global (a mean of means would weigh a short answer more)."""
    numbers = Recipe(2, batch=2, anchors=12, lr=1e-2, clip=1e9, save_every=2, seed=SEED)
    corpus = read(folder)
    shares = [int(corpus.training_batch(0, 2, 12, SEED, rank, 2).labels(3)[1].sum()) for rank in range(2)]
    assert max(shares) > 1.3 * min(shares)
    alone = objective(gamma=4.0)
    train(alone, corpus, numbers, tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {k: str(v) for k, v in world.items()}
        env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, "-c", WORKER, str(folder), str(tmp_path / "two"), str(SEED)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert lines(tmp_path / "two")[0]["world"] == 2
    one, two = (load_file(tmp_path / run / "checkpoint.safetensors") for run in ("one", "two"))
    # Adam's step hides a wrong scale of the gradient; its moments, which are compared too, do not
    assert_same(one, two, atol=1e-6, rtol=1e-4)
    assert lines(tmp_path / "one")[-1]["loss"] == pytest.approx(lines(tmp_path / "two")[-1]["loss"], abs=2e-4)


# --- recipes and commands -------------------------------------------------------------------------------------------
RUN = {"steps": 4, "batch": 4, "anchors": 6, "lr": 0.01, "log_every": 1, "eval_every": 2, "save_every": 2}
DFLASH = {
    "kind": "dflash",
    "model": {
        "block_size": 4,
        "depth": 1,
        "taps": list(TAPS),
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "mask_token": "<open>",
    },
    "objective": {"gamma": 4.0},
    "run": RUN,
}
DELS = {
    "kind": "dels",
    "model": {"variant": "gru", "rank": 4, "hidden": 6, "input_rank": 4, "block_size": 4},
    "objective": {"alphas": [0.2, 20.0], "betas": [0.0, 0.3], "prefixes": [0, 1]},
    "run": RUN | {"steps": 30, "lr": 0.03, "batch": 8, "eval_every": 15, "save_every": 15},
}


@pytest.fixture(scope="module")
def backbone_run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("backbone")
    path = write_recipe(
        out / "recipe.yaml", DFLASH | {"run": RUN | {"steps": 60, "lr": 0.03, "eval_every": 30, "save_every": 30}}
    )
    assert commands.run_training("backbones", path, [folder], out / "run", target=target())
    return out / "run"


def test_backbone_artifact_is_loadable_and_tells_its_origin(folder, backbone_run, tmp_path, capsys):
    place = backbone_run / "artifact"
    found = DFlash.load(place)
    assert found.dtype == torch.bfloat16
    assert (found.block_size, found.tapped_layers, found.mask_token_id) == (4, TAPS, MASK)
    assert found.config.rope["rope_theta"] == target().model.config.rope_parameters["rope_theta"]
    trained = load_file(backbone_run / "checkpoint.safetensors")
    assert torch.equal(found.fc.weight, trained["model.fc.weight"].bfloat16())
    assert (place / "train_log.jsonl").read_bytes() == (backbone_run / "log.jsonl").read_bytes()
    told = json.loads((place / "corpus_manifest.json").read_text())
    assert told["corpora"] == [json.loads((folder / "manifest.json").read_text())]
    first = lines(backbone_run)[0]
    assert first["target"]["id"] == "toy/target"
    assert len(first["target"]["fingerprint"]) == 64
    # from the artifact, with a shorter block: weights start where those ended
    shorter = DFLASH | {"model": DFLASH["model"] | {"block_size": 3}, "run": RUN | {"steps": 1, "lr": 0.0}}
    path = write_recipe(tmp_path / "r.yaml", shorter)
    commands.run_training("backbones", path, [folder], tmp_path / "run", target=target(), init=place)
    assert str(tmp_path / "run" / "artifact") in capsys.readouterr().out
    assert torch.equal(DFlash.load(tmp_path / "run" / "artifact").fc.weight, found.fc.weight)
    deeper = write_recipe(tmp_path / "d.yaml", DFLASH | {"model": DFLASH["model"] | {"depth": 2}})
    with pytest.raises(IncompatibleArtifact, match="num_hidden_layers"):
        commands.run_training("backbones", deeper, [folder], tmp_path / "x", target=target(), init=place)


def test_head_is_trained_fused_and_loadable(folder, backbone_run, tmp_path):
    path = write_recipe(tmp_path / "recipe.yaml", DELS)
    out, drafter = tmp_path / "run", str(backbone_run / "artifact")
    assert commands.run_training("heads", path, [folder], out, target=target(), backbone=drafter)
    steps = [line for line in lines(out) if "step" in line]
    assert steps[-1]["loss"] < steps[0]["loss"]
    chosen = lines(out)[-1]
    taus = {(line["alpha"], line["beta"], line["prefix"]): line["held_walked_tau"] for line in chosen["fusion"]}
    assert set(taus) == set(itertools.product((0.2, 20), (0, 0.3), (0, 1)))
    best = tuple(chosen["chosen"][key] for key in ("alpha", "beta", "prefix"))
    assert taus[best] == max(taus.values()) and chosen["without"] >= 1
    assert len(set(taus.values())) > 1
    head = DeLS.load(out / "artifact")
    config = head.config
    assert (config.alpha, config.beta, config.pure_draft_prefix_len) == best
    assert (config.dtype, config.target_id, config.target_revision) == ("bfloat16", "toy/target", "r1")
    counts = read(folder, held_out=40).counts(VOCAB)
    assert int(head.log_prior.argmax()) == int(counts.argmax())

    import repairzoo

    zoo = repairzoo.build(drafter, head=str(out / "artifact"), target=(target().model, toys.tokenizer()))
    prompt = read(folder).held[0]
    assert zoo.generate(prompt.ids[: prompt.prompt].long()[None], max_new_tokens=8).token_ids[0]


@torch.no_grad()
def test_judged_chain_is_the_chain_that_the_walk_chooses(folder):
    """Up to its first error the teacher-forced chain is the walk's own."""
    from conftest import dels

    from repairzoo.heads.dels.objective import DeLSObjective
    from repairzoo.walk import walk

    backbone, head = draft(2).requires_grad_(False), dels(target()).float()
    head.bind(target().embedding, target().output_weight)
    batch = read(folder).training_batch(0, 4, 4, 0)
    judge = DeLSObjective(head, backbone=backbone)
    right, valid = judge.evaluate(batch)
    lengths = iter(prefix(right & valid).sum(1).tolist())
    seen = []
    for row in range(4):
        for n in range(4):
            labels, mask = (x[row, n] for x in batch.labels(3))
            if not mask[0]:
                continue
            anchor = int(batch.anchors[row, n])
            cache = backbone.new_cache(1, anchor + 4)
            backbone.extend(cache, batch.features[row : row + 1, :anchor], torch.arange(anchor)[None])
            block = backbone.draft(cache, batch.input_ids[row, anchor][None], torch.tensor([anchor]))
            tokens = walk(block, [head], None)[0][0]
            seen.append(int(prefix((tokens == labels) & prefix(mask)).sum()))
            assert seen[-1] == next(lengths)
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, "'modle'"),
        ({"run": {"batch": 2}}, "'run.steps' is missing"),
        ({"run": RUN | {"lr": "2e-3"}}, "'run.lr'.*2.0e-3"),
        ({"run": RUN | {"stepz": 1}}, "'run.stepz'"),
        ({"run": RUN | {"precision": "fp8"}}, "fp8"),
        ({"kind": "nothing"}, "nothing"),
        ({"model": DFLASH["model"] | {"depht": 2}}, "'model.depht'"),
        ({"model": DFLASH["model"] | {"mask_token": "<end>"}}, "'model.mask_token'.*ends"),
        ({"model": DFLASH["model"] | {"mask_token": "<no>"}}, "'model.mask_token'"),
        ({"model": DFLASH["model"] | {"mask_token": 0}}, "occurs in the corpus"),
        ({"model": DFLASH["model"] | {"taps": [0, 7]}}, "target_layer_ids"),
        ({"objective": {"dpace": "x"}}, "dpace"),
        ({"objective": {"gamma": -4.0}}, "gamma=-4.0"),
        ({"run": RUN | {"lr": -1.0}}, "lr=-1.0: give 0 or more"),
        ({"run": RUN | {"warmup": 2.0}}, "warmup=2.0: it is a share"),
        ({"run": RUN | {"clip": 0}}, "clip=0.0: give more than 0"),
        ({"run": RUN | {"steps": 0}}, "steps=0"),
        ({"run": RUN | {"steps": True}}, "'run.steps' is True"),
        ({"run": [1]}, "key 'run' holds keys and values"),
        ({"kind": 7}, "kind 7"),
    ],
)
def test_recipes_are_read_strictly(folder, tmp_path, change, message):
    path = write_recipe(tmp_path / "recipe.yaml", DFLASH | change)
    with pytest.raises((InvalidInput, InvalidArtifact), match=message):
        commands.run_training("backbones", path, [folder], tmp_path / "run", target=target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.lr=[", "no YAML"),
        ("run.stepz=1", "'run.stepz'"),
        ("runs.steps=1", "SECTION.KEY=VALUE"),
        ("run.steps", "SECTION.KEY=VALUE"),
        ("run.steps=many", "'run.steps' is 'many'"),
        ("model.depth=2.5", "'model.depth' is 2.5"),
    ],
)
def test_changes_of_a_recipe_are_read_strictly(folder, tmp_path, change, message):
    path = write_recipe(tmp_path / "recipe.yaml", DFLASH)
    with pytest.raises(InvalidInput, match=message):
        commands.run_training("backbones", path, [folder], tmp_path / "run", target=target(), changes=[change])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("checkpoint.safetensors", lambda raw: raw[:-5], "no checkpoint, or a damaged one.*--init"),
        ("checkpoint.safetensors", lambda raw: raw[:20], "no checkpoint, or a damaged one"),
        ("checkpoint.safetensors", lambda raw: raw.replace(b'"running"', b'"runninG"'), "does not state running"),
        ("log.jsonl", lambda raw: b"{" + raw, "first line does not say what run this is"),
    ],
)
def test_a_damaged_run_is_named_and_left_as_it_is(folder, backbone_run, tmp_path, name, damage, message):
    run = tmp_path / "run"
    shutil.copytree(backbone_run, run)
    (run / name).write_bytes(damage((run / name).read_bytes()))
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    path = write_recipe(tmp_path / "recipe.yaml", DFLASH)
    with pytest.raises((InvalidInput, InvalidArtifact), match=message):
        commands.run_training("backbones", path, [folder], run, target=target())
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


def test_a_file_is_no_folder_of_a_run(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    path = write_recipe(tmp_path / "recipe.yaml", DFLASH)
    with pytest.raises(InvalidInput, match="is a file: name a folder"):
        commands.run_training("backbones", path, [folder], tmp_path / "file", target=target())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_is_not_continued_with_another_recipe(folder, backbone_run, tmp_path):
    run, path = tmp_path / "run", backbone_run.parent / "recipe.yaml"
    shutil.copytree(backbone_run, run)
    for change, message in (("run.lr=0.5", "lr"), ("model.depth=2", "model.depth"), ("objective.gamma=9.0", "gamma")):
        with pytest.raises(InvalidInput, match=f"{message}.*another"):
            commands.run_training("backbones", path, [folder], run, target=target(), changes=[change])


def test_answers_of_another_target_are_refused(folder, tmp_path):
    from repairzoo.target import Target

    other = Target(target().model, toys.tokenizer(), name="toy/target", revision="r2")
    path = write_recipe(tmp_path / "recipe.yaml", DFLASH)
    with pytest.raises(IncompatibleArtifact, match="r2"):
        commands.run_training("backbones", path, [folder], tmp_path / "run", target=other)


@pytest.mark.parametrize("path", ["backbones/dflash/recipe.yaml", "heads/dels/recipe.yaml"])
def test_shipped_recipes_are_read(path):
    assert read_recipe(Path(__file__).parent.parent / path).run.steps > 0


def test_commands_from_a_prompt_file_to_an_artifact(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "load_target", lambda source, dtype=None: target())
    text = "".join(json.dumps(row) + "\n" for row in toys.prompts())
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    arguments = ["corpus", "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "c"), "--taps", "0,1,2"]
    arguments += ["--max-new-tokens", "8", "--max-prompt-tokens", "40", "--temperature", "0.3", "--pass", "t0.3"]
    made = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert made.exit_code == 0
    assert "120 answers" in made.output
    path = write_recipe(tmp_path / "r.yaml", DFLASH | {"run": RUN | {"steps": 1}})
    arguments = ["backbone", str(path), "--corpus", str(tmp_path / "c"), "--out", str(tmp_path / "run")]
    trained = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert trained.exit_code == 0
    assert f"trained: {tmp_path / 'run' / 'artifact'}" in trained.output
    path = write_recipe(tmp_path / "h.yaml", DELS | {"run": RUN | {"steps": 1}})
    arguments = ["head", str(path), "--corpus", str(tmp_path / "c"), "--out", str(tmp_path / "head")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert DeLS.load(tmp_path / "head" / "artifact").config.alpha == 0.2
