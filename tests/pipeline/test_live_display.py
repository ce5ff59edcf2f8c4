"""What a command shows: the pipeline live in terminals of any size, a bar, lines, or nothing."""

import io
import re

import pytest
from files import TAU
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from decode import display
from decode.display import (
    LiveDisplay,
    RequestPanel,
    Running,
    ShownBlock,
    ShownProgress,
)
from decode.pipeline import main


def terminal(width, height):
    return Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height,
        _environ={"TERM": "xterm"},
    )  # fmt: skip


def panel(cached, active, words=6, name="a"):
    """Blocks of several words that are cached, then active ones that are masked."""
    blocks = [
        ShownBlock(Text("cached"), Text(f"word{i} " * words), None) for i in range(1, cached + 1)
    ]
    blocks += [ShownBlock(Text("fully active"), Text("·" * 12), 0)] * active
    return RequestPanel(Text(f"{name} · forward 33"), blocks)


def shown(panels, width=80, height=12):
    console = terminal(width, height)
    console.print(Running(panels))
    return console.file.getvalue().splitlines()


def test_what_is_active_stays_in_view():
    lines = shown([panel(40, 3)])
    assert len(lines) == 11
    assert "… 34 lines above, to block 35" in lines[-1]
    assert lines[1].split()[1:3] == ["35", "cached"]
    assert lines[-2].split()[1:4] == ["43", "fully", "active"]
    assert "word40" in lines[-5] and "word1 " not in " ".join(lines)
    assert "…" not in " ".join(shown([panel(3, 3)]))  # where there is room all is shown


def test_every_panel_keeps_what_is_active():
    lines = " ".join(shown([panel(40, 1), panel(1, 1), panel(30, 1)], height=15))
    assert "41  fully active" in lines and "2  fully active" in lines
    assert "31  fully active" in lines and "lines above" in lines and "word1 word1" in lines
    many = shown([panel(40, 1, name=f"r{i}") for i in range(9)], height=12)
    assert len(many) <= 11 and "… and 6 more" in many[-1]


def test_a_narrow_or_a_low_terminal():
    assert "fully" not in " ".join(shown([panel(40, 2)], width=24))  # the states go first
    assert "41" in " ".join(shown([panel(40, 2)], width=24))
    for height in range(1, 8):
        lines = shown([panel(40, 2)], height=height)
        assert len(lines) == max(1, height - 1) and any("41" in line for line in lines)


def test_the_part_of_one_long_block_where_decoding_is():
    """Autoregressive decoding and a static decoder's one block have nothing to leave out whole."""
    words = " ".join(f"w{i}" for i in range(400))
    lines = shown([RequestPanel(Text("a"), [ShownBlock(Text("decoded"), Text(words), None)])])
    assert "w399" in lines[-2] and "lines above, to block 1" in lines[-1]
    active = ShownBlock(Text("current"), Text(words), words.index("w200"))
    lines = shown([RequestPanel(Text("a"), [active])])
    assert "w200" in lines[1] and "below, to block 1" in lines[-1]


@given(st.integers(0, 30), st.integers(0, 4), st.integers(1, 120), st.integers(1, 40))
def test_never_taller_than_the_terminal(cached, active, width, height):
    lines = shown([panel(cached, active), panel(active, cached)], width, height)
    assert len(lines) <= max(1, height - 1)
    assert all(len(line) <= width for line in lines)


def test_a_run_in_a_low_terminal(student):
    console = terminal(60, 9)
    arguments = ["--model", student, "--problems", "1", "--tasks", "story", "--pause", "0.001"]
    assert main([*arguments, *TAU, "--block-size", "4"], console) == 0
    frames = console.file.getvalue()
    assert "lines above, to block" in frames and "answer" in frames


@pytest.mark.parametrize("forwards", [10, 400, 5000])
def test_the_pauses_of_a_run_are_bounded(monkeypatch, forwards):
    slept = []
    monkeypatch.setattr(display.time, "sleep", slept.append)
    live = LiveDisplay(terminal(80, 20), None, (), pause=None)
    monkeypatch.setattr(live, "_draw", lambda: None)
    monkeypatch.setattr(live, "_panel", lambda job, event: panel(1, 1))
    event = type("Event", (), {"request": 0, "result": None})()
    for _ in range(forwards):
        live.show(None, event)
    assert sum(slept) <= display.ALL_PAUSES
    assert slept[0] == display.FIRST_PAUSE and slept == sorted(slept, reverse=True)
    assert len(slept) >= min(forwards, 50)  # the beginning can be followed


def test_a_pause_that_is_asked_for_is_kept(monkeypatch):
    live = LiveDisplay(terminal(80, 20), None, (), pause=0.5)
    live.paused = 100.0
    assert live.next_pause() == 0.5


SHOWN = {
    "d2f": {"semi-active", "fully active", "to cache", "cached"},
    "static": {"waiting", "current", "decoded"},
    "wino": {"waiting", "current", "decoded"},
    "block": {"waiting", "current", "decoded", "cached"},
    "wedlm": {"window", "committed"},
    "autoregressive": {"decoded"},
}
MODELS = {"wedlm": "tiny-wedlm", "autoregressive": "tiny-ar"}
STATE = re.compile(r"│ +\d+  (\S.{0,11}?)(?: {2,}|…)")  # a block's number, then its state


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
