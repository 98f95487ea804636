"""Compile chat templates with payments where they can do much work.

jinja2 compiles operators, slices, keys and loops to Python's own, which take any time for large
values. So filters that pay are put around the operands, and at the head of each body that can run
more than once. Values of a render are paid from the `Steps` in its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import compiler, nodes
from jinja2.runtime import Context, markup_join, str_join
from jinja2.visitor import NodeTransformer

from strata_nb.text.template_budget import (
    BYTES_PER_STEP,
    WIDEST,
    Counted,
    check_result,
)

CALL_STEPS = 10  # calling a macro or a recursive loop takes as long as ten plain iterations

# No template can write these as names: the key of the budget in a context, and filters. A template
# that reaches the filters through `map('...')` only pays.
STEPS = "steps left"
_COUNT = "count steps"
_WALK = "pay for all of a value"
_WALK_ITEMS = "pay for items"
_COPY = "pay for a copy"
_SEARCH = "pay for a search"
_CONCATENATE = "concatenate"


class PayingGenerator(compiler.CodeGenerator):
    """Put a payment at the head of every body that can run more than once, and into it."""

    def visit_Template(self, node: nodes.Template, frame: compiler.Frame | None = None) -> None:
        repeatable: Iterable[Any] = node.find_all(
            (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
        )
        for block in list(repeatable):
            is_plain_loop = isinstance(block, nodes.For) and not block.recursive
            # What a body builds without an operation: its own text, and its lists.
            texts = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
            lists = block.find_all((nodes.List, nodes.Tuple, nodes.Dict))
            items = sum(len(literal.items) for literal in lists)
            steps = 1 if is_plain_loop else CALL_STEPS
            steps += items + texts * WIDEST // BYTES_PER_STEP
            step = nodes.Filter(nodes.Const(steps), _COUNT, [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(step, lineno=block.lineno))
        _Charging().visit(node)
        super().visit_Template(node, frame)


class _Charging(NodeTransformer):
    """Insert payments where jinja2 compiles to Python's own operations on values of any size."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Pay for one side, since no comparison looks further than the smaller value."""
        self.generic_visit(node)
        before: Any = node
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = _filtered(operand.expr, _SEARCH)
            if not isinstance(before.expr, nodes.Const):
                short = isinstance(operand.expr, nodes.Const) and operand.op not in ("in", "notin")
                before.expr = before.expr if short else _filtered(before.expr, _WALK)
            before = operand
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, _CONCATENATE)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Pay for the items that the loop's own condition leaves out."""
        self.generic_visit(node)
        if node.test is not None:
            node.iter = _filtered(node.iter, _WALK_ITEMS)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Pay for the copy that a slice is, and for the hash of a key."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _COPY)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _filtered(node.arg, _WALK)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Pay for the hash of a key."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, _WALK)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# --- the filters that `_Charging` inserts ---


@jinja2.pass_context
def _count(context: Context, steps: int) -> None:
    context[STEPS].take(steps)


@jinja2.pass_context
def _walk(context: Context, value: Any) -> Any:
    context[STEPS].walk(value)
    return value


@jinja2.pass_context
def _walk_items(context: Context, value: Any) -> Any:
    context[STEPS].walk_items(value)
    return value


@jinja2.pass_context
def _copy(context: Context, value: Any) -> Any:
    context[STEPS].copy(value)
    return value


@jinja2.pass_context
def _search(context: Context, value: Any) -> Any:
    """Pay for `in value`: a look through it, or at one key."""
    value = listed(value)
    if not isinstance(value, Mapping):
        context[STEPS].walk(value)
    return value


@jinja2.pass_context
def _concatenate(context: Context, parts: list[Any]) -> str:
    """Return what jinja2's `~` returns."""
    context[STEPS].walk(*parts)
    result = markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)
    check_result(result, "~")
    return result


@jinja2.pass_context
def paid_print(context: Context, value: Any) -> Any:
    """Pay for what `{{ }}` prints."""
    context[STEPS].walk(value)
    return value


PAYMENTS = {
    _COUNT: _count,
    _WALK: _walk,
    _WALK_ITEMS: _walk_items,
    _COPY: _copy,
    _SEARCH: _search,
    _CONCATENATE: _concatenate,
}


def listed(value: Any) -> Any:
    """Return the list of what a filter yields, so that its size is known; else the value."""
    return list(value) if isinstance(value, Counted) else value
