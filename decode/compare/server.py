"""Start a server for an entry, wait until it is healthy, end it with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from d2f.device import users_environment
from d2f.errors import InputError
from d2f.models import resolve
from decode.compare.config import Command, Vllm

LOG_LINES_QUOTED = 30
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5
_LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec


def vllm_command(entry: Vllm, python: str, port: int) -> list[str]:
    """Return the command of `vllm serve MODEL`."""
    model = resolve(entry.model)
    # By the module that `vllm serve` runs, because the command itself asks for the metadata of a
    # package named vllm, which vLLM's CPU package has not.
    return [
        str(Path(python).absolute()),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(Path(model).absolute()) if Path(model).is_dir() else model),
        *("--served-model-name", entry.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", entry.dtype),
        "--enable-prefix-caching" if entry.prefix_caching else "--no-enable-prefix-caching",
        *entry.args,
    ]


class Server:
    """A server as a context: healthy inside, stopped afterwards, also on an interrupt."""

    def __init__(self, entry: Vllm | Command, python: str, log: Path):
        self.entry, self.log = entry, log
        self.startup_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.health = "/health" if isinstance(entry, Vllm) else entry.health
        if isinstance(entry, Vllm):
            self.command = vllm_command(entry, python, port)
        else:
            self.command = [word.replace("{port}", str(port)) for word in entry.command]

    @property
    def pid(self) -> int:
        """The id of its first process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        began = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**users_environment(), **self.entry.env},
                # A session of its own: an interrupt in the terminal is for the command alone, and
                # all of the server's processes are ended together.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            while self._get(self.health) is None:
                self.check()
                if time.monotonic() > began + self.entry.startup_seconds:
                    raise self._error(f"was not healthy after {self.entry.startup_seconds:g} s")
                time.sleep(POLL_SECONDS)
        except BaseException:  # `__exit__` is not called for a context that was not entered
            self.__exit__()
            raise
        self.startup_seconds = time.monotonic() - began
        return self

    def __exit__(self, *exception: object) -> None:
        """End every process of the server: asked first, killed after a while."""
        assert self._process is not None
        self._signal(signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            self._signal(signal.SIGKILL)  # also workers that outlived it
            self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def check(self, patience: float = 0.0) -> None:
        """Raise InputError with the end of the log if the server has died, or does within
        `patience` seconds."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise self._error(f"ended with status {self._process.wait(patience)}")

    def _error(self, what: str) -> InputError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join(lines[-LOG_LINES_QUOTED:]) or "(empty)"
        return InputError(
            f"entry {self.entry.name}: the server {what}; the end of its log, {self.log}:\n{shown}"
        )

    def version(self) -> str | None:
        """Ask the server for vLLM's version; None of another server."""
        answer = self._get("/version") if isinstance(self.entry, Vllm) else None
        return None if answer is None else str(answer.json()["version"])

    def _get(self, path: str) -> httpx.Response | None:
        """GET a path beside /v1; None unless it is answered with 200."""
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(self.address + path, timeout=5, trust_env=False)
            return answer if answer.status_code == 200 else None
        return None


def _end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, also by kill -9 (Linux)."""
    _LIBC.prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def check_command(entry: Command) -> None:
    """Raise InputError unless the command's first word is a program."""
    if shutil.which(entry.command[0]) is None:
        raise InputError(f"entry {entry.name}: there is no program {entry.command[0]}")


def check_python(entry: Vllm, python: str) -> None:
    """Raise InputError unless `python` can import vLLM."""
    if not Path(python).is_file():
        raise InputError(
            f"entry {entry.name} needs the Python of an environment with vLLM: there is no "
            f"{python}. `make vllm` makes one for a CPU; --vllm-python names another"
        )
    # Asked in that environment's Python, by a look for the package that does not import it.
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise InputError(f"entry {entry.name}: {python} has no vLLM {done.stderr.strip()}".rstrip())


def free_port() -> int:
    """Find a port that nobody listens on now. If another process takes it first, the server ends
    and is reported with its log."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
