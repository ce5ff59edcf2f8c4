"""A server as a process: started, waited for, stopped, its log kept; and vLLM's for one entry."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import httpx

from d2f.device import users_environment
from d2f.errors import InputError
from d2f.files import new_file
from d2f.models import resolve
from decode.compare import guard
from decode.compare.client import UnusableError, fetch
from decode.compare.config import Vllm

LOG_LINES_QUOTED = 30
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5
_NO_ANSWER = (httpx.HTTPError, TimeoutError, UnusableError)


class ServerError(InputError):
    """A server that died or never became healthy; quotes the end of its log."""


class Server:
    """A command that serves on `port`, as a context: healthy inside, stopped afterwards, also on an
    interrupt.

    name: what errors call it. env: more of its environment. patience: seconds that it may take
    until GET /health is answered with 200.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        log: Path,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        patience: float = 120.0,
    ):
        self.name = name
        self.command = command
        self.port = port
        self.log = log
        self.env = dict(env)
        self.patience = patience
        self.startup_seconds = 0.0
        self.pid = 0  # of its first process, once it is started
        self._guard: subprocess.Popen[bytes] | None = None
        self._told: str | None = None  # what the guard said at its end

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        began = time.monotonic()
        with new_file(self.log) as out:
            self._guard = subprocess.Popen(
                # The guard needs the standard library alone: nothing of the environment or its site
                # packages (-I, -S) reaches it.
                [sys.executable, "-I", "-S", guard.__file__, str(STOP_SECONDS), *self.command],
                stdin=subprocess.PIPE,  # the kernel closes it with this process: see guard.py
                stdout=subprocess.PIPE,
                stderr=out,
                env={**users_environment(), **self.env},
                start_new_session=True,  # an interrupt in the terminal is for the command alone
            )
        try:
            assert self._guard.stdout is not None
            # The guard's first line; an empty one where it has ended before it could write it.
            self.pid = int(self._guard.stdout.readline() or 0)
            self._wait(began + self.patience)
        except BaseException:
            # Also on an interrupt: `__exit__` is not called for a context that was not entered.
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - began
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def check(self, patience: float = 0.0) -> None:
        """Raise ServerError if the server has died, or does within `patience` seconds."""
        assert self._guard is not None
        try:
            self._guard.wait(patience)
        except subprocess.TimeoutExpired:
            return
        raise ServerError(
            f"{self.name}: the server ended with status {self._status()}; {self._quote()}"
        )

    def stop(self) -> None:
        """End every process of the server: asked first, killed after a while."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        # The guard reads the end of its input, asks the server to end, and kills it after
        # STOP_SECONDS.
        self._guard.stdin.close()
        self._guard.wait()
        self._status()

    def _status(self) -> str:
        """The server's status as the guard told it at its end, else the guard's own."""
        assert self._guard is not None and self._guard.stdout is not None
        if self._told is None:
            # Read to its end and closed once; later calls quote what it said.
            with self._guard.stdout as said:
                self._told = said.read().decode().strip() or str(self._guard.returncode)
        return self._told

    def _wait(self, deadline: float) -> None:
        while True:
            # First, so that a server that has died is reported at once and not after
            # startup_seconds.
            self.check()
            with contextlib.suppress(*_NO_ANSWER):
                if fetch(f"{self.url[:-3]}/health", 5)[0] == 200:
                    return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name}: the server was not healthy after "
                    f"{self.patience:g} s; {self._quote()}"
                )
            time.sleep(POLL_SECONDS)

    def _quote(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join("    " + line for line in lines[-LOG_LINES_QUOTED:])
        return f"the end of its log, {self.log}:\n{shown or '    (empty)'}"


class VllmServer(Server):
    """`vllm serve MODEL`.

    command: what is run. It is the module that `vllm serve` runs, because that command itself
    asks for the metadata of a package named vllm, which vLLM's CPU package has not.
    """

    def __init__(self, entry: Vllm, python: str, log: Path):
        self.entry = entry
        port = free_port()
        command = [
            str(Path(python).absolute()),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", _absolute(resolve(entry.model))),
            *("--served-model-name", entry.name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", entry.dtype),
            "--enable-prefix-caching" if entry.prefix_caching else "--no-enable-prefix-caching",
            *entry.args,
        ]
        name, patience = f"entry {entry.name}", entry.startup_seconds
        super().__init__(name, command, port, log, env=entry.env, patience=patience)

    def version(self) -> str | None:
        """vLLM's version as the server tells it."""
        with contextlib.suppress(*_NO_ANSWER, ValueError, KeyError, TypeError):
            _, answer = fetch(f"{self.url[:-3]}/version", 10)
            return str(json.loads(answer)["version"])
        return None


def check_python(entry: Vllm, python: str) -> None:
    """Raise InputError unless `python` can import vLLM."""
    if not Path(python).is_file():
        raise InputError(
            f"entry {entry.name} needs the Python of an environment with vLLM: there is no "
            f"{python}. `make vllm` makes one for a CPU; --vllm-python names another"
        )
    # Asked in that environment's Python, by a look for the package that does not import it.
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"entry {entry.name}: {python} has no vLLM {done.stderr.strip()}".rstrip())


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        # Port 0 lets the kernel choose. Another process may take the port before the server does,
        # which then ends and is reported with its log.
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).is_dir() else model
