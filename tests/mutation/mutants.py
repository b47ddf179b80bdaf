"""The one-place mutants of a source file: what each replaces, and where. Texts, types, logs and assertions are left alone."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = ("logger", "log", "warnings")


@dataclass(frozen=True)
class Mutant:
    module: str  # path of the file, relative to the tree
    source: bytes
    lines: tuple[int, int]  # its own, and the first of its statement
    kind: str
    start: int  # the bytes of the file that are replaced
    end: int
    text: str

    @property
    def mutated(self) -> bytes:
        return self.source[: self.start] + self.text.encode() + self.source[self.end :]

    @property
    def key(self) -> str:
        """The same while the place and what stands around it are the same."""
        near = self.source[max(0, self.start - 200) : self.end + 200]
        return hashlib.sha256(near + f"{self.module}{self.kind}{self.text}".encode()).hexdigest()[:16]

    @property
    def diff(self) -> str:
        before, after = self.source.decode().splitlines(), self.mutated.decode().splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.module, self.kind, n=1, lineterm=""))


def mutants(module: str, source: bytes) -> list[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, statement, kind, text in _Finder().find(ast.parse(source), 1):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(module, source, (node.lineno, statement), kind, start, end, text))
    return found


class _Finder:
    def find(self, node: ast.AST, statement: int) -> Iterator[tuple[ast.expr | ast.stmt, int, str, str]]:
        """(what is replaced, the line of its statement, the kind of mutation, the new text) of every mutant below `node`."""
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        if isinstance(node, (ast.expr, ast.stmt)):
            for kind, new in self._changes(node):
                text = ast.unparse(new)
                # an operand keeps its place among operators of any precedence
                yield node, statement, kind, f"({text})" if isinstance(new, (ast.Compare, ast.BoolOp, ast.BinOp)) else text
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
            yield node.test, statement, "not", f"(not {ast.unparse(node.test)})"
        for child in self._children(node):
            yield from self.find(child, statement)

    def _children(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)) or _is_text(node) or _is_log(node):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        skipped = {ast.AnnAssign: ("annotation",), ast.FunctionDef: ("returns", "decorator_list"), ast.arg: ("annotation",),
                   ast.AsyncFunctionDef: ("returns", "decorator_list"), ast.ClassDef: ("bases", "keywords", "decorator_list"),
                   ast.Raise: ("exc", "cause")}.get(type(node), ())  # fmt: skip
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets):
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar"):
            return
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST))

    def _changes(self, node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
        match node:
            case ast.Compare(left, ops, comparators):
                for i, op in enumerate(ops):
                    for new in COMPARED[type(op)]:
                        yield "comparison", ast.Compare(left, [*ops[:i], new(), *ops[i + 1 :]], comparators)
            case ast.BoolOp(op, values):
                yield "and/or", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            case ast.UnaryOp(ast.Not(), operand):
                yield "not", operand
            case ast.BinOp(left, op, right) if type(op) in COMPUTED and not any(_is_sequence(n) for n in (left, right)):
                yield "arithmetic", ast.BinOp(left, COMPUTED[type(op)](), right)
            case ast.AugAssign(target, op, value) if type(op) in COMPUTED and not _is_sequence(value):
                yield "arithmetic", ast.AugAssign(target, COMPUTED[type(op)](), value)
            case ast.Constant(value) if isinstance(value, bool):
                yield "constant", ast.Constant(not value)
            case ast.Constant(value) if isinstance(value, (int, float)):
                yield "constant", ast.Constant(value + 1)
            case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
                yield "return None", ast.Return(ast.Constant(None))
            case ast.Call(ast.Name(name), args, keywords) if name in TWINS:
                yield "min/max", ast.Call(ast.Name(TWINS[name]), args, keywords)
            case ast.Call(func, [first, second, *rest], keywords) if not _is_log(node):
                if (
                    not isinstance(first, ast.Starred)
                    and not isinstance(second, ast.Starred)
                    and ast.dump(first) != ast.dump(second)
                ):
                    yield "swapped arguments", ast.Call(func, [second, first, *rest], keywords)
            case ast.IfExp(test, body, orelse):
                yield "branches", ast.IfExp(test, orelse, body)
            case ast.Expr(value) if not _is_text(node) and not _is_log(value):
                yield "deleted", ast.Pass()
            case ast.Assign([ast.Attribute() | ast.Subscript()], _) | ast.Continue() | ast.Break() | ast.Raise() | ast.Delete():
                yield "deleted", ast.Pass()


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_log(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value).split(".")[-1] in LOGS
    )


def _is_sequence(node: ast.AST) -> bool:
    """A text, list or tuple, whose operators are not those of numbers."""
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
