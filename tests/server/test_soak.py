"""The soak of the server finds nothing in a server that is right, and what is wrong in one that
is not."""

from __future__ import annotations

import argparse
import asyncio
import os

from serving import listening, stock

import d2f
from benchmarks import soak
from decode.server.app import create_app


def test_a_soak_counts_what_is_wrong(monkeypatch, tiny_ar):
    monkeypatch.setattr(soak, "DECODERS", {"tiny-ar": soak.DECODERS["tiny-ar"]})
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(d2f, "load", lambda *_, **__: tiny_ar)
    options = argparse.Namespace(requests=10, distinct=3, in_flight=4, seed=0)
    with listening(create_app([stock("tiny-ar", tiny_ar, batch_size=4, max_waiting=4)])) as url:
        report = asyncio.run(soak.soak(url, os.getpid(), options))
        assert (report["first"], report["leaked"]) == ([], [])
        assert set(report["ends"]) <= {"answered", "left", "refused"}
        assert sum(report["ends"].values()) == 10 and report["ends"]["answered"] > 3
        right = soak.expected
        monkeypatch.setattr(
            soak, "expected", lambda *what: [(f"{text}!", end) for text, end in right(*what)]
        )
        report = asyncio.run(soak.soak(url, os.getpid(), options))
        assert report["ends"]["wrong"] > 3 and "!" in report["first"][0]
