"""What one entry leaves running is not measured with the next."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

from decode.compare import __main__ as measuring
from decode.compare.__main__ import Planned
from decode.compare.entries import wait_for_calm

# Computes until it is told to stop, then waits.
SPINS = """
import sys, threading
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
print("spins", flush=True)
while not told.is_set():
    pass
print("waits", flush=True)
sys.stdin.readline()
"""


def test_it_waits_while_a_process_of_this_one_computes():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SPINS], **pipes) as child:
        assert child.stdout.readline() == "spins\n"
        began = time.monotonic()
        wait_for_calm(most=0.5)
        assert time.monotonic() - began >= 0.5
        child.stdin.write("stop\n")
        child.stdin.flush()
        assert child.stdout.readline() == "waits\n"
        began = time.monotonic()
        wait_for_calm(most=60)
        assert time.monotonic() - began < 60
        child.communicate("\n")


def test_it_is_waited_for_where_another_entry_is_next(monkeypatch):
    seen = []
    monkeypatch.setattr(measuring, "wait_for_calm", lambda: seen.append("calm"))
    monkeypatch.setattr(measuring, "judge", lambda *_, **__: None)

    def contestant(name):
        def run(workload, count, concurrency):
            seen.append(name)
            return SimpleNamespace(answers=[SimpleNamespace(error=None)])

        return SimpleNamespace(entry=SimpleNamespace(name=name), run=run)

    a, b = contestant("a"), contestant("b")
    runs = [
        Planned(None, one, 1, 1, repetition, repetition is None)
        for one, repetition in ((a, None), (a, 0), (b, None), (b, 0), (b, None), (b, 1))
    ]
    ledger = SimpleNamespace(add=lambda record: None)
    measuring.measure(runs, None, ledger, lambda *_: None)
    assert seen == ["calm", "a", "a", "calm", "b", "b", "b", "b"]
