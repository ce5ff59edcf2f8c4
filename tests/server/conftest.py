"""Fixtures of the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Served, listening, stock

import d2f
from decode.server.app import create_app


@pytest.fixture(scope="session")
def tiny_d2f():
    """Load the bundled student. Shared: not to be changed."""
    return d2f.load("tiny-d2f", device="cpu")


@pytest.fixture(scope="session")
def tiny_ar():
    """Load the bundled autoregressive model. Shared: not to be changed."""
    return d2f.load("tiny-ar", device="cpu")


@pytest.fixture(scope="session")
def address(tiny_d2f, tiny_ar) -> Iterator[str]:
    """Serve both models on a socket, for clients that need one."""
    with listening(create_app([stock("tiny-d2f", tiny_d2f), stock("tiny-ar", tiny_ar)])) as url:
        yield url


@pytest.fixture(scope="module")
def served(tiny_d2f, tiny_ar) -> Iterator[Served]:
    """Put both models behind one application, in this process."""
    with Served([stock("tiny-d2f", tiny_d2f), stock("tiny-ar", tiny_ar)]) as both:
        yield both
