"""What a long command shows: a bar in a terminal, lines elsewhere, nothing where nobody looks."""

import io

from rich.console import Console

from decode.display import ShownProgress


def shown(console):
    with ShownProgress(console, "problems") as progress:
        progress.begin(40, "the first rung")
        progress.say("story [0.9]: 40 problems to decode")
        progress.advance(10, "tau_conf [0.9]: half right")
        if progress.bar is not None:
            progress.bar.refresh()
    return console.file.getvalue() if console is not None else ""


def test_a_bar_under_the_lines_of_a_terminal():
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=100,
        _environ={"TERM": "xterm"},
    )  # fmt: skip
    out = shown(console)
    assert "story [0.9]: 40 problems to decode" in out
    assert "tau_conf [0.9]: half right" in out and "10/40 problems" in out


def test_lines_alone_elsewhere():
    for environment in ({"TERM": "dumb"}, {}):
        terminal = bool(environment)
        console = Console(file=io.StringIO(), force_terminal=terminal, _environ=environment)
        assert shown(console) == "story [0.9]: 40 problems to decode\n"


def test_nothing_without_a_console():
    assert shown(None) == ""
