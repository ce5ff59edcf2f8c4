"""The server's page in Debian's chromium, on the real server and models."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack

import pytest
from page_driver import LEFT, RIGHT, STORY, opened
from playwright.sync_api import expect
from serving import Gate, listening, stock
from tiny import fresh_model

import d2f
import decode
from decode.server.app import create_app

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


def test_a_run_is_replayed_for_who_has_nothing_against_motion(browser, page_url):
    with opened(browser, page_url, reduced_motion="no-preference") as driver:
        driver.run(STORY)
        expect(driver.page.locator("#play")).to_have_text("Pause")
        driver.page.click("#play")
        expect(driver.page.locator("#play")).to_have_text("Play")
        shown, most = re.findall(r"\d+", driver.page.locator("#place").inner_text())
        assert int(shown) < int(most)


def test_the_keyboard_alone_does_it_all(tab, events):
    """Tab reaches what is asked, the focus is seen, Ctrl+Enter runs; a field keeps its keys."""
    page = tab.page
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(10):
        page.keyboard.press("Tab")
        assert page.evaluate(outline) == "solid"
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.press("Control+a")
    page.keyboard.type(STORY)
    page.keyboard.press("Control+Enter")
    tab.done()
    assert tab.text(LEFT) == events[LEFT][-1].result.text
    count = len(events[RIGHT])
    page.keyboard.press("Home")  # in the text
    tab.at(count)
    visited = set()
    while page.evaluate("document.activeElement.id") != "play":
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.className")
        assert name not in visited or name in ("model", "decoder", "")
        visited.add(name)
    assert {"max-tokens", "temperature", "order", "run", "model", "decoder", "first"} <= visited
    page.keyboard.press("Home")  # on a button, which has no use for it
    tab.at(0)
    page.keyboard.press("End")
    tab.at(count)


def test_a_trace_is_saved_and_loaded(tab, browser, page_url, tmp_path):
    tab.run(STORY)
    tab.go(4)
    shown = [tab.cells(pane) for pane in (LEFT, RIGHT)]
    with tab.page.expect_download() as download:
        tab.page.click("#save")
    path = tmp_path / "trace.json"
    download.value.save_as(path)
    with opened(browser, page_url) as other:
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


def test_a_model_with_one_decoder_has_one_pane(browser):
    model = fresh_model("llada")
    served = stock("random", model, allowed=("d2f",))
    with listening(create_app([served])) as url, opened(browser, url) as driver:
        driver.run("x")
        assert driver.page.locator(".pane").count() == 1
        assert driver.page.locator("#order").is_hidden()


def test_examples_fill_the_prompt(tab):
    page = tab.page
    page.select_option("#example", label=STORY)
    assert page.locator("#prompt").input_value() == STORY
    expect(page.locator("#expected")).to_contain_text("A right answer: ")
    page.fill("#prompt", "mine")
    expect(page.locator("#expected")).to_be_hidden()
    assert page.locator("#example").input_value() == ""
