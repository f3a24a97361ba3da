"""A Hub on the loopback interface: the routes that the Hub library uses, spoken over HTTP, with faults on demand.

It keeps repositories as commits of whole trees. Files that end in ``.safetensors`` are told with their sha256, as large
files are on the Hub; all others with git's hash.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass
class Repo:
    """Commits are numbered trees; ``refs`` maps branches and tags to them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # of commits that came over HTTP

    def tree(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.refs.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None

    def commit(self, tree: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{branch}{sorted(tree)}".encode()).hexdigest()
        self.commits[sha], self.refs[branch] = dict(tree), sha
        return sha


@dataclass
class Fault:
    """What happens to the next ``times`` requests whose ``"METHOD path"`` matches ``pattern``.

    ``act(handler, body)`` returns the body to send, or None when it has answered (or hung up) itself.
    """

    pattern: str
    act: Callable[[Handler, bytes], bytes | None]
    times: int = 1_000_000


class LoopbackHub:
    """The server. ``requests`` holds ``(method, path, authorization)`` of every request since it was cleared."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens = {"hf_ownertokenownertoken": "owner"}
        self.requests: list[tuple[str, str, str | None]] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.hub = self  # type: ignore[attr-defined]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, repo_id: str, files: dict[str, bytes], branch: str = "main", **options: bool) -> str:
        """Commit a whole tree; returns the commit."""
        with self.lock:
            return self.repos.setdefault(repo_id, Repo(**options)).commit(files, branch)

    def inject(self, pattern: str, act: Callable[[Handler, bytes], bytes | None], times: int = 1_000_000) -> None:
        self.faults.append(Fault(pattern, act, times))

    def calm(self) -> None:
        """No more faults; an empty log."""
        with self.lock:
            self.faults.clear()
            self.requests.clear()

    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.requests]


# --- faults -----------------------------------------------------------------------------------------------------------
def status(code: int, **headers: str) -> Callable[[Handler, bytes], None]:
    return lambda handler, body: handler.answer(code, b'{"error": "injected"}', headers)


def cut(length: int) -> Callable[[Handler, bytes], None]:
    """The headers promise all of it; the connection ends after so many bytes."""

    def act(handler: Handler, body: bytes) -> None:
        handler.answer(200, body, handler.about, send=length)
        handler.hang_up()

    return act


def stall(length: int, seconds: float) -> Callable[[Handler, bytes], None]:
    """The first bytes, and then nothing for a while."""

    def act(handler: Handler, body: bytes) -> None:
        handler.answer(200, body, handler.about, send=length)
        time.sleep(seconds)
        handler.hang_up()

    return act


def shorter(length: int) -> Callable[[Handler, bytes], None]:
    """A truncated file that is sound HTTP."""
    return lambda handler, body: handler.answer(200, body[:length], handler.about)


def stored_elsewhere(handler: Handler, body: bytes) -> bytes:
    """The Hub's chunk storage (xet) keeps the file, as on the real Hub; here it answers 404."""
    route = "/".join(["/api/models", *handler.path.split("/")[1:3], "xet-read-token/main"])
    handler.about |= {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": handler.hub.endpoint + route}
    return body


def flip(handler: Handler, body: bytes) -> bytes:
    """The right size, another byte in the middle."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def hang_up(handler: Handler, body: bytes) -> None:
    handler.hang_up()


def slow(seconds: float) -> Callable[[Handler, bytes], bytes]:
    def act(handler: Handler, body: bytes) -> bytes:
        time.sleep(seconds)
        return body

    return act


def then(action: Callable[[], Any]) -> Callable[[Handler, bytes], bytes]:
    """Do something, such as committing, and answer as if nothing had happened."""

    def act(handler: Handler, body: bytes) -> bytes:
        action()
        return body

    return act


# --- the routes -------------------------------------------------------------------------------------------------------
def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_large(name) else git_hash(content)


def entry(name: str, content: bytes) -> dict[str, Any]:
    out: dict[str, Any] = {"size": len(content), "oid": git_hash(content)}
    if is_large(name):
        out["lfs"] = {
            "sha256": etag(name, content),
            "oid": etag(name, content),
            "size": len(content),
            "pointerSize": 130,
        }
    return out


def card_problems(text: str) -> list[str]:
    """What the Hub's metadata check refuses, as far as its documentation says."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return []
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata must be an object"]
    problems = []
    kinds = {"license": str, "library_name": str, "pipeline_tag": str, "tags": list, "base_model": (str, list),
             "base_model_relation": str, "model-index": list, "language": (str, list), "datasets": list}  # fmt: skip
    problems += [
        f'"{k}" has the wrong type' for k, kind in kinds.items() if k in data and not isinstance(data[k], kind)
    ]
    if data.get("base_model_relation") not in (None, "adapter", "merge", "quantized", "finetune"):
        problems.append('"base_model_relation" must be one of [adapter, merge, quantized, finetune]')
    for model in data.get("model-index") or []:
        if not isinstance(model.get("name"), str):
            problems.append('"model-index[0].name" is required')
        for result in model.get("results") or [{}]:
            if not isinstance(result.get("task", {}).get("type"), str):
                problems.append('"results[].task.type" is required')
            if not {"type", "name"} <= set(result.get("dataset", {})):
                problems.append('"results[].dataset" needs type and name')
            for metric in result.get("metrics") or [{}]:
                if not {"type", "value"} <= set(metric):
                    problems.append('"results[].metrics[]" needs type and value')
    return problems


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    about: dict[str, str]

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self.route()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # ---- answering
    def answer(
        self, code: int, body: bytes = b"", headers: dict[str, str] | None = None, send: int | None = None
    ) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if send is None else body[:send])
            self.wfile.flush()

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def error(self, code: int, kind: str | None = None, words: str = "no") -> None:
        headers = {"X-Error-Message": words} | ({"X-Error-Code": kind} if kind else {})
        self.answer(code, json.dumps({"error": words}).encode(), headers)

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            out = b""
            while size := int(self.rfile.readline(), 16):
                out += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return out
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def user(self) -> str | None:
        return self.hub.tokens.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def route(self) -> None:
        url = urlsplit(self.path)
        sent = self.content()
        self.about = {}
        with self.hub.lock:
            self.hub.requests.append((self.command, url.path, self.headers.get("Authorization")))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        query = parse_qs(url.query)
        try:
            found = self.find(parts, query, sent)
        except KeyError as missing:
            self.error(404, str(missing.args[0]))
            return
        if found is None:
            return
        code, body = found
        for fault in list(self.hub.faults):
            if fault.times and re.search(fault.pattern, f"{self.command} {url.path}"):
                fault.times -= 1
                changed = fault.act(self, body)
                if changed is None:
                    return
                body = changed
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if span and "resolve" in parts:
            start = int(span[1])
            self.about["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            code, body = 206, body[start:]
        self.answer(code, body, self.about)

    def find(self, parts: list[str], query: dict[str, list[str]], sent: bytes) -> tuple[int, bytes] | None:
        """Status and body, or None when it is answered already. ``KeyError("Kind")`` is that kind of 404."""
        if parts[:2] == ["api", "whoami-v2"]:
            if self.user() is None:
                return self.error(401, None, "Invalid username or password.")
            return 200, json.dumps({"name": self.user(), "type": "user"}).encode()
        if parts[:2] == ["api", "validate-yaml"]:
            problems = card_problems(json.loads(sent)["content"])
            body = {"errors": [{"message": p} for p in problems], "warnings": []}
            return 400 if problems else 200, json.dumps(body).encode()
        if parts[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(sent))
        if parts[:2] == ["api", "models"]:
            repo = self.repo("/".join(parts[2:4]))
            return None if repo is None else self.model(repo, parts, query, sent)
        if len(parts) >= 5 and parts[2] == "resolve":
            repo = self.repo("/".join(parts[:2]))
            return None if repo is None else self.resolve(repo, parts)
        raise KeyError("EntryNotFound")

    def repo(self, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and self.user() is None):
            self.error(401, "RepoNotFound", "Repository not found")
            return None
        return repo

    def create(self, asked: dict[str, Any]) -> tuple[int, bytes] | None:
        if self.user() is None:
            return self.error(401, None, "Invalid username or password.")
        owner = asked.get("organization") or self.user()
        if owner == "closed":
            return self.error(403, None, "You don't have the rights to create a model under this namespace")
        repo_id, code = f"{owner}/{asked['name']}", 200
        with self.hub.lock:
            if repo_id in self.hub.repos:
                code = 409
            else:
                repo = Repo(private=asked.get("private") or asked.get("visibility") == "private")
                repo.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
                self.hub.repos[repo_id] = repo
        return code, json.dumps({"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}).encode()

    def model(self, repo: Repo, parts: list[str], query: dict[str, list[str]], sent: bytes) -> tuple[int, bytes] | None:
        repo_id, what, revision = "/".join(parts[2:4]), (parts[4:5] or ["revision"])[0], (parts[5:6] or ["main"])[0]
        if what == "branch":
            if revision in repo.refs:
                return self.error(409, None, "Reference already exists")
            repo.refs[revision] = repo.refs["main"]
            return 201, b"{}"
        found = repo.tree(revision)
        if found is None:
            raise KeyError("RevisionNotFound")
        commit, tree = found
        if what == "revision":
            files = [
                {"rfilename": name}
                | ({k.replace("oid", "blobId"): v for k, v in entry(name, c).items()} if query.get("blobs") else {})
                for name, c in sorted(tree.items())
            ]
            body = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": repo.private, "siblings": files,
                    "tags": [], "downloads": 0, "likes": 0, "gated": repo.gated}  # fmt: skip
            return 200, json.dumps(body).encode()
        if what == "tree":
            files = [{"type": "file", "path": name, **entry(name, content)} for name, content in sorted(tree.items())]
            return 200, json.dumps(files).encode()
        if what == "xet-read-token":
            self.about = {"X-Xet-Cas-Url": f"{self.hub.endpoint}/storage", "X-Xet-Access-Token": "storagetoken",
                          "X-Xet-Token-Expiration": str(int(time.time()) + 3600)}  # fmt: skip
            return 200, b"{}"
        if self.user() is None:
            return self.error(401, None, "Invalid username or password.")
        if what == "preupload":
            known = {name: git_hash(content) for name, content in tree.items() if not is_large(name)}
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": known.get(f["path"])}
                for f in json.loads(sent)["files"]
            ]
            return 200, json.dumps({"files": files}).encode()
        if what == "commit":
            tree = dict(tree)
            for line in sent.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "header":
                    repo.messages.append(value["summary"])
                elif item["key"] == "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "deletedFile":
                    del tree[value["path"]]
            with self.hub.lock:
                sha = repo.commit(tree, revision)
            body = {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}"}
            return 200, json.dumps(body | {"hookOutput": ""}).encode()
        raise KeyError("EntryNotFound")

    def resolve(self, repo: Repo, parts: list[str]) -> tuple[int, bytes] | None:
        if repo.gated and self.user() is None:
            return self.error(403, "GatedRepo", "Access to this model is restricted")
        found, name = repo.tree(parts[3]), "/".join(parts[4:])
        if found is None:
            raise KeyError("RevisionNotFound")
        commit, tree = found
        self.about = {"X-Repo-Commit": commit}
        if name not in tree:
            raise KeyError("EntryNotFound")
        self.about |= {"ETag": f'"{etag(name, tree[name])}"', "Accept-Ranges": "bytes"}
        return 200, tree[name]
