"""Compose entry points from traced fragments: parameters, devices, layer chunks, all-reduce.

The module is written as MLIR text around the lowered fragments:

    util.global       one per parameter and rank, on the rank's device, read from the archives
    flow.executable   one per hand-written kernel, with the function that calls it: attention on
                      CPUs, and products of several rows
    @<entry>.layers.K a chunk of layers as a private function that is never inlined. It takes the
                      caches as buffer views and imports them with `consume`: only so are they
                      updated in place. With several devices compile time is exponential in the
                      layers of one function, so a chunk has few; and where weights are not packed
                      (`LinearForm.shares_layers`), chunks of K layers are all one function,
                      @<entry>.layers.xK, which takes their weights as arguments too.
    @<entry>          the public function: inputs to every rank, embed, chunks in turn, head
    @softmax_sums_bsN what sampling asks of the logits: `llama.softmax_sums`, on rank 0

All-reduce: every rank's partial sum goes to every rank, which adds them in rank order. Ranks stay
concurrent, and the sum does not depend on timing.

What comes from elsewhere to a rank is transferred to it, also where it is there already: a value
whose device the compiler leaves open draws copies of weights behind it, into the buffers that it
might be needed in, in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shark_llm.artifacts.manifest import CacheSpec, EntryPoint, Function, Placement
from shark_llm.export.fragments import DTYPES, FragmentTracer, RankFragments
from shark_llm.export.linear import LinearLibrary
from shark_llm.export.operations import RankOperations, symbol_of
from shark_llm.export.packed import LinearForm
from shark_llm.export.page_attention import PageAttention
from shark_llm.export.pages import PageReaders
from shark_llm.export.prefill_attention import PrefillAttention
from shark_llm.export.signatures import (
    ExportSettings,
    cache_specs,
    entry_points,
    softmax_sums,
)
from shark_llm.export.trace import Fragment, FragmentLibrary, TensorType
from shark_llm.export.writer import ArgumentDims, FunctionBody, Value, device_affinity
from shark_llm.model.config import ModelConfig
from shark_llm.model.llama import AttentionForm
from shark_llm.sharding.plan import (
    LocalParameter,
    RankShape,
    is_quantized,
    local_parameters,
    plan_ranks,
)

PARAMETER_SCOPE = "model"
CHUNK_LAYERS_MULTI_DEVICE = 4


@dataclass(frozen=True, kw_only=True)
class ExportedModule:
    """The composed module and the signatures of what it exports."""

    mlir: str
    entry_points: tuple[EntryPoint, ...]
    softmax_sums: tuple[Function, ...]
    caches: tuple[CacheSpec, ...]


def export_module(
    config: ModelConfig,
    plan: dict[str, Placement],
    tp: int,
    settings: ExportSettings,
    attention_form: AttentionForm,
    linear_form: LinearForm,
) -> ExportedModule:
    """Trace, lower and compose all entry points. Reads no weights, and traces no layer twice."""
    ranks = plan_ranks(config, tp)
    parameters = [local_parameters(config, plan, rank.rank, settings.dtype) for rank in ranks]
    quantized = is_quantized(plan)
    library = FragmentLibrary()
    tracer = FragmentTracer(
        library=library,
        config=config,
        page_size=settings.page_size,
        dtype=settings.dtype,
        form=attention_form,
        tp=tp,
        quantized=quantized,
    )
    entries = entry_points(settings, config.vocab_size)
    fragments = [[tracer.trace(entry, rank) for rank in ranks] for entry in entries]
    sums = softmax_sums(settings, config.vocab_size)
    sum_fragments = [tracer.trace_sums(function) for function in sums]
    lowered = library.lower()
    caches = cache_specs(config, settings, ranks)
    linears = LinearLibrary(
        form=linear_form,
        dtype=settings.dtype,
        quantized=quantized,
        min_rows=settings.page_size,
    )
    readers = PageReaders(
        dtype=settings.dtype, page_size=settings.page_size, head_dim=config.head_dim
    )
    pages = (settings.dtype, settings.page_size, config.head_dim)
    decode_attention, prefill_attention = PageAttention(*pages), PrefillAttention(*pages)
    composer = _Composer(
        config=config,
        settings=settings,
        ranks=ranks,
        parameters=parameters,
        caches=caches,
        operations=RankOperations(
            parameters=parameters,
            linears=linears,
            readers=readers,
            decode_attention=decode_attention,
            prefill_attention=prefill_attention,
        ),
    )
    functions: list[str] = []
    for entry, of_ranks in zip(entries, fragments, strict=True):
        functions += composer.entry_point(entry, of_ranks)
    for function, fragment in zip(sums, sum_fragments, strict=True):
        functions += _plain(function, fragment)
    lines = [
        lowered.aliases + "module @model {",
        lowered.functions,
        *composer.globals(),
        *linears.functions.values(),
        *readers.functions.values(),
        *decode_attention.functions.values(),
        *prefill_attention.functions.values(),
        *functions,
        "}",
        "",
        lowered.resources,
    ]
    return ExportedModule(
        mlir="\n".join(lines), entry_points=entries, softmax_sums=sums, caches=caches
    )


@dataclass(frozen=True, kw_only=True)
class _Composer:
    config: ModelConfig
    settings: ExportSettings
    ranks: tuple[RankShape, ...]
    parameters: list[dict[str, LocalParameter]]
    caches: tuple[CacheSpec, ...]
    operations: RankOperations

    @property
    def tp(self) -> int:
        return len(self.ranks)

    def globals(self) -> Iterator[str]:
        """One global for each parameter on each rank, with the rank's device as affinity."""
        for rank, parameters in enumerate(self.parameters):
            for name, parameter in parameters.items():
                dims = "".join(f"{d}x" for d in parameter.shape)
                yield (
                    f'  util.global private @"{symbol_of(name, rank)}" '
                    f"{{stream.affinity = {device_affinity(rank)}}} = "
                    f'#flow.parameter.named<"{PARAMETER_SCOPE}"::"{parameter.key}"> : '
                    f"tensor<{dims}{parameter.dtype}>"
                )

    def entry_point(self, entry: EntryPoint, fragments: list[RankFragments]) -> list[str]:
        """The chunks of layers, then the public function."""
        layers = self.config.num_layers
        size = layers if self.tp == 1 else CHUNK_LAYERS_MULTI_DEVICE
        chunks = [range(start, min(start + size, layers)) for start in range(0, layers, size)]
        lines: list[str] = []
        distinct = {self._chunk_name(entry, chunk): chunk for chunk in reversed(chunks)}
        for chunk in reversed(distinct.values()):
            lines += self._chunk(entry, fragments, chunk)
        return lines + self._public(entry, fragments, chunks)

    def _chunk(self, entry: EntryPoint, fragments: list[RankFragments], chunk: range) -> list[str]:
        """A function of a few layers.

        It takes, rank by rank, hidden states and the step as tensors, then the caches of its layers
        as buffer views; it returns hidden states and caches.

        Between several ranks, hidden states are buffer views too: as tensors, the compiler puts
        those of two ranks into one buffer, which has to be on one device, and then loses track of
        its size among the function's results ("operation's operand is unlinked").
        """
        body, ops = FunctionBody(), self.operations
        parameters: list[str] = []
        hidden: list[Value] = []
        context: list[tuple[Value, ...]] = []  # per rank: the tensors of Step
        if self.shares_layers:
            for i, (symbol, tensor, rank) in enumerate(self._layer_weights(chunk)):
                weight = Value(f"%w_{i}", tensor, ())
                parameters.append(f"{weight.name}: {tensor.mlir()}")
                body.given[symbol] = body.transfer(weight, rank)
        dims = ArgumentDims(body)
        for rank, of_rank in enumerate(fragments):
            values = []
            types = (of_rank.norm.arguments[0], *of_rank.prepare.results)
            for i, tensor in enumerate(types):
                if i == 0 and self.tp > 1:
                    view = f"%hidden_{rank}"
                    parameters.append(f"{view}: !hal.buffer_view")
                    sizes = dims.of_view(tensor, view)
                    values.append(body.import_tensor(view, tensor, rank, sizes, consume=True))
                    continue
                name = f"%r{rank}_{i}"
                parameters.append(f"{name}: {tensor.mlir()}")
                value = Value(name, tensor, dims.of(tensor, name))
                values.append(value if self.tp == 1 else body.transfer(value, rank))
            hidden.append(values[0])
            context.append(tuple(values[1:]))
        views: dict[tuple[int, int, str], str] = {}
        for rank in range(self.tp):
            for layer in chunk:
                for kind in ("k", "v"):
                    name = f"%{kind}_{rank}_{layer}"
                    parameters.append(f"{name}: !hal.buffer_view")
                    views[rank, layer, kind] = name
        pool = body.view_dim(next(iter(views.values())), 0)
        caches = {
            key: body.import_tensor(
                view, fragments[key[0]].write.results[-1], key[0], (pool,), consume=True
            )
            for key, view in views.items()
        }
        for layer in chunk:
            partials = []
            for rank, of_rank in enumerate(fragments):
                x = ops.norm(body, of_rank, hidden[rank], f"blk.{layer}.attn_norm", rank)
                q, k, v = (ops.linear(body, x, f"blk.{layer}.attn_{name}", rank) for name in "qkv")
                keys = (rank, layer, "k"), (rank, layer, "v")
                mixed, caches[keys[0]], caches[keys[1]] = ops.attend(
                    body, of_rank, rank, (q, k, v), context[rank], caches[keys[0]], caches[keys[1]]
                )
                partials.append(ops.linear(body, mixed, f"blk.{layer}.attn_output", rank))
            hidden = ops.add(body, fragments, hidden, partials)
            partials = []
            for rank, of_rank in enumerate(fragments):
                x = ops.norm(body, of_rank, hidden[rank], f"blk.{layer}.ffn_norm", rank)
                partials.append(ops.mlp(body, x, layer, rank))
            hidden = ops.add(body, fragments, hidden, partials)
        # All imports stand before the first operation and all exports after the last: each of them
        # between operations would cut the layers into one submission more.
        for key, cache in caches.items():
            views[key] = body.export_tensor(cache, key[0])
        passed = self._passed(body, hidden)
        results = [name for name, _ in passed] + list(views.values())
        types_out = [type_ for _, type_ in passed] + ["!hal.buffer_view"] * len(views)
        return [
            f"  util.func private @{self._chunk_name(entry, chunk)}({', '.join(parameters)}) -> "
            f"({', '.join(types_out)}) attributes {{inlining_policy = #util.inline.never}} {{",
            *body.lines,
            f"    util.return {', '.join(results)} : {', '.join(types_out)}",
            "  }",
        ]

    @property
    def shares_layers(self) -> bool:
        """Whether chunks of as many layers are one function."""
        return self.tp > 1 and self.operations.linears.form.shares_layers

    def _chunk_name(self, entry: EntryPoint, chunk: range) -> str:
        which = f"x{len(chunk)}" if self.shares_layers else f"{chunk.start}"
        return f"{entry.name}.layers.{which}"

    def _layer_weights(self, chunk: range) -> Iterator[tuple[str, TensorType, int]]:
        """(symbol, type, rank) of the parameters of some layers; all chunks have the same order."""
        for rank, parameters in enumerate(self.parameters):
            for layer in chunk:
                for name, parameter in parameters.items():
                    if name.startswith(f"blk.{layer}."):
                        dtype = DTYPES[parameter.dtype]
                        tensor = TensorType(shape=parameter.shape, dtype=dtype)
                        yield symbol_of(name, rank), tensor, rank

    def _passed(self, body: FunctionBody, hidden: Sequence[Value]) -> list[tuple[str, str]]:
        """(name, type) of hidden states as they go into a chunk and come out of it."""
        if self.tp == 1:
            return [(h.name, h.type.mlir()) for h in hidden]
        return [(body.export_tensor(h, rank), "!hal.buffer_view") for rank, h in enumerate(hidden)]

    def _public(
        self, entry: EntryPoint, fragments: list[RankFragments], chunks: list[range]
    ) -> list[str]:
        body = FunctionBody()
        inputs = [f"%{spec.name}" for spec in entry.inputs]
        views = {spec.name: f"%cache{i}" for i, spec in enumerate(self.caches)}
        parameters = [f"{name}: !hal.buffer_view" for name in (*inputs, *views.values())]
        page = self.settings.page_size
        table_pages = body.view_dim("%page_table", 1)
        keys = body.scaled(table_pages, page)
        seq: tuple[str, ...] = ()
        seq_pages: tuple[str, ...] = ()
        rows: tuple[str, ...] = ()
        if entry.phase == "prefill":
            seq = (body.view_dim("%tokens", 1),)
            seq_pages = (body.divided(seq[0], page),)
            rows = (body.scaled(seq[0], entry.batch_size),)
        on_host = [
            body.import_tensor(view, tensor, 0, dims)
            for view, tensor, dims in zip(
                inputs, fragments[0].prepare.arguments, (seq, (), (), (table_pages,)), strict=True
            )
        ]
        hidden: list[Value] = []
        context: list[tuple[Value, ...]] = []
        lengths: list[tuple[Value, Value]] = []
        for rank, of_rank in enumerate(fragments):
            local = [v if rank == 0 else body.transfer(v, rank) for v in on_host]
            step = body.call(
                of_rank.prepare, local, (seq, seq, (*seq, keys), seq, seq_pages, (), (table_pages,))
            )
            first = body.name("first_row")
            body.emit(
                f"{first} = arith.constant dense<{self.ranks[rank].vocab.start}> : tensor<i64>"
            )
            kinds = ("weight", "scale") if self.operations.linears.quantized else ("weight",)
            table = [self.operations.load(body, f"token_embd.{kind}", rank) for kind in kinds]
            start = Value(first, of_rank.embed.arguments[1], ())
            hidden += body.call(of_rank.embed, (local[0], start, *table), (rows,))
            context.append(step)
            lengths.append((local[1], local[2]))
        if self.tp > 1:
            everywhere = self.operations.gather(body, hidden)
            hidden = [
                body.call(of_rank.total, everywhere[rank], (rows,))[0]
                for rank, of_rank in enumerate(fragments)
            ]
        passed = self._passed(body, hidden)
        for chunk in chunks:
            passed = self._call_chunk(body, entry, chunk, passed, context, views)
        hidden = [
            Value(name, own.type, own.dims)
            if self.tp == 1
            else body.import_tensor(name, own.type, rank, own.dims, consume=True)
            for rank, ((name, _), own) in enumerate(zip(passed, hidden, strict=True))
        ]
        logits = self._logits(body, entry, fragments, hidden, lengths)
        (best,) = body.call(fragments[0].best, (logits,), ((),))
        results = [*(body.export_tensor(result, 0) for result in (logits, best)), *views.values()]
        types = ", ".join(["!hal.buffer_view"] * len(results))
        return [
            f"  util.func public @{entry.name}({', '.join(parameters)}) -> ({types}) {{",
            *body.lines,
            f"    util.return {', '.join(results)} : {types}",
            "  }",
        ]

    def _call_chunk(
        self,
        body: FunctionBody,
        entry: EntryPoint,
        chunk: range,
        passed: list[tuple[str, str]],
        context: list[tuple[Value, ...]],
        views: dict[str, str],
    ) -> list[tuple[str, str]]:
        """Call one chunk with the hidden states `passed`, and return those that come back; `views`
        is updated to the caches it returns."""
        weights = list(self._layer_weights(chunk)) if self.shares_layers else []
        operands = [(body.load(symbol, of).name, of.mlir()) for symbol, of, _ in weights]
        operands += [
            operand
            for own, of_rank in zip(passed, context, strict=True)
            for operand in (own, *((v.name, v.type.mlir()) for v in of_rank))
        ]
        names = [
            f"rank{rank}.blk.{layer}.{kind}_cache"
            for rank in range(self.tp)
            for layer in chunk
            for kind in ("k", "v")
        ]
        types = [type_ for _, type_ in operands] + ["!hal.buffer_view"] * len(names)
        results = [body.name() for _ in (*passed, *names)]
        result_types = [type_ for _, type_ in passed] + ["!hal.buffer_view"] * len(names)
        arguments = [name for name, _ in operands] + [views[name] for name in names]
        body.emit(
            f"{', '.join(results)} = util.call @{self._chunk_name(entry, chunk)}"
            f"({', '.join(arguments)}) : ({', '.join(types)}) -> ({', '.join(result_types)})"
        )
        views.update(zip(names, results[self.tp :], strict=True))
        return list(zip(results, result_types[: self.tp], strict=False))

    def _logits(
        self,
        body: FunctionBody,
        entry: EntryPoint,
        fragments: list[RankFragments],
        hidden: list[Value],
        lengths: list[tuple[Value, Value]],
    ) -> Value:
        """Every rank's vocabulary rows, side by side on rank 0."""
        output = "token_embd" if self.config.tie_word_embeddings else "output"
        parts = []
        for rank, of_rank in enumerate(fragments):
            # Norm first, on all rows: it has the fragment's shape; the rows that count are few.
            x = self.operations.norm(body, of_rank, hidden[rank], "output_norm", rank)
            last = x  # a decoded row is one token
            if entry.phase == "prefill":
                (last,) = body.call(of_rank.last_rows, (x, *lengths[rank]), ((),))
            part = self.operations.linear(body, last, output, rank)
            parts.append(part if rank == 0 else body.transfer(part, 0))
        if len(parts) == 1:
            return parts[0]
        whole = TensorType(
            shape=(entry.batch_size, self.config.vocab_size), dtype=parts[0].type.dtype
        )
        name = body.name("logits")
        body.emit(
            f"{name} = tensor.concat dim(1) {', '.join(p.name for p in parts)} : "
            f"({', '.join(p.type.mlir() for p in parts)}) -> {whole.mlir()}"
        )
        return Value(name, whole, ())


def _plain(function: Function, fragment: Fragment) -> list[str]:
    """A public function that is one fragment, on rank 0."""
    body = FunctionBody()
    views = [f"%{spec.name}" for spec in function.inputs]
    arguments = [
        body.import_tensor(view, tensor, 0, ())
        for view, tensor in zip(views, fragment.arguments, strict=True)
    ]
    (result,) = body.call(fragment, arguments, ((),))
    view = body.export_tensor(result, 0)
    parameters = ", ".join(f"{view}: !hal.buffer_view" for view in views)
    return [
        f"  util.func public @{function.name}({parameters}) -> !hal.buffer_view {{",
        *body.lines,
        f"    util.return {view} : !hal.buffer_view",
        "  }",
    ]
