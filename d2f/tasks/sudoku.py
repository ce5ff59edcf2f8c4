"""4x4 sudoku with 6 to 10 blanks and one solution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np

from d2f.tasks.problem import Problem, pick, pick_integer

SIDE = 4
MIN_BLANKS, MAX_BLANKS = 6, 10
BLANK = "_"


@dataclass(frozen=True)
class Grid:
    """A solved grid and the same with blanks, each 16 characters row by row."""

    solution: str
    puzzle: str

    @property
    def key(self) -> str:
        """The puzzle."""
        return self.puzzle

    def write(self, rng: np.random.Generator) -> Problem:
        """The problem, which has only one wording."""
        return Problem("sudoku", f"Sudoku:\n{_rows(self.puzzle)}", _rows(self.solution), self.key)


def draw(rng: np.random.Generator) -> Grid:
    """A puzzle with one solution, each number of blanks as likely."""
    blanks = pick_integer(rng, MIN_BLANKS, MAX_BLANKS)
    while True:
        solution = pick(rng, solutions())
        # Blanks at random, and another grid where they leave more than one solution: an answer is
        # compared with the one that is kept.
        order = rng.permutation(SIDE * SIDE).tolist()
        if count_solutions(solution, order[blanks:]) == 1:
            puzzle = list(solution)
            for cell in order[:blanks]:
                puzzle[cell] = BLANK
            return Grid(solution, "".join(puzzle))


@cache
def solutions() -> tuple[str, ...]:
    """The 288 solved grids, in order."""
    grids = map("".join, product(map("".join, permutations("1234")), repeat=SIDE))
    return tuple(grid for grid in grids if _is_solved(grid))


def count_solutions(grid: str, given: list[int]) -> int:
    """How many solved grids agree with grid in the given cells."""
    agree = (1 << len(solutions())) - 1  # one bit a solved grid: intersecting sets is one `&`
    for cell in given:
        agree &= _agreement()[cell, grid[cell]]
    return agree.bit_count()


def check(problem: Problem, text: str) -> bool:
    """Whether the non-empty lines of text are the four rows of the solution, and nothing else."""
    return answer(text) == problem.answer


def answer(text: str) -> str:
    """The non-empty lines of text."""
    return "\n".join(line for line in map(str.strip, text.split("\n")) if line)


@cache
def _agreement() -> dict[tuple[int, str], int]:
    """For a cell and a digit, the solved grids with that digit there: bit i is solution i."""
    table = {(cell, digit): 0 for cell in range(SIDE * SIDE) for digit in "1234"}
    for number, grid in enumerate(solutions()):
        for cell, digit in enumerate(grid):
            table[cell, digit] |= 1 << number
    return table


def _is_solved(grid: str) -> bool:
    """Whether columns and boxes hold four digits each; the rows are permutations already."""
    columns = [grid[column::SIDE] for column in range(SIDE)]
    boxes = [grid[i : i + 2] + grid[i + SIDE : i + SIDE + 2] for i in (0, 2, 8, 10)]
    return all(len(set(unit)) == SIDE for unit in columns + boxes)


def _rows(grid: str) -> str:
    return "\n".join(grid[i : i + SIDE] for i in range(0, SIDE * SIDE, SIDE))
