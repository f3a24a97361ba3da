"""Heads from folders are held to the backbone that they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import causal_lm, dels, dflash

import repairzoo
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput, UnknownName
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig
from repairzoo.train import commands
from repairzoo.train.corpus import CorpusPlan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": "dflash", "mask_token_id": 31, "tapped_layers": (0, 2)}, None),
        ({"backbone": "domino"}, r"backbone\.kind is 'domino'"),
        ({"mask_token_id": 3}, "mask_token_id is 3"),
        ({"tapped_layers": (1,)}, r"tapped_layers is \[1\]"),
    ],
)
def test_a_head_for_another_backbone_is_refused(tmp_path, changes, words):
    target = repairzoo.Target(causal_lm(), name="toy")
    sizes = {"candidates": 4, "pool_size": 4, "width": 8, "num_heads": 2, "factor_dim": 2, "block_size": 4}
    config = LiLiCorrConfig(
        **sizes,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        padded_vocab_size=target.vocab_size,
        target_id="toy",
        **changes,
    )
    LiLiCorr(config).save(tmp_path / "head")
    if words is None:
        assert repairzoo.build(dflash(target), tmp_path / "head", target).heads
    else:
        with pytest.raises(IncompatibleArtifact, match=words):
            repairzoo.build(dflash(target), tmp_path / "head", target)


def test_no_head_has_nothing_to_load():
    with pytest.raises(InvalidInput, match="none"):
        repairzoo.load_head("none")


def test_training_reads_its_small_inputs_before_the_target(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(commands, "load_target", never)
    with pytest.raises(InvalidInput, match=r"prompts\.jsonl"):
        commands.run_corpus(tmp_path / "prompts.jsonl", tmp_path, CorpusPlan(name="greedy"), None)
    recipe = Path(__file__).parent.parent / "backbones" / "dflash" / "recipe.yaml"
    with pytest.raises(repairzoo.RepairZooError, match="corpus"):
        commands.run_training("backbones", recipe, [tmp_path / "corpus"], tmp_path)


NOTHING_LOADS = [
    ({"backbone": "dflsh"}, UnknownName, "did you mean 'dflash'"),
    ({"backbone": ""}, InvalidInput, "backbone=''"),
    ({"backbone": "./nowhere"}, InvalidArtifact, "no such folder"),
    ({"head": "dels+nobody"}, UnknownName, "unknown head 'nobody'"),
    ({"head": "dels+"}, InvalidInput, "must not be empty"),
    ({"head": "./nowhere"}, InvalidArtifact, "no such folder"),
    ({"head": "hf:owner"}, InvalidInput, "no Hub id"),
    ({"head": "hf:owner/name@../x"}, InvalidInput, "no branch, tag or commit"),
    ({"tree": 0}, InvalidInput, "tree=0"),
    ({"tree": "widest"}, InvalidInput, "tree='widest'"),
]


@pytest.mark.parametrize(("options", "kind", "words"), NOTHING_LOADS)
def test_mistakes_in_names_and_options_are_told_before_the_target_is_loaded(monkeypatch, options, kind, words):
    def never(*args):
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr("repairzoo.zoo.as_target", never)
    with pytest.raises(kind, match=words):
        repairzoo.build(**options)


def test_a_head_that_is_none_and_a_sampled_tree_are_refused():
    target = repairzoo.Target(causal_lm(), name="toy")
    for head in (3, object(), dflash(target), type(dels(target))):
        with pytest.raises(InvalidInput, match="neither a corrector"):
            repairzoo.build(dflash(target), head, target)
    for backbone in (3, dels(target), type(dflash(target))):
        with pytest.raises(InvalidInput, match=r"the backbone is given as .* which (lacks slots|is a class)"):
            repairzoo.build(backbone, None, target)
    with pytest.raises(InvalidInput, match="deterministically"):
        repairzoo.build(dflash(target), None, target, tree=4, proposal="sampled")


def test_a_pool_larger_than_the_vocabulary_is_refused():
    class Greedy:
        pool_size = 1000

        def prepare(self, block, pool):
            return None

        def start(self, block):
            return None

        def step(self, prepared, carry, slot, previous, scores):
            return scores, None

    target = repairzoo.Target(causal_lm(), name="toy")
    with pytest.raises(IncompatibleArtifact, match="1000 candidates a slot"):
        repairzoo.build(dflash(target), Greedy(), target)
