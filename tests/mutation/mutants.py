"""Finds the mutants of a source file: copies that differ in one operator, constant, condition or statement.

Nothing is changed that no test could notice or need notice: docstrings and messages, type hints, decorators, asserts,
and what the code says to the log.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}
"""From an operator to the one that takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    """The file, relative to the root of the repository."""
    start: int
    """The first byte of the changed expression or statement."""
    before: str
    after: str

    def line(self, source: bytes) -> int:
        """Return the number of the first changed line, from 1."""
        return source[: self.start].count(b"\n") + 1

    def apply(self, source: bytes) -> bytes:
        """Return the changed source.

        Raises:
            ValueError: the source is not the one that this mutant was made from.
        """
        old = self.before.encode()
        if source[self.start : self.start + len(old)] != old:
            raise ValueError(f"{self.path} has changed since its mutants were drawn: {self.before!r} is not there")
        return source[: self.start] + self.after.encode() + source[self.start + len(old) :]


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of their places."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, after in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = source[start:end].decode()
        found.append(Mutant(path=str(path.relative_to(root)), start=start, before=before, after=after))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.before, mutant.after))


def _changes(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield (node, its new source) for everything that can be changed in a tree."""
    if _is_left_alone(node):
        return
    if isinstance(node, ast.Raise):
        yield node, "pass"
        return
    if isinstance(node, ast.stmt | ast.expr):
        for changed in _changed(node):
            text = ast.unparse(changed)
            yield node, f"({text})" if isinstance(changed, ast.expr) else text
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, CHANGED_ANYWAY):
        yield node.test, f"(not {ast.unparse(node.test)})"
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


CHANGED_ANYWAY = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
"""The kinds of conditions that have mutants of their own, so that they are not negated as well."""


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
    return False


def _changed(node: ast.stmt | ast.expr) -> Iterator[ast.stmt | ast.expr]:
    """Yield the changed forms of one node, its children as they are."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for at, op in enumerate(ops):
                new = [*ops[:at], SWAPS[type(op)](), *ops[at + 1 :]]
                yield ast.Compare(left=left, ops=new, comparators=others)  # type: ignore[arg-type]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS and not _is_text(left):
            yield ast.BinOp(left=left, op=SWAPS[type(op)](), right=right)  # type: ignore[arg-type]
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in SWAPS:
            yield ast.AugAssign(target=target, op=SWAPS[type(op)](), value=value)  # type: ignore[arg-type]
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(op=SWAPS[type(op)](), values=values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value=value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield ast.Return(value=ast.Constant(value=None))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Break() | ast.Continue():
            yield SWAPS[type(node)]()  # type: ignore[misc]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
