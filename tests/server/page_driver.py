"""The page in a browser, as a person works it: for test_page*.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Locator, Page, expect

from d2f.tasks import make_problems

STORY = make_problems("story", "heldout", 2, 0)[1].question
LEFT, RIGHT = 0, 1  # panes
PATIENCE = 30_000  # milliseconds after which a test has failed
expect.set_options(timeout=PATIENCE)
DONE = re.compile(r"tokens in \d+ forwards")


@dataclass(eq=False)
class Driver:
    """A tab with the page. complaints: what its console said. elsewhere: what it asked of other
    hosts."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def pane(self, number: int) -> Locator:
        return self.page.locator(".pane").nth(number)

    def run(self, prompt: str) -> None:
        """Run it in both panes to its end."""
        expect(self.page.locator("#run")).to_be_enabled()
        self.page.fill("#prompt", prompt)
        self.page.click("#run")
        self.done()

    def done(self) -> None:
        expect(self.page.locator("#status")).to_have_text(DONE)

    def go(self, forward: int) -> None:
        """Show that many forwards."""
        self.page.locator("h1").click()  # keys are the replay's where nothing else has the focus
        self.page.keyboard.press("Home")
        for _ in range(forward):
            self.page.keyboard.press("ArrowRight")
        self.at(forward)

    def at(self, forward: int) -> None:
        """Wait until that many forwards are shown."""
        expect(self.page.locator("#place")).to_have_text(re.compile(rf"^Forward {forward} of"))

    def text(self, number: int) -> str:
        return self.pane(number).locator(".text").inner_text()

    def cells(self, number: int) -> list[tuple[str, set[str]]]:
        """Text and marks of each cell of a pane."""
        found = self.pane(number).locator(".blocks .cell")
        cells = found.evaluate_all("all => all.map(one => [one.textContent, one.className])")
        return [(text, set(marks.split()) - {"cell"}) for text, marks in cells]

    def labels(self, number: int) -> list[str]:
        return self.pane(number).locator(".block-label").all_inner_texts()

    def counters(self, number: int) -> dict[str, str]:
        names = self.pane(number).locator(".counters dt").all_inner_texts()
        values = self.pane(number).locator(".counters dd").all_inner_texts()
        return dict(zip(names, values, strict=True))

    def overflow(self) -> int:
        """Pixels that the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@contextmanager
def opened(browser: Browser, url: str, **context: object) -> Iterator[Driver]:
    """The page in a tab of its own. By default nothing moves by itself."""
    settings = {"reduced_motion": "reduce", **context}
    with browser.new_context(**settings) as tabs:  # type: ignore[arg-type]
        tabs.set_default_timeout(PATIENCE)
        page = tabs.new_page()
        driver = Driver(page)
        page.on("console", lambda said: driver.complaints.append(said.text))
        page.on("pageerror", lambda error: driver.complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(url) else driver.elsewhere.append(asked.url),
        )
        page.goto(url)
        yield driver
