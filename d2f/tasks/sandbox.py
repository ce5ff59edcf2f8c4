"""An interpreter of a small Python: what a model wrote is judged without being run as code.

    def scale(values):           one function of one list of whole numbers
        total = 0                assignments to a name, also += -= *= //= %=
        for value in values:     for, if / elif / else, continue, return
            if value > 3:        + - * // %, one comparison
                total += value   [], [i], [a:b:c], append
        return total             abs len max min sorted sum

What it runs comes to what it comes to in Python: each operation is Python's own, on Python's own
values. All else is refused, and so is what takes too many steps or makes too large values.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

LONGEST = 4000  # characters of a program
MOST_STEPS = 20_000  # statements and expressions of a call
MOST_ITEMS = 200  # of a list
LARGEST = 10**40

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_BUILTINS: dict[str, Callable[..., Any]] = {
    "abs": abs, "len": len, "max": max, "min": min, "sorted": sorted, "sum": sum
}  # fmt: skip


class Refused(Exception):
    """The program is not of the small Python, or it fails, or is beyond the limits."""


class _Continue(Exception):
    """Ends a round of a loop."""


class _Return(Exception):
    """Ends a call, with its value."""


class Function:
    """A program that is one function of that name and nothing else, to be called with numbers.
    Raises Refused."""

    def __init__(self, program: str, name: str) -> None:
        if len(program) > LONGEST:
            raise Refused
        try:
            with warnings.catch_warnings(action="ignore"):  # of odd literals
                tree = ast.parse(program)
                compile(tree, "response", "exec")  # refuses a `continue` without a loop
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused from error
        match tree.body:
            case [ast.FunctionDef(its_name, arguments, body, decorator_list=[], returns=None)]:
                self._body = body
            case _:
                raise Refused
        # One argument, without annotation, default or star; looked at here and not unparsed, which
        # goes as deep as what was written.
        match arguments:
            case ast.arguments([], [ast.arg(argument, None)], None, [], [], None, []):
                self._argument = argument
            case _:
                raise Refused
        if its_name != name:
            raise Refused
        # What is assigned anywhere is local everywhere, whatever builtin has its name.
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = (node.id for node in names if isinstance(node.ctx, ast.Store))
        self._local = {self._argument, *assigned}

    def __call__(self, numbers: Sequence[int]) -> Any:
        """What it returns for a list of them. Raises Refused."""
        self._names: dict[str, Any] = {self._argument: list(numbers)}
        self._steps = 0
        try:
            self._run(self._body)
        except _Return as returned:
            return returned.args[0]
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Refused from error
        return None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Refused

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._step()
            match statement:
                case ast.Assign([ast.Name(name)], value):
                    self._names[name] = self._value(value)
                case ast.AugAssign(ast.Name(name), op, value):
                    old = self._names[name]
                    self._names[name] = self._operate(op, old, self._value(value), in_place=True)
                case ast.Expr(ast.Constant(str())):  # a docstring
                    pass
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [value], [])):
                    _append(self._names[name], self._value(value))
                case ast.If(test, body, orelse):
                    self._run(body if self._value(test) else orelse)
                case ast.For(ast.Name(name), values, body, []):
                    for value in self._value(values):
                        self._names[name] = value
                        with suppress(_Continue):
                            self._run(body)
                case ast.Return(ast.expr() as value):
                    raise _Return(self._value(value))
                case ast.Continue():
                    raise _Continue
                case _:
                    raise Refused

    def _value(self, node: ast.expr) -> Any:
        self._step()
        match node:
            case ast.Constant(int(value)):
                return _bounded(value)
            case ast.Name(name):
                return self._names[name]
            case ast.BinOp(left, op, right):
                return self._operate(op, self._value(left), self._value(right))
            case ast.Compare(left, [op], [right]):
                return self._operate(op, self._value(left), self._value(right))
            case ast.UnaryOp(op, operand):
                return self._operate(op, self._value(operand))
            case ast.List([]):
                return []
            case ast.Subscript(values, ast.Slice(start, stop, step)):
                cut = slice(*(part and self._value(part) for part in (start, stop, step)))
                return self._value(values)[cut]
            case ast.Subscript(values, index):
                return self._value(values)[self._value(index)]
            case ast.Call(ast.Name(name), given, []) if name not in self._local:
                return _bounded(_BUILTINS[name](*map(self._value, given)))
            case _:
                raise Refused

    def _operate(self, op: ast.AST, *values: Any, in_place: bool = False) -> Any:
        if isinstance(op, ast.Mult) and any(isinstance(value, list) for value in values):
            raise Refused  # before it is made
        if isinstance(op, ast.Add) and in_place:
            return _bounded(operator.iadd(*values))  # goes on with the same list
        return _bounded(_OPERATORS[type(op)](*values))  # a LookupError where there is none


def _append(values: Any, value: Any) -> None:
    if not isinstance(values, list) or not isinstance(value, int):
        raise Refused
    values.append(value)
    _bounded(values)


def _bounded(value: Any) -> Any:
    if len(value) > MOST_ITEMS if isinstance(value, list) else abs(value) > LARGEST:
        raise Refused
    return value
