"""What layers are made of, as operations on the ranks: norm, products, attention, sums over ranks.

Each emits into a function under construction and loads the parameters that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shark_llm.export.fragments import DTYPES, RankFragments
from shark_llm.export.linear import LinearLibrary
from shark_llm.export.page_attention import PageAttention
from shark_llm.export.pages import PageReaders
from shark_llm.export.prefill_attention import PrefillAttention
from shark_llm.export.trace import Fragment, TensorType
from shark_llm.export.writer import FunctionBody, Value
from shark_llm.sharding.plan import LocalParameter


@dataclass(frozen=True, kw_only=True)
class RankOperations:
    """Operations of one module. `parameters` are those of each rank, by name."""

    parameters: list[dict[str, LocalParameter]]
    linears: LinearLibrary
    readers: PageReaders
    decode_attention: PageAttention
    prefill_attention: PrefillAttention

    def attend(
        self,
        body: FunctionBody,
        fragments: RankFragments,
        rank: int,
        qkv: tuple[Value, ...],
        step: tuple[Value, ...],
        k_cache: Value,
        v_cache: Value,
    ) -> tuple[Value, Value, Value]:
        """`llama.attend`, with the reading of pages written for the compiler, or all that follows
        the writing in one kernel."""
        pool = k_cache.dims
        mask, visible, write_pages, read_pages = step[2], step[3], step[4], step[6]
        held: tuple[Value, ...] = ()
        if fragments.held_rows is not None:
            (rows,) = body.call(fragments.held_rows, (write_pages,), ((),))
            held = (self._read(body, rank, v_cache, rows, fragments.write.arguments[-1], ()),)
        q, k_cache, v_cache = body.call(
            fragments.write, (*qkv, *step, k_cache, v_cache, *held), (step[0].dims, pool, pool)
        )
        if fragments.mix is None:
            mixed = self._walk(body, q, read_pages, visible, k_cache, v_cache, qkv)
            return mixed, k_cache, v_cache
        assert fragments.rows is not None
        (rows,) = body.call(fragments.rows, (read_pages,), (read_pages.dims,))
        pages = fragments.mix.arguments[1]
        keys, values = (
            self._read(body, rank, cache, rows, pages, read_pages.dims)
            for cache in (k_cache, v_cache)
        )
        (mixed,) = body.call(fragments.mix, (q, keys, values, mask), (qkv[0].dims,))
        return mixed, k_cache, v_cache

    def _walk(
        self,
        body: FunctionBody,
        q: Value,
        read_pages: Value,
        visible: Value,
        k_cache: Value,
        v_cache: Value,
        qkv: tuple[Value, ...],
    ) -> Value:
        """Attention without a copy of the pages."""
        batch, tokens, heads, head_dim = q.type.shape
        columns = qkv[1].type.shape[1]
        assert isinstance(batch, int)
        assert isinstance(heads, int)
        assert isinstance(head_dim, int)
        assert isinstance(columns, int)
        operands = (q, read_pages, visible, k_cache, v_cache)
        attention = self.decode_attention if tokens == 1 else self.prefill_attention
        fragment = Fragment(
            name=attention.function(batch, heads, columns // head_dim),
            arguments=tuple(o.type for o in operands),
            results=(qkv[0].type,),
        )
        return body.call(fragment, operands, (qkv[0].dims,))[0]

    def _read(
        self,
        body: FunctionBody,
        rank: int,
        cache: Value,
        rows: Value,
        result: TensorType,
        dims: tuple[str, ...],
    ) -> Value:
        batch, heads, pages = result.shape[:3]
        assert isinstance(batch, int)
        assert isinstance(heads, int)
        function = self.readers.function(batch, heads, pages if isinstance(pages, int) else None)
        fragment = Fragment(name=function, arguments=(cache.type, rows.type), results=(result,))
        return body.call(fragment, (cache, rows), (dims,))[0]

    def load(self, body: FunctionBody, name: str, rank: int) -> Value:
        """A parameter of the rank."""
        parameter = self.parameters[rank][name]
        tensor = TensorType(shape=parameter.shape, dtype=DTYPES[parameter.dtype])
        return body.load(symbol_of(name, rank), tensor)

    def norm(
        self, body: FunctionBody, fragments: RankFragments, x: Value, name: str, rank: int
    ) -> Value:
        """`llama.norm` by the weight `name`."""
        weight = self.load(body, f"{name}.weight", rank)
        return body.call(fragments.norm, (x, weight), (x.dims,))[0]

    def linear(self, body: FunctionBody, x: Value, name: str, rank: int) -> Value:
        """x times the weight `name` of this rank, plus its bias where the rank has one.

        A quantized weight comes with its scale.
        """
        operands = [x, self.load(body, f"{name}.weight", rank)]
        if self.linears.quantized:
            operands.append(self.load(body, f"{name}.scale", rank))
        has_bias = f"{name}.bias" in self.parameters[rank]
        if has_bias:
            operands.append(self.load(body, f"{name}.bias", rank))
        rows, k = x.type.shape
        n = operands[1].type.shape[0]
        assert isinstance(k, int)
        assert isinstance(n, int)
        function = self.linears.function(
            rows if isinstance(rows, int) else None, k, n, bias=has_bias
        )
        result = TensorType(shape=(rows, n), dtype=x.type.dtype)
        fragment = Fragment(
            name=function, arguments=tuple(o.type for o in operands), results=(result,)
        )
        return body.call(fragment, operands, (x.dims,))[0]

    def mlp(self, body: FunctionBody, x: Value, layer: int, rank: int) -> Value:
        """The rank's part of the MLP of a layer."""
        stems = [f"blk.{layer}.ffn_{name}" for name in ("gate", "up", "down")]
        kinds = ("weight", "scale") if self.linears.quantized else ("weight",)
        operands = [x]
        operands += [self.load(body, f"{stem}.{kind}", rank) for kind in kinds for stem in stems]
        has_bias = [f"{stem}.bias" in self.parameters[rank] for stem in stems]
        operands += [
            self.load(body, f"{stem}.bias", rank)
            for stem, is_there in zip(stems, has_bias, strict=True)
            if is_there
        ]
        rows = x.type.shape[0]
        h, i = operands[3].type.shape
        assert isinstance(h, int)
        assert isinstance(i, int)
        function = self.linears.mlp(
            rows if isinstance(rows, int) else None,
            h,
            i,
            gate_bias=has_bias[0],
            up_bias=has_bias[1],
            down_bias=has_bias[2],
        )
        fragment = Fragment(
            name=function, arguments=tuple(o.type for o in operands), results=(x.type,)
        )
        return body.call(fragment, operands, (x.dims,))[0]

    def gather(self, body: FunctionBody, partials: Sequence[Value]) -> list[tuple[Value, ...]]:
        """Every rank's value on every rank: [rank][source]."""
        return [
            tuple(body.transfer(partial, rank) for partial in partials)
            for rank in range(len(self.parameters))
        ]

    def add(
        self,
        body: FunctionBody,
        fragments: list[RankFragments],
        hidden: list[Value],
        partials: Sequence[Value],
    ) -> list[Value]:
        """The residual stream of every rank plus every rank's partial sum, in rank order."""
        everywhere = self.gather(body, partials)
        return [
            body.call(of_rank.add, (own, *everywhere[rank]), (own.dims,))[0]
            for rank, (own, of_rank) in enumerate(zip(hidden, fragments, strict=True))
        ]


def symbol_of(name: str, rank: int) -> str:
    """The symbol of the global that holds a rank's parameter."""
    return f"{name}.rank{rank}"
