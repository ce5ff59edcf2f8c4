"""A vLLM server for one entry: started, waited for, stopped, its log kept."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from d2f.errors import InputError
from d2f.models import resolve
from decode.comparison.config import Vllm

LOG_LINES_QUOTED = 30
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5


class ServerError(InputError):
    """A server that died or never became healthy; quotes the end of its log."""


class VllmServer:
    """`vllm serve MODEL` as a context: healthy inside, stopped afterwards, also on an interrupt.

    command: what is run. It is the module that `vllm serve` runs, because that command itself
    asks for the metadata of a package named vllm, which vLLM's CPU package has not.
    """

    def __init__(self, entry: Vllm, python: str, log: Path):
        self.entry = entry
        self.log = log
        self.port = _free_port()
        self.command = [
            str(Path(python).absolute()),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", _absolute(resolve(entry.model))),
            *("--served-model-name", entry.name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", entry.dtype),
            "--enable-prefix-caching" if entry.prefix_caching else "--no-enable-prefix-caching",
            *entry.args,
        ]
        self.startup_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> VllmServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.entry.env,
                start_new_session=True,  # its own group: all of its processes are stopped together
            )
        try:
            self._wait(began + self.entry.startup_seconds)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ServerError if the server has died."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerError(
                f"entry {self.entry.name}: the server ended with status {status}; {self._quote()}"
            )

    def version(self) -> str | None:
        """vLLM's version as the server tells it."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            answer: dict[str, Any] = httpx.get(f"{self.url[:-3]}/version", timeout=10).json()
            return str(answer["version"])
        return None

    def stop(self) -> None:
        """End every process of the server: asked first, killed after a while."""
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal_group(process.pid, signal.SIGKILL)  # workers that outlived it
            process.wait()

    def _wait(self, deadline: float) -> None:
        while True:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url[:-3]}/health", timeout=5).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"entry {self.entry.name}: the server was not healthy after "
                    f"{self.entry.startup_seconds:g} s; {self._quote()}"
                )
            time.sleep(POLL_SECONDS)

    def _quote(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join("    " + line for line in lines[-LOG_LINES_QUOTED:])
        return f"the end of its log, {self.log}:\n{shown or '    (empty)'}"


def check_python(entry: Vllm, python: str) -> None:
    """Raise InputError unless `python` can import vLLM."""
    if not Path(python).is_file():
        raise InputError(
            f"entry {entry.name} needs the Python of an environment with vLLM: there is no "
            f"{python}. `make vllm` makes one for a CPU; --vllm-python names another"
        )
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"entry {entry.name}: {python} has no vLLM {done.stderr.strip()}".rstrip())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
