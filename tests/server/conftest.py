"""Fixtures of the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Served, stock

import d2f


@pytest.fixture(scope="session")
def tiny_d2f():
    """The bundled student. Shared: not to be changed."""
    return d2f.load("tiny-d2f", device="cpu")


@pytest.fixture(scope="session")
def tiny_ar():
    """The bundled autoregressive model. Shared: not to be changed."""
    return d2f.load("tiny-ar", device="cpu")


@pytest.fixture(scope="module")
def served(tiny_d2f, tiny_ar) -> Iterator[Served]:
    """Both models behind one application, in this process."""
    with Served([stock("tiny-d2f", tiny_d2f), stock("tiny-ar", tiny_ar)]) as both:
        yield both
