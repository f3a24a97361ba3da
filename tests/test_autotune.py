"""Autotune on a tiny target: the replay predicts what is then decoded, and ``build`` obeys the calibration."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import causal_lm, dflash, letters
from hypothesis import given
from hypothesis import strategies as st

import repairzoo
from repairzoo.bench.cost_curve import CostCurve, measure_cost_curve
from repairzoo.bench.replay import Replayed
from repairzoo.bench.suites import Prompt
from repairzoo.bench.tune import (
    Calibration,
    autotune,
    calibration_path,
    calibration_table,
    load,
    place_of,
    predicted,
    save,
)
from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.target import Target

PROMPTS = [Prompt("s", str(i), "tell me why?"[: 8 + 2 * i]) for i in range(2)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(causal_lm(dtype=torch.float32), letters(), name="toy")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    place = tmp_path_factory.mktemp("draft")
    dflash(target).save(place)
    return str(place)


@pytest.fixture(scope="module")
def found(target, folder) -> Calibration:
    return autotune(
        target,
        PROMPTS,
        backbones=[folder],
        heads=["none", "cure"],
        trees=[None, 4],
        max_new_tokens=12,
        check=3,
        repeats=2,
    )


# --- the search -------------------------------------------------------------------------------------------------------
def test_every_candidate_is_predicted_and_the_best_is_measured(found, folder):
    names = [c.spec.name for c in found.candidates]
    assert len(names) == len(set(names)) == 3 * 3  # none, none@tree4 and cure, at 4, 3 and 2 rows
    assert {f"{folder}+cure", f"{folder}@tree4@block3", f"{folder}+cure@block2"} <= set(names)
    assert found.chosen.predicted == max(c.predicted for c in found.candidates)
    assert found.plain > 0 and found.checks[0].candidate is found.chosen


def test_predictions_are_checked_down_the_list_and_the_figures_are_those_of_the_runs(found):
    """Must be there: predicted beside what is then measured, interleaved with plain decoding, answers checked."""
    speeds = [c.predicted for c in found.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert [found.candidates.index(c.candidate) for c in found.checks] == [0, 4, 8]
    for check in found.checks:
        assert len(check.runs) == 2 * len(PROMPTS) and check.wrong == 0
        tokens, seconds, plain_tokens, plain_seconds = (sum(column) for column in zip(*check.runs, strict=True))
        assert tokens == plain_tokens == 2 * 2 * 11  # 12 each, the first from reading the prompt
        assert check.ratio()[0] == pytest.approx(plain_seconds / seconds)
        assert check.ratio()[1] <= check.ratio()[0] <= check.ratio()[2]
        assert found.error(check) == pytest.approx(check.ratio()[0] / (check.candidate.predicted / found.plain) - 1)


def test_the_table_of_a_calibration_says_place_prediction_measurement_and_difference(found, target, tmp_path):
    place = save(found, tmp_path / "c.json")
    text = calibration_table(place)
    assert text == calibration_table(place) and text.count("\n| `") == 3
    check = found.checks[1]
    shown = next(line for line in text.splitlines() if f"`{check.candidate.spec.name}`" in line)
    assert f"| 5 of 9 | {check.candidate.tau:.2f} | {check.candidate.predicted / found.plain:.2f} |" in shown
    assert f"{check.ratio()[0]:.2f} (" in shown and f"{100 * found.error(check):+.1f} %" in shown
    check.wrong = 1
    try:
        assert "wrong answer" in calibration_table(save(found, place))  # no speed over a wrong answer
    finally:
        check.wrong = 0


def test_predicted_tau_is_the_one_that_decoding_has(found, target, folder):
    """The replay is exact: the real loop commits as many tokens a round, whatever the machine does to the times."""
    for candidate in found.candidates[::2]:
        spec = candidate.spec
        zoo = repairzoo.build(folder, head=spec.head, target=target, tree=spec.tree, block=spec.block)
        runs = [zoo.generate(p.text, max_new_tokens=12) for p in PROMPTS]
        rounds = sum(run.stats.rounds for run in runs)
        committed = sum(sum(run.stats.accepted[0]) for run in runs)
        if spec.head == "none":  # CURE decides by the measured cost
            assert candidate.tau == pytest.approx(committed / rounds)


@given(tokens=st.lists(st.integers(1, 8), min_size=1, max_size=6), rest=st.floats(0, 1), draft=st.floats(0, 1))
def test_prediction_is_tokens_over_the_sum_of_the_parts(tokens, rest, draft):
    curve = CostCurve((1, 8), (1.0, 2.0), 10)
    n = len(tokens)
    seen = [Replayed(tokens, [8] * n, [draft] * n, [0.25] * n)]
    assert predicted(seen, curve, rest) == pytest.approx(sum(tokens) / (n * (draft + 0.25 + 2.0 + rest)))


def test_blocks_that_cannot_be_drafted_are_refused(target, folder):
    with pytest.raises(InvalidInput, match="2 to 4"):
        autotune(target, PROMPTS[:1], backbones=[folder], heads=["none"], trees=[None], blocks=[9], max_new_tokens=4)
    with pytest.raises(InvalidInput, match="prompts"):
        autotune(target, [], backbones=[folder])
    with pytest.raises(InvalidInput, match="check=0"):
        autotune(target, PROMPTS, backbones=[folder], check=0)


# --- the curve --------------------------------------------------------------------------------------------------------
def test_cost_curve_is_measured_at_each_width(target):
    curve = measure_cost_curve(target, [3, 1, 2, 3], context=20, taps=(0, 2), repeats=2)
    assert curve.widths == (1, 2, 3) and curve.context == 20
    assert all(s > 0 for s in curve.seconds)
    assert CostCurve.from_dict(json.loads(json.dumps(curve.as_dict()))) == curve


def test_cost_curve_between_and_beyond_its_widths():
    curve = CostCurve((1, 3, 5), (1.0, 3.0, 4.0), 0)
    assert [curve.at(r) for r in (1, 2, 3, 4, 7)] == [1.0, 2.0, 3.0, 3.5, 5.0]
    assert curve.table(3) == (1.0, 2.0, 3.0)
    assert curve.mean(CostCurve((1, 3, 5), (2.0, 3.0, 8.0), 0)) == CostCurve((1, 3, 5), (1.5, 3.0, 6.0), 0)
    assert CostCurve((2,), (1.5,), 0).at(9) == 1.5
    assert CostCurve((1, 2), (2.0, 1.0), 0).at(9) == 1.0  # a noisy fall does not go on to nothing
    for widths, seconds in (((), ()), ((1, 1), (1.0, 1.0)), ((1,), (0.0,)), ((0,), (1.0,)), ((1, 2), (1.0,))):
        with pytest.raises(InvalidInput):
            CostCurve(widths, seconds, 0)


# --- the file, and build ----------------------------------------------------------------------------------------------
def test_build_takes_the_fastest_that_agrees_with_what_is_given(found, target, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REPAIRZOO_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="autotune"):
        repairzoo.build(folder, target=target, tune="auto")
    place = save(found, calibration_path(place_of(target)))
    assert place.is_relative_to(tmp_path)
    zoo = repairzoo.build(folder, target=target, tune="auto")
    best = found.chosen.spec
    assert zoo.nodes == best.tree and zoo.backbone.block_size == (best.block or 4)
    assert (zoo.expander is not None) == (best.head == "cure")
    tree = repairzoo.build(folder, target=target, tune="auto", tree=4, head="none")
    wanted = max((c for c in found.candidates if c.spec.tree == 4), key=lambda c: c.predicted).spec
    assert tree.nodes == 4 and tree.backbone.block_size == (wanted.block or 4)
    cure = repairzoo.build(folder, head="cure", target=target, tune=str(place), block=3)
    assert cure.backbone.block_size == 3
    assert cure.expander.cost == found.curve.table(found.curve.widths[-1])  # the measured cost, not rows
    prompt = [1, 2, 3]
    expected = repairzoo.autoregressive(target, prompt, max_new_tokens=10).token_ids
    assert all(z.generate(prompt, max_new_tokens=10).token_ids == expected for z in (zoo, tree, cure))
    with pytest.raises(InvalidInput, match="no candidate"):
        repairzoo.build(folder, target=target, tune="auto", tree=5)
    with pytest.raises(InvalidInput, match="tune=3"):
        repairzoo.build(folder, target=target, tune=3)


def test_a_calibration_of_another_place_is_refused(found, target, tmp_path):
    place = save(found, tmp_path / "c.json")
    assert load(place, target).as_dict() == found.as_dict()
    other = Target(causal_lm(seed=1, dtype=torch.float32), letters(), name="other")
    with pytest.raises(InvalidInput, match="fingerprint"):
        load(place, other)
    changed = found.as_dict()
    changed["place"] = {**changed["place"], "threads": 99}
    place.write_text(json.dumps(changed))
    with pytest.warns(UserWarning, match="99 threads"):
        load(place, target)


@pytest.mark.parametrize("key", ["schema", "place", "curve", "candidates", "checks", "machine"])
def test_a_damaged_calibration_is_named(found, target, tmp_path, key):
    given = found.as_dict()
    del given[key]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(given))
    with pytest.raises(InvalidArtifact, match=r"c\.json"):
        load(path, target)


@pytest.mark.parametrize("block", [1, 5, True, "3"])
def test_block_lengths_that_cannot_be_drafted_are_refused(block, target, folder):
    with pytest.raises(InvalidInput, match="drafts 2 to 4 rows"):
        repairzoo.build(folder, target=target, block=block)
