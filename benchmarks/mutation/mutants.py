"""The small faults ("mutants") that can be put into a file: mutmut's, and two kinds of our own.

Left out is what no test should see: texts for people, annotations and types' names, decorators,
imports, assertions, what only a type checker or `python -m` reads, functions that capture a CUDA
graph, and arguments that change nothing where tests run (`encoding` of ASCII files, `device` on a
CPU, `strict` of `zip`, a number for JSON's `indent`, `flush` of what is read at the end).
"""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal

# Whatever runs the line fails with most of these, so a line that can have another fault has that.
CRUDE = {"operator_assignment", "argument_to_none"}
SILENT_CALLS = {"cast", "debug", "info", "warn", "TypeVar"}
SILENT_KEYWORDS = {
    "description",
    "device",
    "encoding",
    "flush",
    "help",
    "stacklevel",
    "strict",
    "unit",
}
SILENT_NAMES = m.OneOf(*map(m.Name, ("__all__", "__slots__", "__version__")))
SILENT = m.OneOf(
    *(
        m.Annotation(),
        m.Decorator(),
        m.Import(),
        m.ImportFrom(),
        m.Assert(),
        m.ConcatenatedString(),
    ),
    m.Expr(m.SimpleString()),  # a docstring
    m.Raise(m.Call(m.Name("NotImplementedError"))),
    m.If(m.Name("TYPE_CHECKING") | m.Comparison(m.Name("__name__"))),
    m.Assign(targets=[m.AssignTarget(SILENT_NAMES)]),
)
CAPTURE = m.WithItem(m.Call(m.Attribute(m.Attribute(m.Name("torch"), m.Name("cuda")))))
TYPE = m.Subscript() | m.BinaryOperation(operator=m.BitOr())  # where it is assigned in a module


@dataclass(frozen=True)
class Mutant:
    """One fault. path: of the file, from the root. reached_at: the lines of its statement, one of
    which a test must reach to see it; empty for what runs when the module is imported.
    """

    path: str
    line: int
    kind: str
    reached_at: range
    module: cst.Module
    old: cst.CSTNode
    new: cst.CSTNode

    @cached_property
    def source(self) -> str:
        """The file with the fault."""
        return cst.ensure_type(self.module.deep_replace(self.old, self.new), cst.Module).code

    @property
    def diff(self) -> str:
        before, after = self.module.code.splitlines(), self.source.splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:])

    def is_a_fault(self) -> bool:
        """Whether it is Python, and another program."""
        try:
            return ast.dump(ast.parse(self.source)) != ast.dump(ast.parse(self.module.code))
        except SyntaxError:
            return False


def sample(root: Path, folders: Iterable[str], seed: int) -> Iterator[Mutant]:
    """Mutants in a random order: each line that can have one gives one, all lines alike likely.

    Of a line, a kind of fault is drawn, then one of that kind. A larger sample of the same seed
    begins with the same ones.
    """
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        wrapper = MetadataWrapper(cst.parse_module(file.read_text(encoding="utf-8")))
        finder = _Finder(file.relative_to(root).as_posix(), wrapper.module)
        wrapper.visit(finder)
        for mutant in finder.mutants:
            by_line[mutant.path, mutant.line].append(mutant)
    draw = random.Random(seed)
    for place in draw.sample(sorted(by_line), len(by_line)):
        by_kind: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in by_line[place]:
            by_kind[mutant.kind].append(mutant)
        kinds = sorted(draw.sample(sorted(by_kind), len(by_kind)), key=CRUDE.__contains__)
        drawn = [draw.choice(by_kind[kind]) for kind in kinds]
        yield from [mutant for mutant in drawn if mutant.is_a_fault()][:1]


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: str, module: cst.Module) -> None:
        super().__init__()
        self.path, self.module = path, module
        self.mutants: list[Mutant] = []
        self._statements: list[range] = []
        self._functions = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.append(self._lines(node))
        self._functions += isinstance(node, cst.FunctionDef)
        if self._is_silent(node):
            return False
        position = self.get_metadata(PositionProvider, node, None)
        reached_at = self._statements[-1] if self._functions else range(0)
        for of, operator in OPERATORS:
            for new in operator(node) if position and isinstance(node, of) else ():
                if _keeps_silent_arguments(node, new):
                    about = position.start.line, _kind(operator, node, new), reached_at
                    self.mutants.append(Mutant(self.path, *about, self.module, node, new))
        return not isinstance(node, cst.Raise)  # the message of an error is a text for people

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.pop()
        self._functions -= isinstance(original_node, cst.FunctionDef)

    def _is_silent(self, node: cst.CSTNode) -> bool:
        is_type = not self._functions and m.matches(node, m.Assign(value=TYPE))
        is_for_gpus = isinstance(node, cst.FunctionDef) and bool(m.findall(node, CAPTURE))
        return is_type or is_for_gpus or m.matches(node, SILENT) or _silent(node)

    def _lines(self, node: cst.CSTNode) -> range:
        """Of a statement; of one with a body its head; of a function all: its head runs when it is
        defined, and what a default does is seen in the body."""
        position = self.get_metadata(PositionProvider, node)
        start, end = position.start.line, position.end.line
        body = getattr(node, "body", None)
        if isinstance(body, cst.IndentedBlock) and not isinstance(node, cst.FunctionDef):
            end = self.get_metadata(PositionProvider, body.body[0]).start.line - 1
        return range(start, max(start, end) + 1)


def _silent(node: cst.CSTNode) -> bool:
    match node:
        case cst.Arg(keyword=cst.Name(value=name)) if name in SILENT_KEYWORDS:
            return True
        case cst.Arg(keyword=cst.Name(value="indent"), value=cst.Integer()):
            return True
        case cst.DictElement(key=cst.SimpleString(raw_value="help")):
            return True
        case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
            return name in SILENT_CALLS
        case cst.SimpleString():
            return " " in node.value.strip("'\"")  # several words: a text for people
        case cst.FormattedString():
            texts = (part for part in node.parts if isinstance(part, cst.FormattedStringText))
            return any(" " in part.value for part in texts)
    return False


def _keeps_silent_arguments(node: cst.CSTNode, new: cst.CSTNode) -> bool:
    if not (isinstance(node, cst.Call) and isinstance(new, cst.Call)):
        return True
    if m.matches(node.func, m.Name("len") | m.Name("isinstance")):
        return False  # a call that cannot work is killed by whatever runs it
    silent = [arg for arg in node.args if _silent(arg) or _silent(arg.value)]
    return all(any(arg is kept for kept in new.args) for arg in silent)


def _kind(operator: Callable, node: cst.CSTNode, new: cst.CSTNode) -> str:
    if operator is operator_arg_removal and len(new.args) == len(node.args):
        return "argument_to_none"
    return operator.__name__


def turn_condition(node: cst.If | cst.While) -> Iterable[cst.CSTNode]:
    """`if a:` becomes `if not (a):`."""
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def leave_out_statement(node: cst.Expr | cst.Raise) -> Iterable[cst.CSTNode]:
    """A call whose result nobody takes, or an error, becomes `pass`."""
    if isinstance(node, cst.Raise) or isinstance(node.value, cst.Call):
        yield cst.Pass()


OPERATORS = [
    *mutation_operators,
    *((of, turn_condition) for of in (cst.If, cst.While)),
    *((of, leave_out_statement) for of in (cst.Expr, cst.Raise)),
]
