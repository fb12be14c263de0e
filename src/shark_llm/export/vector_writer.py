"""Writing vector code as MLIR: SSA names, loops, and operations on vectors of 8 lanes.

For what the compiler would not make of whole-tensor operations. Buffers are tensors, which become
memory of the workgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LANES = 8
VECTOR = f"vector<{LANES}xf32>"
WHOLE = f"vector<{LANES}xi32>"
PAIRS = f"vector<{2 * LANES}xi16>"
FLAGS = f"vector<{LANES}xi1>"
LOAD = "iree_tensor_ext.dispatch.tensor.load"
STORE = "iree_tensor_ext.dispatch.tensor.store"
READ = "!iree_tensor_ext.dispatch.tensor<readonly:"
WRITE = "!iree_tensor_ext.dispatch.tensor<writeonly:"
ROTATIONS = ((4, 5, 6, 7, 0, 1, 2, 3), (2, 3, 0, 1, 6, 7, 4, 5), (1, 0, 3, 2, 5, 4, 7, 6))
"""Combined with each in turn, every lane of a vector holds the result of all lanes."""


@dataclass
class VectorWriter:
    """The lines of one workgroup. `constants` are the indices that they name."""

    lines: list[str] = field(default_factory=list)
    constants: dict[int, str] = field(default_factory=dict)
    _count: int = 0

    @property
    def declared(self) -> str:
        """The constants, which come before `text`."""
        return "\n".join(f"{c} = arith.constant {i} : index" for i, c in self.constants.items())

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def name(self) -> str:
        """A new SSA name."""
        self._count += 1
        return f"%v{self._count}"

    def let(self, operation: str) -> str:
        """The value of an operation."""
        name = self.name()
        self.lines.append(f"{name} = {operation}")
        return name

    def index(self, value: int) -> str:
        """A constant of type index."""
        return self.constants.setdefault(value, f"%index{value}")

    def plus(self, index: str, value: int) -> str:
        """`index` plus a constant."""
        return self.let(f"arith.addi {index}, {self.index(value)} : index") if value else index

    def times(self, index: str, value: int) -> str:
        """`index` times a constant."""
        return self.let(f"arith.muli {index}, {self.index(value)} : index")

    def loop(
        self,
        bounds: tuple[str, str, str],
        state: Sequence[str],
        types: Sequence[str],
        body: Callable[[str, list[str]], list[str]],
    ) -> list[str]:
        """for i = bounds[0] to bounds[1] step bounds[2]: state = body(i, state)."""
        result, i = self.name(), self.name()
        inner = [self.name() for _ in state]
        start, stop, step = bounds
        initial = ", ".join(f"{a} = {b}" for a, b in zip(inner, state, strict=True))
        self.lines.append(
            f"{result}:{len(inner)} = scf.for {i} = {start} to {stop} step {step} "
            f"iter_args({initial}) -> ({', '.join(types)}) {{"
        )
        self.lines.append(f"scf.yield {', '.join(body(i, inner))} : {', '.join(types)}\n}}")
        return [f"{result}#{at}" for at in range(len(inner))]

    def binary(self, operation: str, a: str, b: str) -> str:
        """An arith operation of two vectors."""
        return self.let(f"arith.{operation} {a}, {b} : {VECTOR}")

    def fma(self, a: str, b: str, c: str) -> str:
        """a * b + c."""
        return self.let(f"vector.fma {a}, {b}, {c} : {VECTOR}")

    def exp(self, a: str) -> str:
        return self.let(f"math.exp {a} : {VECTOR}")

    def select(self, flags: str, a: str, b: str) -> str:
        """a where the flag is set, b elsewhere."""
        return self.let(f"arith.select {flags}, {a}, {b} : {FLAGS}, {VECTOR}")

    def maximum(self, a: str, b: str) -> str:
        """One instruction, for operands that are not NaN."""
        return self.select(self.let(f"arith.cmpf ogt, {a}, {b} : {VECTOR}"), a, b)

    def shuffle(self, a: str, b: str, lanes: Sequence[int]) -> str:
        """`lanes` of a (0 to 7) and b (8 to 15)."""
        return self.let(f"vector.shuffle {a}, {b} {list(lanes)} : {VECTOR}, {VECTOR}")

    def splat(self, a: str, lane: int) -> str:
        """One lane in all lanes."""
        return self.shuffle(a, a, [lane] * LANES)

    def sums(self, vectors: Sequence[str]) -> str:
        """Lane i: the sum of all lanes of vectors[i], of 8 vectors."""
        while len(vectors) > 2:
            vectors = [
                self.binary(
                    "addf",
                    self.shuffle(a, b, (0, 2, 8, 10, 4, 6, 12, 14)),
                    self.shuffle(a, b, (1, 3, 9, 11, 5, 7, 13, 15)),
                )
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        a, b = vectors
        return self.binary(
            "addf",
            self.shuffle(a, b, (0, 1, 2, 3, 8, 9, 10, 11)),
            self.shuffle(a, b, (4, 5, 6, 7, 12, 13, 14, 15)),
        )

    def transposed(self, rows: Sequence[str]) -> list[str]:
        """Vector i: lane i of each of 8 vectors."""
        rows = list(rows)
        # Exchange lanes between vectors 1, 2 and 4 apart, as the bits of their numbers tell.
        for apart in (1, 2, 4):
            low = [lane if not lane & apart else lane - apart + LANES for lane in range(LANES)]
            high = [lane + apart if not lane & apart else lane + LANES for lane in range(LANES)]
            for i in range(LANES):
                if not i & apart:
                    a, b = rows[i], rows[i + apart]
                    rows[i], rows[i + apart] = self.shuffle(a, b, low), self.shuffle(a, b, high)
        return rows

    def load(self, buffer: str, of: str, at: str) -> str:
        """8 elements, of a row, of a tensor of type `of`, widened to f32 where they are narrower.

        `at` is the place of the first, one index for each dimension.
        """
        dtype = of.removesuffix(">").rpartition("x")[2]
        narrow = f"vector<{LANES}x{dtype}>"
        zero = "%zero" if dtype == "f32" else "%narrow_zero"
        read = self.let(
            f"vector.transfer_read {buffer}[{at}], {zero} {{in_bounds = [true]}} : {of}, {narrow}"
        )
        if dtype == "f32":
            return read
        widen = "sitofp" if dtype == "i8" else "extf"
        return self.let(f"arith.{widen} {read} : {narrow} to {VECTOR}")

    def load_splat(self, buffer: str, of: str, at: str) -> str:
        """One f32 element in all lanes."""
        element = self.let(f"tensor.extract {buffer}[{at}] : {of}")
        return self.let(f"vector.broadcast {element} : f32 to {VECTOR}")

    def store(self, vector: str, buffer: str, of: str, at: str) -> str:
        """The f32 tensor with 8 elements of a row replaced."""
        return self.let(
            f"vector.transfer_write {vector}, {buffer}[{at}] {{in_bounds = [true]}} : "
            f"{VECTOR}, {of}"
        )
