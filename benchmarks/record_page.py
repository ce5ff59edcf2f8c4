"""python -m benchmarks.record_page --output docs/page.webp

Records the server's page: serves tiny-d2f and tiny-ar, runs a held-out problem in chromium, steps
through the forwards, and writes an animated WebP. Each forward is shown equally long, whatever it
took; the seconds that are shown are those of a second run, as the first one warms up.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import parser
from benchmarks.serve_load import serving
from d2f.command import command
from d2f.errors import InputError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    Frame = tuple[bytes, int]  # a PNG, and the milliseconds for which it is shown

MODELS = ("tiny-d2f", "tiny-ar")
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 860, 740  # pixels; a README is about 800 wide
MOST_BYTES = 2_000_000
STEP, PAUSE, LAST = 330, 1300, 2500  # milliseconds


@command(interrupted="interrupted; nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; its exit status."""
    given = parser(__doc__)
    given.add_argument("--output", type=Path, required=True, help="the file, .webp")
    given.add_argument("--example", type=int, default=1, help="number of a held-out problem")
    options = given.parse_args(arguments)
    browser = find_chromium()
    if browser is None:
        raise InputError("expected chromium on the path (Debian: apt-get install chromium)")
    with serving(MODELS) as (url, _), chromium(browser) as found:
        page = found.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme="light",
            reduced_motion="reduce",  # it is stepped through here, not replayed
        )
        page.goto(url)
        frames = list(record(page, options.example))
    write(frames, options.output)


def find_chromium() -> str | None:
    """Find chromium on the path."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Start a browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


def record(page: Page, example: int) -> Iterator[Frame]:
    """Record the prompt, then both panes forward by forward."""
    page.locator("#run:enabled").wait_for()
    page.select_option("#example", str(example))
    yield page.screenshot(), PAUSE
    for _ in range(2):
        page.click("#run")
        page.locator("#run:enabled").wait_for()
    page.locator("h1").click()
    page.keyboard.press("Home")
    page.locator("#place", has_text="Forward 0 of").wait_for()
    page.locator("#panes").evaluate("panes => scrollTo(0, panes.offsetTop + 110)")
    count = int(page.locator("#cursor").get_attribute("max") or 0)
    for forward in range(1, count + 1):
        page.keyboard.press("ArrowRight")
        page.locator("#place", has_text=f"Forward {forward} of").wait_for()
        yield page.screenshot(), STEP if forward < count else LAST


def write(frames: Sequence[Frame], path: Path) -> None:
    """Write the frames as an animation that repeats. Raises InputError where it is too large."""
    from PIL import Image

    images = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in frames]
    beside = path.with_name(path.name + ".tmp")
    images[0].save(
        beside, "WEBP", save_all=True, append_images=images[1:], loop=0,
        duration=[shown for _, shown in frames], quality=80, method=6, minimize_size=True,
    )  # fmt: skip
    size = beside.stat().st_size
    if size > MOST_BYTES:
        beside.unlink()
        raise InputError(f"the recording has {size} bytes, expected at most {MOST_BYTES}")
    os.replace(beside, path)
    seconds = sum(shown for _, shown in frames) / 1000
    print(f"{path}: {len(frames)} frames, {seconds:.1f} s, {size} bytes")


if __name__ == "__main__":
    sys.exit(main())
