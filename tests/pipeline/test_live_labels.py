"""What the live display calls the states of each decoder's blocks, read off the screen."""

import io
import re

import pytest
from rich.console import Console

from decode.pipeline import main

SHOWN = {
    "d2f": {"semi-active", "fully active", "to cache", "cached"},
    "static": {"waiting", "current", "decoded"},
    "threshold": {"waiting", "current", "decoded"},
    "factor": {"waiting", "current", "decoded"},
    "entropy": {"waiting", "current", "decoded"},
    "wino": {"waiting", "current", "decoded"},
    "block": {"waiting", "current", "decoded", "cached"},
    "wedlm": {"window", "committed"},
    "autoregressive": {"decoded"},
}
MODELS = {"wedlm": "tiny-wedlm", "autoregressive": "tiny-ar"}
STATE = re.compile(r"│ +\d+  (\S.{0,11}?)(?: {2,}|…)")  # a block's number, then its state


@pytest.mark.parametrize("decoder", SHOWN)
def test_the_states_of_a_decoder_on_the_screen(decoder):
    """Every forward of one short problem is drawn, in a terminal of a recorded size."""
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=100, height=40,
        _environ={"TERM": "xterm"},
    )  # fmt: skip
    model = ["--model", MODELS.get(decoder, "tiny-d2f"), "--decoder", decoder, "--device", "cpu"]
    if decoder not in MODELS:
        model += ["--block-size", "8"]
    problem = ["--tasks", "sudoku", "--problems", "1", "--pause", "0.0001"]
    assert main([*model, *problem], console) == 0
    assert set(STATE.findall(console.file.getvalue())) == SHOWN[decoder]
