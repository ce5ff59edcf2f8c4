"""python -I runner.py DESCRIPTOR

The process that a solution runs in. Standard input has two lines of JSON, the program and then
``[tests, nonce]``; the second one is only written when the first has been loaded and DESCRIPTOR
said so. The nonce, which only who ran all of the tests gets to, goes to DESCRIPTOR.
"""

import json
import os
import sys
import types


def main() -> None:
    result = int(sys.argv[1])
    channel = os.fdopen(os.dup(0), "rb")
    # `input()` of a solution must not take the tests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Taken before the solution is there, which may put others in their place.
    build, run, write, leave, read = compile, exec, os.write, os._exit, json.loads
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and pickle look there
    run(build(read(channel.readline()), "solution", "exec"), module.__dict__)
    write(result, b"loaded\n")
    tests, nonce = read(channel.readline())
    run(build(tests, "tests", "exec"), module.__dict__)
    write(result, nonce.encode() + b"\n")
    leave(0)


if __name__ == "__main__":
    main()
