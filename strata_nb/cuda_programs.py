"""Do CUDA's modules, kernels and graphs.

`execution.ProgramDriver` says what each operation does. Arguments go to a kernel as one packed
buffer, so that a launch costs the same whatever it has, and a program can lay them out beforehand.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING

from strata_nb import cuda_table as cuda
from strata_nb.cuda_books import Book
from strata_nb.cuda_calls import Calls
from strata_nb.cuda_streams import CudaStreams
from strata_nb.errors import DriverError, RuleViolation
from strata_nb.execution import Dimensions, FunctionFacts

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG_BYTES = 8192


class CudaPrograms(CudaStreams):
    """Load and run kernels on streams of cards, and graphs of them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._modules: Book[int] = Book("modules", CudaPrograms.unload_module)  # module -> device
        self._functions: dict[int, int] = {}  # function -> module
        self._graphs: Book[int] = Book("graphs", CudaPrograms.graph_destroy)  # graph -> device
        self._executables: Book[int] = Book(  # executable -> device
            "executables", CudaPrograms.executable_destroy
        )

    # Kernels.

    def load_module(self, device: int, image: bytes) -> int:
        module, log = c_void_p(), ctypes.create_string_buffer(_LOG_BYTES)
        options = (c_int * 2)(cuda.JIT_ERROR_LOG_BUFFER, cuda.JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        asked = ("cuModuleLoadDataEx", byref(module), image, len(options), options, values)
        try:
            self._calls.call("load_module", device, *asked, numbers={"size": len(image)})
        except DriverError as error:
            if log.value:
                error.add_note(log.value.decode(errors="replace").strip())
            raise
        return self._modules.enter(module, device)

    def unload_module(self, module: int) -> None:
        device = self._modules.find(module)
        self._calls.call("unload_module", device, "cuModuleUnload", module)
        del self._modules[module]
        for function in [key for key, owner in self._functions.items() if owner == module]:
            del self._functions[function]

    def function(self, module: int, name: str) -> int:
        device = self._modules.find(module)
        function = c_void_p()
        asked = ("cuModuleGetFunction", byref(function), module, name.encode())
        try:
            self._calls.call("function", device, *asked)
        except DriverError as error:
            error.add_note(f"the kernel is {name}")
            raise
        assert function.value is not None  # noqa: S101 - the driver said success
        self._functions[function.value] = module
        return function.value

    def function_facts(self, function: int) -> FunctionFacts:
        def attribute(number: int) -> int:
            value = c_int()
            asked = ("cuFuncGetAttribute", byref(value), number, function)
            self._calls.call("function_facts", device, *asked)
            return value.value

        device = self._device_of(function)
        return FunctionFacts(
            registers=attribute(cuda.NUM_REGS),
            local_bytes=attribute(cuda.LOCAL_SIZE_BYTES),
            shared_bytes=attribute(cuda.SHARED_SIZE_BYTES),
        )

    def set_dynamic_shared_bytes(self, function: int, size: int) -> None:
        device = self._device_of(function)
        asked = ("cuFuncSetAttribute", function, cuda.MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        self._calls.call("set_dynamic_shared_bytes", device, *asked, numbers={"size": size})

    def launch(
        self,
        function: int,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        stream: int,
        arguments: Buffer,
        *,
        overlaps: bool = False,
    ) -> None:
        device = self._streams.find(stream).device
        packed = bytes(arguments)
        size = c_size_t(len(packed))
        extra = (c_void_p * 5)(
            cuda.LAUNCH_PARAM_BUFFER_POINTER,
            ctypes.cast(c_char_p(packed), c_void_p),
            cuda.LAUNCH_PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            cuda.LAUNCH_PARAM_END,
        )
        config = cuda.LaunchConfig(*grid, *block, shared_bytes, stream)
        if overlaps:
            allowed = cuda.LaunchAttribute(cuda.PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
            config.attrs, config.numAttrs = ctypes.pointer(allowed), 1
        self._calls.call(
            "launch",
            device,
            "cuLaunchKernelEx",
            byref(config),
            function,
            None,
            extra if packed else None,
            numbers={
                "blocks": grid[0] * grid[1] * grid[2],
                "threads": block[0] * block[1] * block[2],
                "shared": shared_bytes,
                "arguments": len(packed),
            },
        )

    # Graphs.

    def capture_begin(self, stream: int) -> None:
        found = self._streams.find(stream)
        asked = ("cuStreamBeginCapture", stream, cuda.STREAM_CAPTURE_MODE_THREAD_LOCAL)
        self._calls.call("capture_begin", found.device, *asked)
        found.is_capturing = True

    def capture_end(self, stream: int) -> int:
        found, graph = self._streams.find(stream), c_void_p()
        found.is_capturing = False  # also where the driver says that the capture went wrong
        self._calls.call("capture_end", found.device, "cuStreamEndCapture", stream, byref(graph))
        return self._graphs.enter(graph, found.device)

    def graph_instantiate(self, graph: int, device: int) -> int:
        self._graphs.find(graph)
        executable = c_void_p()
        asked = ("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        self._calls.call("graph_instantiate", device, *asked)
        return self._executables.enter(executable, device)

    def graph_launch(self, executable: int, stream: int) -> None:
        self._executables.find(executable)
        device = self._streams.find(stream).device
        self._calls.call("graph_launch", device, "cuGraphLaunch", executable, stream)

    def graph_destroy(self, graph: int) -> None:
        device = self._graphs.find(graph)
        self._calls.call("graph_destroy", device, "cuGraphDestroy", graph)
        del self._graphs[graph]

    def executable_destroy(self, executable: int) -> None:
        device = self._executables.find(executable)
        self._calls.call("executable_destroy", device, "cuGraphExecDestroy", executable)
        del self._executables[executable]

    def _abandon_captures(self) -> None:
        """End captures that a failure left open: until then their streams cannot be waited for."""
        for stream, found in list(self._streams.items()):
            if found.is_capturing:
                with suppress(DriverError):  # a capture that went wrong ends with an error
                    self.capture_end(stream)

    def _device_of(self, function: int) -> int:
        """Return the device of a kernel."""
        if function not in self._functions:
            raise RuleViolation(9, f"there is no function {function:#x}")
        return self._modules[self._functions[function]]
