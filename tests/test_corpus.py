"""Answers of the target: what it would say, what it computed meanwhile, and the same bytes whatever interrupts."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_toys as toys
from conftest import greedy
from safetensors.torch import load_file
from training_toys import END, TAPS, make_corpus, plan, read, target

import repairzoo
from repairzoo.errors import InvalidArtifact, InvalidInput, UnknownName
from repairzoo.prompt_file import read_prompts
from repairzoo.train import corpus as module
from repairzoo.train.corpus import (
    chat_ids,
    features_file,
    plan_batches,
    read_corpus,
    write_corpus,
    write_features,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_answers_are_the_targets_greedy_answers(folder):
    sequences = read_corpus(folder)
    assert len(sequences) == 120
    assert {int(s.ids[-1]) == END for s in sequences} == {True, False}  # some end, some are cut
    for s in sequences[::5]:
        prompt, answer = s.ids[: s.prompt].tolist(), s.ids[s.prompt :].tolist()
        assert prompt == chat_ids(target(), toys.prompts()[s.number]["prompt"])
        assert answer == greedy(target().model, prompt, 12)
    s = sequences[7]
    ids = s.ids[: s.prompt].long()[None]
    assert repairzoo.autoregressive(target(), ids, max_new_tokens=12).token_ids[0] == s.ids[s.prompt :].tolist()


@torch.no_grad()
def test_stored_features_are_those_of_a_fresh_pass(folder):
    corpus = read(folder)
    for s in corpus.train[::9]:
        hidden = target().model(s.ids[None].long(), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap + 1] for tap in TAPS[:1]], -1)  # the last entry of transformers is normed
        width = target().hidden_size
        found = corpus.features(s)
        assert found.shape == (len(s) - 1, 3 * width)
        torch.testing.assert_close(found[:, :width].float(), expected[0, :-1], atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(found[:, 2 * width :].float(), hidden[2][0, :-1], atol=2e-2, rtol=1e-2)


def test_several_answers_share_the_reading_of_their_prompt(tmp_path):
    """Each sampled answer has its own tokens, and the features of a fresh pass over them."""
    toys.make_corpus(tmp_path, 24, name="warm", temperature=1.0, answers=3, batch=36)
    sequences = read_corpus(tmp_path)
    numbers = sorted(s.number for s in sequences)
    assert numbers == sorted(list(range(24)) * 3)
    together = {}
    for s in sequences:
        together.setdefault(s.number, []).append(s)
    assert any(not torch.equal(g[0].ids, g[1].ids) for g in together.values())
    corpus = toys.read(tmp_path)
    for group in together.values():
        for s in group:
            assert torch.equal(s.ids[: s.prompt], group[0].ids[: s.prompt])
    before = {s.shard: load_file(features_file(s.shard))["features"].clone() for s in sequences}
    for shard in before:
        features_file(shard).unlink()
    write_features(toys.target(), tmp_path)
    for shard, old in before.items():
        new = load_file(features_file(shard))["features"]
        torch.testing.assert_close(new.float(), old.float(), atol=2e-2, rtol=2e-2)
    assert corpus.train


@pytest.mark.parametrize("change", [{"answers": 2}, {"answers": 5, "temperature": 1.0}, {"answers": 0}])
def test_several_answers_need_a_temperature_and_a_batch_they_divide(change):
    with pytest.raises(InvalidInput, match="answers="):
        toys.plan(**change)


def test_a_corpus_of_tokens_gets_its_features_back(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.features.*"))
    with pytest.raises(InvalidInput, match="train features"):
        toys.read(bare).features(toys.read(bare).train[0])
    write_features(target(), bare, batch=7)
    for path in folder.glob("*.features.*"):
        again, stored = load_file(bare / path.name)["features"], load_file(path)["features"]
        torch.testing.assert_close(again.float(), stored.float(), atol=2e-2, rtol=1e-2)
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["target"]["revision"] = "another"
    (bare / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidInput, match="another"):
        write_features(target(), bare)


def test_interrupted_run_resumes_to_the_same_bytes(folder, tmp_path, monkeypatch):
    """A kill between shards, and a shard whose features were written but whose tokens were not."""
    whole, calls = module.answer, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(module, "answer", dying)
    with pytest.raises(KeyboardInterrupt):
        make_corpus(tmp_path / "killed")
    assert len(list((tmp_path / "killed").glob("*.tokens.*"))) == 1
    monkeypatch.setattr(module, "answer", whole)
    make_corpus(tmp_path / "killed")
    assert content(tmp_path / "killed") == content(folder)

    shutil.copytree(folder, tmp_path / "cut")
    (tmp_path / "cut" / "greedy-0002.tokens.safetensors").unlink()
    make_corpus(tmp_path / "cut")
    assert content(tmp_path / "cut") == content(folder)


def test_manifest_names_what_was_made_and_finds_a_changed_shard(folder, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["target"] == {"id": "toy/target", "revision": "r1", "source": "given in memory"}
    assert manifest["passes"]["greedy"]["taps"] == [0, 1, 2]
    assert len(manifest["shards"]) == 3
    for name, facts in manifest["shards"].items():
        assert facts["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    sequences = read_corpus(folder)
    assert sum(f["answer_tokens"] for f in manifest["shards"].values()) == sum(len(s) - s.prompt for s in sequences)
    shutil.copytree(folder, tmp_path / "c")
    path = tmp_path / "c" / "greedy-0001.tokens.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InvalidInput, match="greedy-0001"):
        read_corpus(tmp_path / "c")


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"taps": (0,)}, {"batch": 24}, {"seed": 1}])
def test_a_pass_is_continued_only_as_it_was_begun(folder, change):
    with pytest.raises(InvalidInput, match=next(iter(change))):
        make_corpus(folder, **change)
    with pytest.raises(InvalidInput, match="prompts_sha256"):
        make_corpus(folder, count=119)


_PASS = """
import sys, time
from pathlib import Path
import training_toys as toys
from repairzoo.train import corpus
folder, name, temperature = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
whole = corpus.answer

def beside_another(*args):
    (folder / f"{name}.here").touch()
    until = time.monotonic() + 300
    while len(list(folder.glob("*.here"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    return whole(*args)

corpus.answer = beside_another
toys.make_corpus(folder, 48, name=name, temperature=temperature, batch=12)
"""


def test_two_passes_at_once_are_both_in_the_manifest(tmp_path):
    """Two processes in one folder, each of which has read the manifest before the other writes a shard into it."""
    runs = [("cold", 0.0), ("warm", 1.0)]
    together, apart = tmp_path / "together", tmp_path / "apart"
    words = [[sys.executable, "-c", _PASS, str(together), name, str(heat)] for name, heat in runs]
    processes = [subprocess.Popen(w, cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True) for w in words]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    for name, heat in runs[::-1]:
        make_corpus(apart, 48, name=name, temperature=heat, batch=12)
    for path in together.glob("*.here"):
        path.unlink()
    assert content(together) == content(apart)
    assert len(json.loads((together / "manifest.json").read_text())["shards"]) == 8


def test_a_pass_that_another_process_is_at_is_refused(tmp_path):
    with module._alone(tmp_path, "pass-greedy", "the pass"):
        with pytest.raises(InvalidInput, match="another process is at the pass 'greedy'"):
            make_corpus(tmp_path, 12)
        make_corpus(tmp_path, 12, name="beside")
    make_corpus(tmp_path, 12)
    assert read_corpus(tmp_path, ["greedy"])


def test_too_long_prompts_are_skipped(tmp_path):
    rows = [{"prompt": "a" * n, "source": ""} for n in (3, 30, 4, 50)]
    write_corpus(target(), rows, tmp_path, plan(max_prompt_tokens=10, max_new_tokens=5))
    assert sorted(s.number for s in read_corpus(tmp_path)) == [0, 2]
    with pytest.raises(InvalidInput, match="max_prompt_tokens=2"):
        write_corpus(target(), rows, tmp_path / "none", plan(max_prompt_tokens=2))
    with pytest.raises(InvalidInput, match="context"):
        write_corpus(target(), rows, tmp_path / "none", plan(max_prompt_tokens=120))
    with pytest.raises(InvalidInput, match="taps"):
        write_corpus(target(), rows, tmp_path / "none", plan(taps=(3,)))


def test_line_separators_inside_a_prompt_split_no_line(tmp_path):
    rows = [{"prompt": "a\u2028b\u2029c\x85d", "source": "s"}, {"prompt": "e\nf", "source": "s"}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_prompts(path) == [{**row, "line": number} for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize("text", ['{"prompt": ""}', '{"text": "a"}', "[1]", "{", ""])
def test_bad_prompt_files_are_refused_by_line(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + text if text else "")
    with pytest.raises(InvalidInput, match="line 2" if text else "no prompts"):
        read_prompts(path)


def test_every_prefix_of_the_batches_mixes_the_sources():
    lengths, sources = [5 + i % 7 for i in range(96)], ["a"] * 72 + ["b"] * 24
    batches = plan_batches(lengths, sources, plan(batch=8))
    assert sorted(i for batch in batches for i in batch) == list(range(96))
    first = [i for batch in batches[:4] for i in batch]
    assert 6 <= sum(sources[i] == "b" for i in first) <= 10


def test_held_out_prompts_are_the_same_in_every_pass(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "c")
    make_corpus(tmp_path / "c", name="t1.0", temperature=1.0, seed=3, taps=(1, 2, 0), batch=30)
    both = read(tmp_path / "c")

    def held(name):
        return {s.number for s in both.held if s.shard.name.startswith(name)}

    def trained(name):
        return {s.number for s in both.train if s.shard.name.startswith(name)}

    assert held("greedy")
    assert not held("greedy") & trained("t1.0")
    assert not held("t1.0") & trained("greedy")
    sampled = next(s for s in both.train if s.shard.name.startswith("t1.0"))
    alone = read(tmp_path / "c", passes=("t1.0",))
    assert torch.equal(alone.features(sampled), both.features(sampled))
    # columns are looked up by the pass's own taps: layer 0 is stored last here
    width = target().hidden_size
    path = sampled.shard.with_name(sampled.shard.name.replace("tokens", "features"))
    rows = load_file(path)["features"][sampled.start : sampled.start + len(sampled) - 1]
    assert torch.equal(both.features(sampled)[:, :width], rows[:, 2 * width :])


def test_batches_are_a_function_of_seed_and_step_whatever_the_processes(folder):
    corpus, again = read(folder), read(folder)
    seen = set()
    for step in (0, 3, 40):
        whole = corpus.training_batch(step, 4, 6, 0)
        assert torch.equal(whole.input_ids, again.training_batch(step, 4, 6, 0).input_ids)
        assert torch.equal(whole.anchors, again.training_batch(step, 4, 6, 0).anchors)
        for rank in range(2):
            part = corpus.training_batch(step, 4, 6, 0, rank, 2)
            assert torch.equal(part.anchors, whole.anchors[rank::2])
            assert torch.equal(part.input_ids, whole.input_ids[rank::2, : part.input_ids.shape[1]])
        seen.add(whole.anchors.flatten().tolist().__str__())
    assert len(seen) == 3
    assert not torch.equal(corpus.training_batch(0, 4, 6, 1).anchors, corpus.training_batch(0, 4, 6, 0).anchors)
    with pytest.raises(InvalidInput, match="multiple of 3"):
        corpus.training_batch(0, 4, 6, 0, 0, 3)


def test_one_epoch_shows_every_answer_once(folder):
    corpus = read(folder)
    size = 7
    steps = len(corpus.train) // size
    rows = [row for step in range(steps) for row in corpus.training_batch(step, size, 1, 0).input_ids.tolist()]
    texts = {tuple(s.ids.tolist()) for s in corpus.train}
    shown = [tuple(row) for row in rows]
    stripped = {t for t in texts if any(s[: len(t)] == t for s in shown)}
    assert len(rows) == steps * size
    assert len(stripped) >= len(texts) - size  # but for the rest of the division


def test_text_of_prompts_can_be_trained_on_and_is_never_judged(folder):
    answers, text = read(folder), read(folder, text_from=2)
    assert [len(s) for s in answers.held] == [len(s) for s in text.held]
    assert [s.prompt for s in answers.held] == [s.prompt for s in text.held]
    assert {s.prompt for s in text.train} == {2}
    with pytest.raises(InvalidInput, match="text_from=-1"):
        read(folder, text_from=-1)
    batch = text.training_batch(0, 4, 40, 0)
    assert int(batch.anchors[batch.keep].min()) == 2
    assert bool(batch.loss_mask[:, 2].all()) and not bool(batch.loss_mask[:, :2].any())
    assert text.digest() != answers.digest()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: (c / "manifest.json").write_text('{"target": {}'), r"manifest\.json: not valid JSON"),
        (lambda c: (c / "manifest.json").write_text("[]"), "key 'target'"),
        (lambda c: (c / "manifest.json").write_text('{"target": {}, "passes": {}, "shards": 7}'), "key 'shards'"),
        (
            lambda c: (c / "manifest.json").write_text('{"target": {}, "passes": {}, "shards": {}}'),
            r"\('taps'\).*'greedy'",
        ),
        (lambda c: cut(c, "tokens"), "is not what the manifest lists"),
        (lambda c: (unlist(c), cut(c, "tokens")), r"tokens\.safetensors: truncated"),
        (lambda c: cut(c, "features"), r"features\.safetensors: truncated"),
        (lambda c: file_of(c, "features").write_bytes(file_of(c, "tokens").read_bytes()), "train features"),
    ],
)
def test_a_damaged_corpus_is_named_by_file(folder, tmp_path, damage, words):
    shutil.copytree(folder, tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises((InvalidInput, InvalidArtifact), match=words):
        corpus = read(tmp_path / "c")
        for s in (*corpus.train, *corpus.held):
            corpus.features(s)


def test_a_pass_that_is_not_there_is_named(folder):
    with pytest.raises(UnknownName, match="'gredy': did you mean 'greedy'"):
        read(folder, passes=("gredy",))


def file_of(folder, part: str):
    return sorted(folder.glob(f"*.{part}.safetensors"))[0]


def cut(folder, part: str) -> None:
    path = file_of(folder, part)
    path.write_bytes(path.read_bytes()[:-9])


def unlist(folder) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"shards": {}}))
