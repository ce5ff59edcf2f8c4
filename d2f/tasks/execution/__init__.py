"""Running code that a model wrote: in processes of its own, with limits, away from the rest.

    this process          a temporary folder, two pipes, the verdict           run_tests.py
      supervisor            namespaces, limits, ends all that is left          supervisor.py
        runner                loads the solution, then runs its tests          runner.py

It holds against what models write by accident or to be clever: endless loops, fork bombs, floods of
output, `os._exit(0)`, deleted files. It is no prison for an attacker: code that knows this harness
can look for the pipe of the verdict in its own process, and code that changes what the tests
compare with (an `__eq__` that is always true, a patched builtin) passes them.
"""
