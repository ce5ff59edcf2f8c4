"""Serve a model over OpenAI's interface, and call it with the openai client.

    pip install 'd2f-toolkit[serve]' openai
    python examples/serve_and_call.py

In practice the server is a command of its own: d2f serve --model tiny-d2f --port 8000
"""

import argparse
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.request import urlopen

from openai import OpenAI


@contextmanager
def server(model: str):
    """Start `d2f serve` on a free port, yield its address, and stop it at the end."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "decode.serve", "--model", model, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # its log
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start; to see why: {' '.join(command)}")
            try:
                urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)  # it is still loading
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-d2f")
    model = parser.parse_args(arguments).model
    question = "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?"
    messages = [{"role": "user", "content": question}]

    with server(model) as url:
        client = OpenAI(base_url=url, api_key="none")
        answer = client.chat.completions.create(model=model, messages=messages)
        print("whole:", repr(answer.choices[0].message.content))

        # What OpenAI's interface does not know goes into extra_body: a decoder, its options.
        print("streamed:", end=" ", flush=True)
        for chunk in client.chat.completions.create(
            model=model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"decoder": "d2f", "tau_conf": 0.97},
        ):
            if chunk.choices:
                print(repr(chunk.choices[0].delta.content or ""), end=" ", flush=True)
            else:
                print(f"\nforwards: {chunk.usage.d2f['forwards']}")


if __name__ == "__main__":
    main()
