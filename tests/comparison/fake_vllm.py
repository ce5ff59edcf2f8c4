"""Stands in for vLLM: takes the command line that decode.compare gives, and misbehaves on demand
(the variable FAKE). Its first process starts a second, as vLLM does."""

import json
import os
import subprocess
import sys
import threading
import time

from endpoint import Handler, Server, answering  # its own folder comes first on the path

MODE = os.environ.get("FAKE", "good")
values = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
started = time.monotonic()
good = answering(lambda body: "3+4=7\n#### 7", tokens=9)


def get(handler: Handler) -> None:
    if handler.path == "/health":
        ready = MODE != "never healthy" and time.monotonic() - started > 0.2
        return handler.send(200 if ready else 503, "{}")
    return handler.send(200, json.dumps({"version": "0.0-fake"}))


def answer(handler: Handler, body: dict, number: int) -> None:
    assert body["model"] == values["--served-model-name"]
    if MODE == "dies at work":
        print("worker: out of memory", flush=True)
        os._exit(7)
    good(handler, body, number)


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", STUBBORN])
print(f"pids {os.getpid()} {worker.pid}", flush=True)
if MODE == "dies at start":
    print("ValueError: no such model", flush=True)
    os._exit(3)
server = Server(("127.0.0.1", int(values["--port"])), Handler)
server.behaviour, server.models, server.lock = answer, get, threading.Lock()
server.bodies, server.running, server.most = [], 0, 0
server.serve_forever(0.01)
