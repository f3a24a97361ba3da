"""The benchmark on a tiny target: real decoding, real files, accounts that add up."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from conftest import Bigram, causal_lm, dels, dflash, letters
from hypothesis import given, settings
from hypothesis import strategies as st

import repairzoo
from repairzoo.bench import report
from repairzoo.bench.clock import RoundClock
from repairzoo.bench.machine import commit
from repairzoo.bench.matrix import CellSpec, cells_of
from repairzoo.bench.measure import Cell, Setting, judged, measure, plain_cell, zoo_cell
from repairzoo.bench.others import OTHERS, other, published_folder
from repairzoo.bench.outcome import Outcome
from repairzoo.bench.replay import replay
from repairzoo.bench.roofline import floor, round_cost
from repairzoo.bench.run import Plan, run
from repairzoo.bench.suites import SUITES, Prompt, load_suite
from repairzoo.costs import costs, plain_cost
from repairzoo.errors import InvalidInput, UnknownName
from repairzoo.target import Target

COMMIT = commit()
PROMPTS = [Prompt("s", str(i), "how are you today"[: 6 + 3 * i]) for i in range(2)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(causal_lm(dtype=torch.float32), letters(), name="toy")


@pytest.fixture(scope="module")
def backbone(target):
    return dflash(target)


@pytest.fixture(scope="module")
def cells(target, backbone):
    return [
        plain_cell(target),
        zoo_cell("dflash", repairzoo.build(backbone, target=target)),
        zoo_cell("dflash+dels", repairzoo.build(backbone, head=dels(target), target=target)),
        zoo_cell("dflash+dels@tree5", repairzoo.build(backbone, head=dels(target), target=target, tree=5)),
        zoo_cell("dflash@sampled", repairzoo.build(backbone, target=target, proposal="sampled")),
    ]


@pytest.fixture(scope="module")
def raw(tmp_path_factory, target, cells) -> Path:
    path = tmp_path_factory.mktemp("bench") / "toy.jsonl"
    some = [Setting(0.0, 1), Setting(1.0, 1), Setting(0.0, 2)]
    measure(target, cells, PROMPTS, path, settings=some, max_new_tokens=9, prefixes=1, oracle=4)
    return path


# --- accounts (issue: stages sum to the round, τ x rounds = committed, histogram = rounds) ----------------------------
def test_stages_sum_to_the_round_and_rounds_to_the_tokens(raw):
    _, rows = report.read_raw(raw)  # refuses what does not add up
    timed = [row for row in rows if "rounds" in row]
    assert len(timed) > 20
    for row in timed:
        assert abs(report.decode_seconds(row) - row["wall"]) <= 0.05 * row["wall"] + 1e-3
        assert row["decoded"] > 0
    for row in rows:
        if row["batch"] == 1 and row["cell"] != "autoregressive":
            assert set(row["rounds"]) >= {"draft", "head", "verify", "accept", "commit", "host"}
            assert {len(values) for values in row["rounds"].values()} == {len(row["accepted"])}


def test_tau_times_rounds_is_what_was_committed_and_the_histogram_counts_rounds(raw):
    manifest, rows = report.read_raw(raw)
    for cell in manifest["cells"]:
        mine = report.of_cell(rows, cell)
        rounds = sum(len(row["accepted"]) for row in mine)
        committed = sum(len(row["tokens"]) - row["first"] for row in mine)
        assert report.pooled_tau(mine) * rounds == pytest.approx(committed, abs=1e-9)
        assert sum(report.histogram(mine).values()) == rounds
        assert sum(n * k for n, k in report.histogram(mine).items()) == committed


def test_stages_that_do_not_sum_to_the_run_are_refused(raw, tmp_path):
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    broken = next(line for line in lines if "rounds" in line)
    broken["wall"] *= 2
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InvalidInput, match="stages take"):
        report.read_raw(path)
    broken["wall"] /= 2
    broken["rounds"]["verify" if "verify" in broken["rounds"] else "step"][0] += 500
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InvalidInput, match="do not sum"):
        report.read_raw(path)


# --- what is measured -------------------------------------------------------------------------------------------------
def test_every_cell_meets_every_setting_it_serves_once(raw, cells):
    manifest, rows = report.read_raw(raw)
    assert manifest["cells"] == [cell.name for cell in cells]
    seen = [(r["suite"], r["id"], r["cell"], r["temperature"], r["batch"]) for r in rows]
    assert len(seen) == len(set(seen)) == 2 * (3 * 4 + 1)  # sampled: above temperature 0 only
    assert {"commit", "target", "packages", "threads", "options"} <= manifest.keys()


def test_deterministic_proposals_give_plain_tokens_at_any_temperature_and_batch(raw, cells):
    """Target-first walks draw by position, so that even a sampled answer is plain decoding's own."""
    _, rows = report.read_raw(raw)
    for cell in cells[1:4]:
        same, of = report.same_tokens(rows, cell.name)
        assert of == 6 and report.wrong(rows, cell.name) == 0
        assert same == of


def test_a_run_continues_where_it_stopped_and_refuses_other_options(raw, target, cells, tmp_path):
    path = tmp_path / "cut.jsonl"
    lines = raw.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20]) + lines[20][:40])
    some = [Setting(0.0, 1), Setting(1.0, 1), Setting(0.0, 2)]
    measure(target, cells, PROMPTS, path, settings=some, max_new_tokens=9, prefixes=1, oracle=4)
    assert path.read_text().startswith("".join(lines[:20]))
    again, whole = report.read_raw(path)[1], report.read_raw(raw)[1]
    assert {tuple(r["tokens"]) for r in again} == {tuple(r["tokens"]) for r in whole}
    assert len(again) == len(whole)
    before = path.read_bytes()
    measure(target, cells, PROMPTS, path, settings=some, max_new_tokens=9, prefixes=1, oracle=4)
    assert path.read_bytes() == before
    with pytest.raises(InvalidInput, match="options"):
        measure(target, cells, PROMPTS, path, settings=some, max_new_tokens=13, prefixes=1, oracle=4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("commit", "c" * 40), ("cpu", "another"), ("packages", {"torch": "1.0"}), ("artifacts", {"a": 1})],
)
def test_a_run_that_goes_on_elsewhere_says_so_or_is_refused(raw, target, cells, tmp_path, key, value):
    """Rows of another commit say which; another machine or other versions would mix two measurements in one table."""
    path = tmp_path / "begun.jsonl"
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    lines[0]["manifest"][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    some = [Setting(0.0, 1), Setting(1.0, 1), Setting(0.0, 2)]

    def go_on():
        measure(target, cells, PROMPTS, path, settings=some, max_new_tokens=9, prefixes=1, oracle=4)

    if key != "commit":
        with pytest.raises(InvalidInput, match=key):
            go_on()
        return
    if COMMIT is None:
        pytest.skip("not a checkout")
    go_on()
    _, rows = report.read_raw(path)
    assert [row.get("commit") for row in rows] == [None] * (len(rows) - 1) + [COMMIT]
    assert f"commit {value}, then {COMMIT}" in report.overall(path)


def test_a_wrong_answer_is_recorded_and_forbids_its_speed(target, tmp_path):
    def wrong(prompts, options):
        out = plain.run(prompts, options)
        tokens = [[*out.tokens[0][:4], (out.tokens[0][4] + 1) % 32, *out.tokens[0][5:]]]
        return Outcome(tokens, out.finish, out.accepted, out.first, out.seconds, out.wall, out.rounds)

    plain = plain_cell(target)
    path = tmp_path / "wrong.jsonl"
    measure(target, [plain, Cell("liar", wrong)], PROMPTS[:1], path, max_new_tokens=8)
    _, rows = report.read_raw(path)
    (row,) = report.of_cell(rows, "liar")
    assert row["differs"]["at"] == 4 and row["differs"]["tie"] is False
    assert report.wrong(rows, "liar") == 1
    assert report.speed_of(rows, "liar") is None
    assert "wrong answer" in report.markdown(path)


def test_a_difference_where_the_target_is_undecided_is_a_tie():
    """Near ties may flip between a block's kernels and a single token's (transformers#39421, vllm-metal#524)."""
    model = causal_lm(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[5]  # 5 and 7 are always equal
    twin = Target(model, letters(), name="twin")
    prompt = [1, 2, 3]
    assert judged(twin, prompt, [5, 1], [7, 1], Setting(), 0) == {"at": 0, "distance": 0.0, "tie": True}
    best = int(torch.tensor(plain_cell(twin).run([prompt], {"max_new_tokens": 1, "temperature": 0.0}).tokens[0][0]))
    worse = judged(twin, prompt, [best], [(best + 1) % 32 if (best + 1) % 32 not in (5, 7) else 9], Setting(), 0)
    assert worse is not None and not worse["tie"]
    assert judged(twin, prompt, [5], [5, 1], Setting(), 0) == {"at": 1, "tie": False}
    assert judged(twin, prompt, [5], [5], Setting(), 0) is None


def test_the_commands_measure_report_and_tune(target, backbone, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from repairzoo.cli import app

    monkeypatch.setenv("REPAIRZOO_CACHE", str(tmp_path / "cache"))
    target.model.save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    backbone.save(tmp_path / "draft")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "how are you"}\n{"prompt": "why not?"}\n')
    path, drafts = tmp_path / "run.jsonl", str(tmp_path / "draft")
    shared = ["--target", str(tmp_path / "target"), "--dtype", "float32", "--suites", str(tmp_path / "mine.jsonl")]
    words = ["bench", str(path), *shared, "--backbones", drafts, "--heads", "none,cure", "--max-new-tokens", "6"]
    words += ["--others", "hf-loop", "--trees", "chain,3", "--temperatures", "0,1", "--prefixes", "1"]
    out = CliRunner().invoke(app, words)
    assert out.exit_code == 0, out.output
    assert "left out" in out.output  # CURE makes its own trees
    manifest, rows = report.read_raw(path)
    assert manifest["cells"] == ["autoregressive", drafts, f"{drafts}@tree3", f"{drafts}+cure", "hf-loop"]
    assert (
        len(rows) == 2 * (4 + 4 + 1) and manifest["rates"] and set(manifest["overhead"]) == set(manifest["cells"][1:4])
    )
    assert manifest["artifacts"][drafts]["backbone"]
    shown = CliRunner().invoke(app, ["report", str(path), "--tables"])
    assert shown.exit_code == 0 and "what is left of it beside its models" in shown.output
    tuned = CliRunner().invoke(app, ["autotune", *shared, "--backbones", drafts, "--heads", "none", "--trees", "chain",
                                     "--blocks", "trained,3", "--max-new-tokens", "6", "--count", "2",
                                     "--check", "2", "--repeats", "1"])  # fmt: skip
    assert tuned.exit_code == 0, tuned.output
    assert tuned.output.count(", measured ") == 2
    assert "chosen" in tuned.output and list((tmp_path / "cache" / "calibration").glob("*.json"))
    for bad in (["bench", "run.txt"], ["bench", str(path), "--trees", "x"], ["report", "no.jsonl"]):
        failed = CliRunner().invoke(app, bad)
        assert failed.exit_code == 2 and "error:" in failed.output


# --- others -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["hf-greedy", "hf-loop", "hf-lookup", "hf-dflash", "dflash-package", "flashspec-lookup"]
)
def test_others_give_the_same_tokens_and_account_for_them(name, target, backbone):
    package = name.split("-")[0] if name.split("-")[0] in ("dflash", "flashspec") else "transformers"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"max_new_tokens": 16, "temperature": 0.0, "seed": 0}
    expected = plain_cell(target).run([prompt], options).tokens
    with published_folder(backbone) as folder:
        out = other(name, target, Path(folder))([prompt], options)
    assert out.tokens == expected
    assert out.first[0] + sum(out.accepted[0]) == 16
    assert out.accepted[0] and out.wall > 0
    if name == "dflash-package":  # the same checkpoint, the same rounds
        ours = zoo_cell("dflash", repairzoo.build(backbone, target=target)).run([prompt], options)
        assert out.accepted == ours.accepted


def test_all_others_are_measured_greedily_beside_both_temperatures(target, backbone, tmp_path, monkeypatch):
    """``--others all``: each that is installed is compared with plain decoding first; above 0 only ours have rows.
    They load the draft in the blocks that it was trained for, whatever cell comes first."""
    backbone.save(tmp_path / "draft")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "how are you"}\n{"prompt": "why not?"}\n')
    draft, path = str(tmp_path / "draft"), tmp_path / "run.jsonl"
    plan = Plan(
        cells=[f"{draft}@block2", draft, f"{draft}@sampled"], others=["all"], suites=[str(tmp_path / "mine.jsonl")],
        temperatures=[0.0, 1.0], max_new_tokens=10, prefixes=0, overhead=0, rates=False,
    )  # fmt: skip
    blocks = []

    def watched(name, target, folder):
        blocks.append(json.loads((folder / "config.json").read_text())["block_size"])
        return other(name, target, folder)

    monkeypatch.setattr("repairzoo.bench.run.other", watched)
    run(plan, target, path)
    manifest, rows = report.read_raw(path)
    there = [name for name in OTHERS if not any(why.startswith(f"{name}:") for why in manifest["left_out"])]
    assert {"hf-greedy", "hf-loop", "hf-lookup"} <= set(there)
    assert [c for c in manifest["cells"] if c in OTHERS] == there
    greedy, drawn = (report.in_setting(rows, (t, 1)) for t in (0.0, 1.0))
    assert {r["cell"] for r in drawn} == {"autoregressive", f"{draft}@block2", draft, f"{draft}@sampled"}
    for name in there:
        assert report.wrong(greedy, name) == 0 and report.same_tokens(greedy, name) == (2, 2)
        for ours in ("autoregressive", draft):
            ratio = report.speed_of(greedy, ours, name)
            assert ratio is not None and ratio[1] <= ratio[0] <= ratio[2]
    for cell in (draft, f"{draft}@block2"):
        assert report.same_tokens(drawn, cell) == (2, 2)
    assert set(blocks) == {4}
    text = report.markdown(path)
    assert all(f"| `{name}` |" in text for name in there) and report.SAMPLED_NOTE in text


def test_others_that_cannot_run_say_why(target):
    with pytest.raises(InvalidInput, match="choose from"):
        other("vllm", target, None)
    with pytest.raises(InvalidInput, match="checkpoint"):
        other("hf-dflash", target, None)


# --- replay -----------------------------------------------------------------------------------------------------------
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), tree=st.sampled_from([None, 3, 6]), temperature=st.sampled_from([0.0, 1.0]))
def test_replay_finds_the_rounds_that_decoding_had(seed, tree, temperature):
    """In float64 the replayed rounds are the real ones, for chains and trees, at any temperature."""
    from conftest import toy

    verifier = toy()
    zoo = repairzoo.build(dflash(verifier, seed), head=Bigram(seed), target=verifier, tree=tree)
    prompt = [seed % 32, 5, 9]
    out = zoo.generate(prompt, max_new_tokens=14, temperature=temperature, seed=seed)
    seen = replay(zoo, prompt, out.token_ids[0], temperature=temperature, seed=seed, oracle=32)
    assert seen.accepted == out.stats.accepted[0]
    if tree is None:
        assert seen.prefix is not None
        inner = [min(p + 1, n) for p, n in zip(seen.prefix.selected, seen.accepted, strict=True)]
        assert inner == seen.accepted
        assert all(n <= zoo.backbone.slots for n in seen.prefix.oracle)
        assert seen.prefix.oracle[:-1] == [3] * (len(seen.accepted) - 1) or seen.prefix.oracle[0] == 3  # all 32 tokens


# --- the matrix, suites, roofline, clock ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["dflash", "dflash+dels", "dflash+drelay+dels@tree12@block4", "dspark@tree", "x@sampled"]
)
def test_cell_names_can_be_read_back(name):
    assert CellSpec.parse(name).name == name


@pytest.mark.parametrize("name", ["", "+dels", "dflash+", "dflash@leaf", "dflash@tree3@tree4", "dflash@block"])
def test_bad_cell_names_are_refused(name):
    with pytest.raises(InvalidInput):
        CellSpec.parse(name)


def test_matrix_of_the_default_target_has_fifteen_cells():
    """Every backbone with every head, and their best-first trees; what makes its own tree says so."""
    cells, missing = cells_of(["all"], ["all"], [None, "best-first"])
    chains = {cell.name for cell in cells if cell.tree is None}
    pairs = {(b, h) for b in ("dflash", "domino", "dspark") for h in ("none", "drelay", "lilicorr", "dels", "cure")}
    assert chains == {b if h == "none" else f"{b}+{h}" for b, h in pairs} and len(chains) == 15
    assert {cell.name for cell in cells if cell.tree} == {f"{c}@tree" for c in chains if not c.endswith("cure")}
    assert all("expander" in why for why in missing)


def test_matrix_leaves_out_what_has_no_weights_and_says_so():
    cells, missing = cells_of(["dflash", "domino"], ["none", "dels", "cure"], [None, 8])
    names = [cell.name for cell in cells]
    assert {"dflash", "dflash+dels", "dflash+cure", "dflash@tree8"} <= set(names)
    assert "dflash+cure@tree8" not in names
    assert any("expander" in why for why in missing)
    with pytest.raises(InvalidInput, match="no cell"):
        cells_of(["dflash"], ["cure"], [8])
    with pytest.raises(UnknownName):
        cells_of(["dflash"], ["dells"])


def test_suites_by_name_and_file(tmp_path):
    assert len(load_suite("gsm8k", 3)) == 3
    assert all(load_suite(name, 1)[0].suite == name for name in SUITES)
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a\\u2028b"}\n\n{"prompt": "c", "id": "x"}\n', encoding="utf-8")
    assert [(p.suite, p.id, p.text) for p in load_suite(str(path))] == [("mine", "1", "a\u2028b"), ("mine", "x", "c")]
    for text, match in (("{}", "prompt"), ("[", "JSON"), ("", "no prompts")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidInput, match=match):
            load_suite(str(path))
    with pytest.raises(UnknownName, match="gsm8k"):
        load_suite("gsm9k")
    with pytest.raises(InvalidInput, match="datasets:NAME"):
        load_suite("datasets:openai/gsm8k")


def test_suites_of_the_datasets_library(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "why?"}\n{"question": "how?"}\n', encoding="utf-8")
    assert [p.text for p in load_suite(f"datasets:{path}#train/question")] == ["why?", "how?"]
    with pytest.raises(InvalidInput, match="no column"):
        load_suite(f"datasets:{path}#train/answer")


def test_floors_come_from_what_info_counts(target, backbone):
    """One counter (``costs``, held to counts by hand in its own tests) for the roofline and for ``repairzoo info``."""
    zoo = repairzoo.build(backbone, head=dels(target), target=target)
    counted = {c.part: [c.least, c.operations] for c in costs(zoo, context=10)}
    assert round_cost(zoo, target, 10) == {part: counted[part] for part in ("draft", "head", "verify")}
    step = plain_cost(target, context=10)
    assert round_cost(None, target, 10) == {"step": [step.least, step.operations]}
    assert floor([100.0, 10.0], {"bytes_per_second": 50.0, "operations_per_second": 1.0}) == 10.0
    assert floor([100.0, 10.0], {"bytes_per_second": 5.0, "operations_per_second": 1.0}) == 20.0


def test_a_clock_gives_every_round_every_stage():
    clock = RoundClock(torch.device("cpu"))
    for names in (("draft", "verify"), ("draft", "draft", "host")):
        for name in names:
            clock.mark(name)
        clock.end_round()
    rounds = clock.rounds()
    assert {name: len(values) for name, values in rounds.items()} == {"draft": 2, "verify": 2, "host": 2}
    assert rounds["host"][0] == 0 and rounds["verify"][1] == 0
    assert clock.seconds == {name: sum(values) for name, values in rounds.items()}
