"""The composed module's form: parameters, devices, chunks, order of sums; and what depth costs."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

import pytest

from bundles import model_config
from shark_llm.compile.targets import get_target
from shark_llm.export import trace
from shark_llm.export.compose import CHUNK_LAYERS_MULTI_DEVICE, export_module
from shark_llm.export.signatures import ExportSettings
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.plan import local_parameters, plan_parameters

SMALL = ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1,))
DECODE = re.compile(r"util\.func (public|private) @([\w.]+)\(")


@cache
def export(
    config: ModelConfig, tp: int = 1, target: str = "x86-64-v3", settings: ExportSettings = SMALL
) -> str:
    row = get_target(target)
    plan = plan_parameters(config, tp)
    return export_module(config, plan, tp, settings, row.attention_form, row.linear_form).mlir


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every function that is really traced."""
    functions: list[Any] = []
    original = trace._trace

    def counting(function: Any, arguments: Any) -> Any:
        functions.append(function)
        return original(function, arguments)

    monkeypatch.setattr(trace, "_trace", counting)
    return functions


def test_traces_do_not_grow_with_depth(traced: list[Any]) -> None:
    """Issue "export time": 80 layers are traced as often as 2; only lines of calls are more."""
    config = model_config()
    few = export.__wrapped__(config)
    count = len(traced)
    many = export.__wrapped__(dataclasses.replace(config, num_layers=80))
    assert len(traced) == 2 * count
    assert count < 30
    for text, layers in ((few, 2), (many, 80)):
        assert text.count("func.func private") == few.count("func.func private")
        calls = re.findall(r"func\.call @attend_pages\.1x", text)
        assert len(calls) == layers


def test_ranks_of_one_shape_are_traced_once(traced: list[Any]) -> None:
    """Two equal ranks cost what one costs; three kv heads on two ranks are two shapes."""
    export.__wrapped__(model_config(), tp=1)
    alone = len(traced)
    traced.clear()
    export.__wrapped__(model_config(), tp=2)
    equal = len(traced)
    traced.clear()
    export.__wrapped__(
        model_config(hidden_size=144, num_attention_heads=9, num_key_value_heads=3), tp=2
    )
    assert alone <= equal <= alone + 2  # the sum of several ranks' embeddings
    assert equal < len(traced) <= 2 * equal


@pytest.mark.parametrize("tp", [1, 3])
def test_one_global_for_each_parameter_on_each_rank(tp: int) -> None:
    """B08: of a bias that is added once, only rank 0 has a global."""
    config = model_config(attention_bias=True, mlp_bias=True)
    text = export(config, tp)
    found = re.findall(
        r'util\.global private @"[\w.]+" \{stream\.affinity = #hal\.device\.promise'
        r"<@__device_(\d)>\} = "
        r'#flow\.parameter\.named<"model"::"([\w.]+)"> : tensor<([\dx]+)xbf16>',
        text,
    )
    wanted = [
        (str(rank), parameter.key, "x".join(map(str, parameter.shape)))
        for rank in range(tp)
        for parameter in local_parameters(
            config, plan_parameters(config, tp), rank, "bf16"
        ).values()
    ]
    assert sorted(found) == sorted(wanted)
    assert text.count("util.global private") == len(found)
    down = [rank for rank, key, _ in found if key.startswith("blk.0.ffn_down.bias")]
    assert down == ["0"]


@pytest.mark.parametrize(("tp", "layers"), [(1, 9), (2, 5)])
def test_chunks_of_layers(tp: int, layers: int) -> None:
    """One chunk on one device; on several, chunks of few layers, none of them inlined."""
    text = export(dataclasses.replace(model_config(), num_layers=layers), tp)
    functions = DECODE.findall(text)
    size = layers if tp == 1 else CHUNK_LAYERS_MULTI_DEVICE
    starts = range(0, layers, size)
    for entry in ("prefill_bs1", "decode_bs1"):
        assert ("public", entry) in functions
        assert [name for kind, name in functions if name.startswith(f"{entry}.")] == [
            f"{entry}.layers.{start}" for start in starts
        ]
    assert text.count("inlining_policy = #util.inline.never") == 2 * len(starts)


def test_layers_of_a_gpu_s_ranks_share_their_functions() -> None:
    """Two chunks of four layers are one function, the ninth layer is another; all weights of layers
    come as arguments, each pinned to its rank."""
    text = export(dataclasses.replace(model_config(), num_layers=9), 2, "gfx942")
    names = [name for kind, name in DECODE.findall(text) if name.startswith("decode_bs1.")]
    assert sorted(names) == ["decode_bs1.layers.x1", "decode_bs1.layers.x4"]
    calls = re.findall(r"util\.call @decode_bs1\.layers\.(x\d)\((.*?)\) :", text)
    assert [name for name, _ in calls] == ["x4", "x4", "x1"]
    first, second = (arguments.split(", ") for _, arguments in calls[:2])
    assert len(first) == len(second)
    public = text[text.index("util.func public @decode_bs1(") :]
    loaded = dict(re.findall(r'(%\w+) = util\.global\.load @"blk\.(\d)\.', public))
    layers = [[loaded[name] for name in names if name in loaded] for names in (first, second)]
    assert layers[0] == [layer for _ in range(2) for layer in "0123" for _ in range(9)]
    assert [str(int(layer) + 4) for layer in layers[0]] == layers[1]
    start = text.index("private @decode_bs1.layers.x4(")
    chunk = text[start : text.index("\n  }\n", start)]
    assert 'util.global.load @"blk.' not in chunk
    pinned = re.findall(r"flow\.tensor\.transfer %w_\d+ : .* to #hal\.device\.promise<(.*)>", chunk)
    assert pinned == ["@__device_0"] * 36 + ["@__device_1"] * 36


def test_one_device_and_packed_weights_keep_chunks_of_their_own() -> None:
    """A packed weight must be loaded where it is multiplied: it is packed when the module loads."""
    config = dataclasses.replace(model_config(), num_layers=9)
    for tp, target in ((1, "gfx942"), (2, "x86-64-v3")):
        names = [name for _, name in DECODE.findall(export(config, tp, target))]
        assert not [name for name in names if ".layers.x" in name]


@pytest.mark.parametrize("tp", [1, 2])
def test_every_cache_is_imported_once_and_consumed(tp: int) -> None:
    """Of several ranks also the hidden states, by the chunk and by what comes behind the chunks."""
    text = export(model_config(), tp)
    consumed = re.findall(r"hal\.tensor\.import .*consume .*: !hal\.buffer_view", text)
    entries, caches = 2, 2 * 2 * tp
    hidden = 0 if tp == 1 else 2 * tp
    assert len(consumed) == entries * (caches + hidden)
    imports = text.count("hal.tensor.import")
    plain = 4, 3  # tokens, positions, lengths, table; what softmax_sums takes
    assert imports == len(consumed) + entries * plain[0] + plain[1]


def test_partial_sums_are_added_in_rank_order() -> None:
    """B13: every rank adds its residual, then rank 0, 1, 2: the same sum everywhere."""
    text = export(model_config(), tp=3)
    calls = re.findall(r"func\.call @decode_bs1\.add\((.*?)\)", text)
    assert len(calls) == 3 * 2 * 2  # ranks, halves of a block, layers
    transfers = dict(re.findall(r"(%\w+) = flow\.tensor\.transfer (%\w+) : tensor<1x64xf32>", text))
    for ranks in zip(*[iter(calls)] * 3, strict=True):
        sources = [[transfers.get(name, name) for name in call.split(", ")[1:]] for call in ranks]
        assert sources[0] == sources[1] == sources[2]
        assert len(set(sources[0])) == 3


def test_export_gives_the_same_text_again() -> None:
    """The module's key is the digest of its text: a second build reuses the module."""
    assert export.__wrapped__(model_config(), 2) == export(model_config(), 2)


def test_weights_do_not_enter_the_text() -> None:
    """Calls and index constants of a few bytes make the text; no size of a weight does."""
    text = export(model_config())
    assert len(text) < 400_000
    resources = re.findall(r'"0x([0-9A-F]+)"', text)
    assert sum(map(len, resources)) // 2 < 4096


def test_attention_form_is_the_targets() -> None:
    """gfx942 has the fused operation (tm_tensor is how it reaches IREE), CPUs vector code."""
    for target, fused in (("gfx942", True), ("x86-64-v3", False)):
        text = export(model_config(), target=target)
        assert ("tm_tensor.attention" in text) == fused, target
        assert ("flow.executable private" in text) != fused, target


def test_lowered_fragments_have_no_torch_left() -> None:
    for target in ("gfx942", "x86-64-v3"):
        text = export(model_config(), target=target)
        assert not re.search(r"(^|= )torch\.", text, re.MULTILINE)
        assert "!torch" not in text


def test_dynamic_sizes_stay_dynamic() -> None:
    """C01: no example size is frozen: fragments have the types that they are called with."""
    text = export(model_config())
    declared = dict(
        re.findall(r"func\.func private @([\w.]+)\((.*?)\) -> ", text.replace("\n", " "))
    )
    called = re.findall(r"func\.call @([\w.]+)\(.*?\) : \((.*?)\) -> ", text)
    assert len(called) > 20
    for name, types in called:
        arguments = re.findall(r"%\w+: (tensor<[^>]*>)", declared[name])
        assert arguments == types.split(", "), name
