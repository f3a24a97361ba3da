"""Wheel, sdist and editable install: what a user gets without the repository, in an environment of its own."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "results")

CHECK = """
import sys
from pathlib import Path
import repairzoo
from repairzoo.registry import KINDS, registry, registry_file
root, repository = Path(sys.argv[1]), Path(sys.argv[2])
where = Path(repairzoo.__file__).resolve()
assert root in where.parents, where
assert repository not in where.parents and str(repository) not in sys.path
assert root in registry_file().resolve().parents, registry_file()
for kind in ("backbone", "head"):
    for name in registry().names(kind):
        entry = registry().get(kind, name)
        if entry.location:
            assert root in entry.folder().resolve().parents, entry.folder()
            entry.load()
print(*(name for kind in KINDS for name in registry().names(kind)))
"""

DECODE = """
import sys
import repairzoo
zoo = repairzoo.build(sys.argv[1], head=None, target=sys.argv[2], dtype="float32")
ours = zoo.generate([[5, 17, 23, 4]], max_new_tokens=12)
plain = repairzoo.autoregressive(zoo.target, [[5, 17, 23, 4]], max_new_tokens=12)
assert ours.token_ids == plain.token_ids, (ours.token_ids, plain.token_ids)
print(*ours.token_ids[0])
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, into: Path, cwd: Path) -> Path:
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, source, cwd=cwd)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A copy of the sources, so that no build touches the repository."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    return folder


@pytest.fixture(scope="module")
def wheel(work) -> Path:
    return build_wheel(work / "source", work / "wheel", work)


@pytest.fixture(scope="module")
def sdist(work) -> Path:
    code = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, work, cwd=work / "source")
    (path,) = work.glob("*.tar.gz")
    return path


def environment(folder: Path) -> Path:
    """A new environment; returns its Python. It sees this one's dependencies only after :func:`borrow`."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def borrow(python: Path) -> None:
    """Let an environment import the dependencies of this one; a path in a .pth file runs no .pth files of its own, so
    an editable install of this repository stays invisible."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(run(python, "-I", "-c", code, cwd=python.parent).strip())
    paths = dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))
    (site / "borrowed.pth").write_text("\n".join(paths) + "\n")


@pytest.fixture(scope="module")
def installed(work, wheel) -> Path:
    python = environment(work / "clean")
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=work)
    borrow(python)
    return python


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"repairzoo", "repairzoo-0.1.0.dist-info"}
    assert len(names) == len(set(names))
    expected = {"repairzoo/registry.yaml", "repairzoo/py.typed"}
    for source, package in (
        ("repairzoo", "repairzoo"),
        ("heads", "repairzoo/heads"),
        ("backbones", "repairzoo/backbones"),
    ):
        for path in (ROOT / source).rglob("*"):
            if (
                path.suffix in (".py", ".md", ".yaml", ".safetensors")
                or "prompts" in path.parts
                or path.name == "config.json"
            ):
                expected.add(f"{package}/{path.relative_to(ROOT / source).as_posix()}")
    assert not {name for name in expected if not name.endswith("prompts")} - set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_builds_the_same_wheel(work, sdist, wheel):
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (source,) = (work / "unpacked").iterdir()
    assert {"Makefile", "constraints.txt", "registry.yaml", "LICENSE", "tests"} <= {p.name for p in source.iterdir()}
    again = build_wheel(source, work / "again", work)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert sorted(one.namelist()) == sorted(two.namelist())
        for name in one.namelist():
            if not name.endswith("/RECORD"):
                assert one.read(name) == two.read(name), name


def test_installed_wheel_lists_what_exists(work, installed):
    listed = run(installed, "-I", "-c", CHECK, work / "clean", ROOT, cwd=work)
    assert {"smollm2-135m", "dflash", "none", "dels"} <= set(listed.split())
    assert '"heads"' in run(installed.parent / "repairzoo", "list", "--json", cwd=work)


def test_installed_wheel_decodes(work, installed):
    target, draft = GOLDEN / "targets" / "trained_tied", GOLDEN / "dflash" / "trained_b8" / "draft"
    assert len(run(installed, "-I", "-c", DECODE, draft, target, cwd=work).split()) == 12


def test_editable_install_reads_the_repository_where_it_is(work):
    python = environment(work / "editable")
    borrow(python)
    source = work / "source"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed",
        "-e", source, cwd=work)  # fmt: skip
    listed = run(python, "-I", "-c", CHECK, source, work / "elsewhere", cwd=work)
    assert "dels" in listed.split()
    assert not (source / "repairzoo" / "registry.yaml").exists()  # a copy there would grow stale
