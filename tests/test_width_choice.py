"""The engine's widths beside fixed ones on this machine (benchmarks.width_choice)."""

import json
import random
from math import comb

import pytest

import d2f
import decode
from benchmarks import width_choice
from benchmarks.width_choice import CHOSEN, best_window, compared, line, outside


@pytest.mark.parametrize("rounds", [1, 2, 5, 6, 8, 9, 12, 20, 41])
def test_the_interval_holds_the_median_with_the_confidence_and_is_no_wider(rounds):
    """Summed over how many of the rounds lie below the median, each a fair coin."""

    def confidence(out):
        return sum(comb(rounds, below) for below in range(out + 1, rounds - out)) / 2**rounds

    out = outside(rounds)
    assert confidence(out) >= 0.95 or out == 0
    assert confidence(out + 1) < 0.95


def test_rounds_are_compared_each_with_its_own():
    """A host twice as slow in one round is so for all ways in it."""
    chosen = [100.0, 50.0, 110.0, 100.0, 90.0, 101.0]
    speeds = {CHOSEN: chosen, "1": [10.0] * 6, "4": [2 * speed for speed in chosen]}
    speeds |= {"8": [80.0, 100.0, 100.0, 100.0, 100.0, 100.0], "16": [1.0] * 6}
    assert compared(speeds, "4") == (0.5, 0.5, 0.5)
    assert compared(speeds, "8") == pytest.approx((1.005, 0.5, 1.25))
    assert best_window(speeds) == "4"


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "rows.json"
    asked = "--tasks story --in-flight 2 --problems 2 --rounds 2 --json"
    width_choice.main([*asked.split(), str(path)])
    file = json.loads(path.read_text())
    (row,) = file["measured"]
    assert (row["problems"], file["rounds"]) == (20, 2)
    assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in row["speeds"].values())
    share, low, high = compared(row["speeds"], "16")
    assert capsys.readouterr().out.endswith(f"{share:.2f} [{low:.2f}, {high:.2f}]\n")
    with pytest.raises(SystemExit):
        width_choice.main(["--rounds", "0"])


def test_answers_of_other_tokens_are_counted_and_named(monkeypatch):
    short = width_choice.ways(20) | {"8": decode.WeDLM(8, verify="ar", max_new_tokens=2)}
    monkeypatch.setattr(width_choice, "ways", lambda length: dict(reversed(short.items())))
    monkeypatch.setattr(random.Random, "shuffle", lambda self, order: None)  # 16 is first
    model = d2f.load("tiny-wedlm", device="cpu")
    row = width_choice.measured(model, "story", 2, 2, 1)
    assert row["differ"] == {CHOSEN: 0, "1": 0, "4": 0, "8": 20, "16": 0}
    assert line(row).endswith("  other tokens in 8: 20 of 20")
