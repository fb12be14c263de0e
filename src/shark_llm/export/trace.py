"""Trace the model's fragments with make_fx and lower them to plain-tensor MLIR.

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
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shark_llm.interrupts import signals_held_back
from shark_llm.model import llama

LOWERING = (
    "builtin.module("
    "torchdynamo-export-to-torch-backend-pipeline,"
    "torch-backend-to-linalg-on-tensors-backend-pipeline)"
)
"""torch dialect -> linalg on tensors; fused attention becomes iree_linalg_ext.attention."""

DIM_EXAMPLES = {"seq_pages": 3, "table_pages": 5, "pool_pages": 7}
"""The dynamic sizes, and what they are traced with: none of them 1, which counts as fixed."""


FUSED_ATTENTION = llama.fused_attention._opoverload


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
    torch.int8: "i8",
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
            with signals_held_back():
                graph = _trace(function, arguments)
                imported = self._importer.import_stateless_graph(graph.graph, func_name=name)
                # Sizes that differ never broadcast. Without this every dynamic size might be a 1 to
                # be broadcast, and is looked up element by element.
                with self._context:
                    imported.attributes["torch.assume_strict_symbolic_shapes"] = ir.UnitAttr.get()
            self._fragments[name] = Fragment(
                name=name, arguments=tuple(arguments), results=tuple(results)
            )
        return self._fragments[name]

    def lower(self) -> LoweredFragments:
        """Lower all that was traced to linalg on tensors. Call once, after the last trace."""
        with signals_held_back(), self._context:
            PassManager.parse(LOWERING).run(self._importer.module.operation)
        text = str(self._importer.module)
        aliases, opening, rest = text.partition("module {\n")
        functions, closing, resources = rest.rpartition("\n}\n")
        assert opening, text[:200]
        assert closing, text[:200]
        # Public until here: the lowering drops private functions that nobody calls yet.
        return LoweredFragments(
            aliases=aliases,
            functions=functions.replace("func.func @", "func.func private @"),
            resources=resources,
        )


def _trace(function: Callable[..., Any], arguments: Sequence[TensorType]) -> fx.GraphModule:
    """The function as a graph of aten operations over symbolic shapes.

    make_fx directly, not torch.export: fragments mutate nothing and hold nothing, so one pass is
    enough where torch.export makes several. What it would guard (sizes that must match) is true by
    construction here: equal dims are one symbol.
    """
    shapes = ShapeEnv()
    sizes = {name: _symbol(shapes, name, size) for name, size in DIM_EXAMPLES.items()}
    # No memory behind the examples; one mode for all of them, since those of two do not mix.
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True):
        examples = [
            torch.empty(
                [d if isinstance(d, int) else d.multiple * sizes[d.name] for d in a.shape],
                dtype=a.dtype,
            )
            for a in arguments
        ]
        graph: fx.GraphModule = make_fx(function, _allow_non_fake_inputs=True)(*examples)
    for node in graph.graph.find_nodes(op="call_function", target=FUSED_ATTENTION):
        q, keys, values, mask = node.args
        node.target = torch.ops.aten.scaled_dot_product_attention.default
        node.args = (q, keys, values, mask, 0.0, False)
        node.kwargs = {"scale": 1.0, "enable_gqa": True}
    graph.graph.eliminate_dead_code()
    return graph


def _symbol(shapes: ShapeEnv, name: str, size: int) -> torch.SymInt:
    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source, DimDynamic.DYNAMIC)
    node = shapes.create_symintnode(symbol, hint=size, source=source)
    assert isinstance(node, torch.SymInt)
    return node
