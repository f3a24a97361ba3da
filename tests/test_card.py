"""Cards: what the Hub reads of them, that every figure is of a raw file, and that the shipped ones are up to date."""

from __future__ import annotations

import hashlib
import json
import runpy
from pathlib import Path

import pytest
from hub_artifacts import save_backbone, save_head
from hub_server import card_problems

from repairzoo.card import for_repository, measured, read_card, refreshed, write_card
from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.hub import prepared, shipped

ROOT = Path(__file__).parent.parent
CARDS = runpy.run_path(str(ROOT / "benchmarks" / "cards.py"))


def row(cell: str, number: int, accepted: list[int], seconds: float, suite: str = "gsm8k") -> dict:
    tokens = list(range(1 + sum(accepted)))
    return {"suite": suite, "id": f"{suite}-{number}", "cell": cell, "repeat": 0, "tokens": tokens, "finish": "length",
            "accepted": accepted, "seconds": {"prefill": 1.0, "verify": seconds}}  # fmt: skip


def raw_file(root: Path) -> str:
    rows = [row("autoregressive", n, [1] * 12, 12.0) for n in range(3)]
    rows += [row("dflash+dels", n, [3, 4, 5], 3.0 * (n + 1)) for n in range(3)]
    path = root / "benchmarks" / "results" / "toy.jsonl"
    path.parent.mkdir(parents=True)
    lines = [{"manifest": {"cells": ["autoregressive", "dflash+dels"], "options": {"temperature": 0.0}}}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "benchmarks/results/toy.jsonl"


def test_a_new_card_is_what_the_hub_and_its_library_accept(tmp_path):
    from huggingface_hub import ModelCard

    for folder in (save_head(tmp_path / "head"), save_backbone(tmp_path / "backbone")):
        text = (folder / "README.md").read_text()
        assert card_problems(text) == []
        data = ModelCard(text, ignore_metadata_errors=False).data
        assert (data.library_name, data.base_model) == ("repairzoo", "owner/toy")
        assert data["base_model_relation"] == "adapter"
        assert "base_model:adapter:owner/toy" in data.tags
        assert data.eval_results is None  # nothing was measured
        assert ModelCard(str(ModelCard(text))).data.to_dict() == data.to_dict()


def test_figures_come_from_a_raw_file_with_its_hash_and_go_through_the_hubs_own_format(tmp_path):
    from huggingface_hub import ModelCard

    folder, raw = save_head(tmp_path / "head"), raw_file(tmp_path)
    text = refreshed(folder, tmp_path, figures=(raw, "dflash+dels"), licence="Apache-2.0")
    assert card_problems(text) == []
    results = ModelCard(text, ignore_metadata_errors=False).data.eval_results
    assert {(r.dataset_type, r.metric_type): r.metric_value for r in results} == {
        ("gsm8k", "tau"): 4.0, ("gsm8k", "speedup"): 2.0, ("all", "tau"): 4.0, ("all", "speedup"): 2.0,
    }  # fmt: skip
    digest = hashlib.sha256((tmp_path / raw).read_bytes()).hexdigest()
    assert all(r.metric_args["sha256"] == digest and r.metric_args["raw"] == raw for r in results)
    assert "| all | 3 | 4.00 | 2.00× |" in text
    write_card(folder, text)
    assert refreshed(folder, tmp_path) == text  # nothing changes the second time
    assert read_card(folder)["licence"] == "apache-2.0"
    assert len(read_card(folder)["figures"]) == 4
    with pytest.raises(InvalidArtifact, match="nothing was measured of 'domino'"):
        measured(tmp_path, raw, "domino")
    with pytest.raises(InvalidArtifact, match="no such result file"):
        measured(tmp_path, "benchmarks/results/none.jsonl", "dflash")
    (tmp_path / raw).write_text((tmp_path / raw).read_text().replace("[3, 4, 5]", "[3, 4, 6]"))
    with pytest.raises(InvalidInput, match="add up"):
        refreshed(folder, tmp_path)


def test_the_text_of_a_card_is_kept_and_says_how_to_load_what_is_published(tmp_path):
    folder = save_head(tmp_path / "head")
    own = "# Mine\n\nSee [the corpus](../../../corpora).\n\n<!-- use -->\nold\n<!-- end -->\n\nEnd.\n"
    write_card(folder, refreshed(folder, tmp_path, own))
    text = for_repository(folder, "owner/name")
    assert 'head="hf:owner/name"' in text
    assert "See the corpus." in text
    assert text.endswith("End.\n")
    assert 'head="dels"' in (folder / "README.md").read_text()
    front = (folder / "README.md").read_text()
    for key, value in (("library_name", "peft"), ("base_model", "other/model")):
        wrong = "\n".join(f"{key}: {value}" if line.startswith(f"{key}:") else line for line in front.split("\n"))
        write_card(folder, wrong)
        with pytest.raises(InvalidArtifact, match=rf"{key} '{value}'.*remove the front matter"):
            prepared(folder, "owner/name")
    write_card(folder, front.replace("base_model: owner/toy", "base_model:\n- owner/toy"))  # the Hub reads both
    prepared(folder, "owner/name")
    write_card(folder, "---\n: [\n---\n")
    with pytest.raises(InvalidArtifact, match="front matter"):
        prepared(folder, "owner/name")
    assert read_card(folder) == {}  # a bad card stops nobody from loading


@pytest.mark.parametrize("text", ["# Mine\n", "", "\ufeff# Mine\n"])
def test_a_text_without_front_matter_is_published_with_it(tmp_path, text):
    """Whoever writes a README and trains a head has said enough: the config states the rest."""
    from huggingface_hub import ModelCard

    folder = save_head(tmp_path / "head")
    (folder / "README.md").write_text(text, encoding="utf-8")
    card = prepared(folder, "owner/name")["README.md"].decode()  # type: ignore[union-attr]
    assert card_problems(card) == []
    data = ModelCard(card, ignore_metadata_errors=False).data
    assert (data.library_name, data.base_model, data["base_model_relation"]) == ("repairzoo", "owner/toy", "adapter")
    assert card.endswith(text.removeprefix("\ufeff"))
    assert "\ufeff" not in card
    (folder / "README.md").write_text("\ufeff" + card, encoding="utf-8")  # as some editors save it
    assert prepared(folder, "owner/name")["README.md"] == card.encode()


def test_a_card_that_cannot_be_published_says_what_to_do(tmp_path):
    folder = save_head(tmp_path / "head")
    for content, words in (
        ("# café".encode("latin-1"), "save it as UTF-8"),
        (b"---\nlicense: mit\n---\n# x\n", "library_name None.*base_model None.*remove the front matter"),
        (b"---\nlicense: mit\n# it never ends\n", "remove the front matter"),
    ):
        (folder / "README.md").write_bytes(content)
        with pytest.raises(InvalidArtifact, match=words):
            prepared(folder, "owner/name")


CARDS_OF_STRANGERS = {
    "arguments that are a list": "model-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: n}, "
    "metrics: [{type: tau, value: 1, args: [1]}]}]}]",
    "a licence of aliases": "a: &a [x, x]\nb: &b [*a, *a]\nlicense: [*b, *b]",
    "commands for a terminal": 'license: "mit\\e[2J"',
    "figures of objects": "model-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: n}, "
    "metrics: [{type: tau, value: {a: 1}}]}]}]",
    "large": "license: mit\nnotes: " + "x" * 300_000,
    "deep": "license: " + "[" * 2000,
}


@pytest.mark.parametrize("front", CARDS_OF_STRANGERS.values(), ids=CARDS_OF_STRANGERS)
def test_a_card_from_anywhere_is_told_as_plain_values_or_not_at_all(tmp_path, front, capsys):
    from repairzoo.commands.info import show_info

    folder = save_head(tmp_path / "head")
    (folder / "README.md").write_text(f"---\n{front}\n---\n# x\n")
    facts = read_card(folder)
    assert all(isinstance(facts.get(key, ""), str) for key in ("licence", "base_model"))
    for figure in facts.get("figures", ()):
        assert all(isinstance(value, (str, int, float)) for value in figure.values())
    show_info(str(folder))
    shown = capsys.readouterr().out
    assert "anchor_plus_1" in shown
    assert "\x1b" not in shown


def test_the_server_of_the_tests_refuses_bad_metadata():
    """The negative control of ``card_problems``."""
    for front in ("license: [a]", "tags: x", "base_model_relation: lora", ": [", "model-index: [{results: [{}]}]"):
        assert card_problems(f"---\n{front}\n---\n"), front


@pytest.mark.parametrize(("name", "folder"), shipped(), ids=lambda value: value if isinstance(value, str) else "")
def test_shipped_cards_are_up_to_date_and_can_be_published(name, folder):
    """After a new measurement or artifact: python benchmarks/cards.py --write."""
    assert CARDS["card"](folder) == (folder / "README.md").read_text(encoding="utf-8")
    contents = prepared(folder, f"owner/{name}")
    assert {"README.md", "config.json"} <= contents.keys()
    card = contents["README.md"]
    assert isinstance(card, bytes)
    assert card_problems(card.decode()) == []
    assert f"hf:owner/{name}" in card.decode()
    facts = read_card(folder)
    assert facts["licence"]
    for figure in facts.get("figures", ()):
        assert figure["sha256"] == hashlib.sha256((ROOT / figure["raw"]).read_bytes()).hexdigest()
