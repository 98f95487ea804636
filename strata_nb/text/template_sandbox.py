"""The jinja2 environment that chat templates run in.

A template comes with a model file, so it is somebody else's program. jinja2's immutable sandbox
keeps it away from the interpreter and from the conversation's lists; this module adds what
templates expect beyond plain jinja2 (the set that Hugging Face's transformers defines) and a
budget, because a file must not be able to hang its reader.

Bounded, by `Steps`: the turns of loops and the calls of macros and blocks; whatever filters, tests,
operators, methods and `{{ }}` do with large values, each paid by size before it is done; the size
of each value; the processor time, looked at between steps. All that a template builds is at most
2,000,000 steps of 512 bytes, 1 GiB.

Not bounded here: the time for compiling the template's text (its length is limited by the caller),
the length of the rendered text (the caller counts the pieces), and a single operation once it has
begun, which takes at most about a second for values of the permitted size. Filters and methods that
no chat template uses and that have no such bound are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_round, sync_do_sum
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from strata_nb.text.template_budget import (
    BYTES_PER_STEP,
    MAX_BITS,
    MAX_SIZE,
    Counted,
    Steps,
    check_result,
    format_size,
    length,
    percent_size,
)
from strata_nb.text.template_compiler import PAYMENTS, STEPS, PayingGenerator, listed, paid_print

MAX_INDENT = 100  # characters for each level of JSON
MAX_PRECISION = 400  # digits that `round` may keep; a float has no more
MAX_TIME_FORMAT = 1000  # characters

_MISSING_GLOBALS = ("lipsum", "cycler", "joiner")
_MISSING_FILTERS = (
    *("batch", "slice", "filesizeformat", "pprint", "random", "striptags", "urlize"),
    *("wordwrap", "xmlattr"),
)
_MISSING_METHODS = frozenset(
    {"encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans", "striptags"}
    | {"to_bytes", "translate"}
)
# Filters that look at their value itself, and those that pass over its items without looking into
# them. What makes an iterator pays when that is read. The others pay for everything in a value.
_LOOK_AT_ONE = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
_PASS_OVER = frozenset({"items", "list", "map", "reject", "rejectattr", "reverse"})
_PASS_OVER |= {"select", "selectattr"}
_BY_CHARACTER = frozenset({"groupby", "max", "min", "sort", "sum", "unique"})
# Methods and filters that compare each character of a text with each one of an argument.
_COMPARING = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_COMPARING |= {"trim"}
_LOOKING_TESTS = (
    *("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt"),
    *("lessthan", "<=", "le", "lower", "upper", "divisibleby"),
)


class Refusal(jinja2.TemplateError):
    """Carry the message of a template that called raise_exception."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compile chat templates; a compiled one must be rendered with `variables`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of the template runs before it is asked for
            finalize=paid_print,
            extensions=[loopcontrols, GenerationBlock],
        )
        self.code_generator_class = PayingGenerator
        for name in _MISSING_GLOBALS:
            del self.globals[name]
        for name in _MISSING_FILTERS:
            del self.filters[name]
        self.filters |= {"round": _round, "sum": _sum}
        self.filters = {name: _paid_filter(name, f) for name, f in self.filters.items()}
        self.filters |= {"tojson": _tojson, **PAYMENTS}
        self.tests |= {name: _paid_test(self.tests[name]) for name in _LOOKING_TESTS}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @staticmethod
    def variables(given: dict[str, Any]) -> dict[str, Any]:
        """Return what to render with: `given`, and a fresh budget."""
        return {**given, STEPS: Steps()}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may have this attribute."""
        return attr not in _MISSING_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result is a giant."""
        steps: Steps = context[STEPS]
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    steps.build(len(sequence) * times, _unit(sequence), operator)
        elif isinstance(left, str) and operator == "%":
            steps.build(percent_size(left, steps.walk(right)), "characters", operator)
        elif isinstance(left, str) and isinstance(right, str):
            steps.walk(left, right)
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            steps.build(len(left) + len(right), "items", operator)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        check_result(result, operator)
        return result

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, paying for what methods do with large values."""
        if isinstance(obj, (Macro, LoopContext, BlockReference)):  # these pay in their bodies
            return super().call(context, obj, *args, **kwargs)
        steps: Steps = context[STEPS]
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str) or obj is dict:
            args = tuple(map(listed, args))
        # jinja2 passes these to itself.
        given = {key: kwargs[key] for key in kwargs if key not in ("_loop_vars", "_block_vars")}
        if isinstance(owner, str):
            if name in _MISSING_METHODS:
                raise SecurityError(f"the method {name} is unsafe")
            _pay(steps, _METHOD_SIZES, name, owner, args, given)
        else:
            steps.walk(*args, *given.values())
        if isinstance(owner, (list, tuple)):  # which only search themselves
            steps.walk(owner)
        result = super().call(context, obj, *args, **kwargs)
        check_result(result, name)
        if isinstance(result, (list, dict)):
            steps.walk_items(result)
        return result


class GenerationBlock(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training; print its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as it is

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# --- filters, tests and methods that pay ---


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that pays for its value first and for the iterator it returns, if any."""

    @jinja2.pass_context
    def paid(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        steps: Steps = context[STEPS]
        if name in _PASS_OVER:
            steps.walk_items(value)
        elif name not in _LOOK_AT_ONE:
            value = listed(value)
            if isinstance(value, str) and name in _BY_CHARACTER:
                steps.take(len(value))
            _pay(steps, _FILTER_SIZES, name, value, args, kwargs)
        result = function(*_passed(function, context), value, *args, **kwargs)
        if isinstance(result, Iterator):
            return Counted(steps, result)
        check_result(result, name)
        return result

    return paid


def _paid_test(function: Any) -> Callable[..., Any]:
    @jinja2.pass_context
    def paid(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(listed, args))
        context[STEPS].walk(value, *args, *kwargs.values())
        return function(*_passed(function, context), value, *args, **kwargs)

    return paid


def _pay(
    steps: Steps,
    sizes: Mapping[str, Callable[..., int]],
    name: str,
    value: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Pay for what a filter or a method of texts reads, and builds beyond that."""
    size = steps.walk(value, *args, *kwargs.values())
    if isinstance(value, str) and name in _COMPARING:
        steps.compare(value, (*args, *kwargs.values()))
    if name in sizes:
        steps.build(sizes[name](size, value, *args, **kwargs), "characters", name)


# How many characters come out at most: given the bytes of all values, the value, the arguments.


def _padded_size(size: int, text: Any, width: int = 80, *_: Any) -> int:
    return size + width


def _replaced_size(size: int, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return size + str(text).count(str(old)) * len(str(new))


def _indented_size(size: int, text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    each = len(width) if isinstance(width, str) else width
    return size + (len(str(text).splitlines()) + 1) * each


def _joined_size(size: int, value: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return size + length(value) * len(str(d))


_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded_size,
    "format": lambda size, text, *_, **__: percent_size(str(text), size),
    "indent": _indented_size,
    "join": _joined_size,
    "replace": _replaced_size,
}
_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded_size,
    "format": lambda size, text, *_, **__: format_size(text, size),
    "join": lambda size, text, items: _joined_size(size, items, text),
    "ljust": _padded_size,
    "replace": _replaced_size,
    "rjust": _padded_size,
    "zfill": _padded_size,
}


def _passed(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """Return what jinja2 passes to a filter or test before its value."""
    wanted = _PassArg.from_obj(function)
    if wanted is None:
        return ()
    given = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}
    return (given.get(wanted, context.environment),)


# --- what templates expect, and filters that need limits of their own ---


def _unit(sequence: str | list[Any] | tuple[Any, ...]) -> str:
    return "characters" if isinstance(sequence, str) else "items"


def _check_bits(operator: str, left: int, right: int) -> None:
    bits, more = left.bit_length(), right.bit_length()
    built = {"*": bits + more, "**": bits * max(right, 0)}.get(operator, max(bits, more))
    if built > MAX_BITS:
        raise SecurityError(f"`{operator}` would build {built:,} bits, more than {MAX_BITS:,}")


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Return what jinja2's filter returns; `ceil` and `floor` compute a power of ten."""
    if abs(precision) > MAX_PRECISION:
        raise SecurityError(f"`round` to {precision:,} digits, more than {MAX_PRECISION}")
    return do_round(value, precision, method)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, value: Any, attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Return what jinja2's filter returns for numbers; a sum of lists copies each often."""
    if not isinstance(start, (int, float)):
        raise SecurityError("`sum` adds numbers")
    return sync_do_sum(environment, value, attribute, start)


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    """Return the local time, as templates print today's date into the system message."""
    if len(form) > MAX_TIME_FORMAT:
        raise SecurityError(f"`strftime_now` got {len(form):,} characters")
    return datetime.now().strftime(form)


@jinja2.pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter would escape <, >, & and ' for HTML."""
    steps: Steps = context[STEPS]
    if (len(indent) if isinstance(indent, str) else indent or 0) > MAX_INDENT:
        raise SecurityError(f"`tojson` would indent by more than {MAX_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks, size = [], 0
    for chunk in encoder.iterencode(value):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_SIZE:
            raise SecurityError(f"`tojson` would build more than {MAX_SIZE:,} characters")
        steps.take(1 + len(chunk) // BYTES_PER_STEP)
    return "".join(chunks)
