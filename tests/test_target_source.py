"""Where a target comes from, and what is no target: names, folders, damaged files, code and pickles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import noisy, toy
from safetensors.torch import load_file, save_file

import repairzoo
from repairzoo import target_source
from repairzoo.errors import InvalidArtifact, InvalidInput, UnknownName, UnsupportedTarget
from repairzoo.target_source import load_target

SOURCE = Path(__file__).parent / "golden" / "targets" / "trained_tied"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "target"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_not_drawn_at_random(folder):
    """transformers only warns: the target would be another model."""
    rewrite(folder, lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight"))
    with pytest.raises(InvalidArtifact, match=r"lacks.*layers\.0\.mlp\.down_proj"):
        load_target(folder)


def test_damaged_weights_are_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidArtifact, match="damaged"):
        load_target(folder)
    path.write_bytes(whole)
    rewrite(folder, lambda tensors: tensors["model.embed_tokens.weight"][5].fill_(float("nan")))
    with pytest.raises(InvalidArtifact, match="not finite"):
        load_target(folder)


def test_no_code_of_a_repository_is_run_or_asked_about(folder, monkeypatch):
    """Left open, transformers asks at the terminal and runs the code on "y"."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('remote code ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UnsupportedTarget, match="custom code"):
        load_target(folder)


def test_pickles_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedTarget, match="safetensors"):
        load_target(folder)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"source": "smollm2-135"}, UnknownName, "did you mean 'smollm2-135m'"),
        ({"source": "a/b/c"}, InvalidInput, "a/b/c"),
        ({"source": ""}, InvalidInput, "''"),
        ({"source": 3}, InvalidInput, "3"),
        ({"source": SOURCE, "device": "gpu"}, InvalidInput, "gpu"),
        ({"source": SOURCE, "device": "cuda:99"}, InvalidInput, "cuda:99"),
        ({"source": SOURCE, "device": "meta"}, InvalidInput, "meta"),
        ({"source": SOURCE, "dtype": "float12"}, InvalidInput, "float12"),
        ({"source": SOURCE, "dtype": torch.int32}, UnsupportedTarget, "int32"),
        ({"source": SOURCE, "revision": "main"}, InvalidInput, "revision='main'"),
    ],
)
def test_what_cannot_be_loaded_is_named(options, error, words):
    with pytest.raises(error, match=words):
        load_target(**options)


def test_build_does_not_ignore_what_a_loaded_target_contradicts():
    assert repairzoo.build(noisy(0, 3), target=toy(), dtype="float64", device="cpu").target is toy()
    with pytest.raises(InvalidInput, match=r"dtype.*float64 already"):
        repairzoo.build(noisy(0, 3), target=(toy().model, None), dtype=torch.float32)
    with pytest.raises(UnsupportedTarget, match="str"):
        repairzoo.build(noisy(0, 3), target=("a", "b"))
    for nothing in (None, 3):
        with pytest.raises(InvalidInput, match="lacks slots"):
            repairzoo.build(nothing, target=toy())
    with pytest.raises(InvalidInput, match="use_int8"):
        repairzoo.build(noisy(0, 3), target=toy(), draft_int8=True)


def test_an_interrupted_download_is_no_snapshot_and_progress_stays_visible(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled

    shutil.copy(SOURCE / "config.json", tmp_path)
    shutil.copy(SOURCE / "model.safetensors", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert target_source._hub_folder(None) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert target_source._hub_folder(None) == (str(tmp_path), tmp_path.name, "the Hub")

    def offline(*_, local_files_only=False, **__):
        if not local_files_only:
            raise OSError("no network")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert target_source._hub_folder(None) == (str(tmp_path), tmp_path.name, "the Hub cache")
    assert not are_progress_bars_disabled()
