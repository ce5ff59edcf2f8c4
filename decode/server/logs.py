"""The log: a line a request, as text or JSON, on standard error."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from d2f.errors import one_line

LOGGER = logging.getLogger("decode.server")
Format = Literal["text", "json"]


class _Formatter(logging.Formatter):
    """A record as one line; `extra={"fields": {...}}` are its named parts."""

    def __init__(self, form: Format):
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        message = record.getMessage()
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._form == "json":
            line = {"time": when, "level": record.levelname.lower(), "message": message}
            return json.dumps(line | fields)
        trace = fields.pop("trace", None)
        parts = [f"{name}={one_line(_plain(value))}" for name, value in fields.items()]
        text = " ".join([when, record.levelname.lower(), one_line(message), *parts])
        return text if trace is None else f"{text}\n{trace}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def set_up_logs(form: Format) -> None:
    """Write the server's lines to standard error, and what the libraries below warn of."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    for name, level in (
        (LOGGER.name, logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
