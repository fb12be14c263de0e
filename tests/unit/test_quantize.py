"""sharding/quantize.py: the round trip, its bound, and what the eager model makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ladder import PAGE, token_ids, write_kind
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.golden import read_parameters
from shark_llm.model import llama
from shark_llm.model.eager import EagerModel, EagerSettings
from shark_llm.sharding.plan import plan_parameters, scale_name
from shark_llm.sharding.quantize import dequantize, quantize

finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(rows=st.lists(st.lists(finite, min_size=5, max_size=5), min_size=1, max_size=4))
def test_no_weight_moves_further_than_half_a_scale(rows: list[list[float]]) -> None:
    whole = torch.tensor(rows)
    q, scale = quantize(whole)
    assert q.dtype == torch.int8
    assert q.to(torch.int32).abs().amax() <= 127
    error = (q.double() * scale.double()[:, None] - whole.double()).abs()
    assert (error <= scale.double()[:, None] * 0.50001).all()


def test_rounded_rows_are_near_by_groups() -> None:
    """An activation moves by half a step of its own group at most: an outlier harms no other."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(7))
    x[2, 40] = 1000.0
    rounded = llama.round_rows(x)
    for start in range(0, 96, 32):
        group = slice(start, start + 32)
        step = x[:, group].abs().amax(1, keepdim=True) / 127
        assert ((rounded - x)[:, group].abs() <= 0.501 * step).all()
    assert rounded[2, 40] == pytest.approx(1000.0)


@pytest.mark.parametrize(("columns", "group"), [(32, 32), (48, 16), (576, 32), (24, None)])
def test_groups_are_whole(columns: int, group: int | None) -> None:
    assert llama.rounding_group(columns) == group
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(1))
    assert torch.equal(llama.round_rows(x), x) == (group is None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """C06: a row of NaN must not become one of numbers."""
    x = torch.ones(1, 64)
    x[0, 3] = value
    rounded = llama.round_rows(x)
    assert not torch.isfinite(rounded[0, :32]).any()
    assert torch.equal(rounded[0, 32:], x[0, 32:])


def test_next_to_nothing_becomes_zeros() -> None:
    x = torch.tensor([[1e-38] * 32, [0.0] * 32])
    assert torch.equal(llama.round_rows(x), torch.zeros(2, 32))


def test_the_largest_of_a_row_becomes_127() -> None:
    q, scale = quantize(torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16))
    assert q.tolist() == [[32, -127, 64], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([2 / 127, 1.0])


def test_rows_do_not_depend_on_each_other() -> None:
    rows = torch.randn(7, 33, generator=torch.Generator().manual_seed(3))
    whole, scales = quantize(rows)
    q, scale = quantize(rows[2:5])
    assert torch.equal(q, whole[2:5])
    assert torch.equal(scale, scales[2:5])


@pytest.mark.parametrize("kind", ["tied", "biases"])
@pytest.mark.parametrize("tp", [1, 3])
def test_eager_model_of_quantized_weights_is_that_of_the_dequantized(
    kind: str, tp: int, tmp_path: Path
) -> None:
    """A scale after the product is the scale in the weight, on every rank and in the embedding."""
    checkpoint = open_checkpoint(write_kind(tmp_path, kind))
    config = checkpoint.config
    quantized = read_parameters(checkpoint, torch.float32, quantized=True)
    plain = {
        name: dequantize(tensor, quantized[scale_name(name)])
        if tensor.dtype == torch.int8
        else tensor
        for name, tensor in quantized.items()
        if not name.endswith(".scale")
    }
    assert {name for name, tensor in quantized.items() if tensor.dtype == torch.int8} == {
        name for name, tensor in plain.items() if tensor.ndim == 2
    }
    tokens = torch.tensor([token_ids(PAGE)])
    inputs = tokens, torch.tensor([0]), torch.tensor([PAGE - 1]), torch.tensor([[1]])
    logits = [
        EagerModel(
            config=config,
            parameters=parameters,
            plan=plan_parameters(config, tp, quantized=parameters is quantized),
            tp=tp,
            settings=EagerSettings(page_size=PAGE, num_pages=2),
        ).forward("prefill", *inputs)
        for parameters in (quantized, plain)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
