"""Chat messages as a checkpoint's template writes them, in bounded time and memory."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d2f.errors import InputError, quoted

SECONDS = 10.0  # a template takes milliseconds


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt that the tokenizer's chat template makes of messages, up to where the answer
    begins: what its `apply_chat_template` gives with ``add_generation_prompt``. A last message of
    the assistant's whose `prefix` is true is the answer's beginning, and follows to the letter.

    Raises InputError, with the tokenizer's name, for messages that the template refuses, a template
    that is broken, and one that takes longer than SECONDS or more memory than it may.
    """
    # Of a folder the last part alone: a server's clients see it.
    name = f"the chat template of {Path(tokenizer.name_or_path).name or 'the tokenizer'}"
    if tokenizer.chat_template is None:
        raise InputError(f"{name}: expected one, the tokenizer has none")
    messages, prefix = _without_prefix(messages)
    if not messages:
        raise InputError("expected at least one message, got none")
    try:
        # What transformers' apply_chat_template hands to a template.
        variables = {
            **tokenizer.special_tokens_map,
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        request = json.dumps(
            {
                "template": tokenizer.get_chat_template(),
                "variables": variables,
                "seconds": SECONDS,
            }
        )
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(quoted(f"{name}: expected messages of text, {error}")) from error
    reply = _worker.ask(request)
    if reply is None:
        raise InputError(f"{name} did not end: it was stopped after {SECONDS:g} s")
    if "error" in reply:
        raise InputError(quoted(f"{name} refused the messages: {reply['error']}"))
    return reply["text"] + prefix


def _without_prefix(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Messages without a last one that begins the answer, and that beginning."""
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and last.get("prefix") is True:
        content = last.get("content")
        if not isinstance(content, str):
            raise InputError(f"expected text as the beginning of the answer, got {content!r:.60}")
        return messages[:-1], content
    return messages, ""


def encode(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """`render` as token ids. Raises InputError."""
    text = render(tokenizer, messages)
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except (TypeError, ValueError) as error:  # a lone surrogate
        raise InputError(quoted(f"the messages are not Unicode text: {error}")) from error


class _Worker:
    """The process that renders, started when first asked and again after it had to end. One for
    each process of ours: a fork gets its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = -1

    def ask(self, request: str) -> dict[str, str] | None:
        """Its answer, None where it ended instead."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            except BaseException:  # interrupted: its answer would be taken for the next one's
                self.end()
                raise
            if not line.endswith("\n"):
                self.end()
                return None
            reply: dict[str, str] = json.loads(line)
            return reply

    def end(self) -> None:
        """Stop the process, where there is one of ours."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.end()
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                # -P: modules of the worker's folder are not in the way of others of their name
                [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
                start_new_session=True,  # Ctrl-C is for us
            )
        return self._process


_worker = _Worker()
atexit.register(_worker.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.__init__)  # type: ignore[misc]
