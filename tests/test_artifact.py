"""Files: what is written comes back, and what is damaged is refused with the file, the key and the fix."""

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from repairzoo.artifact import (
    COMMON_KEYS,
    check_config,
    check_fit,
    fingerprint,
    load_artifact,
    read_config,
    save_artifact,
)
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact
from repairzoo.safe_file import DTYPES, parse_json, read_header, read_safetensors, replacing, write_safetensors

CONFIG = {
    "schema_version": 1,
    "kind": "dels",
    "block_size": 8,
    "slot_convention": "anchor_plus_1",
    "mask_token_id": None,
    "tapped_layers": [1, 3],
    "pool_size": 16,
    "vocab_size": 100,
    "padded_vocab_size": 128,
    "hidden_size": 32,
    "dtype": "float32",
    "target": {"id": "owner/target", "revision": "abc", "fingerprint": "f00d"},
    "alpha": 0.3,
}
SHAPES = {"up": (4, 3), "gain": (), "none": (0, 2)}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        (a.dtype, a.shape) == (right[name].dtype, right[name].shape) and torch.equal(a, right[name])
        for name, a in left.items()
    )


# --- safetensors ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(lambda s: s != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_write_safetensors_is_the_librarys_own_layout_and_reads_back(described, seed):
    """Equal bytes to the library's file (one metadata key: its order of several is not fixed), and equal tensors."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.randint(0, 2 if dtype == "BOOL" else 100, shape, generator=generator).to(DTYPES[dtype])
        for name, (dtype, shape) in described.items()
    }
    with TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours.safetensors"), Path(folder, "theirs.safetensors")
        write_safetensors(ours, values, {"format": "pt"})
        save_file(values, theirs, {"format": "pt"})
        assert ours.read_bytes() == theirs.read_bytes()
        assert same(read_safetensors(ours), values)
        assert sorted(p.name for p in Path(folder).iterdir()) == ["ours.safetensors", "theirs.safetensors"]


def test_write_safetensors_orders_metadata_and_accepts_views(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    metadata = {str(i): "x" for i in range(20)}
    write_safetensors(tmp_path / "a", {"t": base.T, "part": base[1:]}, metadata)
    write_safetensors(tmp_path / "b", {"part": base[1:], "t": base.T}, dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert torch.equal(load_file(tmp_path / "a")["t"], base.T)


def raw_file(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def one(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}})


ATTACKS = {
    "absurd header length": (one(), b"\0" * 4, 1 << 62, "header claims"),
    "header longer than the file": (one(), b"\0" * 4, 500, "header claims"),
    "no object": ("[1]", b"", None, "does not start with"),
    "no JSON": ("{nope", b"", None, "not valid JSON"),
    "bad UTF-8": (b"{\xff}", b"", None, "not valid JSON"),
    "nested too deep": ('{"w":' + "[" * 60_000, b"", None, "not valid JSON"),
    "nothing but header": ('{"w":[' + "[]," * 30_000 + "0]}", b"", None, "header claims"),
    "duplicate key": (one()[:-1] + "," + one()[1:], b"\0" * 4, None, "appears twice"),
    "unknown dtype": (one("F33"), b"\0" * 4, None, "'F33'"),
    "dtype of another type": (one(3), b"\0" * 4, None, "dtype 3"),
    "negative size": (one(shape=[-1]), b"\0" * 4, None, "impossible shape"),
    "bool size": (one(shape=[True]), b"\0" * 4, None, "impossible shape"),
    "absurd size": (one(shape=[0, 1 << 70], offsets=[0, 0]), b"", None, "impossible shape"),
    "shape against offsets": (one(shape=[2]), b"\0" * 4, None, "needs 8 bytes"),
    "offsets reversed": (one(shape=[0], offsets=[4, 0]), b"\0" * 4, None, "hold -4"),
    "offsets of one": (one(offsets=[0]), b"\0" * 4, None, "impossible data_offsets"),
    "unknown field": (one(extra=1), b"\0" * 4, None, "exactly dtype"),
    "truncated": (one(shape=[3], offsets=[0, 12]), b"\0" * 11, None, "truncated"),
    "trailing bytes": (one(), b"\0" * 5, None, "follow the last tensor"),
    "hole": (one(offsets=[4, 8]), b"\0" * 8, None, "unused bytes"),
    "overlap": (one()[:-1] + ',"v":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}', b"\0" * 6, None, "overlaps"),
    "metadata of numbers": ('{"__metadata__":{"a":1}}', b"", None, "'__metadata__'"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_read_safetensors_refuses_hand_made_bad_files(tmp_path, name):
    header, data, length, words = ATTACKS[name]
    path = raw_file(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(InvalidArtifact, match=r"bad\.safetensors") as caught:
        read_safetensors(path)
    assert words in str(caught.value)


def test_read_safetensors_accepts_what_the_attacks_are_made_of(tmp_path):
    """The negative control of the test above."""
    assert read_safetensors(raw_file(tmp_path / "good", one(), struct.pack("<f", 2.5)))["w"].tolist() == [2.5]


STUBS = {
    "folder": Path.mkdir,
    "nothing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(b"\1"),
}


@pytest.mark.parametrize("make", STUBS.values(), ids=STUBS)
def test_read_safetensors_refuses_folders_nothing_and_stubs(tmp_path, make):
    make(tmp_path / "w.safetensors")
    with pytest.raises(InvalidArtifact, match=r"w\.safetensors"):
        read_safetensors(tmp_path / "w.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_weights_are_named_and_never_written(tmp_path, value, dtype):
    bad = {"fine": torch.ones(2), "broken.weight": torch.tensor([1.0, value], dtype=dtype)}
    save_file(bad, tmp_path / "w.safetensors")
    with pytest.raises(InvalidArtifact, match=r"w.safetensors.*'broken.weight' \(1 of 2\)"):
        read_safetensors(tmp_path / "w.safetensors")
    assert read_safetensors(tmp_path / "w.safetensors", finite=False).keys() == bad.keys()
    with pytest.raises(InvalidArtifact, match=r"broken\.weight"):
        write_safetensors(tmp_path / "new", bad)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1, "a": 2}', "{", b"\xff", "9" * 10_000])
def test_parse_json_is_strict(text):
    with pytest.raises(InvalidArtifact, match="some file"):
        parse_json(text, "some file")


def test_replacing_keeps_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# --- artifacts ------------------------------------------------------------------------------------------------------


def test_save_artifact_load_artifact(tmp_path):
    folder = tmp_path / "new" / "dels"
    save_artifact(folder, CONFIG, tensors(), card="# Card\n")
    config, loaded = load_artifact(folder, expected=SHAPES, kind="dels")
    assert config == CONFIG
    assert same(loaded, tensors())
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "head.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["dels"]
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    save_artifact(folder, dict(reversed(CONFIG.items())), dict(reversed(tensors().items())))  # no card: it stays
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("key", COMMON_KEYS)
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    save_artifact(tmp_path / "a", CONFIG, tensors())
    broken = {k: v for k, v in CONFIG.items() if k != key}
    (tmp_path / "a" / "config.json").write_text(json.dumps(broken))
    with pytest.raises(InvalidArtifact, match=rf"config\.json.*'{key}' is missing"):
        load_artifact(tmp_path / "a")
    with pytest.raises(InvalidArtifact, match=rf"'{key}'"):
        save_artifact(tmp_path / "b", broken, tensors())
    assert not (tmp_path / "b").exists()


WRONG = {
    "schema_version": [0, 2, True, "1"],
    "kind": ["", 3],
    "block_size": [0, 8.0, True, None],
    "slot_convention": ["anchor", None, 1],
    "mask_token_id": [-1, "5"],
    "tapped_layers": [[], [-2], "1", [1.0]],
    "pool_size": [0, "16"],
    "vocab_size": [0, None],
    "padded_vocab_size": [0, 99],
    "hidden_size": [0, 32.5],
    "dtype": ["fp32", None],
    "target": ["owner/target", {}, {"id": "x"}, {"id": "", "revision": None}, {"id": "x", "revision": 1}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(InvalidArtifact, match=f"'{key}'"):
        check_config(CONFIG | {key: value})


def test_check_config_lists_every_problem_at_once():
    with pytest.raises(InvalidArtifact) as caught:
        check_config({k: v for k, v in CONFIG.items() if k != "dtype"} | {"block_size": 0, "kind": ""})
    assert all(f"'{key}'" in str(caught.value) for key in ("dtype", "block_size", "kind"))
    assert WRONG.keys() == COMMON_KEYS.keys()


@cache
def saved() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        save_artifact(folder, CONFIG, tensors())
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_flipped_bit_is_refused_or_harmless(data):
    """spec/engineering, Safe loading: fuzz by bit flips. A flip that leaves a finite weight is found by the hash."""
    with TemporaryDirectory() as folder:
        for name, content in saved().items():
            Path(folder, name).write_bytes(content)
        path = Path(folder, data.draw(st.sampled_from(sorted(saved()))))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        try:
            config, loaded = load_artifact(folder, expected=SHAPES)
        except InvalidArtifact as error:
            assert path.name in str(error) or "config.json" in str(error)
        else:
            assert config == CONFIG
            assert same(loaded, tensors())


def test_every_flip_in_the_weights_themselves_is_refused(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    path = tmp_path / "head.safetensors"
    good = path.read_bytes()
    start = 8 + struct.unpack("<Q", good[:8])[0]
    for at in range(start, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(InvalidArtifact, match=r"head\.safetensors"):
            load_artifact(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    for name in ("config.json", "head.safetensors"):
        path = tmp_path / name
        good = path.read_bytes()
        for length in range(0, len(good) - 1, 3):  # the last byte of config.json is a newline
            path.write_bytes(good[:length])
            with pytest.raises(InvalidArtifact, match=name.replace(".", r"\.")):
                load_artifact(tmp_path)
        path.write_bytes(good)
    load_artifact(tmp_path)


def test_load_artifact_refuses_a_config_of_other_weights(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"alpha": 0.4}))
    with pytest.raises(InvalidArtifact, match="config_sha256"):
        load_artifact(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # another layout of the same config is the same config
    load_artifact(tmp_path)


def test_load_artifact_refuses_weights_without_schema(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    save_file(tensors(), tmp_path / "head.safetensors")
    with pytest.raises(InvalidArtifact, match=r"head\.safetensors.*'schema' is None"):
        load_artifact(tmp_path)


def test_load_artifact_lists_every_tensor_that_does_not_match(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    with pytest.raises(InvalidArtifact) as caught:
        load_artifact(tmp_path, expected={"up": (3, 4), "gain": (), "down": (2,)})
    for words in ("missing 'down' (2,)", "unknown 'none' (0, 2)", "'up' is (4, 3), expected (3, 4)"):
        assert words in str(caught.value)


def test_load_artifact_refuses_another_kind_and_missing_files(tmp_path):
    save_artifact(tmp_path / "a", CONFIG, tensors())
    with pytest.raises(IncompatibleArtifact, match="'kind' is 'dels', not 'drelay'"):
        load_artifact(tmp_path / "a", kind="drelay")
    with pytest.raises(InvalidArtifact, match="nowhere: does not exist"):
        load_artifact(tmp_path / "nowhere")
    with pytest.raises(InvalidArtifact, match="is a file"):
        load_artifact(tmp_path / "a" / "config.json")
    with pytest.raises(InvalidArtifact, match=r"model\.safetensors: does not exist"):
        load_artifact(tmp_path / "a", weights_name="model.safetensors")
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(InvalidArtifact, match=r"config\.json: does not exist"):
        read_config(tmp_path / "a")


def test_save_artifact_refuses_what_json_cannot_hold(tmp_path):
    for value in (float("nan"), torch.ones(1), {1, 2}):
        with pytest.raises(InvalidArtifact, match=r"config\.json"):
            save_artifact(tmp_path / "a", CONFIG | {"alpha": value}, tensors())
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArtifact, match="is a file"):
        save_artifact(tmp_path / "file", CONFIG, tensors())


def test_metadata_is_what_the_card_of_the_format_says(tmp_path):
    save_artifact(tmp_path, CONFIG, tensors())
    assert read_header(tmp_path / "head.safetensors").metadata.keys() == {
        "format", "schema", "config_sha256", "tensors_sha256",
    }  # fmt: skip


# --- fit ------------------------------------------------------------------------------------------------------------

FITS = {"target_id": "owner/target", "vocab_size": 100, "hidden_size": 32}


def test_check_fit_accepts_its_target_and_its_padded_vocabulary():
    assert check_fit(CONFIG, **FITS) == []
    assert check_fit(CONFIG, **FITS | {"vocab_size": 128}) == []
    assert check_fit(CONFIG, **FITS, revision="abc", fingerprint="f00d", block_size=8, tapped_layers=(1, 3)) == []


def test_check_fit_lists_every_mismatch_at_once():
    config = CONFIG | {"backbone": {"kind": "dflash"}, "mask_token_id": 7}
    with pytest.raises(IncompatibleArtifact) as caught:
        check_fit(
            config, target_id="other/target", vocab_size=101, hidden_size=64, backbone="domino", block_size=16,
            mask_token_id=5, tapped_layers=[1], slot_convention="anchor", where="here",
        )  # fmt: skip
    for key in ("target.id", "vocab_size", "hidden_size", "backbone.kind", "block_size", "mask_token_id",
                "tapped_layers", "slot_convention", "here"):  # fmt: skip
        assert key in str(caught.value)


def test_check_fit_goes_by_the_weights_where_it_knows_them():
    """spec/default-target: a copy in a folder is the same target; other weights under one id only cost some τ."""
    assert check_fit(CONFIG, **FITS | {"target_id": "some/folder"}, fingerprint="f00d") == []
    with pytest.raises(IncompatibleArtifact, match=r"target\.id"):
        check_fit(CONFIG, **FITS | {"target_id": "some/folder"}, fingerprint="beef")
    for other in ({"fingerprint": "beef"}, {"revision": "def"}):
        (note,) = check_fit(CONFIG, **FITS, **other)
        assert "other weights of owner/target" in note
    assert check_fit(CONFIG, **FITS, revision="def", fingerprint="f00d") == []


class Tied(torch.nn.Module):
    def __init__(self, seed: int, tied: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 8, _weight=torch.randn(50, 8, generator=generator))
        self.norm = torch.nn.LayerNorm(8)
        if tied:
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight


def test_fingerprint_names_weights_not_their_format():
    name = fingerprint(Tied(0))
    assert name == fingerprint(Tied(0).bfloat16()) == fingerprint(Tied(0, tied=False)) == fingerprint(Tied(0).double())
    assert name != fingerprint(Tied(1))
    changed = Tied(0)
    changed.norm.bias.data[3] = 1
    assert name != fingerprint(changed)
    assert len(name) == 64
