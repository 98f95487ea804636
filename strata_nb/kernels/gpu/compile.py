"""Make machine code of GPU kernels: the only importer of numba.cuda.

    kernel (Python) --Numba--> LLVM code --NVVM--> PTX --nvJitLink--> cubin for one target

PTX is made once, for the oldest cards; nvJitLink turns it into a cubin for the card's own target.
The driver never sees PTX, so it may be older than the toolkit, as long as their major version of
CUDA is the same (NVIDIA promises no more). Nothing here needs a card.

Numba's driver layer, device arrays and dispatcher are not used: they own a context, and ask a card
for its target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu.binding import Binder
from strata_nb.kernels.gpu.intrinsics.intrinsic import SINCE, UNTIL, Intrinsic, llvm_type
from strata_nb.kernels.gpu.intrinsics.memory import SHARED_NAME
from strata_nb.kernels.gpu.intrinsics.ordering import AWAIT_PREVIOUS
from strata_nb.kernels.gpu.intrinsics.warpgroups import ACCELERATED, BOUNDARY
from strata_nb.kernels.gpu.machine_code import loses_words
from strata_nb.kernels.gpu.operations import GpuKernel

Function = Callable[..., Any]

_NEWER = "a newer toolkit: pip install -U 'strata-nb[cuda]'"
OLDEST = (7, 5)  # what PTX is made for
_REGISTERS = 65_536  # of a multiprocessor, which its blocks share, on every card
_SPARING = 80  # the first target that keeps to the registers that a kernel asks for
_SERIALISED = "instructions are serialized"  # of the linker, of products of warpgroups
_WORDS = {"address": "int64", "integer": "int64", "float": "float32"}


class Cubin(NamedTuple):
    """Hold a kernel's machine code for one target, and what it costs.

    entry         name of the kernel in it
    image         the code
    registers     of a thread
    spill_bytes   of a thread, that did not fit registers
    """

    entry: str
    image: bytes
    registers: int
    spill_bytes: int


def llvm_code(kernel: Function, kinds: Sequence[str], vendor: str = "ptx") -> tuple[Any, str]:
    """Return Numba's library of a kernel, and the name of the kernel in it.

    kinds    of the arguments, as the table of kernels has them: address, integer, float
    vendor   "ptx" or "amdgpu": which bodies the intrinsics get
    """
    numba = _numba()
    bound = _binder(vendor).bind(kernel)
    types = [getattr(numba.types, _WORDS[kind]) for kind in kinds]
    made = _compiled(bound, numba.types.void, tuple(types))
    library = made.library
    name = made.fndesc.llvm_func_name
    function = library.get_function(name)
    library._entry_name = name
    numba.compiler.kernel_fixup(function, False)
    return library, name


def ptx_code(kernel: GpuKernel, kinds: Sequence[str]) -> str:
    """Return PTX of a kernel for the oldest cards, under the kernel's own name.

    kinds   of its arguments, as `llvm_code` has them

    A kernel that says nothing about launches before it waits for them first.
    """
    numba = _numba()
    library, name = llvm_code(kernel.function, kinds)
    bounds = kernel.threads, max(1, _REGISTERS // (kernel.threads * kernel.registers))
    numba.nvvm.set_launch_bounds(library.get_function(name), bounds)
    (text,) = library.get_asm_strs(cc=OLDEST)
    # Numba numbers what it compiles: without that the same kernel is the same code every time.
    text = re.sub(r".*_ZN08NumbaEnv.*\n", "", text).replace(name, kernel.name)
    if AWAIT_PREVIOUS not in text:
        text = re.sub(r"^\{$", f"{{\n\t{AWAIT_PREVIOUS}", text, count=1, flags=re.MULTILINE)
    return text


def cubin_of(kernel: GpuKernel, kinds: Sequence[str], target: str) -> Cubin:
    """Return a kernel's machine code for a target such as "sm_90"."""
    return link(ptx_code(kernel, kinds), target)


def link(ptx: str, target: str) -> Cubin:
    """Return the cubin of PTX for a target such as "sm_90"; works without a card."""
    bindings = _numba().nvjitlink
    (entry,) = re.findall(r"\.entry\s+(\w+)\s*\(", ptx)
    ptx, target = _for_target(ptx, target)
    try:
        handle = bindings.create(3, [f"-arch={target}", "-verbose", "-O3"])
    except bindings.nvJitLinkError as error:
        raise UnsupportedDevice(
            f"the installed toolkit makes no code for {target}: {error}", hint=_NEWER
        ) from error
    try:
        try:
            data = ptx.encode()
            bindings.add_data(handle, bindings.InputType.PTX, data, len(data), entry)
            bindings.complete(handle)
        except bindings.nvJitLinkError as error:
            raise UnsupportedDevice(
                f"kernel {entry} cannot be linked for {target}: {_log(bindings, handle, 'error')}",
                hint=_NEWER,
            ) from error
        image = bytearray(bindings.get_linked_cubin_size(handle))
        bindings.get_linked_cubin(handle, image)
        log = _log(bindings, handle, "info")
    finally:
        bindings.destroy(handle)
    if _SERIALISED in log:
        raise AssertionError(f"products of {entry} do not go on beside other instructions: {log}")
    if ACCELERATED in ptx and loses_words(bytes(image), entry):
        raise UnsupportedDevice(
            f"the linker's code of {entry} for {target} overwrites what its products still read",
            hint=_NEWER,
        )
    # Two forms of the report are in use, of which one counts all local memory of a thread.
    registers = int(_number(r"[Uu]sed (\d+) registers", log))
    spills = int(_number(r"(\d+) bytes (?:spill stores|lmem)", log))
    return Cubin(entry, bytes(image), registers, spills)


def _for_target(ptx: str, name: str) -> tuple[str, str]:
    """Return PTX with the instructions that a target has and the oldest has not, and how the linker
    calls the target for it.

    The oldest targets need more registers for the same code; there a kernel takes as many as a
    block may have, and fewer blocks run beside each other.
    """
    target = int(name.removeprefix("sm_"))
    if target < _SPARING:
        ptx = re.sub(r"^\.minnctapersm.*\n", "", ptx, flags=re.MULTILINE)
    for until in {int(one) for one in re.findall(UNTIL.format(r"(\d+)"), ptx)}:
        if target < until:
            ptx = ptx.replace(UNTIL.format(until), "")
    found = [int(since) for since in re.findall(SINCE.format(r"(\d+)"), ptx)]
    usable = [since for since in found if since <= target]
    for since in usable:
        ptx = ptx.replace(SINCE.format(since), "")
    named = f".target sm_{''.join(map(str, OLDEST))}"
    if ACCELERATED in ptx:
        # Matrices of these instructions begin where nothing else in shared memory has to.
        ptx = re.sub(rf"(\.shared \.align) \d+( \.b8 {SHARED_NAME})", rf"\1 {BOUNDARY}\2", ptx)
        return ptx.replace(named, f".target {name}a"), f"{name}a"
    return ptx.replace(named, f".target sm_{max(usable)}") if usable else ptx, name


def _number(pattern: str, log: str) -> str:
    found = re.search(pattern, log)
    if found is None:
        raise AssertionError(f"the linker's report has no {pattern!r}: {log}")
    return found[1]


def _log(bindings: Any, handle: Any, kind: str) -> str:
    size = getattr(bindings, f"get_{kind}_log_size")(handle)
    text = bytearray(size)
    if size:
        getattr(bindings, f"get_{kind}_log")(handle, text)
    return text.decode(errors="replace").rstrip("\0").strip()


# -- Numba -----------------------------------------------------------------------------------------


def toolkit_versions() -> str:
    """Return the versions of what compiles; UnsupportedDevice where something is missing."""
    _numba()
    names = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
    return " ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of the system"  # a toolkit that was not installed as a package of Python


class _Numba(NamedTuple):
    compiler: Any
    dispatcher: Any
    types: Any
    nvvm: Any
    nvjitlink: Any
    intrinsic: Any
    signature: Any


@cache
def _numba() -> _Numba:
    """Return what is used of Numba and the toolkit; UnsupportedDevice where it is missing."""
    try:
        from cuda.bindings import nvjitlink
        from numba.cuda import compiler, dispatcher, types
        from numba.cuda.cudadrv import nvvm
        from numba.cuda.extending import intrinsic
        from numba.cuda.typing import signature
    except ImportError as error:
        raise UnsupportedDevice(
            f"kernels for NVIDIA cards cannot be compiled: {error}",
            hint="install what compiles them: pip install 'strata-nb[cuda]'",
        ) from error
    return _Numba(compiler, dispatcher, types, nvvm, nvjitlink, intrinsic, signature)


@cache
def _binder(vendor: str) -> Binder:
    """Return what binds kernels, with one callee for all functions that are the same."""
    return Binder(lambda intrinsic: _numba_intrinsic(intrinsic, vendor), _callee)


def _callee(function: Function) -> Any:
    """Return what compiled code calls; Numba's own would ask a card for its target."""

    class Callee(_numba().dispatcher.CUDADispatcher):  # type: ignore[misc]
        def compile_device(self, args: Any, return_type: Any = None) -> Any:
            if args not in self.overloads:
                made = _compiled(self.py_func, return_type, args, forceinline=True)
                self.overloads[args] = made
                made.target_context.insert_user_function(
                    made.entry_point, made.fndesc, [made.library]
                )
            return self.overloads[args]

    return Callee(function, targetoptions={"device": True})


def _compiled(function: Function, result: Any, arguments: Any, **options: Any) -> Any:
    """Return what Numba makes of a function up to LLVM code."""
    return _numba().compiler.compile_cuda(
        function,
        result,
        arguments,
        nvvm_options={"opt": 3, "fma": 0},  # contraction only where a kernel says fma
        cc=OLDEST,
        **options,
    )


def _numba_type(name: str) -> Any:
    types = _numba().types
    if "x" in name:
        count, _, element = name.partition("x")
        return types.UniTuple(_numba_type(element), int(count))
    if name == "void":
        return types.void
    return getattr(types, {"i": "int", "f": "float"}[name[0]] + name[1:])


@cache
def _numba_intrinsic(intrinsic: Intrinsic, vendor: str) -> Any:
    """Return the intrinsic as Numba knows one."""
    numba = _numba()
    emit = _body(intrinsic, vendor)
    kind = numba.signature(
        _numba_type(intrinsic.result), *(_numba_type(one) for one in intrinsic.arguments)
    )

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        made = emit(builder, list(arguments))
        if intrinsic.result == "void":
            return context.get_dummy_value()
        if "x" in intrinsic.result:
            count = int(intrinsic.result.partition("x")[0])
            parts = [builder.extract_value(made, number) for number in range(count)]
            return context.make_tuple(builder, kind.return_type, parts)
        return made

    def typed(_: Any, *arguments: Any) -> Any:
        return kind, generate

    # Numba counts the parameters of the function that it is given.
    names = ", ".join(f"a{number}" for number in range(len(intrinsic.arguments)))
    scope: dict[str, Any] = {"typed": typed}
    exec(f"def {intrinsic.name}(context, {names}):\n    return typed(context, {names})", scope)
    return numba.intrinsic(scope[intrinsic.name])


def _body(intrinsic: Intrinsic, vendor: str) -> Callable[[Any, list[Any]], Any]:
    chosen = intrinsic.body or (intrinsic.ptx if vendor == "ptx" else intrinsic.amdgpu)
    if chosen is None:
        raise AssertionError(f"{intrinsic!r} has no body for {vendor}")
    return _assembly(intrinsic, *chosen) if isinstance(chosen, tuple) else chosen


def _assembly(intrinsic: Intrinsic, text: str, constraints: str) -> Callable[..., Any]:
    from llvmlite import ir

    kind = ir.FunctionType(
        llvm_type(intrinsic.result), [llvm_type(one) for one in intrinsic.arguments]
    )

    def emit(builder: Any, arguments: list[Any]) -> Any:
        effects = "~{memory}" in constraints
        return builder.call(ir.InlineAsm(kind, text, constraints, effects), arguments)

    return emit
