"""Trace the model's fragments with torch.export and lower them to plain-tensor MLIR.

Each fragment is traced once per phase, batch size and distinct local shape, from fake tensors: no
weight is read, and depth does not matter. The result is one MLIR module of private functions, which
`compose.py` calls from the entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from iree.compiler import ir
from iree.compiler.extras import fx_importer
from iree.compiler.passmanager import PassManager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

LOWERING = (
    "builtin.module("
    "torchdynamo-export-to-torch-backend-pipeline,"
    "torch-backend-to-linalg-on-tensors-backend-pipeline)"
)
"""torch dialect -> linalg on tensors; scaled_dot_product_attention becomes iree_linalg_ext.attention."""

DIM_EXAMPLES = {"seq_pages": 3, "table_pages": 5, "pool_pages": 7}
"""The dynamic sizes, and the sizes traced with. Distinct, and none of them 1: torch.export would take
an example of 1, or two dims of equal example size, for a fixed relation."""


@dataclass(frozen=True, kw_only=True)
class DynamicDim:
    """`multiple` times a named dynamic size."""

    name: str
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """An argument or a result of a fragment."""

    shape: tuple[int | DynamicDim, ...]
    dtype: torch.dtype

    def mlir(self) -> str:
        """`tensor<4x?x576xf32>`."""
        dims = "".join("?x" if isinstance(d, DynamicDim) else f"{d}x" for d in self.shape)
        return f"tensor<{dims}{MLIR_DTYPES[self.dtype]}>"

    def with_dtype(self, dtype: torch.dtype) -> TensorType:
        return TensorType(shape=self.shape, dtype=dtype)


MLIR_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A traced function: its symbol, arguments and results in order."""

    name: str
    arguments: tuple[TensorType, ...]
    results: tuple[TensorType, ...]


@dataclass(frozen=True, kw_only=True)
class LoweredFragments:
    """The parts of a module's text that entry points are composed around."""

    aliases: str
    functions: str
    resources: str


@dataclass
class FragmentLibrary:
    """All fragments of a build, in one MLIR module."""

    _context: ir.Context = field(default_factory=ir.Context)
    _fragments: dict[str, Fragment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._importer = fx_importer.FxImporter(context=self._context)

    def trace(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[TensorType],
        results: Sequence[TensorType],
    ) -> Fragment:
        """Trace `function(*arguments)`; a name that is there already is traced no second time."""
        if name not in self._fragments:
            program = _export(function, arguments)
            self._importer.import_program(program, func_name=name)
            self._fragments[name] = Fragment(
                name=name, arguments=tuple(arguments), results=tuple(results)
            )
        return self._fragments[name]

    def lower(self) -> LoweredFragments:
        """Lower all that was traced to linalg on tensors. Call once, after the last trace."""
        with self._context:
            PassManager.parse(LOWERING).run(self._importer.module.operation)
        text = str(self._importer.module)
        aliases, opening, rest = text.partition("module {\n")
        functions, closing, resources = rest.rpartition("\n}\n")
        assert opening and closing, text[:200]
        # Public until here: the lowering drops private functions that nobody calls yet.
        return LoweredFragments(
            aliases=aliases,
            functions=functions.replace("func.func @", "func.func private @"),
            resources=resources,
        )


class _Fragment(torch.nn.Module):
    """torch.export takes modules only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self._function(*arguments)


def _export(function: Callable[..., Any], arguments: Sequence[TensorType]) -> ExportedProgram:
    dims = {name: Dim(name, min=1, max=2**20) for name in DIM_EXAMPLES}
    # One mode for all examples of a trace: fake tensors of two modes do not mix.
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        examples = tuple(
            torch.empty([_example_size(d) for d in a.shape], dtype=a.dtype) for a in arguments
        )
    dynamic = tuple(
        {
            axis: dims[d.name] if d.multiple == 1 else d.multiple * dims[d.name]
            for axis, d in enumerate(a.shape)
            if isinstance(d, DynamicDim)
        }
        for a in arguments
    )
    program = torch.export.export(
        _Fragment(function), examples, dynamic_shapes=(dynamic,), strict=False
    )
    # An empty table functionalizes and keeps scaled_dot_product_attention whole.
    return program.run_decompositions({})


def _example_size(dim: int | DynamicDim) -> int:
    return DIM_EXAMPLES[dim.name] * dim.multiple if isinstance(dim, DynamicDim) else dim
