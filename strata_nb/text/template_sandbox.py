"""The jinja2 environment that chat templates run in.

A template comes with a model file, so it is somebody else's program. jinja2's immutable sandbox
keeps it away from the interpreter and from the conversation's lists; this module adds what
templates expect beyond plain jinja2 (the set that Hugging Face's transformers defines) and a
budget, because a file must not be able to hang its reader: loop iterations and macro calls are
counted, and `*` and `**` may not build giants. What the text adds up to is bounded by the caller,
piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import compiler, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000  # about a second; looking back from each of 1,000 messages takes 500,000
CALL_STEPS = 10  # calling a macro or a recursive loop takes as long as ten plain iterations
MAX_REPEATED = 1 << 24  # items or characters that one `*` may build
MAX_BITS = 1 << 14  # of an integer that one `*` or `**` may build

_STEPS = "steps left"  # with a space: no template can name it
_COUNT = "count steps"


class Refusal(jinja2.TemplateError):
    """Carry the message of a template that called raise_exception."""


class Steps:
    """Hold how many steps a render may still take."""

    def __init__(self, limit: int = MAX_STEPS) -> None:
        self._limit = limit
        self._left = limit

    def take(self, steps: int) -> None:
        """Take some steps; raises SecurityError when too few are left."""
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"stopped after {self._limit:,} steps: it would not end")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compile chat templates; a compiled one must be rendered with `variables`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of the template runs before it is asked for
            extensions=[loopcontrols, GenerationBlock],
        )
        self.code_generator_class = _CountingGenerator
        self.filters[_COUNT] = _count
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @staticmethod
    def variables(given: dict[str, Any]) -> dict[str, Any]:
        """Return what to render with: `given`, and a fresh budget."""
        return {**given, _STEPS: Steps()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result is a giant."""
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                _refuse_above(MAX_REPEATED, len(sequence) * times, "items", operator)
        if isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            _refuse_above(
                MAX_BITS, bits * right if operator == "**" else bits + more, "bits", operator
            )
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training; print its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as it is

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _CountingGenerator(compiler.CodeGenerator):
    """Put a counted step at the head of every body that can run more than once."""

    def visit_Template(self, node: nodes.Template, frame: compiler.Frame | None = None) -> None:
        repeatable: Iterable[Any] = node.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for block in list(repeatable):
            is_plain_loop = isinstance(block, nodes.For) and not block.recursive
            steps = nodes.Const(1 if is_plain_loop else CALL_STEPS)
            step = nodes.Filter(steps, _COUNT, [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(step, lineno=block.lineno))
        super().visit_Template(node, frame)


@jinja2.pass_context
def _count(context: Context, steps: int) -> None:
    context[_STEPS].take(steps)


def _refuse_above(limit: int, size: int, unit: str, operator: str) -> None:
    if size > limit:
        raise SecurityError(f"`{operator}` would build {size:,} {unit}, more than {limit:,}")


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    """Return the local time, as templates print today's date into the system message."""
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter would escape <, >, & and ' for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
