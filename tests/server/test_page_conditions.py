"""The server's page where something goes wrong, on a phone, in the dark."""

from __future__ import annotations

import json

import pytest
from page_driver import LEFT, STORY, opened
from playwright.sync_api import expect
from serving import listening, stock

from decode.server.app import create_app
from decode.server.models import Settings

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
def test_what_goes_wrong_is_said_as_text(browser, page_url, answer, said):
    """In the server's own words, which are never taken for HTML; then it can be run again."""
    with opened(browser, page_url) as driver:

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


def test_a_server_that_gives_no_models_is_quoted(browser, page_url):
    with opened(browser, page_url) as driver:
        driver.page.route(
            "**/v1/models", lambda route: route.fulfill(status=503, body="<h1>no</h1>")
        )
        driver.page.reload()
        expect(driver.page.locator("#error")).to_have_text("<h1>no</h1> [503]")
        assert driver.page.locator("#error *").count() == 0
        assert driver.page.locator("#run").is_disabled()


def test_a_prompt_that_does_not_fit_is_refused_in_the_servers_words(browser, page_url):
    with opened(browser, page_url) as driver:
        driver.run("12 " * 2000)
        expect(driver.pane(LEFT).locator(".error")).to_contain_text("[400]")


def test_a_401_asks_for_the_key(browser, models):
    """It is sent from then on, and kept by this tab alone."""
    app = create_app([stock(*model) for model in models.items()], Settings(api_keys=("right",)))
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


def test_a_phone_shows_it_without_scrolling_sideways(browser, page_url):
    with opened(browser, page_url, viewport={"width": 360, "height": 740}) as driver:
        driver.run(STORY)
        driver.go(4)
        for summary in driver.page.locator("summary").all():
            summary.click()
        assert driver.overflow() <= 0
        driver.page.fill("#prompt", "x" * 400)
        driver.page.keyboard.press("Control+Enter")
        driver.done()
        assert driver.overflow() <= 0


CONTRAST = """
() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
  };
  const found = [];
  for (const one of document.querySelectorAll("body *:not(option):not(optgroup)")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.closest(":disabled")) continue;
    const pair = [parts(getComputedStyle(one).color), behind(one)].map(light).sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    found.push([`${one.tagName} ${one.className} ${one.textContent.slice(0, 20)}`, ratio]);
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, page_url, scheme):
    """WCAG AA: a contrast of 4.5 between each text and what is behind it."""
    with opened(browser, page_url, color_scheme=scheme) as driver:
        driver.run(STORY)
        driver.go(3)
        for summary in driver.page.locator("summary").all():
            summary.click()
        found = dict(driver.page.evaluate(CONTRAST))
        assert len(found) > 80
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_the_page_is_refused_what_it_does_not_need(tab):
    """The policy that the page comes with forbids what is inline and what is elsewhere."""
    policy = tab.page.request.get(tab.page.url).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert tab.page.request.get(f"{tab.page.url}page/no.js").status == 404
    assert tab.page.request.get(f"{tab.page.url}page/..%2Fapp.py").status == 404
