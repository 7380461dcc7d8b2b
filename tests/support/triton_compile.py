"""Compile Triton kernels for GPUs that are not there, and read what came out.

The wheels of triton carry NVIDIA's assembler and disassembler, so a build machine can hold a
kernel to limits on registers, spills, shared memory and instruction mix.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# What the launcher would infer for aligned pointers and strides that are multiples of 16.
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: its resources, and its machine code as text."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    sass: str

    def count(self, pattern: str) -> int:
        """Return how many instructions match a regular expression."""
        return len(re.findall(pattern, self.sass))

    def spills(self) -> int:
        """Return the stack bytes and local memory instructions, 0 if all fits the registers."""
        return self.stack_bytes + self.count(r"\b(STL|LDL)\b")


def compile_kernel(
    kernel: Any,
    capability: int,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
) -> Binary:
    """Compile for a compute capability such as 90.

    Args:
        kernel: the decorated function.
        capability: ten times the compute capability.
        types: Triton's name of the type of each argument that is not in `constants`.
        constants: the values of the constexpr arguments.
        options: num_warps and num_stages.
    """
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): _DIVISIBLE for i, name in enumerate(names) if _is_divisible(name, types)},
    )
    target = GPUTarget("cuda", capability, 32)
    return _inspect(triton.compile(source, target=target, options=dict(options)))


def _is_divisible(name: str, types: Mapping[str, str]) -> bool:
    return name.startswith("stride_") or types.get(name, "").startswith("*")


def _inspect(compiled: Any) -> Binary:
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        sass = _tool("nvdisasm", "-c", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, f"no resource usage in: {usage}"
    return Binary(int(found[1]), int(found[2]), compiled.metadata.shared, sass)


def _tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
