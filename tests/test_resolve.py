"""The resolver: every packaging is told apart by its config, and what is not supported is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

import repairzoo
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact
from repairzoo.resolve import Packaging, resolve, resolve_config

GOLDEN = Path(__file__).parent / "golden"
DRAFTS = sorted(p.parent for kind in ("dflash", "domino", "dspark") for p in GOLDEN.glob(f"{kind}/*/draft/config.json"))


def config(folder: str) -> dict:
    return json.loads((GOLDEN / folder / "draft" / "config.json").read_text())


def test_there_are_drafts_of_every_kind():
    assert {p.parent.parent.name for p in DRAFTS} == {"dflash", "domino", "dspark"}


@pytest.mark.parametrize("folder", DRAFTS, ids=lambda p: f"{p.parent.parent.name}/{p.parent.name}")
def test_golden_folders_load_as_what_they_are(folder):
    """The slot convention that the resolver states is the one that the loaded backbone drafts with."""
    found = resolve(folder)
    assert found.kind == folder.parent.parent.name
    loaded = repairzoo.load_backbone(folder)
    assert (loaded.kind, loaded.first_slot) == (found.kind, found.first_slot)
    described = json.loads((folder.parent / "cases.json").read_text())
    if "D" in described["dims"]:
        assert loaded.slots == described["dims"]["D"]


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("dflash/trained_b8", Packaging("dflash", "z-lab", 1, "dflash_config")),
        ("domino/trained_shift_b8", Packaging("domino", "Domino", 0, "projector_type")),
        ("domino/trained_noshift_b8", Packaging("domino", "Domino", 1, "projector_type")),
        ("dspark/trained_gated_b7", Packaging("dspark", "DeepSpec", 0, "markov_rank")),
    ],
)
def test_each_packaging_states_its_slots(folder, found):
    assert resolve_config(config(folder)) == found


def test_layouts_that_look_alike():
    dspark, dflash = config("dspark/trained_rnn_b7"), config("dflash/trained_b8")
    # DeepSpec's own "dflash" baselines: this class with rank 0, and slot 0 predicts
    assert resolve_config(dspark | {"markov_rank": 0}).kind == "dspark"
    nested = {"projector_type": "dspark", "markov_rank": 4}
    specforge = dflash | {"dflash_config": dflash["dflash_config"] | nested}
    assert resolve_config(specforge) == Packaging("dspark", "SpecForge", 0, "projector_type")
    # the first public Domino drafts state DFlash's architecture
    domino = config("domino/trained_shift_b8") | {"architectures": ["DFlashDraftModel"]}
    assert resolve_config(domino).kind == "domino"
    flat = {key: value for key, value in dflash.items() if key != "dflash_config"} | dflash["dflash_config"]
    assert resolve_config(flat) == Packaging("dflash", "z-lab", 1, "target_layer_ids")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_config": {}}, ("speculators_config", "speculators")),
        ({"speculators_model_type": "eagle3"}, ("speculators_model_type", "'eagle3'")),
        ({"speculators_model_type": "dflash2"}, ("speculators_model_type", "DFlash 2")),
        ({"projector_type": "dspark", "sample_from_anchor": False}, ("sample_from_anchor", "row 0")),
        ({"projector_type": "lilicorr"}, ("lilicorr", "--part")),
        ({"model_type": "qwen3_5"}, ("model_type", "offset")),
        ({"architectures": ["DFlash2DraftModel"]}, ("architectures", "DFlash 2")),
        ({"selector_rank": 64}, ("selector_rank", "DFlash 2")),
        ({"conv_kernel_size": 3}, ("conv_kernel_size", "DFlash 2")),
        ({"architectures": ["Gemma4DSparkModel"]}, ("architectures", "Gemma-4")),
        ({"architectures": ["Lfm2DSparkDraftModel"]}, ("architectures", "LFM2")),
        ({"dspark_markov_rank": 512}, ("dspark_markov_rank", "DeepSeek-V4")),
        ({"projector_type": "eagle"}, ("projector_type", "'eagle'")),
        ({"projector_type": "domino"}, ("shift_label", "not guessed")),
        ({"dflash_config": {}}, ("mask_token_id", "missing")),
        ({"dflash_config": {"mask_token_id": 127}}, ("target_layer_ids", "missing")),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(InvalidArtifact) as caught:
        resolve_config(config("dflash/trained_b8") | changes, "some/config.json")
    for word in ("some/config.json", *words):
        assert word in str(caught.value), str(caught.value)


def test_folders_that_are_no_drafts(tmp_path):
    with pytest.raises(InvalidArtifact, match="no such file"):
        resolve(tmp_path)
    with pytest.raises(InvalidArtifact, match="mask_token_id"):
        resolve(GOLDEN / "targets" / "trained_tied")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidArtifact, match="object"):
        resolve(tmp_path)


@pytest.mark.parametrize("folder", ["domino/trained_shift_b8", "dspark/trained_vanilla_b7"])
def test_build_takes_the_folder_of_any_kind(folder):
    case = next(
        c for c in json.loads((GOLDEN / folder / "cases.json").read_text())["cases"] if c["name"] == "len7_new7"
    )
    target = Qwen3ForCausalLM.from_pretrained(GOLDEN / "targets" / "trained_tied", dtype=torch.float32)
    zoo = repairzoo.build(GOLDEN / folder / "draft", target=target)
    out = zoo.generate(case["prompt"], max_new_tokens=7, eos_token_id=[])
    assert case["prompt"] + out.token_ids[0] == case["output_ids"]
    other = Qwen3ForCausalLM.from_pretrained(GOLDEN / "targets" / "random_untied", dtype=torch.float32)
    if "dspark" in folder:
        with pytest.raises(IncompatibleArtifact, match="another target"):
            repairzoo.build(GOLDEN / folder / "draft", target=other)
