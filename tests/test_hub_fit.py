"""What is held against what before weights are used: everything that does not fit in one report, told early."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from conftest import causal_lm, dflash
from hub_artifacts import TOY, save_backbone, save_head

import repairzoo
from repairzoo import artifact
from repairzoo.artifact import SCHEMA, check_fit, config_hash, fingerprint, load_artifact, read_config, read_info
from repairzoo.backbones.dflash import DFlash
from repairzoo.backbones.domino import Domino
from repairzoo.backbones.domino import new_config as new_domino
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.heads.dels import DeLS
from repairzoo.heads.lilicorr import LiLiCorr
from repairzoo.safe_file import read_header, write_safetensors
from repairzoo.statement import KEY


@pytest.fixture(scope="module")
def target():
    return repairzoo.Target(causal_lm(), None, name="owner/toy")


CONFIG = {
    "schema_version": 1, "kind": "dels", "block_size": 4, "slot_convention": "anchor_plus_1", "mask_token_id": 3,
    "tapped_layers": [1], "pool_size": 40, "vocab_size": 61, "padded_vocab_size": 64, "hidden_size": 16,
    "dtype": "float32", "target": {"id": "a/b", "revision": None, "fingerprint": "f" * 64},
    "backbone": {"kind": "domino"},
}  # fmt: skip
FITS = {"target_id": "a/b", "vocab_size": 61, "padded_vocab_size": 64, "hidden_size": 16}


def test_the_report_lists_every_mismatch_at_once():
    assert check_fit(CONFIG, **FITS) == []
    with pytest.raises(IncompatibleArtifact) as caught:
        check_fit(
            CONFIG, target_id="c/d", fingerprint="e" * 64, vocab_size=32, padded_vocab_size=32, hidden_size=8,
            backbone="dflash", block_size=8, mask_token_id=9, tapped_layers=[2], slot_convention="anchor",
            where="here",
        )  # fmt: skip
    keys = ("target.id", "target.fingerprint", "vocab_size is 61", "padded_vocab_size", "hidden_size", "backbone.kind",
            "block_size", "pool_size is 40", "mask_token_id", "tapped_layers", "slot_convention", "here")  # fmt: skip
    for key in keys:
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 64}, "vocab_size is 61"),  # pitfalls 39: a head of the real vocabulary on padded rows
        ({"padded_vocab_size": 61}, "padded_vocab_size is 64"),
        ({"block_size": 5}, "block_size is 4"),
        ({"block_size": 3}, None),
        ({"target_id": "copy", "fingerprint": "f" * 64}, None),
        ({"fingerprint": "e" * 64}, None),
    ],
)
def test_what_fits(changes, words):
    if words is None:
        notes = check_fit(CONFIG, **(FITS | changes))
        assert bool(notes) == ("fingerprint" in changes and changes["fingerprint"][0] == "e")
    else:
        with pytest.raises(IncompatibleArtifact, match=words):
            check_fit(CONFIG, **(FITS | changes))


def test_an_artifact_of_pairs_fits_any_block():
    assert check_fit(CONFIG | {"block_size": 2}, **FITS, block_size=16) == []


def test_a_head_of_shorter_blocks_is_refused_with_its_backbone(tmp_path, target):
    head = save_head(tmp_path / "head")  # blocks of 4
    assert repairzoo.build(dflash(target, block_size=4), head, target).heads
    with pytest.raises(IncompatibleArtifact, match="block_size is 4 but here it is 6"):
        repairzoo.build(dflash(target, block_size=6), head, target)


def test_a_backbone_states_its_target_and_is_held_to_it(tmp_path, target):
    """The shape fits both targets: only the statement tells them apart (z-lab#156: τ near 1, and no error)."""
    made = dflash(target).state_target(target)
    made.save_pretrained(tmp_path / "draft")
    stated = json.loads((tmp_path / "draft" / "config.json").read_text())[KEY]
    assert stated["target"] == {"id": "owner/toy", "revision": None, "fingerprint": fingerprint(target.model)}
    assert (stated["slot_convention"], stated["first_slot"], stated["vocab_size"]) == ("anchor_plus_1", 1, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repairzoo.build(str(tmp_path / "draft"), target=target)
    copy = repairzoo.Target(target.model, None, name="some/folder")
    repairzoo.build(str(tmp_path / "draft"), target=copy)  # the same weights under another name
    with pytest.raises(IncompatibleArtifact, match=r"target\.id is 'owner/toy'.*target\.fingerprint"):
        repairzoo.build(str(tmp_path / "draft"), target=repairzoo.Target(causal_lm(seed=1), None, name="other/toy"))
    with pytest.warns(UserWarning, match="other weights"):
        repairzoo.build(str(tmp_path / "draft"), target=repairzoo.Target(causal_lm(seed=1), None, name="owner/toy"))


def test_a_draft_on_another_kinds_trunk_states_its_own_kind(tmp_path):
    save_backbone(tmp_path / "trunk")
    trunk = DFlash.load(tmp_path / "trunk")
    draft = Domino(new_domino(trunk.config, emb_dim=4, gru_hidden_dim=4), seed=0)
    draft.double().save(tmp_path / "domino")
    stated = Domino.load(tmp_path / "domino").config.published[KEY]
    assert (stated["kind"], stated["first_slot"], stated["target"]) == ("domino", 0, TOY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "domino"}, "kind 'domino', the draft's is 'dflash'"),
        ({"first_slot": 0}, "first_slot 0, the draft's is 1"),
        ({"vocab_size": 99}, "more than the 32 rows"),
        ({"target": {"id": "x"}}, "states target"),
        ({"needs": "more"}, "unknown key 'needs'"),
        ({"schema_version": 2}, "update it"),
    ],
)
def test_a_statement_that_contradicts_its_draft_is_refused(tmp_path, changes, words):
    folder = save_backbone(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    config[KEY] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArtifact, match=words):
        DFlash.load(folder)


def test_a_config_that_is_not_the_weights_own_is_refused_for_drafts_too(tmp_path):
    folder = save_backbone(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    for changed in (config | {"rope_theta": 500.0}, {key: value for key, value in config.items() if key != KEY}):
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(InvalidArtifact, match="config_sha256"):
            DFlash.load(folder)


# --- keys and versions ------------------------------------------------------------------------------------------------


def reseal(folder, config) -> None:
    """Write a config, and its hash into the weights."""
    path = folder / "head.safetensors"
    tensors = load_artifact(folder)[1]
    metadata = read_header(path).metadata | {"config_sha256": config_hash(config)}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(path, tensors, metadata)


def test_unknown_keys_that_tell_are_warnings_and_all_others_errors(tmp_path):
    folder = save_head(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    reseal(folder, config | {"info": {"licence": "mit", "weather": "fine"}})
    with pytest.warns(UserWarning, match="weather"):
        head = repairzoo.load_head(folder)
    with pytest.warns(UserWarning, match="weather"):
        loaded = repairzoo.Head.from_pretrained(folder)
    assert loaded.info == {"licence": "mit", "weather": "fine"}
    assert "info" not in read_config(folder)
    with pytest.warns(UserWarning, match="weather"):
        loaded.save_pretrained(tmp_path / "again")
    assert read_info(tmp_path / "again").keys() == {"licence", "weather", "library_version"}
    assert "license: mit" in (tmp_path / "again" / "README.md").read_text()
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), loaded.parameters(), strict=True))
    reseal(folder, config | {"needs_a_new_feature": True})
    with pytest.raises(InvalidArtifact, match="needs_a_new_feature"):
        repairzoo.load_head(folder)
    reseal(folder, config | {"info": ["licence"]})
    with pytest.raises(InvalidArtifact, match="'info'"):
        repairzoo.load_head(folder)


def test_older_schemas_are_brought_up_or_told_how_to_convert(tmp_path, monkeypatch):
    folder = save_head(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    old = {"rank_of_readout" if key == "rank" else key: value for key, value in config.items()} | {"schema_version": 0}
    reseal(folder, old)
    with pytest.raises(InvalidArtifact, match="convert"):
        repairzoo.load_head(folder)
    monkeypatch.setitem(
        artifact.UPGRADES, 0, lambda c: {"rank" if key == "rank_of_readout" else key: c[key] for key in c}
    )
    assert repairzoo.load_head(folder).config.rank == 4
    reseal(folder, {key: value for key, value in old.items() if key != "rank_of_readout"})
    with pytest.raises(InvalidArtifact, match="rank"):
        repairzoo.load_head(folder)
    (folder / "config.json").write_text(json.dumps(config | {"schema_version": 7}))
    with pytest.raises(InvalidArtifact, match=r"update it \(pip install -U repairzoo\)"):
        repairzoo.load_head(folder)
    assert SCHEMA.endswith("-1")


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_backbone_where_a_head_belongs_is_told_by_name(tmp_path, target):
    head, draft = save_head(tmp_path / "head"), save_backbone(tmp_path / "draft")
    for call in (
        lambda: repairzoo.load_head(draft),
        lambda: repairzoo.Head.from_pretrained(draft),
        lambda: repairzoo.build(dflash(target), str(draft), target),
    ):
        with pytest.raises(IncompatibleArtifact, match="the backbone 'dflash'"):
            call()
    for call in (lambda: repairzoo.load_backbone(head), lambda: repairzoo.Backbone.from_pretrained(head)):
        with pytest.raises(IncompatibleArtifact, match="the head 'dels'"):
            call()
    with pytest.raises(IncompatibleArtifact, match=r"DeLS\.from_pretrained"):
        LiLiCorr.from_pretrained(head)
    assert isinstance(repairzoo.Head.from_pretrained(head), DeLS)
    with pytest.raises(InvalidInput, match="has none"):
        repairzoo.load_head(head, revision="v1")
    with pytest.raises(InvalidInput, match="name of the registry"):
        repairzoo.load_head("dels", revision="v1")
    with pytest.raises(InvalidInput, match=r"repairzoo\.load_head\('dels'\)"):
        repairzoo.Head.from_pretrained("dels")
    with pytest.raises(InvalidInput, match="private"):
        DeLS.load(head).save_pretrained(tmp_path / "again", private=True)
    with pytest.raises(InvalidInput, match="repo_id"):
        DeLS.load(head).save_pretrained(tmp_path / "again", repo_id="owner/name")
    assert not (tmp_path / "again").exists()


def test_a_kind_that_is_not_installed_is_told_by_every_way_of_loading(tmp_path):
    folder = save_head(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kind": "of_a_plug_in"}))
    for load in (repairzoo.load_head, repairzoo.Head.from_pretrained):
        with pytest.raises(InvalidArtifact, match=r"config\.json.*'of_a_plug_in'.*no such head.*dels"):
            load(folder)


def test_everything_that_does_not_fit_a_run_is_in_one_error(tmp_path, target):
    """As ``build`` meets it, and not only the function that compares."""
    folder = save_head(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    wrong = {
        "vocab_size": 30, "padded_vocab_size": 40, "hidden_size": 8, "backbone": {"kind": "domino"}, "block_size": 3,
        "pool_size": 99, "mask_token_id": 5, "tapped_layers": [0],
        "target": {"id": "other/model", "revision": None, "fingerprint": "f" * 64},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(IncompatibleArtifact) as caught:
        repairzoo.build(dflash(target, block_size=4), folder, target)
    for key in ("target.id", "target.fingerprint", "vocab_size", "padded_vocab_size", "hidden_size", "backbone.kind",
                "block_size", "pool_size", "mask_token_id", "tapped_layers", "config.json"):  # fmt: skip
        assert key in str(caught.value), key
