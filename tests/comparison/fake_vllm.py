"""Stands in for vLLM: takes the command line that decode.compare gives, and misbehaves on demand
(the variable FAKE). Its first process starts a second, as vLLM does."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = os.environ.get("FAKE", "good")
values = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
name = values["--served-model-name"]
started = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            ready = MODE != "never healthy" and time.monotonic() - started > 0.3
            return self.send(200 if ready else 503, {})
        return self.send(200, {"version": "0.0-fake"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == name
        if MODE == "dies at work":
            print("worker: out of memory", flush=True)
            os._exit(7)
        tokens = min(9, body["max_tokens"])
        choice = {"index": 0, "text": "3+4=7\n#### 7", "finish_reason": "stop"}
        return self.send(200, {"choices": [choice], "usage": {"completion_tokens": tokens}})

    def send(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", STUBBORN])
print(f"pids {os.getpid()} {worker.pid}", flush=True)
if MODE == "dies at start":
    print("ValueError: no such model", flush=True)
    os._exit(3)
ThreadingHTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever(0.01)
