"""Kernels written by hand: executables of the module beside those that the compiler makes.

Each is written once and called from every layer. Written into the layers, as dispatch regions that
the compiler takes out again, thirty copies of each pass through half of the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BINDING = "!iree_tensor_ext.dispatch.tensor"


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor that a kernel reads or writes: its name there, its type, its dynamic dims there."""

    name: str
    tensor: str
    dims: tuple[str, ...] = ()

    def of(self, access: str) -> str:
        """Its type with its dims, as an operation names it."""
        dims = f"{{{', '.join(self.dims)}}}" if self.dims else ""
        return f"{_BINDING}<{access}:{self.tensor}>{dims}"


def kernel(
    name: str,
    *,
    inputs: Sequence[Operand],
    sizes: Sequence[str],
    output: Operand,
    grid: int,
    lines: str,
) -> str:
    """An executable, to be called as `flow.dispatch @name::@name[workgroups](inputs, sizes)`.

    `sizes` are arguments of type index, which the dims of operands are among; `grid` is the number
    of dimensions of the workgroups; `lines` is what one workgroup does.
    """
    arguments, ties = [], []
    for operand, access in (*((o, "readonly") for o in inputs), (output, "writeonly")):
        bare = f"{_BINDING}<{access}:{operand.tensor}>"
        argument = operand.name
        if operand.dims:
            argument = f"{operand.name}_bare"
            ties.append(
                f"{operand.name} = flow.dispatch.tie_shape {argument} : {operand.of(access)}"
            )
        arguments.append(f"{argument}: {bare}")
    arguments[-1:-1] = [f"{size}: index" for size in sizes]
    counts = [f"%count{i}" for i in range(grid)]
    given = ", ".join(f"{count}: index" for count in counts)
    returned = ", ".join([*counts, "%one", "%one"][:3])
    shapes = "\n".join(ties)
    return f"""
flow.executable private @{name} {{
  flow.executable.export public @{name} workgroups({given}) -> (index, index, index) {{
    %one = arith.constant 1 : index
    flow.return {returned} : index, index, index
  }}
  builtin.module {{
    func.func @{name}({", ".join(arguments)}) {{
{shapes}
{lines}
    return
    }}
  }}
}}"""
