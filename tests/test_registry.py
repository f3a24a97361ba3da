"""The registry: strict, lazy, and helpful about names that do not exist."""

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint
from math import prod
from pathlib import Path

import pytest
import yaml

from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, UnknownName
from repairzoo.registry import (
    KINDS,
    Registry,
    info,
    list_backbones,
    list_heads,
    list_targets,
    read_registry,
    registry,
    registry_file,
    with_entry_points,
)
from repairzoo.safe_file import read_header

ENTRIES = [registry().get(kind, name) for kind in KINDS for name in registry().names(kind)]
METHODS = [entry for entry in ENTRIES if entry.location]


@pytest.fixture
def data() -> dict:
    return yaml.safe_load(registry_file().read_text())


def reread(data: dict, folder: Path) -> Registry:
    path = folder / "registry.yaml"
    path.write_text(yaml.safe_dump(data))
    return read_registry(path)


def test_what_exists_is_listed():
    assert "smollm2-135m" in list_targets()
    assert list_backbones() == registry().names("backbone")
    assert {"none", "dels"} <= set(list_heads())
    assert "dflash" in list_backbones("dfl*")
    assert list_heads("d*ls") == ["dels"]
    assert list_heads("D*") == []  # names are lower case, and so are patterns
    assert registry().default_target().name == "smollm2-135m"


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_entry_load_and_folder(entry):
    """A method's folder is all there is of it: its module lies there, under its own name."""
    loaded = entry.load()
    folder = Path(sys.modules[entry.location.partition(":")[0]].__file__).parent
    assert loaded.__name__ == entry.location.partition(":")[2]
    assert entry.folder() == folder
    assert folder.name == entry.name
    assert (folder / "README.md").is_file()


def test_every_folder_of_a_method_is_registered():
    for kind in ("backbone", "head"):
        package = Path(importlib.import_module(f"repairzoo.{kind}s").__file__).parent
        folders = {path.parent.name for path in package.glob("*/__init__.py")}
        assert folders == set(registry().names(kind)) - {"none"}


@pytest.mark.parametrize("pair", registry().pairs, ids=lambda pair: pair.names())
def test_every_pair_has_its_weights(pair):
    for kind in pair.weights:
        where = registry().weights(pair, kind)
        if isinstance(where, Path):
            (weights,) = where.glob("*.safetensors")
            assert {"config.json", "README.md"} <= {path.name for path in where.iterdir()}
            if kind in pair.parameters:
                assert pair.parameters[kind] == sum(prod(t.shape) for t in read_header(weights).tensors.values())


def test_unknown_names_say_what_is_near_and_what_there_is():
    with pytest.raises(UnknownName, match=r"unknown head 'dles': did you mean 'dels'\? choose from none, dels\b"):
        registry().get("head", "dles")
    with pytest.raises(UnknownName, match="did you mean 'dflash'"):
        info("DFlahs")
    with pytest.raises(UnknownName) as caught:
        info("zzzzzz")
    assert "did you mean" not in str(caught.value)
    assert all(entry.name in str(caught.value) for entry in ENTRIES)
    with pytest.raises(KeyError):  # it is the built-in that it resembles, too
        info("zzzzzz")


def test_info_is_plain_and_complete():
    facts = info("dels")
    assert (facts["kind"], facts["name"], facts["class"]) == ("head", "dels", "repairzoo.heads.dels:DeLS")
    assert facts["pairs"] == [
        {**pair.as_dict(), "installed": facts["pairs"][i]["installed"]}
        for i, pair in enumerate(p for p in registry().pairs if p.head == "dels")
    ]
    assert info("smollm2-135m")["hub"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "class" not in info("none")


def test_target_by_name_or_hub_id():
    assert registry().target("HuggingFaceTB/SmolLM2-135M-Instruct") is registry().target("smollm2-135m")
    assert registry().target("somewhere/else") is None


def test_pair_says_what_there_is(data, tmp_path):
    known = reread(data | {"pairs": [data["pairs"][0]]}, tmp_path)
    assert known.pair("dflash", "none", "smollm2-135m").trained is None
    with pytest.raises(IncompatibleArtifact, match=r"'dels' and target.*dflash x none x smollm2-135m"):
        known.pair("dflash", "dels", "smollm2-135m")
    with pytest.raises(UnknownName, match="unknown backbone"):
        known.pair("dflsh", "dels", "smollm2-135m")


def test_weights_come_from_the_methods_folder_or_the_hub(data, tmp_path):
    data["pairs"][1]["weights"]["backbone"] = "hf:owner/name@abc"
    known = reread(data, tmp_path)
    assert known.weights(known.pairs[1], "backbone") == "hf:owner/name@abc"
    assert known.weights(known.pairs[1], "head") == known.get("head", "dels").folder() / "smollm2-135m"


# --- strictness -----------------------------------------------------------------------------------------------------


def test_a_name_written_twice_is_refused(tmp_path):
    """PyYAML keeps the last of two equal keys and says nothing."""
    text = registry_file().read_text()
    (tmp_path / "registry.yaml").write_text(text.replace("heads:\n", "heads:\n  dels: {title: a, summary: b}\n", 1))
    with pytest.raises(InvalidArtifact, match=r"registry\.yaml.*'dels' is there twice"):
        read_registry(tmp_path / "registry.yaml")


def test_a_name_of_two_kinds_is_refused(data, tmp_path):
    data["heads"]["dflash"] = dict(data["heads"]["dels"])
    with pytest.raises(InvalidArtifact, match=r"'dflash' is registered twice: as backbone .* as head"):
        reread(data, tmp_path)


def test_a_pair_written_twice_is_refused(data, tmp_path):
    data["pairs"].append(data["pairs"][0])
    with pytest.raises(InvalidArtifact, match="dflash x none x smollm2-135m is there twice"):
        reread(data, tmp_path)


@pytest.mark.parametrize("key", ["schema", "targets", "backbones", "heads", "pairs"])
def test_each_section_is_required(data, tmp_path, key):
    del data[key]
    with pytest.raises(InvalidArtifact, match=f"lacks {key}"):
        reread(data, tmp_path)


@pytest.mark.parametrize(
    ("section", "name", "key"),
    [("targets", "smollm2-135m", key) for key in ("title", "summary", "hub", "licence")]
    + [("backbones", "dflash", key) for key in ("title", "summary", "class")]
    + [("heads", "dels", key) for key in ("title", "summary")],
)
def test_each_key_of_an_entry_is_required(data, tmp_path, section, name, key):
    del data[section][name][key]
    with pytest.raises(InvalidArtifact, match=f"'{name}' lacks {key}"):
        reread(data, tmp_path)


@pytest.mark.parametrize("key", ["backbone", "head", "target", "weights", "licence"])
def test_each_key_of_a_pair_is_required(data, tmp_path, key):
    del data["pairs"][1][key]
    with pytest.raises(InvalidArtifact, match=f"a pair lacks {key}"):
        reread(data, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=2), "'schema' is 2"),
        (lambda d: d.update(extra=1), "unknown extra"),
        (lambda d: d.update(heads=[]), "'heads' must map"),
        (lambda d: d.update(pairs={}), "'pairs' must be a list"),
        (lambda d: d["heads"].update({"a+b": d["heads"]["dels"]}), "'a\\+b' is no usable head name"),
        (lambda d: d["heads"].update({7: d["heads"]["dels"]}), "7 is no usable head name"),
        (lambda d: d["heads"]["dels"].update(colour="red"), "'dels' has the unknown colour"),
        (lambda d: d["targets"]["smollm2-135m"].pop("default"), "exactly one target"),
        (lambda d: d["pairs"][1].update(head="nobody"), "no head 'nobody'"),
        (lambda d: d["pairs"][1].pop("trained"), "'trained' must be"),
        (lambda d: d["pairs"][1].update(trained="maybe"), "'trained' must be"),
        (lambda d: d["pairs"][0].update(trained="joint"), "'trained' must be"),
        (lambda d: d["pairs"][1]["weights"].pop("head"), "lacks head"),
        (lambda d: d["pairs"][0]["weights"].update(head="x"), "unknown head"),
        (lambda d: d["pairs"][1].update(figures={"tau": 9.9}), "figures need 'raw'"),
    ],
)
def test_read_registry_refuses(data, tmp_path, change, words):
    reread(data, tmp_path)  # it is sound before the change
    change(data)
    with pytest.raises(InvalidArtifact, match=words):
        reread(data, tmp_path)


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    for content in (b"a: [", b"\xff", b"- 1"):
        (tmp_path / "registry.yaml").write_bytes(content)
        with pytest.raises(InvalidArtifact, match=r"registry\.yaml"):
            read_registry(tmp_path / "registry.yaml")


# --- other packages -------------------------------------------------------------------------------------------------


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A real installed distribution: a module and its entry points."""

    def install(lines: str) -> None:
        (tmp_path / "otherhead.py").write_text("class Other:\n    pass\n")
        meta = tmp_path / "other_heads-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: other-heads\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text(lines)
        monkeypatch.syspath_prepend(str(tmp_path))
        registry.cache_clear()

    yield install
    registry.cache_clear()


def test_other_packages_register_heads(other_package):
    before = list_heads()
    other_package("[repairzoo.heads]\nother = otherhead:Other\n")
    assert list_heads() == [*before, "other"]
    assert info("other")["summary"] == "provided by other-heads"
    assert registry().get("head", "other").load().__name__ == "Other"


def test_other_packages_cannot_take_a_name(other_package):
    other_package("[repairzoo.heads]\ndels = otherhead:Other\n")
    with pytest.raises(InvalidArtifact, match=r"'dels' is registered twice.*registry\.yaml.*other-heads"):
        list_heads()


def test_two_entry_points_of_one_name_are_refused():
    points = [("head", EntryPoint("new", f"module{i}:Class", "repairzoo.heads")) for i in range(2)]
    assert with_entry_points(registry(), points[:1]).names("head")[-1] == "new"
    with pytest.raises(InvalidArtifact, match="'new' is registered twice"):
        with_entry_points(registry(), points)


@pytest.mark.parametrize("value", ["no.such.module:Class", "repairzoo.errors:NoSuchClass"])
def test_a_class_that_cannot_be_imported_is_named(value):
    entry = with_entry_points(registry(), [("head", EntryPoint("new", value, "repairzoo.heads"))]).get("head", "new")
    with pytest.raises(InvalidArtifact, match=f"'new' .* cannot be imported from '{value}'"):
        entry.load()
    with pytest.raises(InvalidArtifact, match="has no class to load"):
        registry().get("head", "none").load()


def test_listing_imports_neither_torch_nor_a_method():
    code = """
import sys
from repairzoo.registry import info, list_heads
list_heads(), info("dels")
heavy = {"torch", "transformers", "repairzoo.heads.dels"} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
