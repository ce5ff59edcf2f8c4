"""Fixtures of the tests of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from page_driver import Driver, opened
from playwright.sync_api import Browser, expect
from serving import Served, listening, stock

import d2f
from benchmarks.browser import chromium, find_chromium
from decode.server.app import create_app


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium. Where it is missing the test is skipped, or fails if it is required."""
    path = find_chromium()
    if path is None and os.environ.get("D2F_TEST_CHROMIUM") != "required":
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    assert path is not None, "D2F_TEST_CHROMIUM is required, and there is no chromium"
    with chromium(path) as found:
        yield found


@pytest.fixture(scope="module")
def models(tiny_d2f, tiny_ar) -> dict[str, d2f.DiffusionModel]:
    """Both bundled models, in the order of the page's panes."""
    return {"tiny-d2f": tiny_d2f, "tiny-ar": tiny_ar}


@pytest.fixture(scope="module")
def page_url(browser, models) -> Iterator[str]:
    """The address of a server of both."""
    with listening(create_app([stock(name, model) for name, model in models.items()])) as address:
        yield address


@pytest.fixture
def tab(browser, page_url) -> Iterator[Driver]:
    """The page, which complains of nothing and asks nothing of another host."""
    with opened(browser, page_url) as driver:
        expect(driver.page.locator("#run")).to_be_enabled()  # all is there
        yield driver
        assert (driver.complaints, driver.elsewhere) == ([], [])
