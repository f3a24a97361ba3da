"""What goes wrong with the Hub, as one error that names repository, revision, file and remedy, and no secret."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from repairzoo.errors import HubError, InvalidArtifact, InvalidInput, RepairZooError

if TYPE_CHECKING:
    from repairzoo.hub import Source

_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=//)[^/\s]+(?=@)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_SYSTEM = re.compile(r"\(os error (\d+)\)")  # in what the Hub's storage client (hf_xet) says


@contextmanager
def told(
    source: Source,
    file: str | None = None,
    commit: str | None = None,
    token: str | bool | None = None,
    writing: bool = False,
    cache: Path | None = None,
) -> Iterator[None]:
    """What the Hub library raises, as one error that names everything. Only its calls belong inside.

    Any exception: its storage client raises bare ``RuntimeError``, and some of its own errors derive from nothing else.
    ``cache`` is the folder that is written to.
    """
    try:
        yield
    except (InvalidArtifact, InvalidInput):
        raise
    except Exception as error:
        words, unreachable, cause = _explained(error, source, writing, cache)
    else:
        return
    place = f"{source}:" + (f" file {file}" if file else "") + (f" at commit {commit}:" if commit else "")
    text = without_secrets(f"{place} {words}", token)
    raise HubError(text, unreachable=unreachable) from (None if _tells_secrets(cause, token) else cause)


def _explained(error: Exception, source: Source, writing: bool, cache: Path | None) -> tuple[str, bool, Exception]:
    """What happened and what helps; whether asking again later may help; the error."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "neither on the Hub nor in the cache", because of this
    endpoint, status = constants.ENDPOINT, getattr(getattr(error, "response", None), "status_code", None)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if status is not None:
        first = " ".join(str(error).split())[:400]  # what the Hub says stands below the library's own words
    login = "log in (hf auth login, or HF_TOKEN)"
    default = cache is None or cache == Path(constants.HF_HUB_CACHE).absolute()
    folder, setting = cache or constants.HF_HUB_CACHE, "HF_HUB_CACHE" if default else "cache_dir"
    storage = _SYSTEM.search(str(error)) if isinstance(error, RuntimeError) else None
    number = int(storage[1]) if storage else error.errno if isinstance(error, OSError) else None
    if writing and (isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403)):
        words = f"not allowed to write to {source.repo_id} at {endpoint}: {login} with a token that may ({first})"
    elif writing and str(error).startswith("Invalid metadata"):
        words = f"the Hub refuses the card's metadata ({' '.join(str(error).split())}): correct README.md"
    elif isinstance(error, errors.GatedRepoError):
        words = f"is gated: accept its terms at {endpoint}/{source.repo_id} and {login}"
    elif isinstance(error, errors.DisabledRepoError):
        words = "access to this repository was disabled on the Hub; use another one"
    elif isinstance(error, errors.RepositoryNotFoundError):
        words = (
            f"there is no such repository at {endpoint}, or it is private: check the name; if it is private, {login}"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        words = f"the repository has no branch, tag or commit {source.revision!r}: see {endpoint}/{source.repo_id}"
    elif isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        words = "the Hub lists this file and does not have it: try again, or take another revision"
    elif status == 401:
        words = f"the Hub does not accept the access token: {login}"
    elif status == 403:
        words = f"the access token may not do this ({first}): use one with the right permissions"
    elif status == 429:
        words = "too many requests for the Hub: wait a few minutes, and log in for a higher limit"
    elif status is not None and status < 500 and status != 408:
        words = f"the Hub answered with status {status} ({first}): what was asked for is not possible like this"
    elif status is not None:
        return f"the Hub answered with status {status} ({first}): try again later", True, error
    elif number in _FULL:
        words = (
            f"no room for the file in the cache {folder} ({first}): free some, or set {setting} to another disk; "
            "nothing was kept of it"
        )
    elif number in _CLOSED or isinstance(error, (NotADirectoryError, FileExistsError)):
        words = f"the cache {folder} cannot be written ({first}): set {setting} to a folder that can be"
    elif isinstance(error, errors.HFValidationError):
        words = f"no usable name ({first})"
    elif "Consistency check failed" in str(error) or isinstance(error, RepairZooError):
        words = f"the download broke off ({first}): try again; nothing was kept of it"
    elif isinstance(error, (OSError, RuntimeError)) or type(error).__module__.startswith(("httpx", "hf_xet")):
        kind = type(error).__name__
        words = (
            f"the connection to the Hub at {endpoint} failed ({kind}: {first}): check the network, the proxy and "
            f"HF_ENDPOINT, and {'push' if writing else 'try'} again; nothing was kept of unfinished files"
        )
        return words, True, error
    else:
        words = f"the answer of {endpoint} makes no sense ({type(error).__name__}: {first}): check HF_ENDPOINT"
    return words, False, error


def without_secrets(text: str, token: str | bool | None = None) -> str:
    """Text without access tokens and without passwords in addresses."""
    from huggingface_hub import get_token

    own = None
    with suppress(OSError):  # a file that only its owner may read
        own = get_token()
    for known in (token, own):
        if isinstance(known, str) and len(known) >= 4:
            text = text.replace(known, "***")
    return _SECRET.sub("***", text)


def _tells_secrets(error: BaseException | None, token: str | bool | None) -> bool:
    """Whether an error, or one of those that a traceback shows before it, holds what must not be printed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if without_secrets(str(error), token) != str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
