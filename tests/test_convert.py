"""``convert``: every packaging into the strict form and back, the same tensors and configs; nothing half-written."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

import repairzoo
from repairzoo import convert as module
from repairzoo.artifact import tensors_hash
from repairzoo.cli import app
from repairzoo.convert import convert
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput, UnknownName
from repairzoo.load_parts import bound_backbone
from repairzoo.resolve import resolve
from repairzoo.safe_file import read_header

GOLDEN = Path(__file__).parent / "golden"
DRAFTS = [
    "dflash/trained_b8",
    "dflash/sliding_b8",
    "domino/trained_shift_b8",
    "domino/trained_noshift_b8",
    "dspark/trained_vanilla_b7",
    "dspark/trained_gated_b7",
]
LAYOUT = {"dflash": "z-lab", "domino": "Domino", "dspark": "DeepSpec"}


@cache
def target(name: str = "trained_tied") -> repairzoo.Target:
    model = Qwen3ForCausalLM.from_pretrained(GOLDEN / "targets" / name, dtype=torch.float32)
    return repairzoo.Target(model, name="golden/target")


def draft(name: str) -> Path:
    return GOLDEN / name / "draft"


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def stored(folder: Path) -> str:
    """Names, dtypes, shapes and bytes of all tensors."""
    return tensors_hash(load_file(folder / "model.safetensors"))


def answers(folder: Path) -> tuple[list[int], list[int]]:
    """What a draft in this folder does: its first blocks' accepted lengths and tokens."""
    zoo = repairzoo.build(folder, target=target(), draft_int8=False)
    out = zoo.generate([[5, 9, 3, 40, 77, 2, 19]], max_new_tokens=12, eos_token_id=[])
    return out.token_ids[0], out.stats.accepted[0]


@pytest.mark.parametrize("name", DRAFTS)
def test_strict_and_back_is_the_same_file(tmp_path, name):
    """Config equal as a value, weights byte for byte as the safetensors library wrote them."""
    kind = name.split("/")[0]
    done = convert(draft(name), tmp_path / "strict", target=target())
    assert (done.kind, done.source, done.target) == (kind, LAYOUT[kind], "golden/target")
    strict = config(tmp_path / "strict")
    assert strict["repairzoo"]["first_slot"] == done.first_slot == resolve(draft(name)).first_slot
    assert strict["repairzoo"]["target"]["fingerprint"]
    assert "config_sha256" in read_header(tmp_path / "strict" / "model.safetensors").metadata
    back = convert(tmp_path / "strict", tmp_path / "back", to=LAYOUT[kind])
    assert back.source == "repairzoo" and config(tmp_path / "back") == config(draft(name))
    assert (tmp_path / "back/model.safetensors").read_bytes() == (draft(name) / "model.safetensors").read_bytes()
    assert answers(tmp_path / "strict") == answers(draft(name))


@pytest.mark.parametrize("name", ["dflash/trained_b8", "domino/trained_noshift_b8", "dspark/trained_rnn_b7"])
def test_speculators_and_back(tmp_path, name):
    """Layer ids one higher, slots by speculative_tokens (vllm#40727, speculators#757); the same drafts all the same."""
    convert(draft(name), tmp_path / "packed", to="speculators", target_id="golden/target", target=target())
    packed, original = config(tmp_path / "packed"), repairzoo.load_backbone(draft(name))
    assert packed["aux_hidden_state_layer_ids"] == [i + 1 for i in original.tapped_layers]
    (method,) = packed["speculators_config"]["proposal_methods"]
    assert packed["block_size"] - method["speculative_tokens"] == original.first_slot
    loaded = bound_backbone(tmp_path / "packed", target())
    assert (loaded.kind, loaded.first_slot, loaded.tapped_layers) == (
        original.kind,
        original.first_slot,
        original.tapped_layers,
    )
    if not name.startswith("dspark"):  # whose own tables are dropped
        assert answers(tmp_path / "packed") == answers(draft(name))
    convert(tmp_path / "packed", tmp_path / "strict", target=target())
    assert config(tmp_path / "strict")["num_target_layers"] == 8
    convert(tmp_path / "strict", tmp_path / "again", to="speculators")
    assert config(tmp_path / "again") == packed
    assert stored(tmp_path / "again") == stored(tmp_path / "packed")
    names = load_file(tmp_path / "again/model.safetensors")
    assert any(n.startswith("domino_head.prefix_gru.") for n in names) == name.startswith("domino")


def test_speculators_copies_of_the_tables_are_compared_and_shared(tmp_path):
    folder = tmp_path / "packed"
    convert(draft("dflash/trained_b8"), folder, to="speculators", target_id="golden/target")
    tensors = load_file(folder / "model.safetensors")
    table = target().embedding.clone()
    full = {
        "embed_tokens.weight": table,
        "lm_head.weight": table.clone(),
        "d2t": torch.zeros(128, dtype=torch.int64),
        "t2d": torch.ones(128, dtype=torch.bool),
        "verifier_norm.weight": torch.ones(64),
    }
    save_file(tensors | full, folder / "model.safetensors")
    with pytest.raises(InvalidArtifact, match=r"repairzoo convert SRC DST --target"):
        repairzoo.load_backbone(folder)
    with pytest.raises(InvalidInput, match="--target"):
        convert(folder, tmp_path / "no")
    done = convert(folder, tmp_path / "strict", target=target())
    assert stored(tmp_path / "strict") == stored(draft("dflash/trained_b8"))
    assert "verifier_norm.weight" in done.notes[0]
    assert answers(tmp_path / "strict") == answers(draft("dflash/trained_b8"))
    convert(tmp_path / "strict", tmp_path / "again", to="speculators", target=target())
    full.pop("verifier_norm.weight")
    assert stored(tmp_path / "again") == tensors_hash(tensors | full)

    for change, words in (
        ({"lm_head.weight": table + 1}, "lm_head.weight"),
        ({"d2t": torch.arange(128)}, "reduced draft vocabulary"),
    ):
        save_file(tensors | full | change, folder / "model.safetensors")
        with pytest.raises((IncompatibleArtifact, InvalidArtifact), match=words):
            convert(folder, tmp_path / "no", target=target())
    assert not list(tmp_path.glob("*no*"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab_size": 64}, ("draft_vocab_size", "reduced")),
        ({"target_hidden_size": 32}, ("target_hidden_size",)),
        ({"aux_hidden_state_layer_ids": None}, ("aux_hidden_state_layer_ids", "not guessed")),
        ({"mask_token_id": None}, ("mask_token_id",)),
        ({"transformer_layer_config": None}, ("transformer_layer_config",)),
        ({"novelty": 1}, ("novelty",)),
        ({"speculators_model_type": "eagle3"}, ("eagle3",)),
    ],
)
def test_speculators_keys_are_refused_by_name(tmp_path, changes, words):
    convert(draft("dflash/trained_b8"), tmp_path / "packed", to="speculators", target_id="x/y")
    path = tmp_path / "packed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidArtifact) as caught:
        repairzoo.load_backbone(tmp_path / "packed")
    for word in (str(path), *words):
        assert word in str(caught.value), str(caught.value)


def test_speculators_without_a_rotary_base_are_refused(tmp_path):
    """lucebox#447: the base is the one number that is never taken from a class."""
    convert(draft("dflash/trained_b8"), tmp_path / "packed", to="speculators", target_id="x/y")
    path = tmp_path / "packed" / "config.json"
    data = json.loads(path.read_text())
    del data["transformer_layer_config"]["rope_theta"], data["transformer_layer_config"]["hidden_act"]
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidArtifact, match="rope_theta"):
        repairzoo.load_backbone(tmp_path / "packed")
    data["transformer_layer_config"]["rope_theta"] = 1e6  # hidden_act alone has its class's value
    path.write_text(json.dumps(data))
    assert repairzoo.load_backbone(tmp_path / "packed").config.num_target_layers is None


def test_slots_of_speculators_follow_the_served_number_of_tokens(tmp_path):
    """speculators#757: trust block_size - speculative_tokens; then sample_from_anchor; old heads reserve row 0."""
    from repairzoo.speculators import first_slot

    def packed(tokens, **more):
        methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
        inner = {"default_proposal_method": "greedy", "proposal_methods": methods}
        return {"speculators_config": inner, "block_size": 8, **more}

    assert [first_slot(packed(n)) for n in (7, 8, 5)] == [1, 0, 1]
    assert first_slot(packed(5, sample_from_anchor=True)) == 0
    with pytest.warns(UserWarning, match="sample_from_anchor"):
        assert first_slot(packed(7, sample_from_anchor=True)) == 1
    assert first_slot({"speculators_config": {}, "block_size": 8}) == 1


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_deepspec_specforge_and_modelopt_hold_the_same_draft(tmp_path, kind):
    source = draft(f"dspark/trained_{kind}_b7")
    with pytest.raises(InvalidInput, match="--target"):
        convert(source, tmp_path / "forge", to="SpecForge")
    convert(source, tmp_path / "forge", to="specforge", target=target())
    assert resolve(tmp_path / "forge").layout == "SpecForge"
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "forge/model.safetensors"))
    assert answers(tmp_path / "forge") == answers(source)
    convert(tmp_path / "forge", tmp_path / "spec", to="DeepSpec", target=target())
    assert stored(tmp_path / "spec") == stored(source)
    ours, theirs = config(tmp_path / "spec"), config(source)
    assert ours.pop("num_anchors") == 512 and theirs.pop("num_anchors") == 10 and ours == theirs
    with pytest.raises(IncompatibleArtifact, match="another target"):
        convert(source, tmp_path / "no", to="SpecForge", target=target("random_untied"))

    # ModelOpt's flat names
    flat = tmp_path / "modelopt"
    shutil.copytree(tmp_path / "forge", flat)
    found = load_file(flat / "model.safetensors")
    for ours_, theirs_ in (("markov_head.markov_", "markov_"), ("confidence_head.proj.", "confidence_proj.")):
        found = {name.replace(ours_, theirs_) if "gate" not in name else name: t for name, t in found.items()}
    save_file(found, flat / "model.safetensors")
    data = config(flat)
    data["dflash_config"] |= {"sample_from_anchor": True, "has_lm_head": False}
    (flat / "config.json").write_text(json.dumps(data))
    assert resolve(flat).layout == "ModelOpt"
    assert answers(flat) == answers(source)
    convert(flat, tmp_path / "strict", target=target())
    assert "markov_head.markov_w1.weight" in load_file(tmp_path / "strict/model.safetensors")
    convert(tmp_path / "strict", tmp_path / "flat", to="ModelOpt")
    assert stored(tmp_path / "flat") == stored(flat) and config(tmp_path / "flat") == data


def test_older_names_come_back(tmp_path):
    """SpecForge strips ``logit_head.``; the strict form does, too, and remembers it."""
    source = tmp_path / "old"
    shutil.copytree(draft("domino/trained_shift_b8"), source)
    tensors = load_file(source / "model.safetensors")
    new = ("prefix_gru.", "embed_proj.")
    save_file(
        {f"logit_head.{n}" if n.startswith(new) else n: t for n, t in tensors.items()}, source / "model.safetensors"
    )
    convert(source, tmp_path / "strict", target_id="golden/target", target_revision="c0ffee")
    assert stored(tmp_path / "strict") == tensors_hash(tensors)
    assert config(tmp_path / "strict")["repairzoo"]["target"] == {"id": "golden/target", "revision": "c0ffee"}
    convert(tmp_path / "strict", tmp_path / "back", to="domino")
    assert stored(tmp_path / "back") == stored(source)


def test_nothing_is_half_written(tmp_path, monkeypatch):
    source = draft("dflash/trained_b8")
    with pytest.raises(InvalidInput, match="--target-id"):
        convert(source, tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidInput, match="exists"):
        convert(source, tmp_path / "there", target_id="x/y")
    with pytest.raises(UnknownName, match=r"did you mean 'DeepSpec'.*SpecForge"):
        convert(source, tmp_path / "out", to="deepspek")
    with pytest.raises(InvalidInput, match="DeepSpec"):
        convert(draft("dspark/trained_gated_b7"), tmp_path / "out", to="z-lab", target_id="x/y")
    with pytest.raises(InvalidArtifact, match="no such"):
        convert(tmp_path / "nowhere", tmp_path / "out")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "_check", fails)
    with pytest.raises(OSError, match="disk full"):
        convert(source, tmp_path / "out", target_id="x/y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_what_is_written_is_read_before_it_gets_its_name(tmp_path, monkeypatch):
    write = module.write_weights

    def damaged(path, tensors, metadata):
        write(path, {n: t + 1 if n == "norm.weight" else t for n, t in tensors.items()}, metadata)

    monkeypatch.setattr(module, "write_weights", damaged)
    with pytest.raises(InvalidArtifact, match="does not read back"):
        convert(draft("dflash/trained_b8"), tmp_path / "out", target_id="x/y")
    assert not list(tmp_path.iterdir())


# --- heads ------------------------------------------------------------------------------------------------------------
def test_lilicorr_comes_apart_and_goes_back(tmp_path):
    """A published folder embeds the head in its draft."""
    source = GOLDEN / "lilicorr" / "head_w48_b8" / "draft"
    data = config(source)
    trunk = config(draft("dflash/trained_b8"))
    folder = tmp_path / "both"
    folder.mkdir()
    own = {**trunk["dflash_config"], **data["dflash_config"]}
    both = trunk | {"dflash_config": own}
    (folder / "config.json").write_text(json.dumps(both))
    tensors = load_file(draft("dflash/trained_b8") / "model.safetensors")
    head = {n: t for n, t in load_file(source / "model.safetensors").items() if n.startswith("lilicorr.")}
    save_file(tensors | head, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match="part"):
        convert(folder, tmp_path / "no", target=target())
    with pytest.raises(InvalidArtifact, match="--part"):
        repairzoo.load_backbone(folder)
    convert(folder, tmp_path / "backbone", part="backbone", target=target())
    assert stored(tmp_path / "backbone") == tensors_hash(tensors)
    done = convert(folder, tmp_path / "head", part="head", target=target(), options={"pool_size": 4})
    assert done.kind == "lilicorr" and repairzoo.load_head(tmp_path / "head").pool_size == 4
    convert(tmp_path / "head", tmp_path / "again", to="lilicorr", draft=folder)
    assert stored(tmp_path / "again") == tensors_hash(head)
    with pytest.raises(InvalidInput, match="this head takes"):
        convert(folder, tmp_path / "no", part="head", target=target(), options={"alpha": 1})


def test_dels_checkpoints_are_read_with_weights_only(tmp_path):
    import pickle

    path = tmp_path / "local.pt"
    gru = {"prefix_gru.weight_ih_l0": torch.randn(24, 64), "prefix_gru.weight_hh_l0": torch.randn(24, 8)}
    gru |= {"rank_proj.weight": torch.randn(4, 8), "low_rank_lm_head.weight": torch.randn(128, 4)}
    sizes = {"gru_hidden_dim": 8, "low_rank_dim": 4, "vocab_size": 128, "rank_activation": "silu", "block_size": 8}
    torch.save({"model_config": sizes | {"pure_draft_prefix_len": 1}, "model_state_dict": gru}, path)
    with pytest.raises(InvalidInput, match="target"):
        convert(path, tmp_path / "head")
    convert(path, tmp_path / "head", target=target(), options={"beta": 0.0, "alpha": 0.5})
    head = repairzoo.load_head(tmp_path / "head")
    assert torch.equal(head.state_dict()["gru_input"], gru["prefix_gru.weight_ih_l0"]) and head.config.alpha == 0.5

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidArtifact, match="weights-only"):
        convert(path, tmp_path / "no", target=target())
    assert not (tmp_path / "ran").exists() and not (tmp_path / "no").exists()


def test_command(tmp_path):
    run = CliRunner().invoke
    name, out = str(draft("domino/trained_shift_b8")), str(tmp_path / "strict")
    result = run(app, ["convert", name, out, "--target-id", "x/y", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["kind"], said["first_slot"], said["target"]) == ("domino", 0, "x/y")
    result = run(app, ["convert", name, out, "--target-id", "x/y"])
    assert result.exit_code == 2 and "exists" in result.output
    assert "slot 0 is block row 0" in run(app, ["convert", out, f"{out}2", "--to", "domino"]).output
