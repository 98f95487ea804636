"""Lower GPU kernels to machine code of AMD cards, with the LLVM that Numba brings along.

Nothing here runs in the package: it shows that kernels stay free of what only NVIDIA has. LLVM ends
the process where it cannot go on, so `lower` works in one of its own.

    modules of a kernel (Numba's, for NVIDIA's LLVM)
      -> one module, without names that only Numba or NVIDIA know
      -> small functions inlined; locals in registers    under a layout that all vendors share
      -> a kernel for one card, optimised                under AMD's, where locals have their own
      -> object                                          address space
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRIPLE = "amdgcn-amd-amdhsa"
# Pointers as AMD's cards have them (32 bits in shared memory), locals still in the common space.
_SHARED_LAYOUT = "e-p:64:64:64-p3:32:32-i64:64-v16:16-v32:32-n32:64-S32"
_CODE_OBJECT = 500  # version of the object's format
_SYMBOL_TABLE, _SYMBOL_BYTES = 2, 24  # of ELF: a kind of section, and the size of an entry


class Lowered(NamedTuple):
    """Say what became of a kernel.

    foreign   what its code needs that AMD's LLVM lacks, in words; if anything, there is no object
    objects   for each card an ELF file, not linked
    """

    foreign: list[str]
    objects: dict[str, bytes]


def lower(
    modules: Sequence[str], entry: str, name: str, threads: int, shared: str, cards: Sequence[str]
) -> Lowered:
    """Lower a kernel for each card, such as gfx1201; AssertionError where LLVM gives up.

    modules   LLVM code: the kernel's and that of all it calls
    entry     name of the kernel in it; `name`: in the object
    threads   the most of a block
    shared    name of the variable that stands for shared memory: its size comes with a launch
    """
    task = {
        "modules": list(modules),
        "entry": entry,
        "name": name,
        "threads": threads,
        "shared": shared,
        "cards": list(cards),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=json.dumps(task),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{name} cannot be lowered: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    objects = {card: bytes.fromhex(text) for card, text in found["objects"].items()}
    return Lowered(found["foreign"], objects)


def symbols(elf: bytes) -> dict[str, int]:
    """Return the names of an object, each with the number of its section: 0 where it has none."""
    sections_at, entry_size, count = struct.unpack_from("<40xQ10xHH", elf)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + entry_size * number)
        for number in range(count)
    ]
    found: dict[str, int] = {}
    for _, kind, _, _, start, size, names, *_ in headers:
        if kind != _SYMBOL_TABLE:
            continue
        names_at = headers[names][4]
        for place in range(start + _SYMBOL_BYTES, start + size, _SYMBOL_BYTES):  # the first is none
            name_at, _, _, section = struct.unpack_from("<IBBH", elf, place)
            name = elf[names_at + name_at : elf.index(b"\0", names_at + name_at)]
            found[name.decode()] = section
    return found


# -- in the process of its own ---------------------------------------------------------------------


def _portable(text: str, entry: str, name: str) -> str:
    """Return a module's text without what only NVIDIA's LLVM or Numba's runtime needs."""
    lines = (
        line
        for line in text.splitlines()
        if not re.match(r'target |@"?(_ZN08NumbaEnv|llvm\.used)|!nvvm', line)
    )
    body = "\n".join(lines).replace(f'"{entry}"', name)
    return f'target datalayout = "{_SHARED_LAYOUT}"\n{body}'


def _as_kernel(text: str, name: str, card: str, threads: int, layout: str) -> str:
    """Return a module's text as AMD's: its layout, and the function as a kernel."""
    text = re.sub(
        r"(?m)^target datalayout.*$",
        f'target datalayout = "{layout}"\ntarget triple = "{TRIPLE}"',
        text,
        count=1,
    )
    text, count = re.subn(
        rf"(?m)^define .*?@{name}\((.*?)\)[^()]*\{{$",
        rf"define protected amdgpu_kernel void @{name}(\1) #99 {{",
        text,
    )
    assert count == 1, f"{count} definitions of {name}"
    return f"""{text}
attributes #99 = {{ nounwind "amdgpu-flat-work-group-size"="1,{threads}" "target-cpu"="{card}" }}
!llvm.module.flags = !{{!999}}
!999 = !{{i32 1, !"amdhsa_code_object_version", i32 {_CODE_OBJECT}}}
"""


def _optimise(binding: Any, module: Any, machine: Any, level: int) -> None:
    options = binding.create_pipeline_tuning_options(speed_level=level)
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _foreign(module: Any, shared: str) -> list[str]:
    """Return what a module needs beside LLVM's own functions and shared memory."""
    functions = [one.name for one in module.functions if one.is_declaration]
    found = [one for one in functions if not one.startswith("llvm.") or "nvvm" in one]
    variables = [one.name for one in module.global_variables if one.is_declaration]
    found += [one for one in variables if one != shared]
    return sorted(found) + ["inline assembly"] * (" asm " in str(module))


def _lower_here(task: dict[str, Any]) -> dict[str, Any]:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    name = task["name"]
    first, *others = (_portable(text, task["entry"], name) for text in task["modules"])
    module = binding.parse_assembly(first)
    for other in others:
        module.link_in(binding.parse_assembly(other))
    module.verify()
    foreign = _foreign(module, task["shared"])
    if foreign:
        return {"foreign": foreign, "objects": {}}
    _optimise(binding, module, binding.Target.from_default_triple().create_target_machine(), 1)
    text, target, objects = str(module), binding.Target.from_triple(TRIPLE), {}
    for card in task["cards"]:
        machine = target.create_target_machine(cpu=card, opt=3, reloc="pic")
        layout = str(machine.target_data)
        made = binding.parse_assembly(_as_kernel(text, name, card, task["threads"], layout))
        made.verify()
        _optimise(binding, made, machine, 3)
        objects[card] = machine.emit_object(made).hex()
    return {"foreign": foreign, "objects": objects}


if __name__ == "__main__":
    json.dump(_lower_here(json.load(sys.stdin)), sys.stdout)
