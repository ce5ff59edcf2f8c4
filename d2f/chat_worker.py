"""Renders chat templates in a process of its own: `d2f.chat` starts it and bounds what it may use.

A template is a program of the checkpoint's. The sandbox keeps it from the machine, and this
process keeps its loops and its memory from ours: it ends itself when a rendering takes too long.

One line of JSON in for each rendering ({template, variables, seconds}), one out ({text} or
{error}). It needs jinja2 alone, so that it is there at once; what templates find in their
environment is what transformers gives them (utils/chat_template_utils.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30  # bytes of address space
LENGTH = 16 << 20  # characters of text


class Generation(Extension):
    """``{% generation %}`` marks what an assistant wrote; the text is the same without."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, which could reach into the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **values).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


class Dict:
    """What a template may do with the type itself."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@functools.cache
def compiled(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def answer(line: str) -> dict[str, str]:
    """What to send back for a line."""
    request = json.loads(line)
    # The signal has no handler, so the system ends the process; a handler would wait for the
    # interpreter, which one long operation of a template can keep busy.
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        text = compiled(request["template"]).render(**request["variables"])
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template may raise any
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if len(text) > LENGTH:
        return {"error": f"it gives {len(text)} characters, expected at most {LENGTH}"}
    return {"text": text}


def main() -> None:
    """Answer until the other end closes."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent may have ignored it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    for line in sys.stdin:
        out.write(json.dumps(answer(line)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
