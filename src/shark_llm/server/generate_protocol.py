"""The bodies of POST /generate, in the forms of sglang and of shortfin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, RootModel, model_validator

from shark_llm.engine.guidance import GrammarSource
from shark_llm.server.guidance import SchemaText
from shark_llm.server.params import MAX_LOGPROBS, UNSUPPORTED, SamplingFields, Strict

SAMPLING_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "num_beams": (1,),
    "stop_regex": ([],),
    "custom_params": ({},),
}
GENERATE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "image_data": ([],),
    "audio_data": ([],),
    "input_embeds": ([],),
    "logprob_start_len": (-1,),
    "token_ids_logprob": ([],),
    "lora_path": (),
    "session_params": ({},),
    "return_hidden_states": (False,),
    "return_input_ids": (False,),
}

Ids = list[int]


class GenerateSampling(SamplingFields):
    """`sampling_params` of /generate; three names for the same limit, of which one may be sent."""

    max_new_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    no_stop_trim: bool | None = None
    json_schema: SchemaText = None
    regex: str | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> GenerateSampling:
        limits = (self.max_new_tokens, self.max_completion_tokens, self.max_tokens)
        if sum(limit is not None for limit in limits) > 1:
            raise ValueError(
                "send one of max_new_tokens, max_completion_tokens and max_tokens, not several"
            )
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("regex: cannot be combined with json_schema; send one of them")
        return self

    def grammar_source(self) -> GrammarSource | None:
        """What the text must match, or None."""
        if self.json_schema is not None:
            return GrammarSource(kind="json_schema", text=self.json_schema, param="json_schema")
        if self.regex is not None:
            return GrammarSource(kind="regex", text=self.regex, param="regex")
        return None

    def token_limit(self) -> int | None:
        for limit in (self.max_new_tokens, self.max_completion_tokens, self.max_tokens):
            if limit is not None:
                return limit
        return None


class GenerateRequest(Strict):
    """The body of POST /generate: `text` or `input_ids`."""

    text: str | list[str] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text: send either text or input_ids")
        prompts = self.prompts()
        if not prompts:
            raise ValueError("text: is an empty list; send at least one prompt")
        if isinstance(self.sampling_params, list) and len(self.sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: has {len(self.sampling_params)} entries "
                f"for {len(prompts)} prompts"
            )
        if self.top_logprobs_num and not self.return_logprob:
            raise ValueError("top_logprobs_num: only allowed when return_logprob is true")
        return self

    def is_single(self) -> bool:
        """Whether one prompt was sent bare, rather than in a list."""
        if self.input_ids is not None:
            return not self.input_ids or isinstance(self.input_ids[0], int)
        return isinstance(self.text, str)

    def prompts(self) -> list[str | Ids]:
        if self.input_ids is not None:
            if not self.input_ids or isinstance(self.input_ids[0], int):
                return [[token for token in self.input_ids if isinstance(token, int)]]
            return [ids for ids in self.input_ids if isinstance(ids, list)]
        return [self.text] if isinstance(self.text, str) else list(self.text or [])

    def sampling(self) -> list[GenerateSampling]:
        """One per prompt."""
        if isinstance(self.sampling_params, list):
            return self.sampling_params
        return [self.sampling_params or GenerateSampling()] * len(self.prompts())


class MetaInfo(BaseModel):
    """About one choice. Log-probabilities are [value, token id, text or null], as in sglang."""

    id: str
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None


class GenerateOutput(BaseModel):
    index: int
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedText(BaseModel):
    text: str


class PromptResponse(BaseModel):
    prompt: str
    responses: list[GeneratedText]


class ShortfinResponse(BaseModel):
    responses: list[PromptResponse]


class GenerateResponse(RootModel[GenerateOutput | list[GenerateOutput] | ShortfinResponse]):
    """One object for one prompt, a list for several, or shortfin's form."""
