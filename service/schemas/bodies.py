"""The bodies of native requests. `service.planning.body_limits` checks the limits that an operator can set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from service.core.request_context import REQUEST_ID_PATTERN
from service.schemas.types import (
    MAX_INT,
    Body,
    Prompt,
    TextOrIds,
    TextOrTexts,
    Texts,
    TokenId,
    TokenIds,
)
from service.settings.service_settings import MAX_PRIORITY, MIN_PRIORITY

ModelName = Annotated[
    str | None,
    Field(
        description="The model to use; optional if only one loaded model can serve the task.",
        examples=["code"],
    ),
]
RequestId = Annotated[
    str | None,
    Field(
        pattern=REQUEST_ID_PATTERN,
        description="Names the request in the reply, the log and `DELETE /requests/{id}`; overrides `X-Request-Id`.",
        examples=["my-request-1"],
    ),
]
Timeout = Annotated[
    float | None,
    Field(
        gt=0,
        description="Seconds until the request ends with finish_reason `deadline`; default and maximum: 600.",
        examples=[30.0],
    ),
]


class JsonSchema(Body):
    """A JSON schema that constrains the output."""

    model_config = ConfigDict(json_schema_extra={"required": ["schema"]})

    name: str | None = Field(None, description="A label without effect.", examples=["person"])
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="At most 64 KiB. The output's properties have its order. Keywords that cannot be enforced are "
        "refused by name; references must be within the schema.",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )
    strict: bool | None = Field(
        None, description="Without effect, since the schema is always enforced.", examples=[True]
    )


class ResponseFormat(Body):
    """Sets the format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `json_schema`.", examples=["json_object"]
    )
    json_schema: JsonSchema | None = Field(None, description="Required with the type `json_schema`.")


class GenerateBody(Body):
    """Continue a prompt (decoder-only) or generate from a source (encoder-decoder)."""

    model: ModelName = None
    prompt: Prompt = Field(
        description="Text, token ids, or a list of up to 32 of either. The tokenizer adds special tokens to text, not "
        "to ids.",
        examples=["def fibonacci(n):", ["import os", "import sys"], [1, 42, 7], [[1, 42], [1, 7]]],
    )
    decoder_prompt: TextOrIds | None = Field(
        None,
        description="Encoder-decoder only: a beginning of the output after the decoder's start token, returned only "
        "with `echo`.",
        examples=["2024-", [5, 9]],
    )
    task: str | None = Field(
        None,
        max_length=128,
        description="A task of the checkpoint's `task_specific_params`, which /info lists: its prefix is put in front "
        "of each text, and its settings are the defaults of this request. Default: none.",
        examples=["summarization", "translation_en_to_de"],
    )
    source_language: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Models whose sources name their language (NLLB, mBART, M2M-100): the texts' language, as the "
        "tokenizer's code. Default: `src_lang` of the checkpoint.",
        examples=["deu_Latn", "de_DE", "de"],
    )
    target_language: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Encoder-decoder with language tokens (NLLB, mBART, M2M-100): the output's language, as the "
        "tokenizer's code. The output begins after its token.",
        examples=["fra_Latn", "fr_XX", "fr"],
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="Maximum number of tokens to generate. Default: the checkpoint's, else "
        "`default_max_tokens` (256), within the context.",
        examples=[64],
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="End-of-sequence and stops are ignored before this many tokens.",
        examples=[0],
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Divides the logits; 0 (or less than 0.0001) is greedy. Default: the checkpoint's, else 0.",
        examples=[0.8],
    )
    top_k: int | None = Field(
        None, ge=0, le=MAX_INT, description="Sample among the k most likely; 0: off.", examples=[40]
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Sample among the most likely tokens that have this total probability.",
        examples=[0.95],
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Exclude tokens less likely than this share of the most likely one.",
        examples=[0.05],
    )
    typical_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Sample among the tokens whose information is closest to the entropy, with this total probability.",
        examples=[0.9],
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=2**63 - 1,
        description="The same request and seed give the same tokens in any batch. Default: random.",
        examples=[7],
    )
    n: int = Field(1, ge=1, le=MAX_INT, description="Number of choices for each prompt, at most 8.", examples=[1, 2])
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="2 to 8: beam search, which returns its n best hypotheses at the end, fewer where few outputs "
        "are possible. Not with sampling, stop "
        "texts or log-probabilities. Default: the checkpoint's, else 1.",
        examples=[4],
    )
    length_penalty: float | None = Field(
        None,
        ge=-10,
        le=10,
        description="Beam search compares score / length ** length_penalty: above 0 favours long outputs. Default: the "
        "checkpoint's, else 1.",
        examples=[1.0],
    )
    early_stopping: Literal[True, False, "never"] | None = Field(
        None,
        description="Beam search ends at num_beams hypotheses (true), when a better one is unlikely (false), or when "
        "none is possible (never). Default: the checkpoint's, else false.",
        examples=[False],
    )
    stop: TextOrTexts | None = Field(
        None,
        description="Up to 4 texts of 1 to 256 characters that end the output before them.",
        examples=["\n\n", ["\nclass ", "\ndef "]],
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, description="Up to 128 ids that end the output.", examples=[[2]]
    )
    include_stop: bool = Field(False, description="Keep the stop text in the output.", examples=[False])
    ignore_eos: bool = Field(False, description="Continue after the end-of-sequence id.", examples=[False])
    response_format: ResponseFormat | None = Field(
        None,
        description="Constrain the output to JSON; default: any text. The output ends where the JSON is complete, or "
        "before, at `max_tokens` or a stop text. Only one of `response_format`, `regex`, `choice` and `grammar`.",
        examples=[{"type": "json_object"}],
    )
    regex: str | None = Field(
        None,
        min_length=1,
        description="Constrain the whole output to a regular expression of at most 4,096 characters, read as "
        "JavaScript reads it, without look-around, back-references and inner anchors. Default: none.",
        examples=["[0-9]{4}-[0-9]{2}-[0-9]{2}"],
    )
    choice: Texts | None = Field(
        None,
        description="Constrain the output to one of at most 1,000 texts of 1 to 1,024 characters. Default: none.",
        examples=[["yes", "no"]],
    )
    grammar: str | None = Field(
        None,
        min_length=1,
        description="Constrain the output to a grammar of at most 65,536 bytes: GBNF (EBNF), which begins with `root`, "
        "or Lark, which begins with `start`. Default: none.",
        examples=['root ::= "[" root "]" | [0-9]+'],
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="Above 1 makes tokens of prompt and output less likely. Default: the checkpoint's, else 1.",
        examples=[1.1],
    )
    no_repeat_ngram_size: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="No sequence of this many tokens occurs twice; 0: off. Default: the checkpoint's, else 0.",
        examples=[3],
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens in the output.", examples=[0.0]
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="The same, multiplied by the number of occurrences.", examples=[0.0]
    )
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="Added to the logits of up to 300 token ids.", examples=[{"42": -5.0}]
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None,
        min_length=1,
        description="Up to 300 ids: no others are generated, the end-of-sequence id neither unless it is among them. "
        "Not with `response_format`, `regex`, `choice` or `grammar`. Default: all.",
        examples=[[15, 16, 17]],
    )
    suppress_tokens: list[TokenId] = Field(
        default_factory=list,
        description="Up to 300 ids that are not generated, beside those that the checkpoint suppresses.",
        examples=[[50256]],
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=64,  # MAX_SPECULATIVE_TOKENS, which is the engine's
        description="Draft up to this many tokens a step where the output repeats the prompt, the source "
        "or itself (n-gram speculation); 0: off. The output is the same. Default: the server's setting.",
        examples=[8],
    )
    prediction: TextOrIds | None = Field(
        None,
        description="A text that much of the output is expected to repeat, such as the one that it edits: drafts come "
        "from it too, at most `num_speculative_tokens` a step, then 8 by default. The output is the same.",
        examples=["def add(a, b):\n    return a + b\n"],
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="Return the log-probability of each output token under the model's own distribution, with this "
        "many (at most 20) most likely alternatives.",
        examples=[3],
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_INT, description="The same for the prompt; the first entry is null.", examples=[0]
    )
    echo: bool = Field(
        False,
        description="Return the prompt before the output (encoder-decoder: the decoder_prompt).",
        examples=[False],
    )
    return_token_ids: bool = Field(
        False, description="Return token ids too; a model without a tokenizer always does.", examples=[True]
    )
    skip_special_tokens: bool = Field(
        True, description="Leave special tokens such as end-of-sequence out of the text.", examples=[True]
    )
    stream: bool = Field(False, description="Reply with server-sent events.", examples=[False])
    timeout_s: Timeout = None
    priority: int = Field(
        0,
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower is served first; equal ones in order of arrival. At least `min_priority` of `/info`.",
        examples=[0],
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Only requests with the same salt (and the same API key) share the prefix cache.",
        examples=["tenant-7"],
    )
    request_id: RequestId = None


class TokenizeBody(Body):
    """Convert text to token ids, as for a prompt or an input."""

    model: ModelName = None
    text: str = Field(description="The text.", examples=["def f(x):"])
    text_pair: str | None = Field(None, description="A second text, read with the first.", examples=["a dog"])
    add_special_tokens: bool = Field(True, description="As for a prompt.", examples=[True])
    return_texts: bool = Field(False, description="Also return each token as text.", examples=[True])


class DetokenizeBody(Body):
    """Convert token ids to text."""

    model: ModelName = None
    token_ids: TokenIds = Field(description="The ids, at most max_model_len.", examples=[[1, 42, 7]])
    skip_special_tokens: bool = Field(False, description="Leave special tokens out.", examples=[False])
