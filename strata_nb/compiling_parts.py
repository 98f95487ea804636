"""Compile what compiled functions are made of, as little as that takes.

Numba treats every function as if it were called from Python: it optimises it, makes machine code of
it, and compiles it anew for every constant among its arguments. A part is only ever read by the
compiler of what calls it, which optimises everything together: so a part is typed and translated to
LLVM's language, once for each set of types, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NoPythonSupportedFeatureValidation,
)
from numba.core.types.misc import unliteral


class Part(CPUDispatcher):  # type: ignore[misc]
    """A function that compiled ones may call, and that Python may not.

    options   as `numba.njit` takes them
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(
            function,
            targetoptions={**options, "nopython": True},
            pipeline_class=_PartCompiler,
        )

    def __call__(self, *_: Any) -> Any:
        raise AssertionError(f"{self.py_func.__name__} is a part: only compiled functions call it")

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Choose the version for these types; a constant is a number like others."""
        return super().get_call_template(tuple(unliteral(one) for one in args), kws)


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code in LLVM's language, as it was translated."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        context = state.targetctx
        library = _PartLibrary(context.codegen(), state.func_id.func_qualname)
        state.library = library
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        # What stands for the part in Numba's tables; it has no code to call.
        name = lowered.fndesc.qualname
        stand_in = _dynfunc.make_function(
            lowered.fndesc.lookup_module(), name, name, 0, lowered.env, (library,)
        )
        context.insert_user_function(stand_in, lowered.fndesc, [library])
        state["cr"] = lowered._replace(cfunc=stand_in)
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[PassManager]:
        """Return Numba's own passes, with another end."""
        passes = PassManager("part")
        for begun in (
            DefaultPassBuilder.define_untyped_pipeline(self.state),
            DefaultPassBuilder.define_typed_pipeline(self.state),
        ):
            passes.passes.extend(begun.passes)
        passes.add_pass(NoPythonSupportedFeatureValidation, "features")
        passes.add_pass(IRLegalization, "legal before lowering")
        passes.add_pass(AnnotateTypes, "types")
        passes.add_pass(_PartLowering, "lowering")
        passes.add_pass(NoPythonBackend, "result")
        passes.finalize()
        return [passes]
