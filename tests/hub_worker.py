"""Fresh processes for the Hub's tests, quickly: a parent that has imported torch forks one for every job.

The Hub library reads its settings when it is imported: a job's are read by loading the module of its settings again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Job:
    def __init__(self, out: Path) -> None:
        self.out = out

    def wait(self, seconds: float = 600) -> dict[str, Any]:
        """``{"value": …}`` or ``{"error": class names, "message": …}``, and ``"output"``: all that was printed."""
        end = time.monotonic() + seconds
        while not self.out.exists():
            assert time.monotonic() < end, f"no end after {seconds} s: {self.log()}"
            time.sleep(0.01)
        return json.loads(self.out.read_text()) | {"output": self.log()}

    def kill(self) -> None:
        """As the system does it that runs out of memory; the job has begun by now."""
        os.kill(int(self.out.with_suffix(".pid").read_text()), signal.SIGKILL)

    def log(self) -> str:
        path = self.out.with_suffix(".log")
        return path.read_text(errors="replace") if path.exists() else ""

    def value(self) -> Any:
        result = self.wait()
        assert "value" in result, result["message"] + result["output"]
        return result["value"]

    def error(self) -> tuple[list[str], str]:
        result = self.wait()
        assert "error" in result, result
        return result["error"], result["message"]


class Worker:
    """``run("function of hub_jobs", env, …)`` in a new process."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.count = folder, 0
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.env = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import hub_worker; hub_worker.serve()"],
            stdin=subprocess.PIPE,
            text=True,
            env=clean | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        )

    def start(self, call: str, env: dict[str, str] | None = None, **args: Any) -> Job:
        self.count += 1
        out = self.folder / f"job{self.count}.json"
        home = {"HF_HOME": str(self.folder / f"home{self.count}")}
        job = {"out": str(out), "env": self.env | home | (env or {}), "call": call, "args": args}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return Job(out)

    def run(self, call: str, env: dict[str, str] | None = None, **args: Any) -> Any:
        return self.start(call, env, **args).value()

    def fail(self, call: str, env: dict[str, str] | None = None, **args: Any) -> tuple[list[str], str]:
        return self.start(call, env, **args).error()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()  # it holds nothing, and leaving Python takes a while
        self.process.wait()


def serve() -> None:
    """The parent: one line of JSON a job."""
    importlib.import_module("hub_jobs")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(BaseException):
                _child(json.loads(line))
            os._exit(0)


def _child(job: dict[str, Any]) -> None:
    out = Path(job["out"])
    out.with_suffix(".pid").write_text(str(os.getpid()))
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["env"])
    from huggingface_hub import constants

    importlib.reload(constants)
    try:
        result = {"value": getattr(importlib.import_module("hub_jobs"), job["call"])(**job["args"])}
    except BaseException as error:
        traceback.print_exc()
        result = {"error": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.rename(out)
