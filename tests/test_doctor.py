"""``doctor``: healthy drafts are called healthy; each of ten planted faults is refused at load or named among the first
two suspects. The drafts are the trained ones of the golden data, of all three kinds."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

import repairzoo
from repairzoo import doctor
from repairzoo.cli import app
from repairzoo.convert import convert
from repairzoo.doctor import diagnose
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput

GOLDEN = Path(__file__).parent / "golden"
KINDS = {"dflash": "trained_b8", "domino": "trained_shift_b8", "dspark": "trained_vanilla_b7"}
PROMPTS = [[11, 3, 77, 40, 2, 19, 8], [5] * 9, [90, 12, 33, 61, 7, 7, 21, 4, 4, 18], [64, 1, 30]]


@cache
def target(name: str = "trained_tied") -> repairzoo.Target:
    model = Qwen3ForCausalLM.from_pretrained(GOLDEN / "targets" / name, dtype=torch.float32)
    return repairzoo.Target(model, name="golden/target")


@cache
def texts(name: str = "trained_tied") -> list[tuple[list[int], int]]:
    """The golden prompts and some more, with what the target makes of them."""
    known = json.loads((GOLDEN / "dflash/trained_b8/cases.json").read_text())["cases"]
    prompts = [c["prompt"] for c in known if c["prompt"]][:4] + PROMPTS
    out = repairzoo.autoregressive(target(name), prompts, max_new_tokens=48, eos_token_id=[])
    return [([*p, *ids], len(p)) for p, ids in zip(prompts, out.token_ids, strict=True)]


def folder(kind: str, tmp_path: Path, change: Callable[[dict, dict], None] | None = None) -> Path:
    """A copy of a trained draft, with its config and tensors changed."""
    source, place = GOLDEN / kind / KINDS[kind] / "draft", tmp_path / "draft"
    shutil.copytree(source, place)
    if change is not None:
        config, tensors = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
        change(config, tensors)
        (place / "config.json").write_text(json.dumps(config))
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def build(place: Path, **options: Any) -> repairzoo.Zoo:
    return repairzoo.build(place, target=target(), draft_int8=False, **options)


def inner(config: dict) -> dict:
    return config.get("dflash_config") or config


def named(diagnosis: Any) -> list[str]:
    assert not diagnosis.healthy, diagnosis.verdict
    return [s.cause for s in diagnosis.suspects[:2]]


# --- the faults -------------------------------------------------------------------------------------------------------
def layers(config: dict, tensors: dict) -> None:
    inner(config)["target_layer_ids"] = [i + 1 for i in inner(config)["target_layer_ids"]]


def mask(config: dict, tensors: dict) -> None:
    inner(config)["mask_token_id"] = 0


def rope(config: dict, tensors: dict) -> None:
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 10000.0
    else:
        config["rope_theta"] = 10000.0


def swap(config: dict, tensors: dict) -> None:
    for name in [n for n in tensors if "k_proj" in n]:
        other = name.replace("k_proj", "v_proj")
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()


def slots(config: dict, tensors: dict) -> None:
    """DominoTree's 1.01: a draft in which row 1 predicts first, read as one in which row 0 does, or the reverse."""
    own = inner(config)
    if own.get("projector_type") == "domino":
        own["shift_label"] = not own["shift_label"]
    else:
        config["architectures"] = ["DSparkDraftModel"]
        own |= {"projector_type": "dspark", "markov_rank": 0, "enable_confidence_head": False}


def ones(config: dict, tensors: dict) -> None:
    tensors["hidden_norm.weight"] = torch.ones_like(tensors["hidden_norm.weight"])


FILE_FAULTS = {
    "slot shift": slots,
    "tapped layers": layers,
    "mask id": mask,
    "rope base": rope,
    "swapped k/v": swap,
    "missing hidden_norm": ones,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_draft_is_healthy(kind, tmp_path):
    """Also in the loop, which accepts at every place what fresh drafts accept there."""
    zoo = build(folder(kind, tmp_path))
    found = diagnose(zoo, PROMPTS, new_tokens=32, blocks=24)
    assert found.healthy and found.verdict.startswith("healthy"), found.verdict
    assert found.tau > 2 and found.per_slot == sorted(found.per_slot, reverse=True)
    assert abs(sum(found.per_slot) - found.accepted) < 1e-5
    assert json.loads(json.dumps(found.as_dict()))["healthy"] is True
    again = zoo.generate(PROMPTS[:1], max_new_tokens=8, eos_token_id=[]).stats.accepted
    assert (
        again
        == build(folder(kind, tmp_path / "two")).generate(PROMPTS[:1], max_new_tokens=8, eos_token_id=[]).stats.accepted
    )  # the doctor leaves the draft as it was


PLANTED = [("dflash", cause) for cause in FILE_FAULTS]
PLANTED += [("domino", "slot shift"), ("domino", "mask id"), ("domino", "tapped layers")]
PLANTED += [("dspark", "rope base"), ("dspark", "swapped k/v")]


@pytest.mark.parametrize(("kind", "cause"), PLANTED)
def test_faults_in_files_are_named(kind, cause, tmp_path):
    """z-lab#156, vllm#40727, Automodel#2461, lucebox#447, ROCmFPX#44: all of these load, and draft badly."""
    zoo = build(folder(kind, tmp_path, FILE_FAULTS[cause]))
    found = diagnose(zoo, texts=texts(), blocks=40)
    assert cause in [s.cause for s in found.suspects[:2]], found.verdict
    # from the layers above, this Domino drafts as well as from its own: 0.02 nats, no draft fewer
    assert not found.healthy or (cause, kind) == ("tapped layers", "domino")


def test_a_missing_hidden_norm_is_refused(tmp_path):
    with pytest.raises(InvalidArtifact, match=r"hidden_norm\.weight"):
        build(folder("dflash", tmp_path, lambda _, tensors: tensors.pop("hidden_norm.weight")))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_features_that_are_one_row_late_are_named(kind, tmp_path):
    """C9: the feature of position t - 1 at position t."""
    zoo = build(folder(kind, tmp_path))
    write = type(zoo.backbone).extend

    def late(self, cache, features, positions):
        write(self, cache, features.roll(1, 1), positions)

    zoo.backbone.extend = types.MethodType(late, zoo.backbone)
    assert "stale feature row" in named(diagnose(zoo, texts=texts(), blocks=40))


def test_rows_that_are_stale_only_between_rounds_are_named(tmp_path):
    """Reading a text at once is right; what later rounds commit lands where the round before put it."""
    zoo = build(folder("dflash", tmp_path))
    write, last = type(zoo.backbone).extend, []

    def stale(self, cache, features, positions):
        old = last[0] if last and last[0].shape == features.shape and features.shape[1] <= self.block_size else features
        last[:] = [features]
        write(self, cache, old, positions)

    zoo.backbone.extend = types.MethodType(stale, zoo.backbone)
    assert "stale feature row" in named(diagnose(zoo, PROMPTS, new_tokens=32, blocks=24))


def test_overflow_in_half_precision_is_named(tmp_path):
    """hidden_norm makes the scale of fc free: harmless in float32, beyond float16's range in float16."""

    def loud(config: dict, tensors: dict) -> None:
        tensors["fc.weight"] *= 2.0**17

    zoo = build(folder("dflash", tmp_path, loud))
    zoo.backbone.half()
    assert named(diagnose(zoo, texts=texts()[:2], blocks=8))[0] == "half-precision overflow"


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_another_target_is_named(kind, tmp_path):
    """Of the same sizes; DSpark's own tables give it away at load (test_dspark)."""
    zoo = repairzoo.build(folder(kind, tmp_path), target=target("random_untied"), draft_int8=False)
    assert "wrong target" in named(diagnose(zoo, texts=texts("random_untied"), blocks=24))


def test_a_stated_target_is_held_to(tmp_path):
    """Where the draft says which weights it was made for, no measuring is needed."""
    convert(folder("dflash", tmp_path), tmp_path / "strict", target=target())
    other = target("random_untied")
    with pytest.warns(UserWarning, match="other weights"):
        zoo = repairzoo.build(tmp_path / "strict", target=other, draft_int8=False)
    found = diagnose(zoo, texts=texts("random_untied"), blocks=16)
    assert named(found)[0] == "wrong target" and "fingerprints" in found.verdict


def test_a_head_of_another_backbone_is_refused(tmp_path):
    source = GOLDEN / "lilicorr" / "head_w48_b8" / "draft"
    convert(source, tmp_path / "head", part="head", target=target())
    with pytest.raises(IncompatibleArtifact, match=r"backbone\.kind"):
        build(folder("domino", tmp_path), head=tmp_path / "head")


def test_a_head_that_lowers_acceptance_is_named(tmp_path):
    class Contrary:
        """Prefers what the backbone likes least."""

        pool_size = 4

        def prepare(self, block, pool):
            return None

        def start(self, block):
            return None

        def step(self, prepared, carry, slot, previous, scores):
            return -scores, carry

    zoo = build(folder("dflash", tmp_path), head=Contrary())
    found = diagnose(zoo, texts=texts(), blocks=16)
    assert named(found)[0] == "head on the wrong backbone"
    assert found.without_head is not None and found.without_head > found.accepted + 1


def test_what_cannot_be_diagnosed_is_refused(tmp_path):
    zoo = build(folder("dflash", tmp_path))
    with pytest.raises(InvalidInput, match="no tokenizer"):
        diagnose(zoo)
    with pytest.raises(InvalidInput, match="new_tokens=4"):
        diagnose(zoo, PROMPTS, new_tokens=4)
    with pytest.raises(InvalidInput, match="blocks=3: give at least 4"):  # one place has no spread: its error is NaN
        diagnose(zoo, PROMPTS, blocks=3)
    with pytest.raises(InvalidInput, match="blocks to look at"):
        diagnose(zoo, texts=[([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 1)])
    zoo.backbone = object()
    with pytest.raises(InvalidInput, match="DFlash, Domino and DSpark"):
        diagnose(zoo, PROMPTS)


def test_the_verdict_of_a_healthy_draft_accuses_nothing():
    near = doctor.Suspect("rope base", "with 1e7: rope_theta is wrong", False, 0.1)
    said = doctor._verdict([near], 1.6)
    assert said.startswith("healthy: 1.60 tokens a round") and "trained little" in said
    assert said.endswith("not clear: rope base") and "is wrong" not in said
    assert "trained little" not in doctor._verdict([], 3.0)
    clear = doctor.Suspect("rope base", "with 1e7: rope_theta is wrong", True, 0.1)
    assert doctor._verdict([clear, near], 1.6) == "rope base: with 1e7: rope_theta is wrong"


def test_command(monkeypatch):
    suspects = [doctor.Suspect("slot shift", "rows", True, 2.0), doctor.Suspect("rope base", "base", False, 0.1)]
    probe = doctor.Probe("slot 0 at block row 1", "slot shift", 32, 2.5, 0.5, 1.5, 9.0)
    found = doctor.Diagnosis(
        False, "slot shift: rows", suspects, 1.5, 40, 0.5, [0.4, 0.1], 0.75, [(3, 9, 0.5)], [probe]
    )
    monkeypatch.setattr("repairzoo.doctor.diagnose", lambda *_, **__: found)
    monkeypatch.setattr("repairzoo.zoo.build", lambda *_, **__: None)
    text = CliRunner().invoke(app, ["doctor", "dflash", "--head", "dels"])
    assert text.exit_code == 0, text.output
    for line in ("slot shift: rows", "suspect 2: rope base (not clear): base", "without the head         1.75"):
        assert line in text.output
    found.healthy, found.verdict, found.suspects = True, "healthy: all", suspects[1:]
    assert "suspect 1: rope base (not clear): base" in CliRunner().invoke(app, ["doctor"]).output
    found.suspects = suspects
    said = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert said["suspects"][0]["cause"] == "slot shift" and said["probes"][0]["z"] == 9.0
