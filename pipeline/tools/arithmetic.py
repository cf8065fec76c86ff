"""Arithmetic on text that a model wrote: a walk over the syntax tree, bounded in length and size of every value.

Nothing is compiled or run, so an expression can neither reach the interpreter nor allocate more than a few numbers.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

MAX_CHARS = 200  # which bounds the depth of the walk, too: a level takes at least one character
MAX_ABS = 10**30  # of every intermediate value

Number = int | float
Function = tuple[Callable[..., Number], int, int]
"""What it computes, the fewest and the most arguments."""

_SIGNS = str.maketrans(
    {"^": "**", "＾": "**", "×": "*", "÷": "/", "−": "-", "‐": "-", "‑": "-", "–": "-"}
    | dict(zip("（）＋－＊／％．，", "()+-*/%.,", strict=True))
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
)
_ALLOWED = re.compile(r"[0-9A-Za-z_.+\-*/%(), ]*")
_GLUED = re.compile(r"(?<![0-9A-Za-z_])[0-9][0-9_.]*+(?:[eE][+-]?[0-9]++)?+[A-Za-z_]")  # 1if: the parser would print a warning
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Function] = {
    "sqrt": (math.sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (round, 1, 1),
    "min": (min, 2, 8),
    "max": (max, 2, 8),
}
_NAMES: dict[str, Function | Number] = {**_FUNCTIONS, **{f"math.{name}": function for name, function in _FUNCTIONS.items()}}


class ArithmeticFault(ValueError):
    """The expression has no value here; the message is what the model reads."""


def evaluate(expression: str, *, signs: Mapping[int, str] = _SIGNS, names: Mapping[str, Function | Number] = _NAMES) -> Number:
    """Returns the value of an expression over `+ - * / // % **`, parentheses, sqrt, abs, round, min and max.

    `^ × ÷ −` and full-width signs are read as people mean them; `math.sqrt(2)` is `sqrt(2)`. Integers stay exact.

    Args:
        expression: what to evaluate.
        signs: characters that stand for other ones, as for `str.translate`.
        names: functions and constants as they are written, `sqrt` or `math.sqrt`.

    Raises:
        ArithmeticFault: not such an expression, too long, undefined, or a value beyond `MAX_ABS`.
    """
    text = expression.strip().translate(signs)
    if not text:
        raise ArithmeticFault("the expression is empty")
    if len(text) > MAX_CHARS:
        raise ArithmeticFault(f"the expression is longer than {MAX_CHARS} characters")
    if not _ALLOWED.fullmatch(text):
        raise ArithmeticFault("the expression has signs that are not arithmetic")
    if _GLUED.search(text):
        raise ArithmeticFault("the expression is malformed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the parser's answers to malformed and to deeply nested text
        raise ArithmeticFault("the expression is malformed") from None
    return _value(tree.body, names)


def format_number(value: Number) -> str:
    """Returns the value as text: integers exactly, floats to 4 decimals (4 significant digits below 0.001)."""
    if isinstance(value, int):
        return str(value)
    if 0 < abs(value) < 0.001:
        return f"{value:.4g}"
    return f"{value + 0.0:.4f}".rstrip("0").rstrip(".")  # + 0.0: a negative zero prints as 0


def _value(node: ast.expr, names: Mapping[str, Function | Number]) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, names)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _binary(node.op, _value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Call) and not node.keywords:
        return _call(_written(node.func), names, [_value(argument, names) for argument in node.args])
    constant = names.get(_written(node))
    if isinstance(constant, int | float):
        return constant
    raise ArithmeticFault("only numbers, + - * / // % **, parentheses, sqrt, abs, round, min and max are known")


def _binary(kind: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(kind, ast.Pow):
        return _power(left, right)
    if type(kind) not in _BINARY:
        raise ArithmeticFault("only + - * / // % ** are known between numbers")
    try:
        return _bounded(_BINARY[type(kind)](left, right))
    except ZeroDivisionError:
        raise ArithmeticFault("division by zero") from None


def _power(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        raise ArithmeticFault("division by zero")
    if base < 0 and exponent != int(exponent):
        raise ArithmeticFault("a root of a negative number is not real")
    # Sizes are compared before the power is taken: 9**9**9 would fill the memory.
    if base != 0 and exponent * math.log10(abs(base)) > math.log10(MAX_ABS):
        raise ArithmeticFault("the result is too large")
    return _bounded(base**exponent)


def _written(node: ast.expr) -> str:
    """`name` or `module.name` as it is written, empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _call(name: str, names: Mapping[str, Function | Number], arguments: list[Number]) -> Number:
    function = names.get(name)
    if not isinstance(function, tuple):
        raise ArithmeticFault(f"unknown function, known are {', '.join(_FUNCTIONS)}")
    compute, fewest, most = function
    if not fewest <= len(arguments) <= most:
        raise ArithmeticFault(f"{name} takes {fewest}{f' to {most}' if most > fewest else ''} arguments")
    if name.endswith("sqrt") and arguments[0] < 0:
        raise ArithmeticFault("a root of a negative number is not real")
    try:
        return _bounded(compute(*arguments))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):  # outside the function's domain, or beyond any float
        raise ArithmeticFault(f"{name} has no value there") from None


def _bounded(value: Number) -> Number:
    if not abs(value) <= MAX_ABS:  # false for nan too
        raise ArithmeticFault("the result is too large")
    return value
