"""Starts a server and ends it, with all that it started, when the command behind it is gone.

    python guard.py SECONDS COMMAND ...

The command holds the other end of this process's standard input; the kernel closes it with the
command, however that ends, also by kill -9. Then the server's process group is asked to end and
killed SECONDS later. Standard output says two numbers: the server's process, and its exit status.
The server prints to this process's standard error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main() -> None:
    seconds, *command = sys.argv[1:]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # its own group: all of its processes are ended together
    )
    # The main thread waits for the server, which may end first; a daemon thread does not keep this
    # process alive then.
    threading.Thread(target=end_with_input, args=(server, float(seconds)), daemon=True).start()
    with suppress(BrokenPipeError):  # nobody is there to be told
        print(server.pid, flush=True)
    status = server.wait()
    signal_group(server.pid, signal.SIGKILL)  # workers that outlived it
    with suppress(BrokenPipeError):
        print(status, flush=True)


def end_with_input(server: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until this process's input is closed, then end the server: asked first, killed after so
    many seconds. Runs in a thread."""
    # Nothing is ever written to it: this returns when the other end is closed. Not through
    # sys.stdin, whose lock would be held when the interpreter ends before: a fatal error.
    os.read(sys.stdin.fileno(), 1)
    # The group has the server's own id, as it was started in a new session.
    signal_group(server.pid, signal.SIGTERM)
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        signal_group(server.pid, signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, which may be gone already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
