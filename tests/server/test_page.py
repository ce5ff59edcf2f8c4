"""The server's page in Debian's chromium, as a person works it, on the real server and models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from serving import listening, stock
from tiny import Gate, fresh_model

import d2f
import decode
from benchmarks.record_page import chromium, find_chromium
from d2f.tasks import make_problems
from decode.server.app import create_app
from decode.server.options import Options

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


@pytest.fixture
def tab(browser, address) -> Iterator[Driver]:
    """The page, which complains of nothing and asks nothing of another host."""
    with opened(browser, address) as driver:
        expect(driver.page.locator("#run")).to_be_enabled()  # all is there
        yield driver
        assert (driver.complaints, driver.elsewhere) == ([], [])


MOST = 64  # max tokens, as the page has it


@pytest.fixture(scope="module")
def events(models) -> list[list[decode.Event]]:
    """What the decoders of both panes do with the story."""
    decoders = (decode.D2F(max_new_tokens=MOST), decode.Autoregressive(max_new_tokens=MOST))
    return [
        list(decode.stream(model, STORY, decoder))
        for model, decoder in zip(models.values(), decoders, strict=True)
    ]


@pytest.mark.parametrize("order", ["one", "both"])
def test_both_panes_decode_what_generate_decodes(tab, events, order):
    tab.page.select_option("#order", order)
    tab.run(STORY)
    for pane in (LEFT, RIGHT):
        result = events[pane][-1].result
        assert tab.text(pane) == result.text
        counters = tab.counters(pane)
        assert counters["Forwards"] == str(result.forwards)
        assert counters["Visible tokens"] == str(len(result.tokens))
        assert counters["Tokens a forward"] == f"{result.tokens_per_forward:.2f}"
        assert counters["Rows fed"] == str(sum(fed for fed, _ in result.calls))
        expect(tab.pane(pane).locator(".shared")).to_be_visible(visible=order == "both")
    assert "The same text." in tab.page.locator("#status").inner_text()


def drawn(event: decode.Event, model: d2f.DiffusionModel) -> list[tuple[str, set[str]]]:
    """Text and marks of the cells of an event in which nothing was taken back."""
    cells: list[tuple[str, set[str]]] = []
    fresh = {one.position for one in event.revealed}
    ended = False
    for block in event.blocks:
        for position, token in enumerate(block.tokens, block.start):
            if token is None:
                cells.append(("", {"masked"}))
                continue
            is_end = token in model.end_ids
            ended |= is_end
            marks = {"settled" if position < len(event.settled) else "decided"}
            marks |= {"end"} if ended else set()
            marks |= {"fresh"} if position in fresh else set()
            text = "▪" if is_end else model.tokenizer.decode([token]).replace("\n", "↵")
            cells.append((text, marks))
    return cells


def test_each_forward_is_drawn_as_the_decoder_left_it(tab, events, models):
    """Stepping there and back: cells, states in the decoder's words, a bar a forward."""
    tab.run(STORY)
    count = len(events[RIGHT])
    tab.go(0)
    there_and_back = [("ArrowRight", n) for n in range(1, count + 1)]
    there_and_back += [("ArrowLeft", n) for n in range(count - 1, 1, -1)]
    for key, forward in there_and_back:
        tab.page.keyboard.press(key)
        tab.at(forward)
        for pane, model in zip((LEFT, RIGHT), models.values(), strict=True):
            event = events[pane][min(forward, len(events[pane])) - 1]
            assert tab.cells(pane) == drawn(event, model)
            words = [block.state if pane == LEFT else "decoded" for block in event.blocks]
            assert tab.labels(pane) == [f"{i} {word}" for i, word in enumerate(words, 1)]
            rows = tab.pane(pane).locator(".rows")
            fed, cached = event.call
            said = f"forward {event.forward}: {fed} rows fed, {cached} already cached"
            assert rows.get_attribute("aria-label") == said
            assert rows.locator("rect.fed").count() == len(events[pane])
            assert rows.locator("rect.fed:not(.later)").count() == event.forward


def test_what_is_taken_back_is_marked(tab, models):
    """The options of the form reach the decoder, and revoked tokens are shown struck through."""
    options = {"block_size": 8, "tau_conf": 0.3, "revoke": "always"}
    left = tab.pane(LEFT)
    left.locator(".options summary").click()
    left.locator("[name=block_size]").fill("8")
    left.locator("[name=tau_conf]").fill("0.3")
    left.locator("[name=revoke]").select_option("always")
    expect(left.locator(".options summary")).to_have_text("Options of d2f (3 changed)")
    prompt = "Use 3, 7 and 12 to make 15."
    tab.run(prompt)
    decoder = decode.D2F(max_new_tokens=MOST, **options)
    before: dict[int, int] = {}
    seen = 0
    tab.go(0)
    for event in decode.stream(models["tiny-d2f"], prompt, decoder):
        tab.page.keyboard.press("ArrowRight")
        tab.at(event.forward)
        now = {
            block.start + i: token
            for block in event.blocks
            for i, token in enumerate(block.tokens)
            if token is not None
        }
        gone = sorted(p for p, token in before.items() if now.get(p) != token)
        before, seen = now, seen + len(gone)
        cells = tab.cells(LEFT)
        assert [p for p, (_, marks) in enumerate(cells) if "revoked" in marks] == gone
        assert sum("settled" in marks for _, marks in cells) == len(event.settled)
        assert all(cells[p][0] for p in gone)  # the text that it had
    assert seen


def test_an_empty_answer_has_its_likely_reason(tab):
    tab.run("What is the capital of France?")
    said = "1 answer is empty: the model may not know such a task"
    assert tab.text(LEFT) == ""
    expect(tab.pane(LEFT).locator(".error")).to_contain_text(said)
    tab.run(STORY)
    expect(tab.pane(LEFT).locator(".error")).to_be_hidden()


def test_play_and_pause(tab):
    """Four forwards a second, as the page's clock goes: to the end, and not on after a pause."""
    tab.run(STORY)
    page = tab.page
    page.clock.install(time=0)
    page.clock.pause_at(10)
    page.locator("h1").click()
    page.keyboard.press("Space")  # at the end: it begins anew
    page.clock.run_for(1100)  # and the next frame of the screen
    expect(page.locator("#play")).to_have_text("Pause")
    tab.at(4)
    page.keyboard.press("Space")
    page.clock.run_for(1100)
    expect(page.locator("#play")).to_have_text("Play")
    tab.at(4)
    page.select_option("#speed", "10")
    page.click("#play")
    page.clock.run_for(600)
    tab.at(9)
    page.clock.run_for(5000)
    expect(page.locator("#play")).to_have_text("Play")
    place = page.locator("#place").inner_text()
    assert re.fullmatch(r"Forward (\d+) of \1", place)


def test_a_trace_is_saved_and_loaded(tab, browser, address, tmp_path):
    tab.run(STORY)
    tab.go(4)
    shown = [tab.cells(pane) for pane in (LEFT, RIGHT)]
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    path = tmp_path / "trace.json"
    download.value.save_as(path)
    with opened(browser, address) as other:
        expect(other.page.locator("#load")).to_be_enabled()
        other.page.set_input_files("#file", path)
        expect(other.page.locator("#status")).to_contain_text("Loaded trace.json")
        assert other.page.locator("#prompt").input_value() == STORY
        other.go(4)
        assert [other.cells(pane) for pane in (LEFT, RIGHT)] == shown
        trace = json.loads(path.read_text())
        del trace["runs"][1]["frames"][2]["blocks"][0]["tokens"]
        for text, said in ((json.dumps(trace), "is damaged"), ("{", "is no trace")):
            path.write_text(text)
            other.page.set_input_files("#file", path)
            expect(other.page.locator("#error")).to_contain_text(said)
        assert [other.cells(pane) for pane in (LEFT, RIGHT)] == shown
        assert other.complaints == []


def test_a_run_is_followed_live_and_escape_frees_the_engine(browser):
    """One model: two of its decoders. Pausing stops the view, not the run."""
    model = fresh_model("llada")
    gate, served = Gate(model), stock("random", model)
    with listening(create_app([served])) as url, opened(browser, url) as driver, ExitStack() as end:
        end.callback(gate.open)
        page = driver.page
        expect(page.locator("#run")).to_be_enabled()
        chosen = [driver.pane(pane).locator(".decoder").input_value() for pane in (LEFT, RIGHT)]
        assert chosen[0] == "d2f" != chosen[1]
        page.fill("#prompt", "x")
        page.keyboard.press("Control+Enter")
        gate.let(2)
        driver.at(2)
        expect(page.locator("#play")).to_have_text("Pause")
        page.click("#play")
        gate.let(1)
        expect(page.locator("#place")).to_have_text("Forward 2 of 3")
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_contain_text("stopped")
        page.keyboard.press("End")
        expect(driver.pane(LEFT).locator(".badge")).to_have_text("stopped")
        gate.open()
        driver.run("y")  # the engine is free for the next one
        assert driver.complaints == []
        stats = served.engine.stats
        assert (stats.running, stats.cancelled, stats.finished) == (0, 1, 2)


REFUSED = {"message": "the <b>queue</b> is full", "type": "x", "param": None, "code": None}
CHUNK = {"choices": [{"index": 0, "delta": {"content": "<i>4"}, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"status": 429, "json": {"error": REFUSED}, "headers": {"retry-after": "7"}},
            "the <b>queue</b> is full [429] (try again in 7 s)",
        ),
        ({"status": 503, "body": "<h1>no</h1>"}, "<h1>no</h1> [503]"),
        (
            {"body": f"data: {json.dumps(CHUNK)}\n\n", "content_type": "text/event-stream"},
            "The connection ended before the answer did.",
        ),
        (
            {
                "body": f"data: {json.dumps({'error': REFUSED})}\n\n",
                "content_type": "text/event-stream",
            },
            "the <b>queue</b> is full",
        ),
        (None, "The server cannot be reached."),
    ],
    ids=["429", "503", "cut", "in the stream", "gone"],
)
def test_what_goes_wrong_is_said_as_text(browser, address, answer, said):
    """In the server's own words, which are never taken for HTML; then it can be run again."""
    with opened(browser, address) as driver:

        def respond(route):
            route.abort() if answer is None else route.fulfill(**answer)

        driver.page.route("**/v1/chat/completions", respond)
        driver.run(STORY)
        error = driver.pane(LEFT).locator(".error")
        expect(error).to_have_text(said)
        assert driver.page.locator(".error *, .text *").count() == 0
        expect(driver.pane(LEFT).locator(".badge")).to_have_text("failed")
        driver.page.unroute("**/v1/chat/completions")
        driver.run(STORY)
        expect(error).to_be_hidden()


def test_a_401_asks_for_the_key(browser, models):
    """It is sent from then on, and kept by this tab alone."""
    app = create_app([stock(*model) for model in models.items()], Options(api_key=("right",)))
    with listening(app) as url, opened(browser, url) as driver:
        page = driver.page
        for key in ("wrong", "right"):
            expect(page.locator("#error")).to_be_visible()
            expect(page.locator("#error")).to_contain_text("with a key of this server [401]")
            expect(page.locator("#key")).to_be_focused()
            page.keyboard.type(key)
            page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator("#key-form")).to_be_hidden()
        driver.run(STORY)
        expect(driver.pane(LEFT).locator(".text")).to_contain_text("####")
        stored = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
        assert stored == [{"d2f-api-key": "right"}, {}, ""]


def test_a_phone_shows_it_without_scrolling_sideways(browser, address):
    with opened(browser, address, viewport={"width": 360, "height": 740}) as driver:
        driver.run(STORY)
        driver.go(4)
        for summary in driver.page.locator("summary").all():
            summary.click()
        assert driver.overflow() <= 0
        driver.page.fill("#prompt", "x" * 400)
        driver.page.keyboard.press("Control+Enter")
        driver.done()
        assert driver.overflow() <= 0


def test_a_long_answer_scrolls_to_what_changed(browser, address):
    with opened(browser, address, viewport={"width": 320, "height": 300}) as driver:
        blocks = driver.pane(RIGHT).locator(".blocks")
        blocks.evaluate("box => Object.assign(box.style, {minHeight: 0, maxHeight: '4rem'})")
        driver.run(STORY)
        assert blocks.evaluate("box => box.scrollHeight > box.clientHeight")
        driver.go(1)
        driver.page.keyboard.press("End")
        expect(driver.page.locator("#place")).to_have_text(re.compile(r"Forward (\d+) of \1$"))
        assert blocks.evaluate("""box => {
          const fresh = [...box.querySelectorAll(".fresh")];
          const { top, bottom } = fresh.at(-1).getBoundingClientRect();
          const own = box.getBoundingClientRect();
          return own.top <= top && bottom <= own.bottom;
        }""")
