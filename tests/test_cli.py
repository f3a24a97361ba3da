"""The command line: answers at once, streams, counts, and never shows a traceback for a user's mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import repairzoo
from repairzoo.bench.suites import Prompt
from repairzoo.bench.tune import autotune, save
from repairzoo.cli import app
from repairzoo.registry import registry

GOLDEN = Path(__file__).parent / "golden"
DRAFT = GOLDEN / "dflash" / "trained_b8" / "draft"


def invoke(*arguments: object, text: str | None = None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=text)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The golden target, with a tokenizer of one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(GOLDEN / "targets" / "trained_tied", folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def options(target) -> list[object]:
    return ["--target", target, "--backbone", DRAFT, "--head", "none", "--dtype", "float32", "--device", "cpu"]


# --- options that commands share ------------------------------------------------------------------------------------


def test_an_option_means_the_same_in_every_command():
    """One name, one declaration: what ``bench`` says of a target, ``autotune``, ``generate`` and training say too."""
    from typer.main import get_command

    from repairzoo.train.cli import app as training

    said: dict[str, set[str]] = {}
    commands = [c for root in (app, training) for c in get_command(root).commands.values()]  # type: ignore[attr-defined]
    for name in ("target", "device", "threads", "suites"):
        options = [p for command in commands for p in command.params if p.name == name and command.name != "info"]
        options = [p for p in options if "--target" not in p.opts or "compare and state" not in p.help]  # convert's
        assert len(options) >= (1 if name == "threads" else 2), name
        said[name] = {f"{p.help} {p.show_default}" for p in options}
    assert all(len(texts) == 1 for texts in said.values()), said


# --- quick commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["train", "--help"], ["list"], ["info", "dels"], ["--version"]]
)
def test_quick_commands_import_nothing_heavy(arguments):
    code = f"""
import sys
from repairzoo.cli import app
from repairzoo.registry import registry
try:
    app({arguments!r})
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {{"torch", "transformers", "numpy", "safetensors"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command():
    out = invoke("--help").stdout
    assert all(command in out for command in ("generate", "list", "info", "train"))
    assert "--compare" in invoke("generate", "--help").stdout


def test_list():
    known = json.loads(invoke("list", "--json").stdout)
    assert known == {
        "targets": repairzoo.list_targets(),
        "backbones": repairzoo.list_backbones(),
        "heads": repairzoo.list_heads(),
    }
    assert json.loads(invoke("list", "d*", "--json").stdout)["targets"] == []
    out = invoke("list").stdout
    assert all(name in out for names in known.values() for name in names)
    table = out[out.index("Trained for smollm2-135m") :].splitlines()
    row = next(line for line in table if line.startswith("dflash"))
    trained = next(p for p in registry().pairs if (p.backbone, p.head) == ("dflash", "dels"))
    assert f"{trained.figures['tau']:.2f} ×{trained.figures['speedup']:.2f}" in row
    assert "Without weights, for every backbone: cure" in out
    assert "Trained for" not in invoke("list", "d*").stdout
    nothing = invoke("list", "zzz*")
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "no name matches 'zzz*'" in nothing.stderr


def test_info():
    assert json.loads(invoke("info", "dels", "--json").stdout) == repairzoo.info("dels")
    out = invoke("info", "dels").stdout
    assert "repairzoo.heads.dels:DeLS" in out
    assert "dflash x dels x smollm2-135m" in out


def test_version():
    assert invoke("--version").stdout == f"repairzoo {repairzoo.__version__}\n"


def test_an_unknown_name_is_one_line_or_one_object():
    result = invoke("info", "dles")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: unknown name 'dles': did you mean 'dels'?")
    assert result.stderr.count("\n") == 1
    result = invoke("info", "dles", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "UnknownName"


# --- generate -------------------------------------------------------------------------------------------------------


def test_generate_streams_the_answer_and_reports_beside_it(options):
    zoo = repairzoo.build(DRAFT, target=options[1], dtype="float32", device="cpu")
    expected = zoo.generate("hello", max_new_tokens=24)
    result = invoke("generate", "hello", "--raw", "--max-new-tokens", 24, *options)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected.text[0] + "\n"  # statistics never mix with the answer
    for words in (f"{expected.stats.tau:.2f} committed", f"{expected.stats.rounds} rounds", str(options[1])):
        assert words in result.stderr


def test_generate_shows_repairs(options, tmp_path):
    """Into a pipe there are signs and no escapes; the page is written whole; the JSON stays what it is."""
    plain = invoke("generate", "hello", "--raw", "--max-new-tokens", 24, *options).stdout
    shown = invoke("generate", "hello", "--raw", "--max-new-tokens", 24, "--show-repairs", *options)
    assert shown.exit_code == 0, shown.stderr
    assert "\x1b" not in shown.stdout and "|" in shown.stdout
    assert "the target's own token" in shown.stderr and "not measured" in shown.stderr
    page = tmp_path / "page.html"
    quiet = invoke("generate", "hello", "--raw", "--max-new-tokens", 24, "--html", page, *options)
    assert quiet.stdout == plain and str(page) in quiet.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "hello" in text and "slot 0" in text
    found = invoke("generate", "hello", "--raw", "--max-new-tokens", 24, "--html", page, "--json", *options)
    assert json.loads(found.stdout)["text"] + "\n" == plain
    wrong = invoke("generate", "hello", "--html", page / "page.html", *options)
    assert wrong.exit_code == 2 and "is a file, not a folder" in wrong.stderr
    both = invoke("generate", "hello", "--compare", "--show-repairs", *options)
    assert both.exit_code == 2 and "--compare times the rounds" in both.stderr


def test_generate_json_compares_with_plain_decoding(options):
    result = invoke("generate", "-", "--compare", "--json", "--max-new-tokens", 24, *options, text="hello")
    assert result.exit_code == 0, result.stderr
    out = json.loads(result.stdout)
    zoo = repairzoo.build(DRAFT, target=options[1], dtype="float32", device="cpu")
    plain = repairzoo.autoregressive(zoo.target, "hello", max_new_tokens=24)
    assert out["token_ids"] == plain.token_ids[0]
    assert out["text"] == plain.text[0]
    assert out["compare"]["identical"] is True
    assert out["compare"]["ratio"] > 0
    assert sum(out["stats"]["accepted"][0]) == len(out["token_ids"]) - 1  # the first comes from reading the prompt
    assert out["target"]["source"] == zoo.target.source


def test_generate_decodes_as_it_was_tuned(options, tmp_path):
    """--tune takes head, nodes and block from the calibration, as far as they are not named, and says what they are."""
    zoo = repairzoo.build(DRAFT, target=options[1], dtype="float32", device="cpu")
    prompts = [Prompt("s", "0", "hello")]
    found = autotune(zoo.target, prompts, backbones=[str(DRAFT)], heads=["none"], trees=[None, 3], max_new_tokens=8)
    place, out = save(found, tmp_path / "tuned.json"), []
    options = options[:4] + options[6:]  # no --head: it is open
    for tree in (None, 3):
        spec = max((c for c in found.candidates if tree in (None, c.spec.tree)), key=lambda c: c.predicted).spec
        more = ["--tune", place, *(["--tree", tree] if tree else [])]
        out.append(invoke("generate", "hello", "--raw", "--max-new-tokens", 8, *more, *options))
        assert out[-1].exit_code == 0, out[-1].stderr
        said = next(line for line in out[-1].stderr.splitlines() if line.startswith("drafted by"))
        assert "dels" not in said
        assert (f"tree of {spec.tree} nodes" in said) == (spec.tree is not None)
        assert (f"blocks of {spec.block}" in said) == (spec.block is not None)
    assert out[0].stdout == out[1].stdout == zoo.generate("hello", chat=False, max_new_tokens=8).text[0] + "\n"
    nothing = invoke("generate", "hello", "--tune", tmp_path / "none.json", *options)
    assert nothing.exit_code == 2 and "run repairzoo autotune" in nothing.stderr
    other = invoke("generate", "hello", "--tune", place, "--tree", 5, *options)
    assert other.exit_code == 2 and "no candidate" in other.stderr


def test_generate_compare_says_what_differs(options):
    result = invoke("generate", "hello", "--compare", "--max-new-tokens", 12, *options)
    assert "same tokens" in result.stderr
    assert "yes, token for token" in result.stderr
    sampled = invoke(
        "generate", "hello", "--compare", "--max-new-tokens", 12, "--temperature", 1, "--seed", 3, *options
    )
    assert "not comparable above temperature 0" in sampled.stderr


def test_generate_seed_and_tree(options):
    sampled = ["generate", "hello", "--json", "--temperature", 1.5, "--max-new-tokens", 24, *options]
    texts = [json.loads(invoke(*sampled, "--seed", seed).stdout)["token_ids"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    tree = json.loads(invoke("generate", "hello", "--json", "--tree", 12, "--max-new-tokens", 24, *options).stdout)
    chain = json.loads(invoke("generate", "hello", "--json", "--max-new-tokens", 24, *options).stdout)
    assert tree["token_ids"] == chain["token_ids"]
    stop = chain["text"][3:5]
    more = ["--tree", "best-first", "--stop", stop, "--max-new-tokens", 24]
    stopped = json.loads(invoke("generate", "hello", "--json", *more, *options).stdout)
    assert stopped["text"] == chain["text"][: chain["text"].index(stop)] and stopped["finish_reason"] == "stop"
    drawn = json.loads(invoke(*sampled, "--seed", 1, "--proposal", "sampled").stdout)
    assert drawn["stats"]["rounds_per_row"] == [drawn["stats"]["rounds"]]
    assert drawn["stats"]["drafted"] != json.loads(invoke(*sampled, "--seed", 1).stdout)["stats"]["drafted"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--backbone", "dflsh"], "did you mean 'dflash'"),
        (["--head", "dles"], "did you mean 'dels'"),
        (["--head", "dels"], "not for target"),
        (["--target", "no/such/folder"], "no/such/folder"),
        (["--target", DRAFT.parent], "config.json"),
        (["--max-new-tokens", -1], "max_new_tokens"),
        (["--temperature", -1], "temperature"),
        (["--top-p", 2], "top_p"),
        (["--top-k", -3], "top_k"),
        (["--min-p", -1], "min_p"),
        (["--tree", 0], "tree"),
        (["--tree", 4, "--proposal", "sampled"], "proposal"),
        (["--chat"], "no chat template"),
    ],
)
def test_generate_mistakes_are_one_message(options, extra, words):
    result = invoke("generate", "hello", *options, *extra, "--json")
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert words in json.loads(result.stdout)["error"]["message"]


def test_generate_refuses_an_empty_prompt_and_a_target_without_tokenizer(options):
    result = invoke("generate", "", "--raw", *options)
    assert result.exit_code == 2
    assert "empty" in result.stderr
    result = invoke("generate", "hello", *options, "--target", GOLDEN / "targets" / "trained_tied")
    assert result.exit_code == 2
    assert "no tokenizer" in result.stderr
