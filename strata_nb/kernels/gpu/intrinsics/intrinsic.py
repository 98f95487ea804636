"""What an intrinsic is, and what its bodies are written with.

Bodies get a builder of `llvmlite` and the values of the arguments. That package is imported when
something is compiled, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WARP = 32

Emit = Callable[[Any, list[Any]], Any]
"""Emit LLVM code with a builder for arguments, and return the result (None for a void one)."""


class Intrinsic:
    """Hold a name, its signature and what it becomes; kernels call it.

    result      type of the result: "i32", "f32", "4xi32" for a tuple of four, "void"
    arguments   types of the arguments
    body        emits code that both vendors' LLVM understands; None where the two differ
    ptx         for NVIDIA: instruction and constraints of an inline assembly, or emits code; of an
                instruction `since(90, ...)` older cards have nothing
    amdgpu      for AMD: emits code
    """

    def __init__(
        self,
        name: str,
        signature: str,
        *,
        body: Emit | None = None,
        ptx: tuple[str, str] | Emit | None = None,
        amdgpu: Emit | None = None,
    ) -> None:
        self.name = name
        result, _, rest = signature.partition("(")
        self.result = result
        self.arguments = tuple(part.strip() for part in rest.rstrip(")").split(",") if part.strip())
        self.body, self.ptx, self.amdgpu = body, ptx, amdgpu

    def __repr__(self) -> str:
        return f"{self.result} {self.name}({', '.join(self.arguments)})"

    def __call__(self, *arguments: Any) -> Any:
        """Exist for those who read types: only a compiled or simulated kernel can call it."""
        raise TypeError(f"{self!r} has a meaning in kernels only, called with {arguments}")


SINCE = "//since {}: "  # before an instruction in PTX: a comment until it is linked


def since(target: int, instruction: str, constraints: str) -> tuple[str, str]:
    """Return an instruction without a result that targets have from `target` on, such as 90.

    Nothing that reads or writes memory is moved across it.
    """
    joined = ",".join(part for part in (constraints, "~{memory}") if part)
    return SINCE.format(target) + instruction, joined


UNTIL = "//until {}: "  # before what takes its place in PTX for older targets


def by_age(target: int, newer: str, older: Sequence[str], constraints: str) -> tuple[str, str]:
    """Return an instruction that targets have from `target` on, with others in its place before.

    Both have the same operands; `older` write some of their results before they have read all.
    """
    lines = [SINCE.format(target) + newer, *(UNTIL.format(target) + one for one in older)]
    return "\n\t".join(lines), constraints


# -- for bodies ------------------------------------------------------------------------------------


def llvm() -> Any:
    """Return the module whose types and constants bodies use."""
    from llvmlite import ir

    return ir


def llvm_type(name: str) -> Any:
    """Return the LLVM type of a type name."""
    ir = llvm()
    if name == "void":
        return ir.VoidType()
    if "x" in name:
        count, _, element = name.partition("x")
        return ir.LiteralStructType([llvm_type(element)] * int(count))
    floats = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
    return floats[name] if name in floats else ir.IntType(int(name[1:]))


def constant(value: int, bits: int = 32) -> Any:
    """Return an integer that is part of the code."""
    ir = llvm()
    return ir.Constant(ir.IntType(bits), value)


def as_tuple(builder: Any, values: Sequence[Any]) -> Any:
    """Return values of one type as the result of an intrinsic."""
    ir = llvm()
    found = ir.Constant(ir.LiteralStructType([one.type for one in values]), ir.Undefined)
    for number, one in enumerate(values):
        found = builder.insert_value(found, one, number)
    return found


def llvm_function(builder: Any, name: str, kind: Any) -> Any:
    """Return a function of LLVM by its name, declared in what the builder makes."""
    return builder.module.globals.get(name) or llvm().Function(builder.module, kind, name)


def llvm_call(name: str, signature: str) -> Emit:
    """Return what calls a function of LLVM by its name."""
    result, _, rest = signature.partition("(")
    kinds = [part.strip() for part in rest.rstrip(")").split(",") if part.strip()]

    def emit(builder: Any, arguments: list[Any]) -> Any:
        kind = llvm().FunctionType(llvm_type(result), [llvm_type(one) for one in kinds])
        return builder.call(llvm_function(builder, name, kind), arguments)

    return emit


def nothing(builder: Any, arguments: list[Any]) -> None:
    """Emit nothing."""


def escaped(text: str) -> str:
    """Return the text of an inline assembly of several lines as LLVM reads it."""
    return text.replace("\n", "\\0A").replace("\t", "\\09")
