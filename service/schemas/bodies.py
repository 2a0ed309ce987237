"""The bodies of native requests. Limits that an operator can set are checked in `triptych.service.planning.checks`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from triptych.service.core.request_context import REQUEST_ID_PATTERN
from triptych.service.schemas.parameters import Parameters, native_body
from triptych.service.schemas.types import (
    PIXEL,
    Body,
    Detail,
    PromptOrNone,
    TextOrIds,
    Texts,
    TokenIds,
)

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
        description="Id of the request in the reply, the log and `DELETE /requests/{id}`; overrides `X-Request-Id`.",
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
        description="At most 64 KiB. The output has properties in the schema's order. Keywords that cannot be enforced "
        "are refused by name; references must be to places in the schema.",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )
    strict: bool | None = Field(
        None, description="Without effect, since the schema is always enforced.", examples=[True]
    )


class ResponseFormat(Body):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `json_schema`.", examples=["json_object"]
    )
    json_schema: JsonSchema | None = Field(None, description="Required with the type `json_schema`.")


@native_body
class GenerateBody(Parameters):
    """Continue a prompt (decoder-only) or generate from a source (encoder-decoder)."""

    model: ModelName = None
    prompt: PromptOrNone = Field(
        description="Text, token ids, or a list of up to 32 of either. The tokenizer adds special tokens to text, not "
        "to ids.",
        examples=["def fibonacci(n):", ["import os", "import sys"], [1, 42, 7], [[1, 42], [1, 7]]],
    )
    images: Texts | None = Field(
        None,
        description="Image files in base64 or as data URLs, for a model that reads pictures in prompts. The prompt is "
        "one text that has the model's mark (such as `<|image_pad|>`) in the place of each. Default: none.",
        examples=[[PIXEL]],
    )
    image_detail: Detail | None = Field(
        None, description="`low`: images take fewer tokens, of models that read any size.", examples=["low"]
    )
    decoder_prompt: TextOrIds | None = Field(
        None,
        description="Encoder-decoder only: the beginning of the output, after the decoder's start token; returned only "
        "with `echo`.",
        examples=["2024-", [5, 9]],
    )
    task: str | None = Field(
        None,
        max_length=128,
        description="A task of the checkpoint's `task_specific_params`, which /info lists. Its prefix is put before "
        "each text, and its settings are the defaults of this request. Default: none.",
        examples=["summarization", "translation_en_to_de"],
    )
    source_language: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="The texts' language, as a code of the tokenizer, for models that mark the language of a source "
        "(NLLB, mBART, M2M-100). Default: `src_lang` of the checkpoint.",
        examples=["deu_Latn", "de_DE", "de"],
    )
    target_language: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="The output's language, as a code of the tokenizer, for encoder-decoders with language tokens "
        "(NLLB, mBART, M2M-100). The output begins after its token.",
        examples=["fra_Latn", "fr_XX", "fr"],
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="Constrain the output to JSON; default: any text. The output ends when the JSON is complete, or "
        "earlier at `max_tokens` or a stop text. Only one of `response_format`, `regex`, `choice` and `grammar`.",
        examples=[{"type": "json_object"}],
    )
    regex: str | None = Field(
        None,
        min_length=1,
        description="Constrain the whole output to a regular expression of at most 4,096 characters, in JavaScript's "
        "syntax, without look-around, back-references and inner anchors. Default: none.",
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
        description="Constrain the output to a grammar of at most 65,536 bytes: GBNF (EBNF), whose first rule is "
        "`root`, or Lark, whose first rule is `start`. Default: none.",
        examples=['root ::= "[" root "]" | [0-9]+'],
    )
    suffix: str | None = Field(
        None,
        description="A text that follows the output: the model fills in what is between the prompt, a text, and the "
        "suffix. For decoders with marks for it (Qwen Coder, StarCoder, DeepSeek, Codestral) and encoder-decoders with "
        "sentinels (T5). Default: none.",
        examples=["\n\nprint(add(1, 2))\n"],
    )
    prediction: TextOrIds | None = Field(
        None,
        description="A text that the output is expected to repeat largely, such as the text to edit. Drafts are also "
        "proposed from it, at most `num_speculative_tokens` a step (here 8 by default). The output is the same, on a "
        "GPU but for rounding.",
        examples=["def add(a, b):\n    return a + b\n"],
    )
    echo: bool = Field(
        False,
        description="Return the prompt before the output (encoder-decoder: the decoder_prompt).",
        examples=[False],
    )
    return_token_ids: bool = Field(
        False, description="Also return token ids; a model without a tokenizer always does.", examples=[True]
    )
    stream: bool = Field(False, description="Reply with server-sent events.", examples=[False])
    timeout_s: Timeout = None
    request_id: RequestId = None


class TokenizeBody(Body):
    """Convert text to token ids."""

    model: ModelName = None
    text: str = Field(description="The text.", examples=["def f(x):"])
    text_pair: str | None = Field(None, description="A second text, read with the first.", examples=["a dog"])
    add_special_tokens: bool = Field(True, description="Add special tokens, as for a prompt.", examples=[True])
    return_texts: bool = Field(False, description="Also return each token as text.", examples=[True])


class DetokenizeBody(Body):
    """Convert token ids to text."""

    model: ModelName = None
    token_ids: TokenIds = Field(description="The ids, at most max_model_len.", examples=[[1, 42, 7]])
    skip_special_tokens: bool = Field(False, description="Omit special tokens.", examples=[False])
