"""What users and systems do wrong ends in one message that names it, before the work and not after it: no traceback,
nothing half-written, and nothing of theirs touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_report import row, write
from typer.testing import CliRunner

import repairzoo.target_source
from repairzoo.bench import report
from repairzoo.bench.measure import Cell, measure, plain_cell
from repairzoo.bench.suites import Prompt
from repairzoo.cli import app
from repairzoo.commands.shared import print_json, reporting
from repairzoo.errors import InvalidInput
from repairzoo.prompt_file import read_prompts


def refused(*arguments: object, words: str, text: bytes | None = None) -> None:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split()), result.stderr


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """A place where no target can be loaded: whoever tries has not looked at the mistake before."""

    def load(*_, **__):
        raise AssertionError("the target is loaded before the mistake is told")

    monkeypatch.setattr(repairzoo.target_source, "load_target", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run.txt"], "ends in .jsonl"),
        (["folder.jsonl"], "is a folder"),
        (["file/run.jsonl"], "is a file, not a folder"),
        (["r.jsonl", "--trees", "x"], "--trees 'x': give a whole number of at least 1, or chain, best-first"),
        (["r.jsonl", "--trees", "\u00b2"], "--trees"),
        (["r.jsonl", "--trees", "0"], "--trees '0'"),
        (["r.jsonl", "--blocks", "1"], "--blocks '1': give a whole number of at least 2, or trained"),
        (["r.jsonl", "--batches", "0"], "--batches '0'"),
        (["r.jsonl", "--batches", ","], "give at least one of each"),
        (["r.jsonl", "--temperatures", "nan"], "temperature=nan"),
        (["r.jsonl", "--temperatures", "warm"], "--temperatures 'warm'"),
        (["r.jsonl", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["r.jsonl", "--repeats", "0"], "repeats=0"),
        (["r.jsonl", "--count", "0"], "count=0"),
        (["r.jsonl", "--prefixes", "-1"], "prefixes=-1"),
        (["r.jsonl", "--oracle", "0"], "oracle=0"),
        (["r.jsonl", "--seed", "-1"], "seed=-1"),
        (["r.jsonl", "--threads", "0"], "--threads 0"),
        (["r.jsonl", "--suites", "gsm9k"], "did you mean 'gsm8k'"),
        (["r.jsonl", "--suites", "no.jsonl"], "no.jsonl: no such file"),
        (["r.jsonl", "--others", "hf-gredy"], "did you mean 'hf-greedy'"),
        (["r.jsonl", "--heads", "dles"], "did you mean 'dels'"),
        (["r.jsonl", "--cells", "dflash+dles"], "did you mean 'dels'"),
        (["r.jsonl", "--cells", "dflash@tree0"], "at least 1 node"),
        (["r.jsonl", "--cells", "dflash@block1"], "at least 2 rows"),
        (["r.jsonl", "--cells", "dflash@tree4@sampled"], "leave one of them out"),
        (["r.jsonl", "--cells", "dflash+cure@tree4"], "an expander makes the tree itself"),
        (["r.jsonl", "--cells", "dflash", "--target", "owner/name"], "a target that the registry does not know"),
    ],
)
def test_a_benchmark_that_cannot_be_is_told_before_the_target_is_loaded(unloaded, arguments, words):
    refused("bench", *arguments, words=words)
    assert sorted(p.name for p in unloaded.iterdir()) == ["file", "folder.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trees", "0"], "--trees '0'"),
        (["--trees", "best-first"], "or chain"),
        (["--blocks", "1"], "--blocks '1'"),
        (["--threads", "-2"], "--threads -2"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--max-new-tokens", "1"], "max_new_tokens=1"),
        (["--count", "0"], "count=0"),
        (["--heads", "dles"], "did you mean 'dels'"),
        (["--out", "folder.jsonl"], "is a folder"),
        (["--out", "file/c.json"], "is a file, not a folder"),
    ],
)
def test_what_cannot_be_tuned_is_told_before_the_target_is_loaded(unloaded, arguments, words):
    refused("autotune", *arguments, words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "the prompt is empty"),
        (["x", "--temperature", "nan"], "temperature=nan"),
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "--top-p", "0"], "top_p=0.0"),
        (["x", "--top-k", "0"], "top_k=0"),
        (["x", "--tree", "0"], "--tree '0': give a whole number of at least 1, or best-first"),
        (["x", "--html", "folder.jsonl"], "is a folder"),
        (["x", "--html", "file/p.html"], "is a file, not a folder"),
        (["x", "--compare", "--show-repairs"], "use one of them"),
        (["x", "--head", "cure+dels"], "cure"),
        (["x", "--head", "cure+cure"], "cure"),
    ],
)
def test_what_cannot_be_generated_is_told_before_the_target_is_loaded(unloaded, arguments, words):
    refused("generate", *arguments, words=words)


def test_standard_input_that_is_no_text_is_named(unloaded):
    refused("generate", "-", text=b"\xff\xfe", words="standard input is no utf-8 text")


# --- raw files --------------------------------------------------------------------------------------------------------
def whole_run(path: Path) -> list[str]:
    write(path, [row("autoregressive", [1] * 4, 4.0), row("dflash", [3, 1], 3.0)])
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], "is empty"),
        (lambda lines: ["{}\n"], "the first line must be the manifest"),
        (lambda lines: ["[1, 2]\n"], "the first line must be the manifest"),
        (lambda lines: ["some words"], "line 1: no JSON"),
        (lambda lines: ["\udcff\n"], "line 1: no JSON"),
        (lambda lines: lines[1:], "the first line must be the manifest"),
        (lambda lines: [lines[0], lines[1][:50] + "\n", lines[2]], "line 2: no JSON"),
        (lambda lines: [lines[0], "7\n"], "line 2: 'suite'"),
        (lambda lines: [lines[0], lines[1].replace('"cell"', '"celt"')], "line 2: 'cell' is None"),
        (lambda lines: [lines[0], lines[1].replace('"accepted": [1,', '"accepted": ["1",')], "line 2: 'accepted'"),
        (lambda lines: [lines[0].replace('"packages"', '"parcels"'), *lines[1:]], "does not say 'packages'"),
        (lambda lines: [lines[0].replace('"cells"', '"sells"'), *lines[1:]], "does not say 'cells'"),
    ],
)
def test_a_report_of_a_damaged_file_names_the_line(tmp_path, change, words):
    path = tmp_path / "run.jsonl"
    lines = change(whole_run(path))
    path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    refused("report", path, "--tables", words=words)
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_report_of_a_killed_run_tells_what_is_there(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = whole_run(path)
    expected = report.markdown(path)
    path.write_text("".join(lines) + lines[2][:30])
    shown = CliRunner().invoke(app, ["report", str(path), "--tables"])
    assert shown.exit_code == 0 and expected in shown.stdout
    path.write_text(lines[0])  # nothing was measured yet
    assert CliRunner().invoke(app, ["report", str(path), "--tables"]).exit_code == 0


def test_a_page_that_cannot_be_written_is_told_before_it_is_made(tmp_path):
    path = tmp_path / "run.jsonl"
    whole_run(path)
    refused("report", path, "--html", tmp_path, words="is a folder")
    refused("report", path, "--html", path / "page.html", words="is a file, not a folder")
    refused("report", path, "--html", tmp_path / "." / "run.jsonl", words="that is the raw file itself")
    refused("report", tmp_path / "no.jsonl", words="there is no such file")
    assert len(report.read_raw(path)[1]) == 2


def test_a_benchmark_never_touches_a_file_that_is_not_its_own(unloaded):
    """Its last line has no end: a run that goes on would cut it."""
    mine = unloaded / "prompts.jsonl"
    mine.write_text('{"prompt": "one"}\n{"prompt": "two"}')
    before = mine.read_bytes()
    refused("bench", mine, words="the first line must be the manifest")
    mine.write_text('{"prompt": "alone"}')
    refused("bench", mine, words="the first line must be the manifest")
    assert mine.read_text() == '{"prompt": "alone"}' and before.endswith(b"}")


def test_a_run_goes_on_only_as_it_was_begun_and_cuts_what_a_kill_left(tmp_path):
    from conftest import letters, toy

    from repairzoo.target import Target

    target = Target(toy().model, letters(), name="toy")
    cells, path = [plain_cell(target)], tmp_path / "run.jsonl"
    prompts = [Prompt("s", str(i), "how are you") for i in range(2)]
    measure(target, cells, prompts, path, max_new_tokens=3)
    whole = path.read_bytes()
    cut = whole[: whole.rindex(b"\n", 0, -1) + 20]
    path.write_bytes(cut)
    with pytest.raises(InvalidInput, match="options"):
        measure(target, cells, prompts, path, max_new_tokens=4)
    assert path.read_bytes() == cut
    measure(target, cells, prompts, path, max_new_tokens=3)
    assert len(report.read_raw(path)[1]) == 2
    path.write_bytes(whole[:40])  # killed while it wrote the manifest
    measure(target, cells, prompts, path, max_new_tokens=3)
    assert len(report.read_raw(path)[1]) == 2
    with pytest.raises(InvalidInput, match="two cells have the name"):
        measure(target, [*cells, Cell(cells[0].name, cells[0].run)], prompts, path, max_new_tokens=3)
    with pytest.raises(InvalidInput, match="two prompts are s/0"):
        measure(target, cells, [prompts[0], prompts[0]], path, max_new_tokens=3)
    with pytest.raises(InvalidInput, match=r"prompt s/long: .* has 200 tokens"):
        measure(target, cells, [Prompt("s", "long", "a" * 200)], tmp_path / "new.jsonl", max_new_tokens=3)
    assert not (tmp_path / "new.jsonl").exists()


# --- prompts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{}", "no UTF-8 text"),
        (b'{"prompt": "x", "source": 7}\n', "line 1: 'source'"),
        (b"[" * 100_000, "line 1: no JSON"),
    ],
)
def test_prompt_files_that_cannot_be_read_are_named(tmp_path, content, words):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=words):
        read_prompts(path)


# --- the system, and Ctrl-C -------------------------------------------------------------------------------------------
def test_errors_of_the_system_are_one_message(capsys):
    with pytest.raises(typer.Exit) as end, reporting(False), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")
    assert end.value.exit_code == 2 and "No space left on device" in capsys.readouterr().err
    with pytest.raises(typer.Exit), reporting(True):
        os.rename("/nowhere/a", "/nowhere/b")
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["type"] == "FileNotFoundError" and told["message"].startswith("/nowhere/b: No such file")
    with pytest.raises(typer.Exit), reporting(False):
        Path("/dev/null/.page.html.0123456789ab.tmp").write_text("x")
    assert "error: /dev/null/page.html: Not a directory; look at" in capsys.readouterr().err
    with pytest.raises(BrokenPipeError), reporting(False):  # typer ends quietly
        raise BrokenPipeError
    with pytest.raises(ZeroDivisionError), reporting(False):  # a fault of ours is not hidden
        raise ZeroDivisionError


@pytest.fixture
def heard():
    """Ctrl-C is heard, also where the tests run behind a shell that has it ignored (``make test &``)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x"], "interrupted"),
        (["bench", "r.jsonl"], "interrupted; the same command goes on with what r.jsonl holds"),
        (["train", "features", "corpus"], "interrupted; the same command continues"),
    ],
)
def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path, arguments, words, heard):
    monkeypatch.setattr(
        repairzoo.target_source, "load_target", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT) or [][0]
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text('{"target": {}, "passes": {}, "shards": {}}')
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 130 and ended.stderr.strip() == words
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_json_is_json_whatever_the_numbers_are(capsys):
    print_json({"a": [float("nan"), 1.5, {"b": float("inf")}], "c": ("x", True, None, 2)})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, 1.5, {"b": None}], "c": ["x", True, None, 2],
    }  # fmt: skip


def test_output_that_knows_no_greek_is_no_reason_to_fail():
    command = [sys.executable, "-c", "from repairzoo.cli import main; main()", "doctor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\\u03c4" in done.stdout
