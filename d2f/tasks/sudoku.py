"""4x4 sudoku with 6 to 10 blanks and one solution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations

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
        """The puzzle itself."""
        return self.puzzle

    def write(self, rng: np.random.Generator) -> Problem:
        """Put it into words; there is one wording."""
        return Problem("sudoku", f"Sudoku:\n{_rows(self.puzzle)}", _rows(self.solution), self.key)


def draw(rng: np.random.Generator) -> Grid:
    """Draw a puzzle with one solution; each number of blanks is as likely."""
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
    """Enumerate the 288 solved grids, in order, by backtracking over rows."""
    rows = ["".join(row) for row in permutations("1234")]
    grids = [""]
    for _ in range(SIDE):
        grids = [grid + row for grid in grids for row in rows if _fits(grid, row)]
    return tuple(grids)


def _fits(grid: str, row: str) -> bool:
    """Check that a row repeats no digit of its columns, nor of its boxes where it is their second
    row."""
    above = [grid[i : i + SIDE] for i in range(0, len(grid), SIDE)]
    if any(row[column] in [other[column] for other in above] for column in range(SIDE)):
        return False
    if len(above) % 2 == 0:
        return True
    boxes = (slice(0, 2), slice(2, 4))
    return all(set(row[box]).isdisjoint(above[-1][box]) for box in boxes)


def count_solutions(grid: str, given: list[int]) -> int:
    """Count the solved grids that agree with grid in the given cells."""
    agree = (1 << len(solutions())) - 1  # one bit a solved grid: intersecting sets is one `&`
    for cell in given:
        agree &= _agreement()[cell, grid[cell]]
    return agree.bit_count()


def check(problem: Problem, text: str) -> bool:
    """Check that the non-empty lines of text are the four rows of the solution."""
    return answer(text) == problem.answer


def answer(text: str) -> str:
    """Extract the non-empty lines."""
    return "\n".join(line for line in map(str.strip, text.split("\n")) if line)


@cache
def _agreement() -> dict[tuple[int, str], int]:
    """Map a cell and a digit to the solved grids with that digit there: bit i is solution i."""
    table = {(cell, digit): 0 for cell in range(SIDE * SIDE) for digit in "1234"}
    for number, grid in enumerate(solutions()):
        for cell, digit in enumerate(grid):
            table[cell, digit] |= 1 << number
    return table


def _rows(grid: str) -> str:
    return "\n".join(grid[i : i + SIDE] for i in range(0, SIDE * SIDE, SIDE))
