"""The widths that the engine chooses, by costs that are exact (benchmarks.made_up_costs)."""

import json

import numpy as np
import pytest

from benchmarks import made_up_costs
from benchmarks.made_up_costs import MACHINES, Machine, measured
from decode.engine.learned import Learned


def test_a_machine_counts_what_forwards_take_and_tells_it_with_a_scatter():
    machine, learned, draws = Machine(2.0, 0.5, 0.1, 16), Learned(), np.random.default_rng(3)
    for _ in range(60):
        machine.note(learned, 4, 4, 2, draws)
    assert machine.seconds == pytest.approx(60 * (2.0 + 1.0 + 1.6) / 1000)
    machine.note(learned, 100, 100, 1, draws)
    assert machine.seconds == pytest.approx(60 * 0.0046 + 0.0125)
    assert learned.curve.seconds(np.array([[4.0], [4.0]]), 2)[0] == pytest.approx(0.0046, rel=0.2)


@pytest.mark.parametrize("machine", ["4 cores", "flat"])
def test_after_a_round_the_choice_is_about_as_good_as_the_best_fixed_window(machine):
    row = measured("sudoku", machine, 4, 4, 3)
    best = max(row["fixed"].values())
    assert row["fixed"][1] < 0.6 * best  # there is something to be chosen
    assert min(row["chosen"][1:]) > 0.93 * best
    assert measured("sudoku", machine, 4, 4, 2)["chosen"] == row["chosen"][:2]


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "rows.json"
    asked = "--tasks story --machines flat --in-flight 2 --waves 1 --rounds 2 --json"
    made_up_costs.main([*asked.split(), str(path)])
    (row,) = json.loads(path.read_text())["measured"]
    best = max(row["fixed"].values())
    assert f"{row['chosen'][1] / best:.2f}" == capsys.readouterr().out.split()[-1]
    assert set(MACHINES) > {row["machine"]}
    with pytest.raises(SystemExit):
        made_up_costs.main(["--rounds", "1"])
