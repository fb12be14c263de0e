"""The total map between Hugging Face's tensor names and ours, and the shapes the config demands.

Ours are GGUF's names. Every tensor of a checkpoint is either a parameter, or on the short list of
ignored ones, or an error; every parameter must be there. An error lists all names at once.

Shapes: V vocab, H hidden, M mlp, D head_dim, A = num_heads * D, K = num_kv_heads * D.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shark_llm.errors import WeightMapError
from shark_llm.model.config import ModelConfig

# part of our name -> part of Hugging Face's, within a block
BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_HF_OUTER = {hf: ours for ours, hf in OUTER_MODULES.items()}
_HF_BLOCK = {hf: ours for ours, hf in BLOCK_MODULES.items()}

# Old files store the angles of rope, which follow from the config; others the scales of an fp8 KV
# cache, which ours is not.
IGNORED = re.compile(
    r"(model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|rope\.freqs"
    r"|model\.layers\.\d+\.self_attn\.(attn\.|[kv]_proj\.)?[kv]_scale)"
)
_HF_BLOCK_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OUR_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def from_hf_name(hf_name: str) -> str | None:
    """Our name of a Hugging Face tensor; None when a Llama has no such tensor."""
    if match := _HF_BLOCK_NAME.fullmatch(hf_name):
        layer, module, kind = match.groups()
        return f"blk.{layer}.{_HF_BLOCK[module]}.{kind}" if module in _HF_BLOCK else None
    module, _, kind = hf_name.rpartition(".")
    return f"{_HF_OUTER[module]}.weight" if kind == "weight" and module in _HF_OUTER else None


def to_hf_name(name: str) -> str:
    """The Hugging Face name of one of our parameters."""
    if match := _OUR_BLOCK_NAME.fullmatch(name):
        layer, module, kind = match.groups()
        return f"model.layers.{layer}.{BLOCK_MODULES[module]}.{kind}"
    module, _, kind = name.rpartition(".")
    return f"{OUTER_MODULES[module]}.{kind}"


def expected_parameters(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its shape, in the order in which the model uses them.

    Without `output.weight` when the embeddings are tied.
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "attn_q": (heads, hidden, config.attention_bias),
        "attn_k": (kv_heads, hidden, config.attention_bias),
        "attn_v": (kv_heads, hidden, config.attention_bias),
        "attn_output": (hidden, heads, config.attention_bias),
        "ffn_gate": (mlp, hidden, config.mlp_bias),
        "ffn_up": (mlp, hidden, config.mlp_bias),
        "ffn_down": (hidden, mlp, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for module in BLOCK_MODULES:
            name = f"blk.{layer}.{module}"
            if module in linears:
                out_features, in_features, bias = linears[module]
                shapes[f"{name}.weight"] = (out_features, in_features)
                if bias:
                    shapes[f"{name}.bias"] = (out_features,)
            else:
                shapes[f"{name}.weight"] = (hidden,)
    shapes["output_norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return shapes


def check_weight_map(
    where: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]], unknown: Iterable[str]
) -> None:
    """Raise WeightMapError unless `found` is exactly what `config` demands and `unknown` is empty.

    `found` maps our names to shapes; `unknown` holds names, as the file spells them, of tensors
    that a Llama does not have.
    """
    expected = expected_parameters(config)
    surplus = [*unknown, *(to_hf_name(name) for name in found if name not in expected)]
    if surplus:
        raise WeightMapError(
            f"{where}: {len(surplus)} tensors that the config has no place for:"
            f" {', '.join(surplus)}; {_surplus_hint(config, surplus)}"
        )
    missing = [to_hf_name(name) for name in expected if name not in found]
    if missing:
        raise WeightMapError(
            f"{where}: {len(missing)} tensors are missing: {', '.join(missing)};"
            f" {_missing_hint(config, missing)}"
        )
    wrong = [
        f"{to_hf_name(name)} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise WeightMapError(
            f"{where}: shapes that disagree with the config: {'; '.join(wrong)};"
            " config and weights are not of the same model"
        )


def _surplus_hint(config: ModelConfig, surplus: list[str]) -> str:
    if all(name.endswith(".bias") and from_hf_name(name) for name in surplus):
        return (
            f"they are biases, but attention_bias = {config.attention_bias} and"
            f" mlp_bias = {config.mlp_bias}: set the flag that fits the weights"
        )
    if all(_HF_BLOCK_NAME.fullmatch(name) and from_hf_name(name) for name in surplus):
        return (
            f"num_hidden_layers = {config.num_layers}: config and weights are not of the same model"
        )
    if any(re.search(r"scale|qweight|qzeros|g_idx|absmax|quant", name) for name in surplus):
        return "the weights look quantized: use the unquantized model"
    return "use a checkpoint of a plain Llama or Mistral"


def _missing_hint(config: ModelConfig, missing: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return (
            f"tie_word_embeddings = {config.tie_word_embeddings} demands it: set it to true if the"
            " model shares its embeddings, or complete the download"
        )
    return (
        f"the config demands them (num_hidden_layers = {config.num_layers}): complete the download"
    )
