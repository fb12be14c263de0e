"""Rotary position embedding: its parameters, read strictly from a Hugging Face config.json.

Old spelling: `rope_theta` beside `rope_scaling` {type | rope_type, factor ...}. New spelling
(transformers 5): all of it in `rope_parameters`. Formulas and defaults are those of transformers'
modeling_rope_utils. Dynamic scaling is refused: its angles depend on the length of the sequence, so
cached keys could not be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shark_llm.model.config_values import is_number, read_positive, read_size, refuse

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `theta` belong to the types that name them."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None = computed from factor
    truncate: bool = True  # yarn: round the correction range to whole dimensions


# fmt: off
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    }),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate", "finetuned",
    }),
}
# fmt: on


def rope_from_hf(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rope from the old keys, from the new one, or from both where they agree."""
    dicts = {key: hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    for key, rope in dicts.items():
        if not isinstance(rope, Mapping):
            refuse(key, rope, "must be an object")
    theta = _theta(hf, dicts)
    read = [_rope_dict(hf, key, rope, theta, max_positions) for key, rope in dicts.items()]
    if not read:
        return RopeConfig(theta=theta)
    if read[0] != read[-1]:
        refuse(
            "rope_parameters",
            hf["rope_parameters"],
            f"disagrees with rope_scaling = {hf['rope_scaling']!r}: remove the wrong one",
        )
    return read[0]


def _theta(hf: Mapping[str, Any], dicts: Mapping[str, Mapping[str, Any]]) -> float:
    """rope_theta beside the dicts or in them; wherever it stands, it must say the same."""
    said = {"rope_theta": read_positive(hf, "rope_theta", 0.0)} if _has(hf, "rope_theta") else {}
    for key, rope in dicts.items():
        if _has(rope, "rope_theta"):
            said[f"{key}.rope_theta"] = read_positive(rope, "rope_theta", 0.0, f"{key}.")
    if len(set(said.values())) > 1:
        (first, value), *_, (last, other) = said.items()
        refuse(last, other, f"disagrees with {first} = {value}: remove the wrong one")
    return next(iter(said.values()), 10000.0)


def _has(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) is not None


def _rope_dict(
    hf: Mapping[str, Any], key: str, rope: Mapping[str, Any], theta: float, max_positions: int
) -> RopeConfig:
    where = f"{key}."
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("type") not in (None, rope_type):
        refuse(f"{where}type", rope["type"], f"disagrees with rope_type = {rope_type!r}")
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        refuse(f"{where}rope_type", rope_type, f"supported are {', '.join(get_args(RopeType))}")
    for name, value in rope.items():
        harmless = {"partial_rotary_factor": 1} | ({"factor": 1} if rope_type == "default" else {})
        if name in ("rope_type", "type", "rope_theta") or name in ROPE_KEYS[rope_type]:
            continue
        if value is not None and not (name in harmless and value == harmless[name]):
            refuse(f"{where}{name}", value, f"not understood for rope type {rope_type!r}")

    if rope_type == "default":
        return RopeConfig(theta=theta)

    original: int | None = None
    if rope_type in ("llama3", "yarn"):
        # Absent everywhere: the model was not extended (transformers' standardize_rope_params).
        outer = read_size(hf, "original_max_position_embeddings", max_positions)
        original = read_size(rope, "original_max_position_embeddings", outer)
        if hf.get("original_max_position_embeddings") is not None and original != outer:
            refuse(
                f"{where}original_max_position_embeddings",
                original,
                f"disagrees with original_max_position_embeddings = {outer}",
            )
    if rope_type == "yarn" and "factor" in rope and rope["factor"] is None:
        assert original is not None
        rope = {**rope, "factor": max_positions / original}
    if not is_number(rope.get("factor")) or rope["factor"] < 1:
        refuse(f"{where}factor", rope.get("factor"), "must be a number of at least 1")
    factor = float(rope["factor"])
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    if rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if rope.get(name) is None:
                refuse(f"{where}{name}", None, "llama3 rope needs it")
        low = read_positive(rope, "low_freq_factor", 1.0, where)
        high = read_positive(rope, "high_freq_factor", 4.0, where)
        if high <= low:
            refuse(f"{where}high_freq_factor", high, f"must be above low_freq_factor = {low}")
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):  # null is not absent here: transformers takes it for false
        refuse(f"{where}truncate", truncate, "must be true or false")
    beta_fast = read_positive(rope, "beta_fast", 32.0, where)
    beta_slow = read_positive(rope, "beta_slow", 1.0, where)
    if beta_fast < beta_slow:
        refuse(f"{where}beta_fast", beta_fast, f"must not be below beta_slow = {beta_slow}")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_yarn_attention_factor(rope, factor, where),
        truncate=truncate,
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float | None:
    """The explicit one; else from mscale and mscale_all_dim when both are there; else None."""
    if rope.get("attention_factor") is not None:
        return read_positive(rope, "attention_factor", 1.0, where)
    if not rope.get("mscale") or not rope.get("mscale_all_dim"):
        return None

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return scale(read_positive(rope, "mscale", 1.0, where)) / scale(
        read_positive(rope, "mscale_all_dim", 1.0, where)
    )
