"""The workspace of a module: what a step allocates on each device beside weights and caches.

Sizes depend on the tokens and the context of a step. In the compiler's phase "stream" every buffer
has its place, and its size is arithmetic on the shapes of the arguments; that arithmetic is done
here, for the shapes of one step, along the calls from the entry point through its chunks of layers:

    %1 = hal.buffer_view.dim<%arg0 : !hal.buffer_view>[1] : index       tokens of a row
    %2 = arith.muli %1, %c256 : index
    %buffer, %t = stream.resource.alloca ... on(...@__device_1...) ... {%2} => ...
    %t_2 = stream.resource.dealloca ... => %buffer : ...
    %3:2 = util.call @prefill_bs1.layers.0(%buffer, %1) : ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shark_llm.compile.dev_directory import read_report
from shark_llm.errors import CompileError, UsageError

PREFILL_TOKENS = 512
"""Of a step: what a server takes at once by default, its --max-num-batched-tokens."""

_FUNCTION = re.compile(
    r"  util\.func (?:public|private) @\"?(?P<name>[\w.$]+)\"?\((?P<args>[^)]*)\)"
)
_DIM = re.compile(r"    (?P<to>%\S+) = hal\.buffer_view\.dim<(?P<view>%\w+) : \S+>\[(?P<dim>\d)\]")
_CONSTANT = re.compile(r"    (?P<to>%\S+) = arith\.constant (?P<value>-?\d+) : (?:index|i64)")
_SAME = re.compile(
    r"    (?P<to>%\S+) = (?:arith\.index_cast(?:ui)?|util\.assume\.int) (?P<value>%\w+)"
    r".*(?:: index| to i64| to index)$"
)
_ARITHMETIC = re.compile(
    r"    (?P<to>%\S+) = (?:arith|util)\.(?P<op>\w+) (?P<left>%[^\s,]+), (?P<right>%[^\s,]+)"
)
_ALLOCATION = re.compile(
    r"    (?P<to>%[^\s,]+), \S+ = stream\.resource\.alloca .*\{(?P<size>%\S+)\}"
)
_FREE = re.compile(r"    \S+ = stream\.resource\.dealloca .* => (?P<buffer>%\S+) : ")
_EXPORT = re.compile(
    r"    (?P<to>%\S+) = stream\.tensor\.export .* : tensor<(?P<shape>[^>]*)>"
    r"(?:\{(?P<dims>[^}]*)\})? in "
)
_CALL = re.compile(
    r"    (?P<to>%[\w]+)\S* = util\.call @\"?(?P<name>[\w.$]+)\"?\((?P<args>[^)]*)\)"
)
_RETURN = re.compile(r"    util\.return (?P<values>[^:]*) : ")
_DEVICE = re.compile(r"@__device_(\d+)")

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": lambda a, b: a // b,
    "divui": lambda a, b: a // b,
    "ceildivsi": lambda a, b: -(-a // b),
    "ceildivui": lambda a, b: -(-a // b),
    "maxsi": max,
    "maxui": max,
    "minsi": min,
    "minui": min,
    "align": lambda a, b: -(-a // b) * b,
}


def module_workspace(
    stream: str,
    tp: int,
    *,
    context_tokens: int,
    page_size: int,
    prefill_tokens: int = PREFILL_TOKENS,
) -> dict[str, tuple[int, ...]]:
    """Entry point -> the bytes that it has allocated at most, on each rank's device.

    `stream` is the module after the compiler's phase "stream". A prefill has `prefill_tokens` in
    all its rows, and every row a page table for `context_tokens`. Raises CompileError where a size
    is no arithmetic on those.
    """
    functions = _functions(stream.splitlines())
    pages = -(-context_tokens // page_size)
    found = {}
    for name in functions:
        if entry := re.fullmatch(r"(prefill|decode)_bs(\d+)", name):
            pages_of_step = -(-prefill_tokens // (int(entry[2]) * page_size))
            tokens = pages_of_step * page_size if entry[1] == "prefill" else 1
            run = _Run(functions=functions, tp=tp, shape=_StepShape(tokens=tokens, pages=pages))
            run.call(name, run.shape.arguments())
            found[name] = tuple(run.peak)
    if not found:
        raise CompileError("the module has no entry points prefill_bs{N} or decode_bs{N}")
    return found


def built_workspace(
    dev_dir: Path,
    *,
    model: str,
    target: str,
    context_tokens: int,
    prefill_tokens: int = PREFILL_TOKENS,
) -> dict[int, tuple[int, ...]]:
    """{tp: bytes of each rank} for the module of a build: of its entry point that needs most.

    Raises UsageError unless `dev_dir` has the phases of a build of `model` for `target`.
    """
    report = read_report(dev_dir)
    if not report:
        raise UsageError(
            f"--dev-artifacts-dir {dev_dir} has no build-report.json: name what a build wrote with "
            "--output-dev-artifacts-dir"
        )
    settings = report["settings"]
    built = (report["model"], settings["target"])
    if built != (model, target):
        raise UsageError(
            f"--dev-artifacts-dir {dev_dir} is of {built[0]} for {built[1]}, and the plan is of "
            f"{model} for {target}: leave it out, or name that build's"
        )
    phases = sorted((dev_dir / "phases").glob("*.stream.mlir"))
    if len(phases) != 1:
        raise UsageError(
            f"--dev-artifacts-dir {dev_dir} has no phases/*.stream.mlir: build it with "
            "--save-intermediates"
        )
    tp = int(settings["tp"])
    entries = module_workspace(
        phases[0].read_text(),
        tp,
        context_tokens=context_tokens,
        page_size=int(settings["page_size"]),
        prefill_tokens=prefill_tokens,
    )
    return {tp: tuple(max(of[rank] for of in entries.values()) for rank in range(tp))}


@dataclass(frozen=True, kw_only=True)
class _Function:
    arguments: list[str]
    lines: list[str]


@dataclass(frozen=True, eq=False)
class _Buffer:
    size: int
    devices: frozenset[int]
    """More than one where the compiler leaves the choice open: each then counts it."""


@dataclass(frozen=True)
class _View:
    """A buffer view: the sizes of its dimensions that are known."""

    dims: Mapping[int, int]


_Value = int | _Buffer | _View | None  # None: not known here


@dataclass(frozen=True, kw_only=True)
class _StepShape:
    """What the callers of a module choose: how large a step is."""

    tokens: int
    """Of a row: a multiple of the page size in prefill, 1 in decode."""
    pages: int
    """Of a row's page table."""

    def arguments(self) -> list[_Value]:
        """Of an entry point, as far as they have sizes: tokens, two vectors, the page table."""
        return [_View({1: self.tokens}), None, None, _View({1: self.pages})]


@dataclass(kw_only=True)
class _Run:
    """One step, as far as its buffers go."""

    functions: Mapping[str, _Function]
    tp: int
    shape: _StepShape
    live: set[_Buffer] = field(default_factory=set)
    peak: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peak = [0] * self.tp

    def call(self, name: str, arguments: Sequence[_Value]) -> list[_Value]:
        """Run a function; its results."""
        function = self.functions[name]
        known: dict[str, _Value] = dict(zip(function.arguments, arguments, strict=False))
        mine: list[_Buffer] = []
        results: list[_Value] = []
        for line in function.lines:
            if found := _ARITHMETIC.match(line):
                left, right = known.get(found["left"]), known.get(found["right"])
                operation = _OPERATIONS.get(found["op"])
                if operation and isinstance(left, int) and isinstance(right, int):
                    known[found["to"]] = operation(left, right)
            elif found := _CONSTANT.match(line):
                known[found["to"]] = int(found["value"])
            elif found := _SAME.match(line):
                known[found["to"]] = known.get(found["value"])
            elif found := _DIM.match(line):
                view = known.get(found["view"])
                known[found["to"]] = (
                    view.dims.get(int(found["dim"])) if isinstance(view, _View) else None
                )
            elif found := _EXPORT.match(line):
                dynamic = iter(_names(found["dims"] or ""))
                shape = found["shape"].split("x")[:-1]
                sizes = {axis: known.get(next(dynamic)) for axis, d in enumerate(shape) if d == "?"}
                known[found["to"]] = _View(
                    {axis: value for axis, value in sizes.items() if isinstance(value, int)}
                )
            elif found := _ALLOCATION.match(line):
                size = known.get(found["size"])
                if not isinstance(size, int):
                    raise CompileError(
                        f"@{name} allocates a size that depends on more than the shapes of a step: "
                        f"{line.strip()[:200]}"
                    )
                buffer = _Buffer(size, frozenset(map(int, _DEVICE.findall(line))))
                known[found["to"]] = buffer
                mine.append(buffer)
                self._allocate(buffer)
            elif found := _FREE.match(line):
                freed = known.get(found["buffer"])
                if isinstance(freed, _Buffer):
                    self.live.discard(freed)
            elif found := _CALL.match(line):
                given = self.call(found["name"], [known.get(a) for a in _names(found["args"])])
                known |= {f"{found['to']}#{i}": value for i, value in enumerate(given)}
                known[found["to"]] = given[0] if len(given) == 1 else None
                mine += [value for value in given if isinstance(value, _Buffer)]
            elif found := _RETURN.match(line):
                results = [known.get(value) for value in _names(found["values"])]
        # What nobody holds after the function is freed with its last reference.
        self.live.difference_update(b for b in mine if not any(b is r for r in results))
        return results

    def _allocate(self, buffer: _Buffer) -> None:
        self.live.add(buffer)
        for device in buffer.devices:
            held = sum(each.size for each in self.live if device in each.devices)
            self.peak[device] = max(self.peak[device], held)


def _functions(lines: Iterable[str]) -> dict[str, _Function]:
    """The module's functions by name, each with the lines of its own level."""
    functions: dict[str, _Function] = {}
    current: list[str] | None = None
    for line in lines:
        if function := _FUNCTION.match(line):
            current = []
            arguments = [each.partition(":")[0].strip() for each in function["args"].split(",")]
            functions[function["name"]] = _Function(arguments=arguments, lines=current)
        elif line == "  }":
            current = None
        elif current is not None and line.startswith(("    %", "    util.return")):
            current.append(line)
    return functions


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
