"""What goes wrong with the Hub, as one error that names repository, revision, file and remedy, and no secret."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from repairzoo.errors import HubError, RepairZooError

if TYPE_CHECKING:
    from repairzoo.hub import Source

_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=//)[^/@\s:]+:[^/@\s]+(?=@)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def told(
    source: Source,
    file: str | None = None,
    commit: str | None = None,
    token: str | bool | None = None,
    writing: bool = False,
) -> Iterator[None]:
    """What the Hub library raises, as one error that names everything. Only its calls belong inside."""
    try:
        yield
    except (RepairZooError, OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        found = _explained(error, source, writing)
    except Exception as error:
        if not type(error).__module__.partition(".")[0].startswith("httpx"):
            raise
        found = _explained(error, source, writing)
    else:
        return
    words, unreachable, cause = found
    place = f"{source}:" + (f" file {file}" if file else "") + (f" at commit {commit}:" if commit else "")
    text = _without_secrets(f"{place} {words}", token)
    hidden = _without_secrets(str(cause), token) != str(cause)
    raise HubError(text, unreachable=unreachable) from (None if hidden else cause)


def _explained(error: Exception, source: Source, writing: bool) -> tuple[str, bool, Exception]:
    """What happened and what helps; whether asking again later may help; the error."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "neither on the Hub nor in the cache", because of this
    endpoint, status = constants.ENDPOINT, getattr(getattr(error, "response", None), "status_code", None)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    login = "log in (hf auth login, or HF_TOKEN)"
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
    elif status is not None:
        return f"the Hub answered with status {status} ({first}): try again later", status >= 500, error
    elif isinstance(error, OSError) and error.errno in _FULL:
        words = (
            f"no room for the file in the cache {constants.HF_HUB_CACHE} ({first}): free some, or set HF_HUB_CACHE to "
            "another disk; nothing was kept of it"
        )
    elif isinstance(error, OSError) and (
        error.errno in _CLOSED or isinstance(error, (NotADirectoryError, FileExistsError))
    ):
        words = (
            f"the cache {constants.HF_HUB_CACHE} cannot be written ({first}): set HF_HUB_CACHE to a folder that can be"
        )
    elif isinstance(error, errors.HFValidationError):
        words = f"no usable name ({first})"
    elif "Consistency check failed" in str(error) or isinstance(error, RepairZooError):
        words = f"the download broke off ({first}): try again; nothing was kept of it"
    elif isinstance(error, (OSError, errors.OfflineModeIsEnabled)) or type(error).__module__.startswith("httpx"):
        kind = type(error).__name__
        words = (
            f"the connection to the Hub at {endpoint} failed ({kind}: {first}): check the network, the proxy and "
            "HF_ENDPOINT, and try again; nothing was kept of unfinished files"
        )
        return words, True, error
    else:
        words = f"the answer of {endpoint} makes no sense ({type(error).__name__}: {first}): check HF_ENDPOINT"
    return words, False, error


def _without_secrets(text: str, token: str | bool | None = None) -> str:
    """Text without access tokens and without passwords in addresses."""
    for known in (token, os.environ.get("HF_TOKEN"), os.environ.get("HUGGING_FACE_HUB_TOKEN")):
        if isinstance(known, str) and len(known) >= 4:
            text = text.replace(known, "***")
    return _SECRET.sub("***", text)
