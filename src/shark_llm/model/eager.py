"""The model in plain torch, on all ranks in turn: between transformers and compiled modules.

It runs the same fragments that are exported, with the same all-reduce order, from whole weights.

Legend: as in llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shark_llm.artifacts.manifest import Placement, Replicate
from shark_llm.model import llama
from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import page_elements
from shark_llm.model.llama import AttentionForm, Phase


@dataclass(frozen=True, kw_only=True)
class EagerSettings:
    """How the eager model computes; the defaults are what compiled CPU modules do."""

    page_size: int
    num_pages: int
    attention_form: AttentionForm = "matmul"
    narrow_operands: bool = False
    """Round activations to the norms' dtype before each product, as `LinearForm` plain does."""
    round_rows: bool = False
    """Round them to whole numbers by groups instead, as `LinearForm.rounds_rows` says."""


@dataclass
class EagerModel:
    """A paged Llama over `tp` ranks. `parameters` are whole tensors by our names, any float.

    `plan` says how they are cut; its ranges are applied to the whole tensors here. A matrix may be
    i8 with an f32 scale for each of its rows, `blk.0.attn_q.scale`.
    """

    config: ModelConfig
    parameters: Mapping[str, torch.Tensor]
    plan: Mapping[str, Placement]
    tp: int
    settings: EagerSettings
    caches: list[list[torch.Tensor]] = field(init=False)
    """Per rank: keys and values of each layer in turn, each (P, one page)."""

    def __post_init__(self) -> None:
        dtype = self._dtype
        self.caches = []
        for rank in range(self.tp):
            k = self._local("blk.0.attn_k.weight", rank)
            assert k is not None
            elements = page_elements(
                k.shape[0] // self.config.head_dim, self.settings.page_size, self.config.head_dim
            )
            shape = (self.settings.num_pages, elements)
            self.caches.append(
                [torch.zeros(shape, dtype=dtype) for _ in range(2 * self.config.num_layers)]
            )

    @torch.no_grad()
    def forward(
        self,
        phase: Phase,
        tokens: torch.Tensor,
        start_positions: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
    ) -> torch.Tensor:
        """One step, as entry points take it: (N, S), (N), (N), (N, T) i64 -> logits (N, V) f32."""
        config, ranks = self.config, range(self.tp)
        step = llama.prepare(
            config, self.settings.page_size, tokens, start_positions, seq_lens, page_table
        )
        partials = []
        for rank in ranks:
            first = torch.tensor(self._first_row(rank))
            table, scale = self._weight("token_embd.weight", rank), "token_embd.scale"
            partials.append(llama.embed(tokens, first, table, self._local(scale, rank)))
        hidden = llama.add_partials(*partials)
        for layer in range(config.num_layers):
            x = self._norm(hidden, f"blk.{layer}.attn_norm.weight")
            partials = []
            for rank in ranks:
                q, k, v = (self._linear(x, f"blk.{layer}.attn_{name}", rank) for name in "qkv")
                caches = self.caches[rank]
                mixed, caches[2 * layer], caches[2 * layer + 1] = llama.attend(
                    config,
                    self.settings.page_size,
                    phase,
                    self.settings.attention_form,
                    q,
                    k,
                    v,
                    step,
                    caches[2 * layer],
                    caches[2 * layer + 1],
                )
                partials.append(self._linear(mixed, f"blk.{layer}.attn_output", rank))
            hidden = llama.add_partials(hidden, *partials)
            x = self._norm(hidden, f"blk.{layer}.ffn_norm.weight")
            partials = []
            for rank in ranks:
                g = self._linear(x, f"blk.{layer}.ffn_gate", rank)
                u = self._linear(x, f"blk.{layer}.ffn_up", rank)
                partials.append(self._linear(llama.gate(g, u), f"blk.{layer}.ffn_down", rank))
            hidden = llama.add_partials(hidden, *partials)
        x = self._norm(hidden, "output_norm.weight")
        last = llama.last_rows(x, start_positions, seq_lens)
        output = "token_embd" if config.tie_word_embeddings else "output"
        return torch.cat([self._linear(last, output, rank) for rank in ranks], dim=1)

    @property
    def _dtype(self) -> torch.dtype:
        """Of all that is not quantized, and of the caches."""
        return self.parameters["output_norm.weight"].dtype

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return llama.norm(x, self.parameters[name], self.config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        weight = self._weight(f"{name}.weight", rank)
        if self.settings.narrow_operands:
            x = x.to(self._dtype)
        if self.settings.round_rows:
            x = llama.round_rows(x)
        y = x.to(torch.float32) @ weight.to(torch.float32).t()
        scale = self._local(f"{name}.scale", rank)
        if scale is not None:
            y = y * scale
        bias = self._local(f"{name}.bias", rank)
        return y if bias is None else y + bias.to(torch.float32)

    def _first_row(self, rank: int) -> int:
        placement = self.plan["token_embd.weight"]
        return 0 if isinstance(placement, Replicate) else placement.ranges[rank][0]

    def _weight(self, name: str, rank: int) -> torch.Tensor:
        weight = self._local(name, rank)
        assert weight is not None, name
        return weight

    def _local(self, name: str, rank: int) -> torch.Tensor | None:
        """The rank's part of a parameter; None where the rank has none."""
        if name not in self.parameters:
            return None
        whole, placement = self.parameters[name], self.plan[name]
        if isinstance(placement, Replicate):
            return whole
        start, stop = placement.ranges[rank]
        return whole.narrow(placement.dim, start, stop - start) if stop > start else None
