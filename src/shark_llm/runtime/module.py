"""A bundle loaded on its devices: module, parameters, KV caches, and the step that runs.

Legend: B rows of a step, S tokens of a padded row, T pages of a table, P pages of the pool,
V vocabulary.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np
import numpy.typing as npt

from shark_llm.artifacts.bundle import Bundle
from shark_llm.artifacts.cpu import missing_cpu_features
from shark_llm.artifacts.manifest import SUM_BLOCK, CacheSpec, EntryPoint, Manifest
from shark_llm.errors import ArtifactError, CapacityError, DeviceError, UsageError
from shark_llm.runtime.devices import CPU_DRIVERS, DTYPES, DeviceConfig, DeviceSet
from shark_llm.runtime.memory import available_bytes
from shark_llm.runtime.runner import Phase, Row, StepOutput

MEMORY_SHARE = 0.5
"""Of what is free on the CPU, and of what weights leave on a GPU: the most that a default KV cache
takes."""


class IreeRunner:
    """The ModelRunner over iree.runtime. See `ModelRunner` for the contract."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        devices: DeviceSet,
        context: Any,
        functions: dict[str, Any],
        caches: list[Any],
        num_pages: int,
        max_model_len: int,
    ) -> None:
        self.page_size = manifest.page_size
        self.num_pages = num_pages
        self.vocab_size = manifest.vocab_size
        self.max_model_len = max_model_len
        self._entries: dict[Phase, list[EntryPoint]] = {
            phase: sorted(
                (e for e in manifest.entry_points if e.phase == phase), key=lambda e: e.batch_size
            )
            for phase in ("prefill", "decode")
        }
        self.prefill_batch_sizes = tuple(e.batch_size for e in self._entries["prefill"])
        self.decode_batch_sizes = tuple(e.batch_size for e in self._entries["decode"])
        self.device_seconds = 0.0
        self._specs = manifest.caches
        self._devices = devices
        self._context = context
        self._functions = functions
        self._caches = caches
        self._sums = {sums.batch_size: sums for sums in manifest.softmax_sums}
        self._logits: Any = None
        self._best: Any = None
        self._steps = 0

    def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
        """One step of up to as many rows as the largest entry point of the phase takes."""
        entry = self._entry(phase, len(rows))
        inputs = pack_rows(rows, entry.batch_size, self.page_size, phase)
        arguments = rt.VmVariantList(len(inputs) + len(self._caches))
        for array in inputs:
            arguments.push_ref(self._devices.upload(0, array, "i64"))
        for cache in self._caches:
            arguments.push_ref(cache)
        results = rt.VmVariantList(len(entry.results) + len(self._caches))
        self._invoke(entry.name, arguments, results)
        self._logits, self._best = (results.get_as_object(i, rt.HalBufferView) for i in range(2))
        # The other results are the caches, updated in place: the same memory. Were one a copy, the
        # step would be slow, but the next one would still see what this one wrote.
        self._caches = [
            results.get_as_object(len(entry.results) + i, rt.HalBufferView)
            for i in range(len(self._caches))
        ]
        best_tokens = self._devices.download(0, self._best, (entry.batch_size,), "i64")
        self._steps += 1
        return StepOutput(
            best_tokens=best_tokens[: len(rows)],
            # By way of this runner, which lets go of the logits before it closes the devices.
            read_logits=partial(self._read_logits, self._steps, entry.batch_size, len(rows)),
            read_sums=partial(self._read_sums, self._steps, entry.batch_size),
        )

    def _read_logits(self, step: int, batch_size: int, count: int) -> npt.NDArray[np.float32]:
        assert step == self._steps, "the logits of an earlier step"
        assert self._logits is not None, "the runner is closed"
        shape = (batch_size, self.vocab_size)
        return self._devices.download(0, self._logits, shape, "f32")[:count]

    def _read_sums(
        self, step: int, batch_size: int, inverse_temperatures: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        assert step == self._steps, "the logits of an earlier step"
        assert self._logits is not None, "the runner is closed"
        count = len(inverse_temperatures)
        sums = self._sums[batch_size]
        scales = np.ones(batch_size, np.float32)
        scales[:count] = inverse_temperatures
        arguments = rt.VmVariantList(len(sums.inputs))
        for view in (self._logits, self._best, self._devices.upload(0, scales, "f32")):
            arguments.push_ref(view)
        results = rt.VmVariantList(len(sums.results))
        self._invoke(sums.name, arguments, results)
        view = results.get_as_object(0, rt.HalBufferView)
        blocks = -(-self.vocab_size // SUM_BLOCK)
        # A copy: a step may ask twice, at other temperatures.
        return self._devices.download(0, view, (batch_size, blocks), "f32")[:count].copy()

    def _invoke(self, name: str, arguments: Any, results: Any) -> None:
        began = time.perf_counter()
        try:
            with self._devices.given_way():
                self._context.invoke(self._functions[name], arguments, results)
        finally:
            self.device_seconds += time.perf_counter() - began

    def forward(self, phase: Phase, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """One step: logits (B, V) f32 after each row's last token."""
        return self.run(phase, rows).read_logits()

    def _entry(self, phase: Phase, count: int) -> EntryPoint:
        for entry in self._entries[phase]:
            if count <= entry.batch_size:
                return entry
        raise AssertionError(f"{count} rows, compiled for {self._entries[phase][-1].batch_size}")

    def poison(self) -> None:
        """Overwrite all caches with NaN: what no request wrote may change no result."""
        for i, spec in enumerate(self._specs):
            nan = np.full(_cache_shape(spec, self.num_pages), np.nan, DTYPES[spec.dtype][1])
            self._caches[i] = self._devices.upload(spec.rank, nan, spec.dtype)

    def close(self) -> None:
        """Free everything, results and views before functions, context and devices."""
        self._logits = self._best = None
        self._caches.clear()
        self._functions.clear()
        self._context = None
        self._devices.close()


def pack_rows(
    rows: Sequence[Row], batch_size: int, page_size: int, phase: Phase
) -> tuple[npt.NDArray[np.int64], ...]:
    """tokens (B, S), start_positions (B), seq_lens (B), page_table (B, T), all i64.

    Tables are padded with page 0. An unused row has length 1 and page 0 alone: it computes one
    token into the scratch page, so that no softmax is over nothing.
    """
    longest = max(len(row.tokens) for row in rows)
    width = 1 if phase == "decode" else -(-longest // page_size) * page_size
    table_width = max(len(row.pages) for row in rows)
    tokens = np.zeros((batch_size, width), np.int64)
    starts = np.zeros(batch_size, np.int64)
    lengths = np.ones(batch_size, np.int64)
    table = np.zeros((batch_size, table_width), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        starts[i] = row.start
        lengths[i] = row.start + len(row.tokens)
        table[i, : len(row.pages)] = row.pages
    return tokens, starts, lengths, table


def load_runner(
    bundle: Bundle,
    config: DeviceConfig,
    kv_cache_tokens: int | None = None,
    max_model_len: int | None = None,
) -> IreeRunner:
    """Load a bundle on its devices; parameters are mapped, not read.

    `kv_cache_tokens` None takes what fits, `max_model_len` None what the bundle allows. Raises
    DeviceError for unfit devices, UsageError for limits beyond the bundle's, CapacityError for a
    cache that does not fit or is too small for one sequence, ArtifactError for a module that does
    not load.
    """
    manifest = bundle.manifest
    check_device(manifest, config)
    longest = _max_model_len(manifest, max_model_len)
    num_pages = _num_pages(manifest, kv_cache_tokens, longest)
    devices = DeviceSet(config, manifest.tp)
    try:
        context, functions = _load_module(bundle, devices)
        devices.unpin_workers()  # they have packed the weights by now
        caches = [
            devices.allocate(spec.rank, _cache_shape(spec, num_pages), spec.dtype)
            for spec in manifest.caches
        ]
    except BaseException:
        devices.close()
        raise
    return IreeRunner(
        manifest=manifest,
        devices=devices,
        context=context,
        functions=functions,
        caches=caches,
        num_pages=num_pages,
        max_model_len=longest,
    )


def check_device(manifest: Manifest, config: DeviceConfig) -> None:
    """Raise DeviceError unless the target that the module was compiled for is what runs here."""
    built, asked = manifest.target.driver, config.driver
    if built != asked and not (built in CPU_DRIVERS and asked in CPU_DRIVERS):
        raise DeviceError(
            f"the bundle was compiled for {manifest.target.name} ({built}), --device is {asked}: "
            f"serve it with --device {built}, or compile it for another target"
        )
    if missing := missing_cpu_features(manifest.target.cpu_features):
        raise DeviceError(
            f"the bundle was compiled for a CPU with {', '.join(missing)}, which this one lacks: "
            "compile it here with --compile-target host, or for x86-64-v3"
        )
    config.resolved_ids(manifest.tp)


def _max_model_len(manifest: Manifest, asked: int | None) -> int:
    if asked is not None and asked > manifest.max_model_len:
        raise UsageError(
            f"--max-model-len is {asked}; the model allows at most {manifest.max_model_len}"
        )
    return asked or manifest.max_model_len


def _num_pages(manifest: Manifest, tokens: int | None, longest: int) -> int:
    """Pages of the pool, scratch page included."""
    page = manifest.page_size
    if tokens is None:
        batch = max(e.batch_size for e in manifest.entry_points if e.phase == "decode")
        whole_pages = -(-longest // page)
        tokens = min(batch * whole_pages * page, _tokens_that_fit(manifest))
        if tokens < page:
            raise CapacityError(
                f"no memory for a KV cache: one page of {page} tokens takes "
                f"{page * _bytes_per_token(manifest)} bytes; free memory, or use a smaller model"
            )
    elif tokens < page:
        raise UsageError(f"--kv-cache-tokens is {tokens}; it must be at least one page, {page}")
    return 1 + tokens // page


def _bytes_per_token(manifest: Manifest, rank: int | None = None) -> int:
    """Of one rank, or of all ranks together."""
    page_bytes = sum(
        math.prod(_cache_shape(spec, 1)) * np.dtype(DTYPES[spec.dtype][1]).itemsize
        for spec in manifest.caches
        if rank is None or spec.rank == rank
    )
    return page_bytes // manifest.page_size


def _tokens_that_fit(manifest: Manifest) -> int:
    """Tokens for which there is memory beside the weights, on the fullest device."""
    shared, *own = (manifest.files[name].size for name in manifest.archives)
    memory = manifest.target.memory_bytes
    if memory is None:  # the ranks share the memory of this machine
        left = [(available_bytes() - shared - sum(own), _bytes_per_token(manifest))]
    else:
        left = [
            (memory - shared - size, _bytes_per_token(manifest, rank))
            for rank, size in enumerate(own or [0])
        ]
    return min(int(MEMORY_SHARE * max(0, free)) // per_token for free, per_token in left)


def _cache_shape(spec: CacheSpec, num_pages: int) -> tuple[int, ...]:
    return tuple(num_pages if isinstance(dim, str) else dim for dim in spec.shape)


def _mapped(path: Path) -> mmap.mmap:
    """The file as read-only memory. `VmModule.mmap` asks for a file that can be written to."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _load_module(bundle: Bundle, devices: DeviceSet) -> tuple[Any, dict[str, Any]]:
    """A context with the module in it, and its entry points by name."""
    manifest = bundle.manifest
    instance = rt.VmInstance()
    index = rt.ParameterIndex()
    try:
        archives = [_mapped(path) for path in bundle.archives]
        for archive in archives:
            index.load_from_file_handle(rt.FileHandle.wrap_memory(archive), "irpa")
        parameters = rt.create_io_parameters_module(
            instance, index.create_provider(scope=manifest.parameter_scope)
        )
        hal = rt.create_hal_module(instance, devices=devices.devices)
        module = rt.VmModule.wrap_buffer(instance, _mapped(bundle.module), close_buffer=True)
        context = rt.VmContext(instance, [parameters, hal, module])
        functions = {
            f.name: module.lookup_function(f.name)
            for f in (*manifest.entry_points, *manifest.softmax_sums)
        }
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ArtifactError(
            f"{bundle.module} does not load on {devices.config.driver}: {reason}; rebuild the "
            "bundle for this machine"
        ) from error
    # What is read again, such as the rows of an embedding, comes back by itself; what the module
    # has packed for its products, or has on a GPU, would only lie in memory a second time.
    for archive in archives:
        archive.madvise(mmap.MADV_DONTNEED)
    missing = [name for name, function in functions.items() if function is None]
    if missing:
        raise ArtifactError(
            f"{bundle.module} has no function {missing[0]}, which its manifest names: rebuild "
            "the bundle"
        )
    return context, functions
