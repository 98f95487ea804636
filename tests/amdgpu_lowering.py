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
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRIPLE = "amdgcn-amd-amdhsa"
# Pointers as AMD's cards have them (32 bits in shared memory), locals still in the common space.
_SHARED_LAYOUT = "e-p:64:64:64-p3:32:32-i64:64-v16:16-v32:32-n32:64-S32"
_CODE_OBJECT = 500  # version of the object's format


class Lowered(NamedTuple):
    """Hold a kernel's object for one card, and what was seen on the way.

    object       an ELF file, not linked
    declared     names of functions that have no body
    outside      names of variables that have no value
    assembly     whether there is inline assembly
    locals       variables that did not fit registers
    """

    object: bytes
    declared: list[str]
    outside: list[str]
    assembly: bool
    locals: int


def lower(
    modules: Sequence[str], entry: str, name: str, threads: int, cards: Sequence[str]
) -> dict[str, Lowered]:
    """Return a kernel's object for each card, such as gfx1201.

    modules   LLVM code: the kernel's and that of all it calls
    entry     name of the kernel in it; `name`: in the object
    threads   the most of a block
    """
    task = {
        "modules": list(modules),
        "entry": entry,
        "name": name,
        "threads": threads,
        "cards": list(cards),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=json.dumps(task),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{name} cannot be lowered: {done.stderr[-2000:]}"
    return {
        card: Lowered(bytes.fromhex(found.pop("object")), **found)
        for card, found in json.loads(done.stdout).items()
    }


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


def _lower_here(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import llvmlite.binding as binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    name = task["name"]
    first, *others = (_portable(text, task["entry"], name) for text in task["modules"])
    module = binding.parse_assembly(first)
    for other in others:
        module.link_in(binding.parse_assembly(other))
    module.verify()
    declared = sorted(one.name for one in module.functions if one.is_declaration)
    outside = sorted(one.name for one in module.global_variables if one.is_declaration)
    assembly = " asm " in str(module)
    _optimise(binding, module, binding.Target.from_default_triple().create_target_machine(), 1)
    text = str(module)
    target, found = binding.Target.from_triple(TRIPLE), {}
    for card in task["cards"]:
        machine = target.create_target_machine(cpu=card, opt=3, reloc="pic")
        layout = str(machine.target_data)
        made = binding.parse_assembly(_as_kernel(text, name, card, task["threads"], layout))
        made.verify()
        _optimise(binding, made, machine, 3)
        found[card] = {
            "object": machine.emit_object(made).hex(),
            "declared": declared,
            "outside": outside,
            "assembly": assembly,
            "locals": len(re.findall(r"= alloca ", text)),
        }
    return found


if __name__ == "__main__":
    json.dump(_lower_here(json.load(sys.stdin)), sys.stdout)
