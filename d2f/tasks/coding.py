"""Write a short Python function that is described in words; unit tests judge it.

    Write a Python function rate(sizes) of a list of whole numbers. Leave out those of 3 or less.
    Square each. Make each at most 20. Add them up. Return that plus 4.

The tests compare what the response returns with what the reference returns, both interpreted by
asteval with bounded steps and values: what a model wrote is not run as code.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np

from d2f.tasks.problem import Draft, Problem, pick, pick_integer

# The parts of the functions, in words and as lines of Python. In both {items} is the list, {n} one
# number of it, {k} and {m} are constants.

NAMES = tuple(
    "compute measure evaluate collect reduce combine process transform gather rate weigh assess "
    "review digest settle derive".split()
)
# Names of the list, and of one of its numbers.
ITEMS = tuple((f"{one}s", one) for one in "number value score price size point age weight".split())
OPENINGS = (
    "Write a Python function {name}({items}) of a list of whole numbers.",
    "Write {name}, a Python function of a list of whole numbers called {items}.",
    "In Python, define {name}({items}) for a list of whole numbers.",
    "I need a Python function {name} that takes a list of whole numbers, {items}.",
)


@dataclass(frozen=True, eq=False)
class Part:
    """Describe one thing that a function does.

    words: wordings to choose from. lines: Python. among: the values that k, and m, may have.
    title, variable, add, is_ordered: of a result, which combines the numbers that remain. Its lines
    stand before the loop and those of `add` at the end of the loop's body; what it returns is
    `variable`; is_ordered: the order of the numbers matters.
    """

    name: str
    words: tuple[str, ...]
    lines: str = ""
    among: tuple[range, ...] = ()
    title: str = ""
    variable: str = ""
    add: str = ""
    is_ordered: bool = False


SMALL, MIDDLE, LARGE = range(2, 10), range(1, 21), range(5, 31)
FEW = range(2, 6)

# Done to the list, before the loop.
CUTS = (
    Part("all", ("",)),
    Part("skip", ("Leave out the first {k}.", "Pass over the first {k}."),
         "{items} = {items}[{k}:]", (FEW,)),
    Part("only", ("Use no more than the first {k}.", "Stop after the first {k}."),
         "{items} = {items}[:{k}]", (range(3, 8),)),
    Part("second", ("Use every second one.", "Take every other one."), "{items} = {items}[::2]"),
)  # fmt: skip
# Added where the order counts.
ORDERS = (
    Part("back", ("Go from the last to the first.", "Go through them backwards."),
         "{items} = {items}[::-1]"),
    Part("sort", ("Sort them.", "Go from the smallest to the largest."),
         "{items} = sorted({items})"),
)  # fmt: skip
# Done to each number in turn.
STEPS = (
    Part("multiple", ("Keep only multiples of {k}.", "Leave out all but multiples of {k}."),
         "if {n} % {k} != 0:\n    continue", (FEW,)),
    Part("indivisible", ("Leave out multiples of {k}.", "Keep only what is no multiple of {k}."),
         "if {n} % {k} == 0:\n    continue", (FEW,)),
    Part("above", ("Keep only those above {k}.", "Leave out those of {k} or less."),
         "if {n} <= {k}:\n    continue", (MIDDLE,)),
    Part("below", ("Keep only those below {k}.", "Leave out those of {k} or more."),
         "if {n} >= {k}:\n    continue", (LARGE,)),
    Part("least", ("Keep only those of {k} or more.", "Leave out those below {k}."),
         "if {n} < {k}:\n    continue", (MIDDLE,)),
    Part("most", ("Keep only those of {k} or less.", "Leave out those above {k}."),
         "if {n} > {k}:\n    continue", (LARGE,)),
    Part("add", ("Add {k} to each.", "Increase each by {k}."), "{n} = {n} + {k}", (MIDDLE,)),
    Part("subtract", ("Subtract {k} from each.", "Decrease each by {k}."), "{n} = {n} - {k}",
         (MIDDLE,)),
    Part("multiply", ("Multiply each by {k}.", "Take {k} times each."), "{n} = {n} * {k}",
         (SMALL,)),
    Part("square", ("Square each.", "Multiply each by itself."), "{n} = {n} * {n}"),
    Part("divide", ("Divide each by {k}, rounding down.", "Divide each by {k} and round down."),
         "{n} = {n} // {k}", (SMALL,)),
    Part("remainder", ("Take the remainder of each by {k}.", "Reduce each modulo {k}."),
         "{n} = {n} % {k}", (range(3, 21),)),
    Part("absolute", ("Drop the sign of each.", "Take the absolute value of each."),
         "{n} = abs({n})"),
    Part("distance", ("Take the distance of each from {k}.", "Find how far each is from {k}."),
         "{n} = abs({n} - {k})", (MIDDLE,)),
    Part("raise", ("Raise those below {k} to {k}.", "Make each at least {k}."),
         "{n} = max({n}, {k})", (MIDDLE,)),
    Part("cap", ("Lower those above {k} to {k}.", "Make each at most {k}."), "{n} = min({n}, {k})",
         (LARGE,)),
    Part("lower above", ("Take {m} off those above {k}.", "Subtract {m} from those above {k}."),
         "if {n} > {k}:\n    {n} = {n} - {m}", (MIDDLE, SMALL)),
    Part("lift below", ("Add {m} to those below {k}.", "Increase those below {k} by {m}."),
         "if {n} < {k}:\n    {n} = {n} + {m}", (MIDDLE, SMALL)),
    Part("grow", ("Multiply multiples of {k} by {m}.", "Take {m} times the multiples of {k}."),
         "if {n} % {k} == 0:\n    {n} = {n} * {m}", (FEW, SMALL)),
    Part("fork",
         ("Add {k} to even ones, subtract {m} from odd ones.",
          "Increase even ones by {k} and decrease odd ones by {m}."),
         "if {n} % 2 == 0:\n    {n} = {n} + {k}\nelse:\n    {n} = {n} - {m}", (SMALL, SMALL)),
)  # fmt: skip
RESULTS = (
    Part("sum", ("Add them up.", "Take the sum."), "total = 0", title="Sum", variable="total",
         add="total += {n}"),
    Part("count", ("Count those above {k}.", "Take how many are above {k}."), "count = 0",
         (MIDDLE,), title="Count", variable="count", add="if {n} > {k}:\n    count += 1"),
    Part("largest",
         ("Find the largest, or {k} if none is larger.", "Take the largest of them and {k}."),
         "best = {k}", (MIDDLE,), title="Largest", variable="best",
         add="if {n} > best:\n    best = {n}"),
    Part("smallest",
         ("Find the smallest, or {k} if none is smaller.", "Take the smallest of them and {k}."),
         "best = {k}", (LARGE,), title="Smallest", variable="best",
         add="if {n} < best:\n    best = {n}"),
    Part("turns",
         ("Add and subtract them in turn.", "Add the first, subtract the second, and so on."),
         "total = 0\nsign = 1", title="Alternating sum", variable="total",
         add="total += sign * {n}\nsign = -sign", is_ordered=True),
    Part("rises",
         ("Count those above the one before, the first against {k}.",
          "Take how many exceed the one before, which is {k} at first."),
         "count = 0\nbefore = {k}", (MIDDLE,), title="Number of rises", variable="count",
         add="if {n} > before:\n    count += 1\nbefore = {n}", is_ordered=True),
    Part("list", ("List them.", "Put them in a list."), "result = []", title="List",
         variable="result", add="result.append({n})", is_ordered=True),
    Part("totals", ("List the running totals.", "Put the sum so far in a list at each."),
         "total = 0\nresult = []", title="Running totals", variable="result",
         add="total += {n}\nresult.append(total)", is_ordered=True),
    Part("records",
         ("List the largest so far at each, from {k} on.",
          "Put the largest so far, at least {k}, in a list at each."),
         "best = {k}\nresult = []", (MIDDLE,), title="Running maximum", variable="result",
         add="best = max(best, {n})\nresult.append(best)", is_ordered=True),
)  # fmt: skip
# Ends of the function: what it returns of {variable}, a number or a list.
_AS_IT_IS = Part("as it is", ("Return it.", "Return that."), "return {variable}")
NUMBER_ENDS = (
    _AS_IT_IS,
    Part("times", ("Return {k} times that.", "Return it times {k}."), "return {variable} * {k}",
         (SMALL,)),
    Part("plus", ("Return that plus {k}.", "Return {k} more than that."), "return {variable} + {k}",
         (MIDDLE,)),
    Part("from", ("Return {k} minus that.", "Return that subtracted from {k}."),
         "return {k} - {variable}", (LARGE,)),
)  # fmt: skip
LIST_ENDS = (
    _AS_IT_IS,
    Part("end", ("Return its last {k}.", "Return the last {k} of it."), "return {variable}[-{k}:]",
         (FEW,)),
    Part("turned", ("Return it in reverse.", "Return it back to front."),
         "return {variable}[::-1]"),
)  # fmt: skip

MIN_STEPS, MAX_STEPS = 3, 6
NUMBERS = range(-20, 41)  # in the tests
RANDOM_TESTS, LONGEST_TEST = 30, 10
# Probe inputs; every step must change the result on at least one.
PROBES = ([7, -12, 31, 4, 18, -3, 25], [40, 3, -20, 14, 9, 22, -7], [-1, 16, 2, 28, 33, 11, 6])
LEAST_LEFT = 7  # of the numbers of PROBES, after any step


class Filled(NamedTuple):
    """A part with its constants."""

    part: Part
    constants: tuple[int, ...] = ()

    def fill(self, text: str, **names: str) -> str:
        """Put the constants and the names into words or lines."""
        return text.format(**dict(zip("km", self.constants, strict=False)), **names)


class Description(NamedTuple):
    """A whole function: what it does to the list, to each number, to those that remain, and to the
    result."""

    cut: Filled
    steps: tuple[Filled, ...]
    result: Filled
    end: Filled

    @property
    def parts(self) -> tuple[Filled, ...]:
        return (self.cut, *self.steps, self.result, self.end)

    @property
    def key(self) -> str:
        """Join the parts in order, as in "skip 2, above 3, square, add 4, sum, times 2"."""
        return ", ".join(" ".join([p.part.name, *map(str, p.constants)]) for p in self.parts)

    def write(self, rng: np.random.Generator) -> tuple[str, str]:
        """Return words and code; rng chooses names and wording."""
        items, n = pick(rng, ITEMS)
        name = pick(rng, NAMES)
        sentences = [pick(rng, OPENINGS).format(name=name, items=items)]
        sentences += [part.fill(pick(rng, part.part.words)) for part in self.parts]
        return " ".join(filter(None, sentences)), self.code(name, items, n)

    def code(self, name: str, items: str, n: str) -> str:
        """Write it in Python; items, n: names of the list and of one of its numbers."""
        result = self.result.part
        names = {"items": items, "n": n, "variable": result.variable}
        steps = [step.fill(step.part.lines, **names) for step in self.steps]
        loop = "\n".join([*steps, self.result.fill(result.add, **names)])
        before = [part.fill(part.part.lines, **names) for part in (self.cut, self.result)]
        body = [
            f'"""{result.title} of what is left of the {items}."""',
            *filter(None, before),
            f"for {n} in {items}:\n{indent(loop, '    ')}",
            self.end.fill(self.end.part.lines, **names),
        ]
        return f"def {name}({items}):\n{indent(chr(10).join(body), '    ')}"

    def apply(self, numbers: list[int]) -> Any:
        """Compute what the function returns, part by part."""
        for cut, steps in ((self.cut, ()), *((_ALL, (step,)) for step in self.steps)):
            numbers = _function(Description(cut, steps, _LIST, _RETURN))(numbers)
        return _function(Description(_ALL, (), self.result, self.end))(numbers)


_ALL, _RETURN = Filled(CUTS[0]), Filled(_AS_IT_IS)
_LIST = Filled(next(part for part in RESULTS if part.name == "list"))


@lru_cache(8192)
def _function(description: Description) -> Callable[[list[int]], Any]:
    space: dict[str, Any] = {}
    exec(description.code("function", "items", "n"), space)
    function: Callable[[list[int]], Any] = space["function"]
    return function


def draw(rng: np.random.Generator) -> Draft:
    """Draw MIN_STEPS to MAX_STEPS different steps, each of which changes some result."""
    result = pick(rng, RESULTS)
    cut = _fill(rng, pick(rng, CUTS + ORDERS if result.is_ordered else CUTS))
    end = _fill(rng, pick(rng, LIST_ENDS if result.variable == "result" else NUMBER_ENDS))
    while True:
        found = Description(cut, _draw_steps(rng), _fill(rng, result), end)
        if _all_matter(found):
            return Draft(found.key, found.write)


def _fill(rng: np.random.Generator, part: Part) -> Filled:
    return Filled(part, tuple(pick(rng, among) for among in part.among))


def _draw_steps(rng: np.random.Generator) -> tuple[Filled, ...]:
    """Draw steps that each change what the ones before have left, and leave enough."""
    count = pick_integer(rng, MIN_STEPS, MAX_STEPS)
    steps: list[Filled] = []
    numbers = [number for probe in PROBES for number in probe]
    for place in rng.permutation(len(STEPS)).tolist():
        step = _fill(rng, STEPS[place])
        after = _function(Description(_ALL, (step,), _LIST, _RETURN))(numbers)
        if after != numbers and len(after) >= LEAST_LEFT:
            steps.append(step)
            numbers = after
        if len(steps) == count:
            break
    return tuple(steps)


def _all_matter(found: Description) -> bool:
    """Check that leaving out any one step changes the result on some probe."""
    expected = [found.apply(probe) for probe in PROBES]
    for place in range(len(found.steps)):
        other = found._replace(steps=found.steps[:place] + found.steps[place + 1 :])
        if [other.apply(probe) for probe in PROBES] == expected:
            return False
    return True


def tests(problem: Problem) -> list[list[int]]:
    """List the inputs that a response is tried with, a function of the key: the empty list, one
    number, PROBES, random ones and all of NUMBERS."""
    rng = np.random.default_rng(list(problem.key.encode()))
    lengths = [pick_integer(rng, 1, LONGEST_TEST) for _ in range(RANDOM_TESTS)]
    drawn = [[pick(rng, NUMBERS) for _ in range(length)] for length in lengths]
    return [[], [0], *PROBES, *drawn, [NUMBERS[i] for i in rng.permutation(len(NUMBERS)).tolist()]]


def check(problem: Problem, text: str) -> bool:
    """Check that text is one function of the asked name, and that it returns what the reference
    returns for every test."""
    name = problem.answer.removeprefix("def ").partition("(")[0]
    try:
        reference, response = Function(problem.answer, name), Function(text, name)
        return all(response(numbers) == reference(numbers) for numbers in tests(problem))
    except Refused:
        return False


# The small Python that responses are written in.


class Refused(Exception):
    """The program is not of the small Python, fails, or exceeds the limits."""


LONGEST = 4000  # characters of a program
MOST_STEPS = 20_000  # statements and expressions of a call
MOST_ITEMS = 200  # of a list
LARGEST = 10**40
BUILTINS = {"abs": abs, "len": len, "max": max, "min": min, "sorted": sorted, "sum": sum}
# Assignments to a name, for, if, continue, return, arithmetic, comparisons, slices, append.
SYNTAX = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AugAssign, ast.Expr,
    ast.If, ast.For, ast.Return, ast.Continue, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call,
    ast.Attribute, ast.Subscript, ast.Slice, ast.List, ast.Name, ast.Constant, ast.Load, ast.Store,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.Lt, ast.LtE, ast.Gt,
    ast.GtE, ast.Eq, ast.NotEq,
)  # fmt: skip


class Function:
    """A program that is one function of that name and nothing else, to be called with numbers."""

    def __init__(self, program: str, name: str) -> None:
        """Read the program. Raises Refused."""
        try:
            with warnings.catch_warnings(action="ignore"):  # about odd literals
                tree = ast.parse(program[: LONGEST + 1])
                compile(tree, "response", "exec")  # refuses a `continue` without a loop
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused from error
        match tree.body:
            case [
                ast.FunctionDef(
                    its_name,
                    ast.arguments([], [ast.arg(argument, None)], None, [], [], None, []),
                    decorator_list=[],
                    returns=None,
                )
            ] if its_name == name and len(program) <= LONGEST:
                pass
            case _:
                raise Refused
        nodes = list(ast.walk(tree))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        if not all(_is_allowed(node, docstrings) for node in nodes):
            raise Refused
        # A name assigned anywhere is local everywhere, even if a builtin has it.
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        known = {key: BUILTINS[key] for key in BUILTINS.keys() - stored - {argument}}
        self._interpreter = _interpreter(known)
        self._interpreter.eval(program, show_errors=False, raise_errors=True)
        self._function = self._interpreter.symtable[name]

    def __call__(self, numbers: Sequence[int]) -> Any:
        """Return what it returns for a list of numbers. Raises Refused."""
        self._interpreter.steps = 0
        try:
            return self._function(list(numbers))
        except Exception as error:  # asteval wraps whatever the program raises
            raise Refused from error


def _is_allowed(node: ast.AST, docstrings: Sequence[ast.expr]) -> bool:
    match node:
        case ast.Attribute(attr=name):
            return name == "append"
        case ast.Constant(value=str()):
            return node in docstrings
        case ast.Constant(value=value):
            return type(value) is int and value <= LARGEST
        case ast.Call(keywords=[_, *_]):
            return False
    return isinstance(node, SYNTAX)


def _interpreter(builtins: dict[str, Any]) -> Any:
    """Make an asteval interpreter that knows only these functions and bounds steps and values."""
    from asteval import Interpreter

    class Bounded(Interpreter):
        steps = 0

        def run(self, node: Any, *arguments: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Refused
            value = super().run(node, *arguments, **options)
            is_large = isinstance(value, int) and abs(value) > LARGEST
            if is_large or (isinstance(value, list) and len(value) > MOST_ITEMS):
                raise Refused
            return value

        def on_binop(self, node: ast.BinOp) -> Any:
            # A list times a number is refused before it is made.
            if isinstance(node.op, ast.Mult):
                left, right = self.run(node.left), self.run(node.right)
                if isinstance(left, list) or isinstance(right, list):
                    raise Refused
                return left * right
            return super().on_binop(node)

        def on_augassign(self, node: ast.AugAssign) -> Any:
            # Python extends the same list, asteval would make another.
            if isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add):
                old = self.run(ast.Name(node.target.id, ast.Load()))
                if isinstance(old, list):
                    old += self.run(node.value)
                    return None
            return super().on_augassign(node)

        def on_call(self, node: ast.Call) -> Any:
            if isinstance(node.func, ast.Attribute):  # append
                target, values = self.run(node.func.value), [self.run(a) for a in node.args]
                if not isinstance(target, list) or not isinstance(values[0], int):
                    raise Refused
                return target.append(*values)
            return super().on_call(node)

    allowed = dict.fromkeys(("augassign", "for", "functiondef", "if"), True)
    interpreter = Bounded(use_numpy=False, minimal=True, config=allowed)
    interpreter.symtable.clear()
    interpreter.symtable.update(builtins)
    return interpreter
