"""What a figure depends on besides the code under test: versions, hardware, commit, weights, bandwidth and rate."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from repairzoo.artifact import fingerprint, tensors_hash
from repairzoo.bench.clock import synchronise
from repairzoo.target import Target

RESULTS = "benchmarks/results"
_PACKAGES = ("torch", "transformers", "safetensors", "repairzoo", "dflash", "flashspec")


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, processor, threads and GPU of this process; JSON values."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    cuda = device.type == "cuda" if device is not None else torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": packages(),
        "commit": commit(),
        "cpu": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that this package runs from, with ``+`` where tracked files differ from it; None outside git.

    Results do not count: a run that replaces a committed raw file would mark itself.
    """
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            out = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or here.parent.parent != Path(top).resolve():  # installed inside somebody else's repository
        return None
    head, changes = (
        git("rev-parse", "HEAD"),
        git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){RESULTS}"),
    )
    return None if head is None else head + ("+" if changes else "")


def weights_hash(part: Any) -> str | None:
    """sha256 of the tensors of a backbone or head; None where it has none."""
    if not isinstance(part, torch.nn.Module):
        return None
    state = part.state_dict()
    return tensors_hash(state) if state else None


def target_facts(target: Target) -> dict[str, Any]:
    return {
        "id": target.name,
        "revision": target.revision,
        "source": target.source,
        "fingerprint": fingerprint(target.model),
    }


def measured_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> dict[str, float]:
    """Bytes per second of a large copy (read and write counted) and operations per second of a large product.

    Both are the best of several passes: floors are computed from them.
    """
    cuda = device.type == "cuda"
    source = torch.empty((1 << 28) if cuda else (1 << 25), dtype=torch.uint8, device=device).fill_(1)
    sink = torch.empty_like(source)
    copied = _best(lambda: sink.copy_(source), device, seconds)
    n = 4096 if cuda else 768
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    product = _best(lambda: a @ b, device, seconds)
    return {"bytes_per_second": 2 * source.numel() / copied, "operations_per_second": 2 * n**3 / product}


def _best(run: Any, device: torch.device, seconds: float) -> float:
    run()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best
