"""Domino and DSpark from a recipe, on the trunk of a DFlash: they begin as it drafts, learn, and load again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_toys import VOCAB, draft, make_corpus, read, target, write_recipe

import repairzoo
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.train import commands
from repairzoo.train.data import Batch, Corpus
from repairzoo.train.held import estimated_tau
from repairzoo.train.recipe import method, read_recipe, read_section
from repairzoo.train.teacher import teacher
from repairzoo.train.trainer import total_loss

RUN = {"steps": 6, "batch": 4, "anchors": 4, "lr": 0.01, "eval_every": 3, "save_every": 3, "eval_sequences": 8}
RECIPES = {
    "domino": {
        "kind": "domino",
        "model": {"emb_dim": 4, "gru_hidden_dim": 6, "shift_label": False},
        "objective": {"gamma": 4.0},
        "run": RUN,
    },
    "dspark": {
        "kind": "dspark",
        "model": {"markov_rank": 4, "markov_head_type": "rnn"},
        "objective": {"least_count": None},
        "run": RUN,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    place = tmp_path_factory.mktemp("trunk")
    draft(7).save(place)
    return place


@pytest.mark.parametrize("kind", RECIPES)
def test_recipe_to_artifact(kind, folder, trunk, tmp_path):
    path = write_recipe(tmp_path / "recipe.yaml", RECIPES[kind])
    assert commands.run_training("backbones", path, [folder], tmp_path / "run", target=target(), init=trunk)
    artifact = tmp_path / "run" / "artifact"
    loaded = repairzoo.load_backbone(artifact)
    assert loaded.kind == kind and loaded.dtype == torch.bfloat16 and loaded.output_rows.abs().max() > 0
    begun = json.loads((artifact / "train_log.jsonl").read_text().splitlines()[0])
    assert json.loads(json.dumps(begun)) and "dflash" in json.dumps(begun)
    zoo = repairzoo.build(artifact, target=target())
    plain = repairzoo.autoregressive(target(), "xab", max_new_tokens=9)
    assert zoo.generate("xab", max_new_tokens=9).token_ids == plain.token_ids
    # what was trained can go on, and another shape cannot
    module = method(kind, "backbones")
    module.plan(read_recipe(path), target(), [folder], init=artifact)
    change = {"domino": {"emb_dim": 5}, "dspark": {"markov_rank": 5}}[kind]
    other = RECIPES[kind] | {"model": RECIPES[kind]["model"] | change}
    with pytest.raises(IncompatibleArtifact, match="recipe's"):
        module.plan(read_recipe(write_recipe(tmp_path / "other.yaml", other)), target(), [folder], init=artifact)


@pytest.mark.parametrize("kind", RECIPES)
def test_training_begins_with_the_trunk_and_the_loss_falls(kind, folder, trunk, tmp_path):
    path = write_recipe(tmp_path / "recipe.yaml", RECIPES[kind])
    job = method(kind, "backbones").plan(read_recipe(path), target(), [folder], init=trunk)
    theirs, mine = repairzoo.load_backbone(trunk).state_dict(), job.objective.module.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    batch = job.corpus.training_batch(0, 4, 4, 0)
    optimiser = torch.optim.AdamW(job.objective.module.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        loss = total_loss(job.objective.terms(job.objective.module, batch, 0.5))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    tau, accuracy = estimated_tau(*job.objective.evaluate(batch))
    assert tau >= 1 and len(accuracy) == job.objective.module.slots


def test_a_dspark_is_taught_the_targets_law():
    """The label's law is the target's at the position before it."""
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    some = torch.zeros(2, 7, 0)
    states = teacher(target())(Batch(ids, ids > 0, some, ids[:, :1], ids[:, :1] > 0))
    with torch.no_grad():
        expected = target().model(ids).logits
    torch.testing.assert_close(states @ target().output_weight.T, expected, atol=1e-5, rtol=1e-4)


def test_the_targets_law_is_read_from_the_corpus_where_it_is_stored(tmp_path, folder):
    """Reading the texts again would cost more than training a small draft on them."""
    last = target().num_layers - 1
    corpus, plain = read(folder, last=last), read(folder)
    batch = corpus.training_batch(0, 4, 4, seed=0)
    assert batch.last is not None and torch.equal(batch.features, plain.training_batch(0, 4, 4, seed=0).features)
    places = batch.last.any(-1)
    assert places.sum() > 20
    stored, read_again = (teacher(target())(b)[places] for b in (batch, replace(batch, last=None)))
    torch.testing.assert_close(stored, read_again, atol=2e-2, rtol=2e-2)  # stored in bfloat16
    without = make_corpus(tmp_path, taps=(0, 1))
    assert Corpus([folder, without], (0, 1), target().hidden_size, last=last).training_batch(0, 4, 4, 0).last is None


@pytest.mark.parametrize("kind", RECIPES)
def test_a_trunk_is_needed(kind, folder, tmp_path):
    path = write_recipe(tmp_path / "recipe.yaml", RECIPES[kind])
    with pytest.raises(InvalidInput, match="--init"):
        method(kind, "backbones").plan(read_recipe(path), target(), [folder])


@pytest.mark.parametrize("kind", RECIPES)
def test_shipped_recipes_are_read(kind):
    recipe = read_recipe(Path(__file__).parent.parent / "backbones" / kind / "recipe.yaml")
    module = method(kind, "backbones")
    for name in ("model", "objective"):
        section = getattr(module, f"{name.title()}Section")
        assert read_section(section, getattr(recipe, name), recipe.path, name)
