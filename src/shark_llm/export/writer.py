"""Writing the text of one MLIR function: values with their types and dynamic sizes, operations.

Ranks are devices: rank r is @__device_r, in the order of the compiler's target flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shark_llm.export.trace import Fragment, TensorType


def device_affinity(rank: int) -> str:
    """The attribute that places a value or a global on the rank's device."""
    return f"#hal.device.promise<@__device_{rank}>"


@dataclass
class Value:
    """An SSA value: its name, type and dynamic dims (SSA names of index values)."""

    name: str
    type: TensorType
    dims: tuple[str, ...]


@dataclass
class FunctionBody:
    """The lines of one function under construction."""

    lines: list[str] = field(default_factory=list)
    given: dict[str, Value] = field(default_factory=dict)
    """Globals, by symbol, that come as arguments and so are not loaded."""
    _count: int = 0

    def emit(self, text: str) -> None:
        """Add an operation."""
        self.lines.append(f"    {text}")

    def name(self, stem: str = "v") -> str:
        """A new SSA name."""
        self._count += 1
        return f"%{stem}{self._count}"

    def import_tensor(
        self,
        view: str,
        tensor: TensorType,
        rank: int,
        dims: tuple[str, ...],
        *,
        consume: bool = False,
    ) -> Value:
        """The tensor in a buffer view, on the rank; `consume` lets it be updated in place."""
        name = self.name()
        how = " consume" if consume else ""
        shape = f"{{{', '.join(dims)}}}" if dims else ""
        self.emit(
            f"{name} = hal.tensor.import on({device_affinity(rank)}){how} {view} : "
            f"!hal.buffer_view -> {tensor.mlir()}{shape}"
        )
        return Value(name, tensor, dims)

    def view_dim(self, view: str, axis: int) -> str:
        """A dynamic size of a buffer view."""
        name = self.name("dim")
        self.emit(f"{name} = hal.buffer_view.dim<{view} : !hal.buffer_view>[{axis}] : index")
        return name

    def scaled(self, size: str, factor: int) -> str:
        """`size` times a constant."""
        return self._with_constant("muli", size, factor)

    def divided(self, size: str, divisor: int) -> str:
        """`size` over a constant that divides it."""
        return self._with_constant("divui", size, divisor)

    def _with_constant(self, operation: str, size: str, constant: int) -> str:
        operand, name = self.name("c"), self.name("size")
        self.emit(f"{operand} = arith.constant {constant} : index")
        self.emit(f"{name} = arith.{operation} {size}, {operand} : index")
        return name

    def export_tensor(self, value: Value, rank: int) -> str:
        """A buffer view of the value."""
        name = self.name("view")
        shape = f"{{{', '.join(value.dims)}}}" if value.dims else ""
        self.emit(
            f"{name} = hal.tensor.export on({device_affinity(rank)}) {value.name} : "
            f"{value.type.mlir()}{shape} -> !hal.buffer_view"
        )
        return name

    def transfer(self, value: Value, rank: int) -> Value:
        """The value on another rank."""
        name = self.name()
        shape = f"{{{', '.join(value.dims)}}}" if value.dims else ""
        self.emit(
            f"{name} = flow.tensor.transfer {value.name} : {value.type.mlir()}{shape} "
            f"to {device_affinity(rank)}"
        )
        return Value(name, value.type, value.dims)

    def load(self, symbol: str, tensor: TensorType) -> Value:
        """The value of a global."""
        if symbol in self.given:
            return self.given[symbol]
        name = self.name("w")
        self.emit(f'{name} = util.global.load @"{symbol}" : {tensor.mlir()}')
        return Value(name, tensor, ())

    def call(
        self, fragment: Fragment, arguments: Sequence[Value], dims: Sequence[tuple[str, ...]]
    ) -> tuple[Value, ...]:
        """Call a fragment; `dims` are the dynamic sizes of each result."""
        assert len(arguments) == len(fragment.arguments), fragment.name
        results = [self.name() for _ in fragment.results]
        self.emit(
            f"{', '.join(results)} = func.call @{fragment.name}"
            f"({', '.join(a.name for a in arguments)}) : "
            f"({', '.join(a.mlir() for a in fragment.arguments)}) -> "
            f"({', '.join(r.mlir() for r in fragment.results)})"
        )
        return tuple(
            Value(name, tensor, d)
            for name, tensor, d in zip(results, fragment.results, dims, strict=True)
        )


class ArgumentDims:
    """The dynamic sizes of a chunk's arguments, read from the first that has them."""

    def __init__(self, body: FunctionBody) -> None:
        self._body = body
        self._known: dict[object, str] = {}

    def of_view(self, tensor: TensorType, view: str) -> tuple[str, ...]:
        """Of an argument that is a buffer view of `tensor`."""
        for axis, dim in enumerate(tensor.shape):
            if not isinstance(dim, int) and dim not in self._known:
                self._known[dim] = self._body.view_dim(view, axis)
        return tuple(self._known[dim] for dim in tensor.shape if not isinstance(dim, int))

    def of(self, tensor: TensorType, name: str) -> tuple[str, ...]:
        """Of an argument that is a tensor."""
        dims = []
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, int):
                continue
            if dim not in self._known:
                index = self._body.name("axis")
                size = self._body.name("dim")
                self._body.emit(f"{index} = arith.constant {axis} : index")
                self._body.emit(f"{size} = tensor.dim {name}, {index} : {tensor.mlir()}")
                self._known[dim] = size
            dims.append(self._known[dim])
        return tuple(dims)
