"""Mutated artifacts: what loads is equal to the valid one, all else is one kind of error; no crash, no hang.

spec/engineering, Safe loading; pitfalls 44 (huggingface_hub#4306, xet-core#604, safetensors#668).
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_artifacts import files, save_backbone, save_head
from test_stacks import new

from repairzoo import hub
from repairzoo.artifact import config_hash
from repairzoo.convert import convert
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.load_parts import load_folder
from repairzoo.safe_file import MAX_JSON, write_safetensors

Files = dict[str, bytes]
PARTS = {"head": ("head.safetensors", save_head), "backbone": ("model.safetensors", save_backbone)}
ROOM = 1 << 30  # bytes of address space that a load may take beyond what is taken already
SECONDS = 20  # of processor time for one load
TOTAL: dict[str, int] = {}


@pytest.fixture(scope="module", params=PARTS)
def valid(request, tmp_path_factory) -> tuple[str, Files]:
    """Name of the weights file, and the files of a sound artifact."""
    name, save = PARTS[request.param]
    return name, files(save(tmp_path_factory.mktemp("valid") / "artifact"))


@pytest.fixture(scope="module", autouse=True)
def limited() -> Iterator[None]:
    """A large allocation fails here, and a hang ends, instead of harming the machine; both then fail the test."""

    def hang(*_):
        raise AssertionError(f"more than {SECONDS} s of processor time for one tiny file")

    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    handler = signal.signal(signal.SIGVTALRM, hang)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


def write(folder: Path, content: Files) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)


def outcome(folder: Path):
    """What a folder loads as: ``(config, tensors)``, or None for the right kind of error, which names a path."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = load_folder(folder)
    except (InvalidArtifact, IncompatibleArtifact) as error:
        assert folder.name in str(error)
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return loaded.config.to_dict(), dict(loaded.state_dict())


def same(left, right) -> bool:
    return left[0] == right[0] and left[1].keys() == right[1].keys() and all(
        torch.equal(tensor, right[1][name]) for name, tensor in left[1].items()
    )  # fmt: skip


def check(tmp_path: Path, valid: Files, mutants: list[Files], name: str, most_fail: float = 0.9) -> None:
    """Load every mutant; those that load must equal the valid artifact, and nearly all must fail."""
    write(tmp_path / "valid", valid)
    expected = outcome(tmp_path / "valid")
    assert expected is not None
    failed = 0
    folder = tmp_path / "mutant"
    write(folder, valid)
    for mutant in mutants:
        changed = {key: data for key, data in mutant.items() if data != valid.get(key)}
        write(folder, changed)
        found = outcome(folder)
        failed += found is None
        assert found is None or same(found, expected), changed
        write(folder, {key: valid[key] for key in changed if key in valid})
        for key in changed.keys() - valid.keys():
            (folder / key).unlink()
    assert failed >= most_fail * len(mutants), f"{name}: only {failed} of {len(mutants)} were refused"
    TOTAL[name] = TOTAL.get(name, 0) + len(mutants)


# --- bytes ------------------------------------------------------------------------------------------------------------


def split(weights: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", weights[:8])[0]
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def join(header: str | dict, data: bytes, length: int | None = None) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_truncated_at_every_section(valid, tmp_path):
    name, sound = valid
    weights, config = sound[name], sound["config.json"]
    header, data = split(weights)
    start = len(weights) - len(data)
    edges = {o for n, e in header.items() if n != "__metadata__" for o in e["data_offsets"]}
    lengths = {*range(12), *range(12, start, 7), start - 1, start, start + 1}
    lengths |= {start + edge + shift for edge in edges for shift in (-1, 0, 1)}
    mutants = [sound | {name: weights[:n]} for n in sorted(lengths) if 0 <= n < len(weights)]
    mutants += [sound | {"config.json": config[:n]} for n in range(0, len(config) - 1, 5)]
    mutants += [sound | {name: weights + more} for more in (b"\0", b"\0" * 8, weights)]
    check(tmp_path, sound, mutants, "truncated", 1.0)


def test_flipped_bits(valid, tmp_path):
    name, sound = valid
    chance, mutants = random.Random(0), []
    for file, count in ((name, 150), ("config.json", 70)):
        for _ in range(count):
            content = bytearray(sound[file])
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            mutants.append(sound | {file: bytes(content)})
    check(tmp_path, sound, mutants, "flipped")


def test_spliced_blocks(valid, tmp_path):
    name, sound = valid
    chance, mutants = random.Random(1), []
    for _ in range(80):
        file = chance.choice((name, "config.json"))
        content = sound[file]
        a, b = sorted(chance.randrange(len(content)) for _ in range(2))
        piece = chance.choice((b"", content[a:b] * 2, content[a:b][::-1], chance.randbytes(b - a), b"\xff" * (b - a)))
        mutants.append(sound | {file: content[:a] + piece + content[b:]})
    check(tmp_path, sound, mutants, "spliced", 0.85)


# --- the header -------------------------------------------------------------------------------------------------------
ODD = [None, True, False, 0, -1, 7, 1.5, 1e999, 2**31, 2**63, 2**64, 10**400, "", "x", "../../etc/passwd", [], [[]], {}]


def headers(header: dict) -> Iterator[str | dict]:
    """Headers with one thing wrong."""
    tensors = [key for key in header if key != "__metadata__"]
    for key in tensors:
        entry = header[key]
        for dtype in ("F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "f32", "C64", *ODD[::3]):
            if dtype != entry["dtype"]:
                yield header | {key: entry | {"dtype": dtype}}
        begin, end = entry["data_offsets"]
        for offsets in ([end, begin], [begin - 1, end - 1], [begin + 4, end + 4], [begin, end + 1], [0, 2**63],
                        [begin, 10**400], [begin], [begin, end, end], [str(begin), end], *ODD[1::3]):  # fmt: skip
            yield header | {key: entry | {"data_offsets": offsets}}
        for shape in ([0], [-1, -1], [2**31, 2**33], [1] * 100_000, [2**62], [1.0], ["1"], *ODD[::3]):
            if shape != entry["shape"]:
                yield header | {key: entry | {"shape": shape}}
        for tricky in ("../../escape", "/etc/passwd", "a\0b", "", "\ud800", "x" * 10_000):
            yield {(tricky if name == key else name): value for name, value in header.items()}
        yield {name: value for name, value in header.items() if name != key}
        text = json.dumps(header)
        yield text[:-1] + f", {json.dumps(key)}: {json.dumps(entry)}}}"
    first = tensors[0]
    for other in tensors[1:]:
        yield header | {other: header[other] | {"data_offsets": header[first]["data_offsets"]}}
    meta = header["__metadata__"]
    for key in meta:
        for value in ("", "0" * 64, meta[key].upper(), None, 1, [meta[key]]):
            if key != "format" and value != meta[key]:
                yield header | {"__metadata__": meta | {key: value}}
    for number in ("0", "2", "999999999999", "-1", "1.0", "١", "one"):
        yield header | {"__metadata__": meta | {"schema": f"repairzoo-artifact-{number}"}}
    for value in ODD:
        yield header | {"__metadata__": value}
    for depth in (10, 40, 500, 980, 100_000):
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            deep = opened * depth + "1" + closed * depth
            yield json.dumps(header)[:-1] + f', "deep": {deep}}}'
            yield '{"w": {"dtype": ' + deep + ', "shape": [], "data_offsets": [0, 4]}}'


def test_wrong_headers(valid, tmp_path):
    name, sound = valid
    header, data = split(sound[name])
    wrong = list(headers(header))
    mutants = [sound | {name: join(changed, data)} for changed in random.Random(2).sample(wrong, min(len(wrong), 250))]
    for power in range(64):
        for shift in (-1, 0, 1):
            length = (1 << power) + shift
            if length not in (struct.unpack("<Q", sound[name][:8])[0],):
                mutants.append(sound | {name: join(header, data, length)})
    check(tmp_path, sound, mutants, "headers", 1.0)


def test_more_than_the_bytes_of_one_tensor_for_two_is_refused_though_the_hash_is_right(tmp_path):
    """Overlap that no hash finds: two names for the same bytes."""
    folder = save_head(tmp_path / "head")
    header, data = split((folder / "head.safetensors").read_bytes())
    header["twin"] = header["up"]
    (folder / "head.safetensors").write_bytes(join(header, data))
    assert outcome(folder) is None


# --- the config -------------------------------------------------------------------------------------------------------


def places(config: dict, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all keys, nested ones too."""
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def replaced(config: dict, path: tuple, value) -> dict:
    if len(path) > 1:
        value = replaced(config[path[0]], path[1:], value)
    return config | {path[0]: value}


def without(config: dict, path: tuple) -> dict:
    if len(path) > 1:
        return config | {path[0]: without(config[path[0]], path[1:])}
    return {key: value for key, value in config.items() if key != path[0]}


WRONG = [*ODD, 10**9, 1e-300, "\ud800", ["x"], [-5], [2**40], {"a": 1}, [[[[[[1]]]]]], "n" * 5000]


def configs(config: dict, values: list) -> Iterator[tuple[tuple, dict]]:
    for path in places(config):
        for value in values:
            yield path, replaced(config, path, value)
        yield path, without(config, path)
    yield ("unknown",), config | {"required_by_a_newer_version": True}
    yield ("__proto__",), config | {"__class__": "os.system", "auto_map": {"AutoModel": "evil.Model"}}


def test_wrong_types_in_every_config_key(valid, tmp_path):
    """Beside weights that were written with the right config."""
    _, sound = valid
    config = json.loads(sound["config.json"])
    mutants = [sound | {"config.json": json.dumps(changed).encode()} for _, changed in configs(config, WRONG[::4])]
    text = sound["config.json"].decode()
    for key in config:
        mutants.append(sound | {"config.json": (text.rstrip()[:-1] + f', "{key}": null}}').encode()})
    for depth in (33, 900, 100_000):
        mutants.append(sound | {"config.json": ("[" * depth + "]" * depth).encode()})
        deep = '{"a":' * depth + "1" + "}" * depth
        mutants.append(sound | {"config.json": (text.rstrip()[:-1] + f', "x": {deep}}}').encode()})
    check(tmp_path, sound, mutants, "configs", 0.98)


def test_wrong_types_in_every_config_key_though_the_hash_is_right(valid, tmp_path):
    """A file that somebody made so on purpose: it is refused, or it is an artifact that means what its config says."""
    name, sound = valid
    config = json.loads(sound["config.json"])
    header, data = split(sound[name])
    meta = header["__metadata__"]
    folder = tmp_path / "sealed"
    write(folder, sound)
    count = 0
    wrong = list(configs(config, WRONG))
    for path, changed in random.Random(3).sample(wrong, min(len(wrong), 250)):
        try:
            seal = config_hash(changed)
        except (ValueError, OverflowError, UnicodeEncodeError):
            continue
        (folder / "config.json").write_text(json.dumps(changed))
        (folder / name).write_bytes(join(header | {"__metadata__": meta | {"config_sha256": seal}}, data))
        found = outcome(folder)
        if found is not None:
            told, stated = found[0], json.loads(json.dumps(changed))
            told.pop("info", None), stated.pop("info", None)
            if "target" in told and isinstance(stated.get("target"), dict):
                stated["target"] = {"fingerprint": None} | stated["target"]
            assert json.loads(json.dumps(told)).get(path[0]) == stated.get(path[0]), path
        count += 1
    TOTAL["sealed"] = TOTAL.get("sealed", 0) + count


GOLDEN = Path(__file__).parent / "golden"
OTHERS = ["drelay", "lilicorr", "dflash/sliding_b8", "domino/trained_shift_b8", "dspark/trained_rnn_b7", "speculators"]


def other(kind: str, folder: Path) -> Path:
    """A sound artifact of another kind or packaging than those above."""
    if kind in ("drelay", "lilicorr"):
        return new(kind, 3).save_pretrained(folder)
    if kind == "speculators":
        convert(GOLDEN / "domino/trained_noshift_b8/draft", folder, to="speculators", target_id="golden/target")
        return folder
    return shutil.copytree(GOLDEN / kind / "draft", folder)


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_and_packaging_holds_its_keys_to_their_types(tmp_path, kind):
    """Published drafts carry no hash of their config: what it says is all there is."""
    folder = other(kind, tmp_path / "artifact")
    weights = next(folder.glob("*.safetensors"))
    config, (header, data) = json.loads((folder / "config.json").read_text()), split(weights.read_bytes())
    meta = header.get("__metadata__", {})
    assert outcome(folder) is not None
    wrong = list(configs(config, WRONG))
    chosen = [*random.Random(4).sample(wrong, 90), *wrong[-2:]]  # the last ones: unknown keys
    for path, changed in chosen:
        try:
            seal = config_hash(changed)
        except (ValueError, OverflowError, UnicodeEncodeError):
            continue
        (folder / "config.json").write_text(json.dumps(changed))
        if "config_sha256" in meta:
            weights.write_bytes(join(header | {"__metadata__": meta | {"config_sha256": seal}}, data))
            assert path != ("unknown",) or outcome(folder) is None
        outcome(folder)  # loads, or the right kind of error
        TOTAL["kinds"] = TOTAL.get("kinds", 0) + 1


# --- paths ------------------------------------------------------------------------------------------------------------


def test_links_folders_and_pipes_in_the_place_of_files(valid, tmp_path):
    name, sound = valid
    count = 0
    for file in (name, "config.json"):
        for kind in ("folder", "loop", "dangling", "zero", "random", "pipe", "parent", "passwd", "gone", "empty"):
            folder = tmp_path / f"{file}-{kind}"
            write(folder, {key: data for key, data in sound.items() if key != file})
            path = folder / file
            if kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "empty":
                path.touch()
            elif kind != "gone":
                aims = {"loop": path, "dangling": "nothing", "zero": "/dev/zero", "random": "/dev/urandom"}
                path.symlink_to(aims.get(kind, {"parent": "..", "passwd": "/etc/passwd"}.get(kind, "")))
            assert outcome(folder) is None
            count += 1
    linked = tmp_path / "linked"  # the Hub library's cache is made of links
    write(linked, {key: data for key, data in sound.items() if key != name})
    write(tmp_path / "blobs", {"weights": sound[name]})
    (linked / name).symlink_to("../blobs/weights")
    assert outcome(linked) is not None
    TOTAL["links"] = TOTAL.get("links", 0) + count


SHARDS = ["../weights", "/etc/passwd", "..", ".", "", "a/b", "a\\..\\b", "a\0b", "\ud800", "x" * 5000, 7, None, [], {}]


def test_shards_that_lie_elsewhere(tmp_path):
    folder = save_backbone(tmp_path / "whole")
    sound = files(folder)
    header, _ = split(sound["model.safetensors"])
    tensors = [key for key in header if key != "__metadata__"]
    (tmp_path / "weights").write_bytes(sound["model.safetensors"])
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for shard in SHARDS:
        for chosen in (tensors, tensors[:1]):
            table = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | dict.fromkeys(chosen, shard)
            index.write_text(json.dumps({"weight_map": table}))
            assert outcome(folder) is None
    for value in ODD:
        index.write_text(json.dumps({"weight_map": value}))
        assert outcome(folder) is None
    TOTAL["shards"] = 2 * len(SHARDS) + len(ODD)


def test_names_of_repositories_and_revisions_cannot_climb():
    for source in ("hf:../x", "hf:a/..", "hf:a/b/c", "hf:/etc/x", "hf:a", "hf:", "hf://a/b", "hf:a/b@",
                   "hf:a/b@../../x", "hf:a/b@/etc", "hf:a/b@x//y", "hf:a/b@-x", "hf:a/b@x\0y",
                   "hf:a--b/c", "hf:a/b.git", "hf:a b/c",
                   "hf:a/b@" + "x" * 500, "hf:" + "a" * 200 + "/b", "hf:a/b@main\n", "hf:ä/b"):  # fmt: skip
        with pytest.raises(ValueError, match=r"hf:|Hub id|revision|states"):
            hub.parse(source)
    assert hub.parse("hf:a/b@refs/pr/1") == hub.Source("a/b", "refs/pr/1")
    with pytest.raises(ValueError, match="another"):
        hub.parse("a/b@x", "y")
    for revision in ("", 5, b"main", ["main"]):
        with pytest.raises(InvalidInput, match="revision"):
            hub.parse("a/b", revision)
    with pytest.raises(InvalidInput, match="Hub id"):
        hub.Source(None)  # type: ignore[arg-type]


def test_what_is_no_folder_says_what_it_may_have_been(tmp_path):
    for source, words in (
        ("https://me:hf_secretsecretsecret@hub.example/a/b", "is an address"),
        (str(tmp_path / ("x" * 5000)), "no such folder"),
        (str(tmp_path / "no\0thing"), "no such folder"),
    ):
        with pytest.raises(InvalidArtifact, match=words) as caught:
            hub.locate(source)
        assert "owner/name" in str(caught.value)
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidInput, match="tokn"):
        hub.locate(tmp_path, tokn="x")


# --- memory -----------------------------------------------------------------------------------------------------------


SIZE = 12_000_000


def swollen(kind: str, folder: Path) -> None:
    """A file of 12 MB, in the place of a sound one."""
    path = folder / "head.safetensors"
    metadata = split(path.read_bytes())[0]["__metadata__"]
    if kind == "config":
        (folder / "config.json").write_text('{"slot_convention": [' + "[]," * (SIZE // 3) + "0]}")
    elif kind in ("lists", "names"):
        many = "[]," * (SIZE // 3) + "0" if kind == "lists" else ""
        text = f'{{"a":[{many}]}}' if many else "{" + ",".join(f'"{n:x}":0' for n in range(SIZE // 9)) + "}"
        path.write_bytes(join(text, b""))
    else:
        dtype = {"bytes": torch.uint8, "halves": torch.bfloat16, "not finite": torch.float32}[kind]
        tensor = torch.zeros(SIZE // dtype.itemsize, dtype=dtype)
        write_safetensors(path, {"huge": tensor}, metadata)
        if kind == "not finite":
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(struct.pack("<f", float("nan")))


@pytest.mark.parametrize("kind", ["config", "lists", "names", "bytes", "halves", "not finite"])
def test_loading_takes_no_more_than_twice_the_file(tmp_path, kind):
    """Python's own objects (a parsed header took 29 times its text) and torch's (a comparison is as large again)."""
    folder = save_head(tmp_path / "head")
    swollen(kind, folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = peak()
    with pytest.raises(InvalidArtifact):
        load_folder(folder)
    assert peak() - before <= 2 * SIZE


@pytest.mark.parametrize("item", ["[]", "{}", '{"a":1}', "0.5", '"ä"'])
def test_the_largest_config_that_is_parsed_takes_some_megabytes(tmp_path, item):
    """Below the bound of JSON the text is no measure: an empty list takes thirty times its own."""
    folder = save_head(tmp_path / "head")
    text = '{"slot_convention": [' + f"{item}," * ((MAX_JSON - 100) // (len(item.encode()) + 1)) + "0]}"
    assert 0.99 * MAX_JSON < (folder / "config.json").write_bytes(text.encode()) <= MAX_JSON
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    with pytest.raises(InvalidArtifact):
        load_folder(folder)
    assert peak() - before <= 64 * MAX_JSON


def peak() -> int:
    """Bytes that this process held at most since its peak was cleared."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def test_at_least_two_thousand_mutants_were_tried():
    """The families above, counted; skipped when some of them were not selected."""
    if len(TOTAL) < 8:
        pytest.skip(f"only {sorted(TOTAL)} ran")
    assert sum(TOTAL.values()) >= 2000, TOTAL
