"""A Jinja environment for templates that come with a model file and are not trusted.

Knows Jinja, not chats. On top of Jinja's immutable sandbox (no way to the interpreter, no changing of arguments)
everything that loops, calls, makes or compares values is paid for from a meter, so that a hostile template ends with an
error and not with a process that hangs or runs out of memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Undefined, nodes, pass_eval_context
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firstlight.text.meter import Paid, active_meter, check_arguments, check_binop, joined

__all__ = ["TemplateEnvironment"]

_ITERATED, _CONCATENATED, _WEIGHED = "firstlight.iterated", "firstlight.concatenated", "firstlight.weighed"
"""Filters that stand only in rewritten trees."""
_REMOVED_FILTERS = ("pprint", "random", "urlize", "xmlattr")
_COMPARING_TESTS = frozenset(
    {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in"}
)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders chat templates as the `transformers` library does, and pays for each operation from the active meter.

    Args:
        strftime_now: gives today's date in a format; templates that name the date call it.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_weighed
        )
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters = {
            name: _paid_filter(name, function)
            for name, function in self.filters.items()
            if name not in _REMOVED_FILTERS
        }
        self.filters |= {_ITERATED: _iterated, _CONCATENATED: _concatenated, _WEIGHED: _weighed}
        self.tests = {
            name: _paid_test(function) if name in _COMPARING_TESTS else function  # type: ignore[arg-type]
            for name, function in self.tests.items()
        }
        kept = {name: self.globals[name] for name in ("namespace", "dict", "joiner", "cycler")}
        self.globals = kept | {"range": _range, "raise_exception": _raise, "strftime_now": strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree with loops, `~`, comparisons and list literals led through our own filters."""
        return _metered_tree(super()._parse(source, name, filename))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, macro or block wrote."""
        meter, kept, total = active_meter(), [], 0
        for part in parts:
            total += len(part)
            if total > meter.max_characters:
                break
            kept.append(part)
        meter.size(total)
        return "".join(kept)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, macro or method from a template."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            return joined(owner, args[0])
        if isinstance(owner, (str, bytes, bytearray, int, float)):
            check_arguments(name, owner, [*args, *kwargs.values()])
        else:
            active_meter().step()
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own safe stand-in for `str.format`, paid for like any other method."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        safe = wrapped

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_arguments(value.__name__, value.__self__, [*args, *kwargs.values()])
            return safe(*args, **kwargs)

        return formatted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, refused where its result would be large."""
        if operator == "+" and type(left) is str and type(right) is str:  # what templates do most
            active_meter().size(len(left) + len(right))
            return left + right
        check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _iterated(values: Any) -> Any:
    """The values of a loop, each round paid for."""
    return values if isinstance(values, Undefined) or not isinstance(values, Iterable) else Paid(values)


def _concatenated(*values: Any) -> str:
    """The values of a `~` expression as one string."""
    return joined("", values)


def _weighed(value: Any) -> Any:
    """`value`, after a look at its size written out."""
    if not isinstance(value, (str, int)):
        active_meter().weigh(value)
    return value


def _metered_tree(tree: nodes.Template) -> nodes.Template:
    """Rewrites `tree` in place: see `TemplateEnvironment._parse`."""
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise TemplateSyntaxError("recursive loops are not available in chat templates", loop.lineno)
        loop.iter = _filtered(_ITERATED, loop.iter)
    _rewrite(tree)
    return tree


def _rewrite(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            _rewrite(value)
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _rewrite(item)
            setattr(node, name, [_replaced(item) if isinstance(item, nodes.Node) else item for item in value])


def _replaced(node: nodes.Node) -> nodes.Node:
    """The node to stand in `node`'s place."""
    if isinstance(node, nodes.Concat):
        return _filtered(_CONCATENATED, *node.nodes)
    if isinstance(node, nodes.Compare):
        node.expr = _looked_at(node.expr)
        for operand in node.ops:
            operand.expr = _looked_at(operand.expr)
    elif isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and getattr(node, "ctx", "load") == "load":
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_constant else _filtered(_WEIGHED, node)
    return node


def _looked_at(expression: nodes.Expr) -> nodes.Expr:
    """An operand of a comparison; literals were looked at already."""
    is_checked = isinstance(expression, (nodes.Const, nodes.List, nodes.Tuple))
    return expression if is_checked or _is_weighed(expression) else _filtered(_WEIGHED, expression)


def _is_weighed(expression: nodes.Expr) -> bool:
    return isinstance(expression, nodes.Filter) and expression.name == _WEIGHED


def _filtered(name: str, first: nodes.Node, *others: nodes.Expr) -> nodes.Filter:
    """A call of one of our own filters, as a node; compiled to a plain call."""
    node = nodes.Filter(first, name, list(others), [], None, None)
    node.set_lineno(first.lineno)
    return node


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` paid for from the meter; keeps Jinja's marks on it (whether it wants the environment)."""
    num_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        check_arguments(name, None, [*args[num_hidden:], *kwargs.values()])
        result = function(*args, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            active_meter().size(len(result))
        return result

    return filtered


def _paid_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tested(*args: Any) -> Any:
        for value in args:
            _weighed(value)
        return function(*args)

    return tested


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return joined(str(d), value)


def _range(*bounds: int) -> range:
    values = range(*bounds)
    active_meter().step(len(values))
    return values


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, other alphabets as they are (Jinja's own filter escapes both)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
