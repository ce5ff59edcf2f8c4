"""What a command shows: the pipeline live in terminals of any size, a bar, lines, or nothing."""

import io
import re

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from decode import display
from decode.display import LiveDisplay, RequestPanel, Running, ShownProgress
from decode.pipeline import main


def terminal(width, height):
    return Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height,
        _environ={"TERM": "xterm"},
    )  # fmt: skip


def panel(cached, active, words=6, name="a"):
    """Blocks of several words that are cached, then active ones that are masked."""
    blocks = [(Text("cached"), Text(f"word{i} " * words)) for i in range(1, cached + 1)]
    blocks += [(Text("fully active"), Text("·" * 12))] * active
    return RequestPanel(f"{name} · forward 33", blocks)


def shown(panels, width=80, height=13):
    console = terminal(width, height)
    console.print(Running(panels))
    *lines, of_cursor = console.file.getvalue().splitlines()
    assert not of_cursor  # behind a full line ^C would move the cursor down, and a line would stay
    return lines


def test_what_is_active_stays_in_view():
    lines = shown([panel(40, 3)])
    assert len(lines) == 11 and "lines 35 to 43 of 43" in lines[-1]
    assert lines[1].split()[1:3] == ["35", "cached"]
    assert lines[-2].split()[1:4] == ["43", "fully", "active"]
    assert "lines" not in " ".join(shown([panel(3, 3)]))  # where there is room all is shown
    # One long block: of decoded text the end, else where decoding goes on.
    words = " ".join(f"w{i}" for i in range(400))
    assert "w399" in shown([RequestPanel("a", [(Text("decoded"), Text(words))])])[-2]
    lines = shown([RequestPanel("a", [(Text("current"), Text(words.replace("w200", "·")))])])
    assert "·" in lines[1] and "w201" in lines[1]


def test_every_panel_keeps_what_is_active():
    lines = " ".join(shown([panel(40, 1), panel(1, 1), panel(30, 1)], height=16))
    assert all(f"{number}  fully active" in lines for number in (41, 2, 31))
    # A short one leaves its room to a long one: 13 + 2 lines and four of borders.
    lines = " ".join(shown([panel(12, 1), panel(1, 1)], height=21))
    assert "lines" not in lines and "1   cached" in lines
    many = shown([panel(40, 1, name=f"r{i}") for i in range(9)], height=13)
    assert len(many) <= 11 and "… and 6 more" in many[-1]


@pytest.mark.parametrize("height", [1, 2, 5, 9])
def test_a_narrow_or_a_low_terminal(height):
    console = terminal(24, height)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        live.update(Running([panel(40, 2)] * 3), refresh=True)
        lines = console.file.getvalue().splitlines()
        assert len(lines) <= height and all(len(Text.from_ansi(line)) <= 24 for line in lines)


@pytest.mark.parametrize(
    ("pause", "forwards", "said"), [(None, 10, 0.5), (None, 400, 3), (1, 9, 9)]
)
def test_the_pauses_of_a_run_are_bounded_unless_they_are_asked_for(
    monkeypatch, pause, forwards, said
):
    slept = []
    monkeypatch.setattr(display.time, "sleep", slept.append)
    live = LiveDisplay(terminal(80, 20), None, (), pause=pause)
    monkeypatch.setattr(live, "_draw", lambda: None)
    monkeypatch.setattr(live, "_panel", lambda job, event: panel(1, 1))
    event = type("Event", (), {"request": 0, "result": None})()
    for _ in range(forwards):
        live.show(None, event)
    assert sum(slept) == pytest.approx(said, abs=0.06)


SHOWN = {
    "d2f": {"semi-active", "fully active", "to cache", "cached"},
    "static": {"waiting", "current", "decoded"},
    "block": {"waiting", "current", "decoded", "cached"},
    "wedlm": {"window", "committed"},
    "autoregressive": {"decoded"},
}
MODELS = {"wedlm": "tiny-wedlm", "autoregressive": "tiny-ar"}
STATE = re.compile(r"│ \d+  (\S+(?: \S+)?) {2,}")  # a block's number, then its state


@pytest.mark.parametrize("decoder", SHOWN)
def test_the_states_of_a_decoder_on_the_screen(decoder):
    """Every forward of one short problem is drawn."""
    console = terminal(100, 40)
    model = ["--model", MODELS.get(decoder, "tiny-d2f"), "--decoder", decoder, "--device", "cpu"]
    if decoder not in MODELS:
        model += ["--block-size", "8"]
    problem = ["--tasks", "sudoku", "--problems", "1", "--pause", "0.0001"]
    assert main([*model, *problem], console) == 0
    assert set(STATE.findall(console.file.getvalue())) == SHOWN[decoder]


def progress_on(console):
    with ShownProgress(console, "problems") as progress:
        progress.begin(40, "the first rung")
        progress.say("story [0.9]: 40 problems to decode")
        progress.advance(10, "tau_conf [0.9]: half right")
        progress.bar.refresh()
    return console.file.getvalue() if console is not None else ""


def test_a_bar_under_the_lines_of_a_terminal_and_lines_alone_elsewhere(capsys):
    out = progress_on(terminal(100, 20))
    assert "story [0.9]: 40 problems to decode" in out
    assert "tau_conf [0.9]: half right" in out and "10/40 problems" in out
    for environment in ({"TERM": "dumb"}, {}):
        live = bool(environment)
        console = Console(file=io.StringIO(), force_terminal=live, _environ=environment)
        assert progress_on(console) == "story [0.9]: 40 problems to decode\n"
    assert progress_on(None) == "" and capsys.readouterr().out == ""
