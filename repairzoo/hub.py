"""Artifacts on the Hugging Face Hub: one revision, one commit, one allow-listed set of files, nothing executable.

The Hub library carries the bytes, with its own settings (``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, proxies). What is decided here: a revision is resolved once, and every file comes from the commit
that it named then; a commit that is in the cache needs no request; each file is held to the hash that the Hub states
for it before anything reads it; and whatever goes wrong is one error that names repository, revision, file and remedy.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from repairzoo.errors import HubError, InvalidArtifact, InvalidInput
from repairzoo.hub_errors import told, without_secrets

PREFIX = "hf:"
CONFIG, CARD = "config.json", "README.md"
HEAD, WHOLE, INDEX = "head.safetensors", "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
WEIGHTS = (HEAD, WHOLE, INDEX, SHARDS)
# all that ever travels, in either direction
FILES = (CONFIG, CARD, *WEIGHTS, "recipe*.yaml", "train_log*.jsonl", "corpus_manifest.json")
TIMEOUT = 10.0  # seconds without an answer about a revision
OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "config_only")  # of ``fetch``
PUSH_OPTIONS = ("revision", "private", "token", "commit_message", "create_pr")

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Source:
    """A repository and a revision: a branch, a tag or a commit. Raises ``InvalidInput`` for what can be neither."""

    repo_id: str
    revision: str = "main"

    def __post_init__(self) -> None:
        name, revision = self.repo_id, self.revision
        id_like = isinstance(name, str) and _ID.fullmatch(name)
        if not id_like or ".." in name or "--" in name or name.endswith((".", "-", ".git")):
            raise InvalidInput(f"{without_secrets(repr(name))} is no Hub id: give owner/name or hf:owner/name@revision")
        like = isinstance(revision, str) and _REVISION.fullmatch(revision)
        if not like or ".." in revision or "//" in revision or revision.endswith(("/", ".")):
            raise InvalidInput(
                f"revision {without_secrets(repr(revision))} of {name} is no branch, tag or commit (None: main)"
            )

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo_id}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The commit that the revision states itself; None for a branch or tag."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None


def is_hub(source: str | Path) -> bool:
    """``hf:…``, or an id ``owner/name`` (perhaps ``@revision``) where no such folder lies."""
    if not isinstance(source, str):
        return False
    plain = source.partition("@")[0]
    return source.startswith(PREFIX) or (bool(_ID.fullmatch(plain)) and not os.path.exists(source))


def parse(source: str, revision: str | None = None) -> Source:
    """``hf:owner/name@revision``, where the prefix and the revision may be absent.

    Raises:
        InvalidInput: no such form, or two different revisions.
    """
    name, at, stated = source.removeprefix(PREFIX).partition("@")
    if name.startswith("//"):
        raise InvalidInput(f"{source!r}: write hf:owner/name@revision, without slashes after the colon")
    if at and not stated:
        raise InvalidInput(f"{source!r}: nothing follows the @; name a branch, tag or commit, or leave it out")
    if stated and revision not in (None, stated):
        raise InvalidInput(f"{source!r} states one revision and revision={revision!r} another; give one")
    return Source(name, stated or ("main" if revision is None else revision))


# --- reading ----------------------------------------------------------------------------------------------------------


def fetch(
    source: Source,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    config_only: bool = False,
) -> Path:
    """The folder of one commit in the Hub library's cache, with every allow-listed file of it.

    A commit that is in the cache costs no request. A branch or tag costs one; if the Hub cannot be reached, the commit
    that it named when it was last asked is used, with a warning.

    Args:
        source: repository and revision.
        token: None for the one that the Hub library finds, False for none.
        cache_dir: None for the Hub library's own.
        local_files_only: no request at all, as with ``HF_HUB_OFFLINE``.
        force_download: fetch files that are in the cache too.
        config_only: the config and the card are enough.

    Returns:
        the folder; its name is the commit.

    Raises:
        HubError: not found, private, gated, not reachable, interrupted, damaged on the way, no room, no permission.
        InvalidArtifact: the repository holds no artifact.
    """
    from huggingface_hub import HfApi, is_offline_mode

    root, commit = _root(source, cache_dir), source.commit
    if commit is not None and not force_download and _complete(root / "snapshots" / commit, config_only):
        return root / "snapshots" / commit
    if force_download and (local_files_only or is_offline_mode()):
        raise HubError(
            f"{source}: cannot be fetched again while the Hub is switched off (HF_HUB_OFFLINE or local_files_only): "
            "leave force_download (--force) out, or switch it on"
        )
    if local_files_only or is_offline_mode():
        known = commit or _ref(root, source.revision)
        if known is not None and _complete(root / "snapshots" / known, config_only):
            return root / "snapshots" / known
        raise HubError(
            f"{source}: {'no such commit' if known is None else 'not the whole of it'} in the cache {root.parent}, and "
            "the Hub is switched off (HF_HUB_OFFLINE or local_files_only): pull it once with a connection, or give "
            "the folder of a copy"
        )
    api = HfApi(token=token, library_name="repairzoo", library_version=version("repairzoo"))
    try:
        with told(source, token=token):
            info = api.model_info(source.repo_id, revision=source.revision, files_metadata=True, timeout=TIMEOUT)
            files = _listing(api, source, info)
    except HubError as error:
        known = None if commit or force_download or not error.unreachable else _ref(root, source.revision)
        if known is None or not _complete(root / "snapshots" / known, config_only):
            raise
        warnings.warn(f"{error} Using commit {known} from the cache meanwhile.", stacklevel=3)
        return root / "snapshots" / known
    sha = info.sha
    if not isinstance(sha, str) or not _COMMIT.fullmatch(sha) or commit not in (None, sha):
        raise HubError(f"{source}: the Hub answers with commit {sha!r}, which cannot be; check HF_ENDPOINT")
    _refuse_other(source, sha, files)
    folder = root / "snapshots" / sha

    def get(name: str) -> None:
        if force_download or not os.path.isfile(folder / name):
            _download(source, sha, name, files[name], folder, token, cache_dir, force_download)

    get(CONFIG)  # first: what does not fit is refused before the weights come
    with blaming(folder):
        check_config_file(folder)
    patterns = _patterns(folder)
    if not any(fnmatchcase(name, pattern) for name in files for pattern in patterns):
        raise InvalidArtifact(f"{source} at commit {sha}: has no {patterns[0]}, which its {CONFIG} belongs to")
    for name in sorted(files.keys() - {CONFIG}):
        others = any(fnmatchcase(name, pattern) for pattern in WEIGHTS if pattern not in patterns)
        if name == CARD if config_only else _allowed(name) and not others:
            get(name)
    known = _ref(root, source.revision)
    if known is None or _complete(folder) or not _complete(root / "snapshots" / known):
        _write_ref(root, source.revision, sha)  # not a config alone over a whole commit: that one loads offline
    return folder


def locate(source: str | Path, revision: str | None = None, **options: Any) -> Path:
    """A folder as it is, or that of a Hub source; ``options`` are those of :func:`fetch`.

    Raises:
        InvalidInput: a revision of a folder, an unknown option. InvalidArtifact: no such folder. HubError: see
            :func:`fetch`.
    """
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise InvalidInput(f"unknown options {', '.join(unknown)} for {source}; there are {', '.join(OPTIONS)}")
    if is_hub(source):
        return fetch(parse(str(source), revision), **options)
    folder = Path(source).expanduser()
    if not os.path.isdir(folder):
        what = "is an address" if "://" in str(source) else "there is no such folder"
        raise InvalidArtifact(
            f"{without_secrets(str(source))}: {what}; on the Hub it would be owner/name or hf:owner/name@revision"
        )
    if revision is not None:
        raise InvalidInput(f"revision={revision!r}: {source} is a folder and has none; leave it out")
    return folder


def check_config_file(folder: Path) -> dict[str, Any]:
    """The checked keys that every artifact states, of a head or a backbone, without its weights.

    Returns:
        ``artifact.COMMON_KEYS`` and, for a head, its own; ``target`` is None for a published draft that states none.

    Raises:
        InvalidArtifact: neither a head nor a backbone, or one that this version does not read.
    """
    from repairzoo import statement
    from repairzoo.artifact import read_config
    from repairzoo.registry import registry
    from repairzoo.resolve import resolve
    from repairzoo.safe_file import read_json

    if _states_head(read_json(folder / CONFIG)):
        return read_config(folder)
    try:
        kind = resolve(folder).kind
    except (InvalidArtifact, TypeError) as error:  # a list where a name belongs
        raise InvalidArtifact(
            f"{folder / CONFIG}: neither the config of a head, which states 'slot_convention', nor of a draft: {error}"
        ) from error
    config = registry().get("backbone", kind).load().read_config(folder)
    return statement.common(config, kind)


def read_info(folder: Path) -> dict[str, Any]:
    """The informational part of the config of a head or a backbone; empty where there is none."""
    from repairzoo.safe_file import read_json

    raw = read_json(folder / CONFIG)
    place = raw if _states_head(raw) else raw.get("repairzoo") or {}
    return dict(place.get("info") or {})


def _states_head(raw: Any) -> bool:
    """Whether a parsed config is a head's: published drafts leave their slot convention to their code."""
    return isinstance(raw, dict) and "slot_convention" in raw


def _patterns(folder: Path) -> tuple[str, ...]:
    """Names of the weights that belong to the config of a folder.

    Raises:
        InvalidArtifact: a config that cannot be read.
    """
    from repairzoo.safe_file import read_json

    return (HEAD,) if _states_head(read_json(folder / CONFIG)) else (WHOLE, INDEX, SHARDS)


@contextmanager
def blaming(folder: Path) -> Iterator[None]:
    """Say of a bad artifact from the Hub whose fault it is, and remove what was damaged here, so that a retry works."""
    try:
        yield
    except InvalidArtifact as error:
        found = _snapshot(folder)
        if found is None:
            raise
        repo_id, commit = found
        if damaged := [name for name in names(folder) if _damaged(folder / name) and _evict(folder / name)]:
            raise InvalidArtifact(
                f"{error} — {repo_id} at commit {commit}: the cache's copy of {', '.join(damaged)} was damaged and is "
                "removed now: load it again, and it is fetched again"
            ) from error
        raise InvalidArtifact(
            f"{error} — this is what {repo_id} holds at commit {commit}: take another revision, or tell its owner "
            "(a damaged cache is ruled out by: repairzoo pull --force)"
        ) from error


def _refuse_other(source: Source, commit: str, files: dict[str, _Stated]) -> None:
    """Refuse a listing without a config or without safetensors, before anything is fetched."""
    from repairzoo.safe_file import MAX_JSON

    where = f"{source} at commit {commit}"
    if CONFIG not in files:
        raise InvalidArtifact(f"{where}: has no {CONFIG}, so it is no head or backbone; name another repository")
    if (files[CONFIG].size or 0) > MAX_JSON:
        raise InvalidArtifact(f"{where}: {CONFIG} has {files[CONFIG].size} bytes, so it is no head or backbone")
    if not any(fnmatchcase(name, pattern) for name in files for pattern in WEIGHTS):
        pickles = sorted(name for name in files if name.endswith(_PICKLES))
        if pickles:
            raise InvalidArtifact(
                f"{where}: has no safetensors, only {', '.join(pickles)}, which are never fetched or unpickled; ask "
                "its owner for safetensors, or download it yourself and use `repairzoo convert`"
            )
        raise InvalidArtifact(f"{where}: has no {HEAD} or {WHOLE}, so it is no head or backbone")


@dataclass(frozen=True, slots=True)
class _Stated:
    """What the Hub says of a file: its size, and its hash (git's for plain files, sha256 for large ones)."""

    size: int | None
    digest: str | None


def _listing(api: Any, source: Source, info: Any) -> dict[str, _Stated]:
    entries = [(f.rfilename, f.size, f.blob_id, f.lfs) for f in info.siblings or ()]
    if not entries:  # an endpoint that lists files elsewhere
        tree = api.list_repo_tree(source.repo_id, recursive=True, revision=info.sha)
        entries = [(f.path, f.size, f.blob_id, f.lfs) for f in tree if hasattr(f, "blob_id")]
    out: dict[str, _Stated] = {}
    for name, size, blob, lfs in entries:
        digest = lfs.sha256 if lfs else blob
        if not isinstance(name, str) or not isinstance(size, (int, type(None))) or not isinstance(digest, str | None):
            raise TypeError(f"a listed file states {name!r}, {size!r}, {digest!r}")
        out[name] = _Stated(size, digest)
    return out


def _download(
    source: Source,
    commit: str,
    name: str,
    stated: _Stated,
    folder: Path,
    token: str | bool | None,
    cache_dir: str | Path | None,
    force: bool,
) -> None:
    from huggingface_hub import hf_hub_download

    with told(source, name, commit, token, cache=_root(source, cache_dir).parent):
        got = hf_hub_download(
            source.repo_id,
            name,
            revision=commit,
            cache_dir=cache_dir,
            force_download=force,
            token=token,
            library_name="repairzoo",
            library_version=version("repairzoo"),
            tqdm_class=_patient(),
        )
    if Path(got).parent.name != commit:
        raise HubError(
            f"{source}: file {name}: asked for commit {commit}, the Hub sent {Path(got).parent.name}: try again, and "
            "check HF_ENDPOINT"
        )
    path = folder / name
    if (
        (stated.size is not None and path.stat().st_size != stated.size)
        or _differs(path, stated.digest)
        or _damaged(path)
    ):
        _evict(path)
        raise HubError(
            f"{source}: file {name} of commit {commit} arrived damaged: its hash is not what the Hub states. The "
            "copy is removed: try again"
        )


def _patient() -> Any:
    """A progress bar that ends a download which begins anew again and again; the Hub library would go on for ever."""
    from huggingface_hub.utils import tqdm

    class Patient(tqdm):  # type: ignore[misc]
        restarts = 0

        def update(self, n: float | None = 1) -> bool | None:
            if n is not None and n < 0:
                self.restarts += 1
                if self.restarts > 3:
                    raise HubError("the connection breaks off in the middle of the file, every time")
            return super().update(n)

    return Patient


def _root(source: Source, cache_dir: str | Path | None) -> Path:
    from huggingface_hub import constants

    base = Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser().absolute()
    return base / f"models--{source.repo_id.replace('/', '--')}"


def _allowed(name: str) -> bool:
    return "/" not in name and "\\" not in name and any(fnmatchcase(name, pattern) for pattern in FILES)


def names(folder: Path) -> list[str]:
    """Allow-listed files that lie in a folder."""
    return sorted(path.name for path in folder.iterdir() if _allowed(path.name)) if folder.is_dir() else []


def _complete(folder: Path, config_only: bool = False) -> bool:
    """Whether the config and all weights are there; an interrupted download leaves a folder too."""
    from repairzoo.safe_file import read_json

    if config_only or not os.path.isfile(folder / CONFIG):
        return os.path.isfile(folder / CONFIG)
    try:
        if _patterns(folder) == (HEAD,):
            return os.path.isfile(folder / HEAD)
        if not os.path.isfile(folder / INDEX):
            return os.path.isfile(folder / WHOLE)
        shards = set(read_json(folder / INDEX)["weight_map"].values())
        return bool(shards) and all(os.path.isfile(folder / Path(shard).name) for shard in shards)
    except InvalidArtifact:
        return any(os.path.isfile(folder / name) for name in (HEAD, WHOLE, INDEX))  # what reads it says what is wrong
    except (TypeError, KeyError, AttributeError):
        return False


def _ref(root: Path, revision: str) -> str | None:
    """The commit that a branch or tag named when the Hub was last asked."""
    try:
        commit = (root / "refs" / revision).read_text(encoding="ascii").strip()  # some tools end the line
    except (OSError, UnicodeDecodeError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _write_ref(root: Path, revision: str, commit: str) -> None:
    """Remember for the next time without a connection what a branch or tag names; as the Hub library does it."""
    if revision == commit or _ref(root, revision) == commit:
        return
    path = root / "refs" / revision
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    with suppress(OSError):  # a cache that cannot be written was complete before
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(commit, encoding="ascii")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _snapshot(folder: Path) -> tuple[str, str] | None:
    """Repository and commit of a folder in a Hub cache; None for any other."""
    folder = folder.absolute()
    name = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not name.startswith("models--") or not _COMMIT.fullmatch(folder.name):
        return None
    return name.removeprefix("models--").replace("--", "/"), folder.name


def _differs(path: Path, digest: str | None) -> bool:
    """Whether a file has another hash than this one: sha1 (40 digits; git's or plain) or sha256 (64)."""
    if digest is None or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
        return False
    if len(digest) == 64:
        found = [hashlib.sha256()]
    else:
        starts = (b"blob %d\0" % path.stat().st_size, b"")
        found = [hashlib.sha1(start, usedforsecurity=False) for start in starts]
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            for each in found:
                each.update(chunk)
    return digest not in [each.hexdigest() for each in found]


def _links(path: Path) -> list[Path]:
    """A file and what it links to, one after the other.

    The cache keeps a file in ``blobs`` of its repository, named by its hash; version 2 of the Hub library may keep a
    link there, to a file that repositories share: ``blobs/xx/…`` beside them, with a name that is no hash of its bytes.
    """
    chain = [path]
    while chain[-1].is_symlink() and len(chain) < 8:
        chain.append(chain[-1].parent / os.readlink(chain[-1]))
    return chain


def _damaged(path: Path) -> bool:
    """Whether a file of the cache is not what its name there says."""
    try:
        return any(blob.parent.name == "blobs" and _differs(path, blob.name) for blob in _links(path)[1:])
    except OSError:
        return False


def _evict(path: Path) -> bool:
    """Remove a file of the cache and what it links to; whether that worked."""
    try:
        for place in reversed(_links(path)):
            if place == path or "blobs" in (place.parent.name, place.parent.parent.name):
                place.unlink(missing_ok=True)
    except OSError:
        return False
    return True


# --- writing ----------------------------------------------------------------------------------------------------------


def push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> Any:
    """Publish an artifact in one commit, so that no reader ever sees half of it.

    The artifact is loaded strictly first; only allow-listed files travel. Weights that the repository holds under other
    names are removed in the same commit. A folder without a card gets one, or keeps the text that the repository has.

    Args:
        folder: what ``save_pretrained`` or training wrote.
        repo_id: ``owner/name``; made if it does not exist.
        revision: a branch, made if it does not exist; None for ``main``.
        private: of a new repository; None for the owner's default.
        commit_message: None says what it is. create_pr: propose the commit instead of making it.

    Returns:
        ``huggingface_hub.CommitInfo``: ``oid`` is the commit, ``commit_url`` its address.

    Raises:
        InvalidArtifact: the folder holds no sound artifact, or what looks like an access token.
        HubError: the Hub refuses it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from repairzoo.card import for_repository

    place, folder = Source(repo_id, revision or "main"), Path(folder)
    contents = prepared(folder, repo_id)
    kind = check_config_file(folder)["kind"]
    api = HfApi(token=token, library_name="repairzoo", library_version=version("repairzoo"))
    with told(place, token=token, writing=True):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        present = api.list_repo_files(repo_id, revision=place.revision)
        _refuse_foreign(place, present, token)
        if CARD in present:
            contents[CARD] = for_repository(folder, repo_id, _card_there(place, token)).encode()
        stale = [name for name in present if any(fnmatchcase(name, w) for w in WEIGHTS) and name not in contents]
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=commit_message or f"{kind}, written by repairzoo {version('repairzoo')}",
            revision=revision,
            create_pr=create_pr,
        )


def _card_there(place: Source, token: str | bool | None) -> str:
    """The card that the repository has, not by way of the cache."""
    from huggingface_hub import hf_hub_download

    with TemporaryDirectory() as room:
        path = hf_hub_download(place.repo_id, CARD, revision=place.revision, token=token, cache_dir=room)
        return Path(path).read_bytes().decode("utf-8-sig", "replace")


def _refuse_foreign(place: Source, present: list[str], token: str | bool | None) -> None:
    """Refuse to write over another model: its config would be replaced and its weights removed.

    Raises:
        InvalidInput: the repository's config is that of a model, and of no draft.
    """
    from huggingface_hub import hf_hub_download

    from repairzoo.resolve import resolve_config
    from repairzoo.safe_file import read_json

    if CONFIG not in present:
        return
    with TemporaryDirectory() as room, suppress(InvalidArtifact):
        path = hf_hub_download(place.repo_id, CONFIG, revision=place.revision, token=token, cache_dir=room)
        raw = read_json(path)
        if not isinstance(raw, dict) or not {"model_type", "architectures"} & raw.keys():
            return
        try:
            resolve_config(raw)
        except (InvalidArtifact, TypeError) as error:
            raise InvalidInput(
                f"{place} holds another model ({raw.get('architectures') or raw['model_type']!r}), which would be "
                "written over; name another repository"
            ) from error


def prepared(folder: Path, repo_id: str) -> dict[str, bytes | str]:
    """What would travel, by name: paths, and the text of the card. The artifact is loaded strictly.

    Raises:
        InvalidArtifact: see :func:`push`.
    """
    from repairzoo.card import for_repository
    from repairzoo.load_parts import load_folder

    Source(repo_id)
    contents: dict[str, bytes | str] = {name: str(folder / name) for name in outgoing(folder)}
    load_folder(folder)
    return contents | {CARD: for_repository(folder, repo_id).encode()}


def shipped() -> list[tuple[str, Path]]:
    """Repository names and folders of all weights that this installation carries, in the order of the registry."""
    from repairzoo.registry import registry

    known, found = registry(), {}
    for pair in known.pairs:
        for part in pair.weights:
            folder = known.weights(pair, part)
            if isinstance(folder, Path) and (folder / CONFIG).is_file():
                found.setdefault(folder, f"repairzoo-{getattr(pair, part)}-{folder.name}")
    return [(name, folder) for folder, name in found.items()]


def copy_to(folder: Path, out: Path) -> None:
    """Copy an artifact's files into a new folder, which appears complete or not at all.

    Raises:
        HubError: no room, no permission, or it exists.
    """
    place = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    try:
        place.mkdir(parents=True)
        for name in names(folder):
            shutil.copyfile(folder / name, place / name)
        os.rename(place, out)
    except OSError as error:
        raise HubError(f"{out}: cannot be written ({error}); nothing was kept of it") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def full_id(repo_id: str, token: str | bool | None = None) -> str:
    """``owner/name``; a name alone belongs to the owner of the access token.

    Raises:
        HubError: there is no token to ask whose it is.
    """
    from huggingface_hub import HfApi

    if "/" in repo_id:
        return repo_id
    with told(Source(f"me/{repo_id}"), token=token, writing=True):
        return f"{HfApi(token=token).whoami()['name']}/{repo_id}"


def outgoing(folder: Path) -> list[str]:
    """Names of the files of an artifact's folder that may travel.

    Raises:
        InvalidArtifact: no such folder, a link to a file that lies elsewhere, a text that holds an access token.
    """
    if not folder.is_dir():
        raise InvalidArtifact(f"{folder}: there is no such folder; name the folder of a head or a backbone")
    found = names(folder)
    homes = {folder.resolve()}
    if _snapshot(folder) is not None:
        root = folder.absolute().parent.parent.resolve()
        homes = {root, root.parent / "blobs"}
    for name in found:
        path = folder / name
        if not os.path.isfile(path) or homes.isdisjoint(path.resolve().parents):
            raise InvalidArtifact(f"{path}: is no file of this folder; put a copy in its place")
        if not name.endswith(".safetensors") and re.search(rb"hf_[A-Za-z0-9]{20,}", path.read_bytes()):
            raise InvalidArtifact(f"{path}: holds what looks like an access token; remove it, and revoke the token")
    return found


def describe(source: str | Path, revision: str | None = None, **options: Any) -> dict[str, Any]:
    """What a Hub repository or a folder holds, told by its config and its card; no weights are fetched.

    Returns:
        plain values, ready for JSON: ``kind`` (``"head"`` or ``"backbone"``), ``name``, where it comes from, the keys
        of the config, and what the card states of licence and measurements.

    Raises:
        HubError, InvalidArtifact, InvalidInput: see :func:`fetch`.
    """
    from repairzoo.card import read_card

    hub = parse(str(source), revision) if is_hub(source) else None
    folder = locate(source, revision, **(options | {"config_only": True} if hub else {}))
    with blaming(folder):
        config = check_config_file(folder)
    is_head = _patterns(folder) == (HEAD,)
    out: dict[str, Any] = {"kind": "head" if is_head else "backbone", "name": config["kind"]}
    if hub is None:
        out["folder"] = str(folder)
    else:
        out |= {"repository": hub.repo_id, "revision": hub.revision, "commit": folder.name}
    out |= {key: value for key, value in config.items() if key != "kind"}
    return out | read_card(folder) | {"pairs": []}
