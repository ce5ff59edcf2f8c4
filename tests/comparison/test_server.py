"""The server that the command starts: waited for, stopped with all it started, its log quoted."""

import subprocess
import sys
import time
from contextlib import nullcontext

import psutil
import pytest

from d2f.errors import InputError
from decode.compare.config import Vllm
from decode.compare.server import Server, check_python


def entry(mode="good", **more):
    return Vllm(name="served", kind="vllm", model="tiny-ar", env={"FAKE": mode}, **more)


def pids(log):
    line = next(line for line in log.read_text().splitlines() if line.startswith("pids"))
    return [int(pid) for pid in line.split()[1:]]


def gone(log, within=5.0):
    """Wait until no process of the server is left; false where one stays."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(map(alive, pids(log))):
            return True
        time.sleep(0.02)
    return False


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_healthy_inside_and_gone_outside(fake_python, tmp_path, error):
    log = tmp_path / "logs" / "served.log"
    with pytest.raises(error) if error else nullcontext():
        with Server(entry(), fake_python, log) as server:
            assert server.version() == "0.0-fake"
            server.check()
            assert all(psutil.pid_exists(pid) for pid in pids(log))
            if error:
                raise error
    assert gone(log)
    with pytest.raises(InputError, match="ended with status"):
        server.check()


def test_it_is_asked_to_end_where_the_command_is_killed(fake_python, tmp_path):
    script = (
        "import pathlib, sys, time\n"
        "from decode.compare.config import Vllm\n"
        "from decode.compare.server import Server\n"
        "entry = Vllm(name='served', kind='vllm', model='tiny-ar')\n"
        "with Server(entry, sys.argv[1], pathlib.Path(sys.argv[2])):\n"
        "    print('healthy', flush=True); time.sleep(600)\n"
    )
    log = tmp_path / "served.log"
    command = [sys.executable, "-c", script, fake_python, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "healthy\n"
        first, worker = pids(log)
        process.kill()
    until = time.monotonic() + 5
    while alive(first) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(first)
    psutil.Process(worker).kill()  # which ignores what a real worker would not


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies at start", r"(?s)ended with status 3.*ValueError: no such model"),
        ("never healthy", r"(?s)not healthy after 0.6 s.*pids"),
    ],
)
def test_one_that_does_not_serve_is_an_error_that_quotes_its_log(fake_python, tmp_path, mode, said):
    log = tmp_path / "served.log"
    seconds = 60.0 if mode == "dies at start" else 0.6
    with pytest.raises(InputError, match=said) as caught:
        with Server(entry(mode, startup_seconds=seconds), fake_python, log):
            raise AssertionError("it never was healthy")
    assert str(log) in str(caught.value)
    assert gone(log)


def test_the_command_is_that_of_vllm_serve(fake_python, tmp_path):
    given = entry(dtype="float32", args=("--max-model-len", "256"))
    command = Server(given, fake_python, tmp_path / "log").command
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--model") + 1].endswith("tiny-ar")
    assert "--no-enable-prefix-caching" in command
    assert command[-2:] == ["--max-model-len", "256"]
    with pytest.raises(InputError, match="make vllm"):
        check_python(entry(), str(tmp_path / "none"))
    without = tmp_path / "no-vllm"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    with pytest.raises(InputError, match="has no vLLM"):
        check_python(entry(), str(without))
