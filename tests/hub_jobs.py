"""What the processes of the Hub's tests do; see ``hub_worker``."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, hf_hub_download

import repairzoo.backbones.dflash
import repairzoo.heads.dels
import repairzoo.load_parts
from repairzoo import hub
from repairzoo.artifact import tensors_hash

WARM = (HfApi, ModelCard, hf_hub_download)  # imported once, before the forks


def load(source, part="head", **options):
    """Load a head or a backbone; its tensors' hash, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = getattr(repairzoo, f"load_{part}")(source, **options)
    return {"hash": tensors_hash(loaded.state_dict()), "warnings": [str(w.message) for w in caught]}


def fetch(source, **options):
    folder = hub.fetch(hub.parse(source), **options)
    return {"folder": str(folder), "files": {name: (folder / name).stat().st_size for name in hub.names(folder)}}


def from_pretrained(base, source, **options):
    loaded = getattr(repairzoo, base).from_pretrained(source, **options)
    return {"type": type(loaded).__name__, "hash": tensors_hash(loaded.state_dict()), "info": loaded.info}


def push(folder, repo_id, base=None, **options):
    """Push a folder, or what was loaded from it (``base``: Head or Backbone)."""
    if base is None:
        made = hub.push(folder, repo_id, **options)
    else:
        made = getattr(repairzoo, base).from_pretrained(folder).push_to_hub(repo_id, **options)
    return {"oid": made.oid, "url": made.commit_url}


def command(args):
    """The console script in this process: exit code; what it prints is the job's output."""
    from typer.main import get_command

    from repairzoo.cli import app

    code = get_command(app).main(args, standalone_mode=False)
    sys.stdout.flush()
    return code


def info(source):
    return repairzoo.info(source)


def load_with_little_disk(source, limit, **options):
    """No file may grow beyond ``limit`` bytes: writing fails as on a full disk. Then the same with room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        load(source, **options)
    except repairzoo.HubError as error:
        told = str(error)
    else:
        told = None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = [p for p in Path(os.environ["HF_HOME"]).rglob("*") if p.suffix in (".incomplete", ".tmp")]
    return {"told": told, "left": [str(p) for p in left], **load(source, **options)}


@contextmanager
def unable_to_override(reading=False):
    """Let root meet file permissions too: CAP_DAC_OVERRIDE (1) leaves the effective set of this thread's children.

    ``reading``: CAP_DAC_READ_SEARCH (2) as well.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] &= ~0b110 if reading else ~0b10
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0


def load_from_closed_cache(first, then, **options):
    """Fill the cache with ``first``, forbid all writing, load it again and then ``then``."""
    out = {"filled": load(first, **options)["hash"]}
    home = Path(os.environ["HF_HOME"])
    folders = [home, *(p for p in home.rglob("*") if p.is_dir() and not p.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        with unable_to_override():
            try:
                (home / "probe").touch()
                out["closed"] = False
            except PermissionError:
                out["closed"] = True
            out["again"] = load(first, **options)["hash"]
            try:
                load(then, **options)
            except repairzoo.HubError as error:
                out["told"] = str(error)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    return out


def load_from_forbidden_cache(source, **options):
    """Fill the cache, then let nobody look into it; what is told."""
    load(source, **options)
    home = Path(os.environ["HF_HOME"])
    home.chmod(0)
    try:
        with unable_to_override(reading=True):
            load(source, **options)
    except repairzoo.HubError as error:
        return str(error)
    finally:
        home.chmod(0o755)


def threads(source, count, **options):
    """Load in many threads of one process at once."""
    results = []

    def one():
        try:
            results.append(load(source, **options)["hash"])
        except Exception as error:
            results.append(repr(error))

    started = [threading.Thread(target=one) for _ in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return results


def decode(sources, prompt):
    """Tokens of a tiny random target with each ``(backbone, head)``, and of plain decoding."""
    from conftest import causal_lm

    target = repairzoo.Target(causal_lm(), None, name="owner/toy")
    out = []
    for backbone, head in sources:
        zoo = repairzoo.build(backbone, head=head, target=target)
        made = zoo.generate([prompt], max_new_tokens=16)
        out.append([made.token_ids[0], made.stats.accepted])
    return {"tokens": out, "plain": repairzoo.autoregressive(target, [prompt], max_new_tokens=16).token_ids[0]}


def decode_default(sources, prompt="A train leaves at 9:40 and arrives at 13:05.", new=32):
    """Tokens and accepted lengths on the default target, for ``(backbone, head)`` each."""
    target = repairzoo.load_target(dtype="float32")
    out = []
    for backbone, head in sources:
        made = repairzoo.build(backbone, head=head, target=target).generate(prompt, max_new_tokens=new)
        out.append([made.token_ids[0], made.stats.accepted])
    return {"tokens": out, "plain": repairzoo.autoregressive(target, prompt, max_new_tokens=new).token_ids[0]}
