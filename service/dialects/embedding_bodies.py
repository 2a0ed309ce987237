"""The body of /v1/embeddings: OpenAI's, with what Jina's and vLLM's have beyond it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from service.dialects.common import Extended, Ignored, Native, NotFilled, NotSupported, NotTrue, Refused, native_field
from service.schemas.encode_bodies import Ranges
from service.schemas.types import EncodeInput

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbeddingBody(Extended):
    """Turn inputs into vectors, as OpenAI, Jina and vLLM do."""

    input: EncodeInput = Field(
        description="Text, token ids, several of either, or a list of `{text}` or `{image}`.",
        examples=["a cat", ["a cat", "a dog"]],
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None,
        description="Numbers, or base64 of little-endian float32, which the official client requests. Integers of "
        "`embedding_type` are numbers in either.",
        examples=["float"],
    )
    dimensions: Annotated[int | None, Native()] = Field(
        None, description="Number of leading dimensions to keep.", examples=[128]
    )
    user: Annotated[Any, Ignored("no vector depends on the end user")] = None
    rid: Annotated[Any, Ignored("`request_id` names the request; SGLang's")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    embedding_type: EmbeddingType | None = Field(
        None, description="As in /encode, or `base64` for that of floats. Jina's.", examples=["float", "int8"]
    )
    encoding_type: EmbeddingType | None = Field(
        None, description="The same, as older clients of Jina call it.", examples=["float"]
    )
    ranges: Ranges | None = native_field("", [[-0.2], [0.2]], more=" Not OpenAI's.")
    task: str | None = native_field("", "retrieval.query", "text-matching", more=" Jina's.", max_length=128)
    prompt_name: str | None = native_field("", "query", more=" Not OpenAI's.")
    late_chunking: bool | None = Field(
        None,
        description="Read the texts as the parts of one, in their order, so that each vector is of a part that has "
        "been read with the others. Where no white space stands between two, one space is put there. Jina's.",
        examples=[True],
    )
    truncate: bool | None = Field(
        None, description="Truncate an input that is too long; default: refuse it. Jina's.", examples=[True]
    )
    truncate_prompt_tokens: Annotated[Any, Refused(-1)] = Field(
        None, description="-1: the same as `truncate`. No other length is served. vLLM's.", examples=[-1]
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end is truncated; default: right. vLLM's.", examples=["right"]
    )
    normalize: bool | None = Field(None, description="As in /encode. Not OpenAI's.", examples=[True])
    normalized: bool | None = Field(None, description="The same. Jina's.", examples=[True])
    use_activation: bool | None = Field(None, description="The same. vLLM's.", examples=[True])
    add_special_tokens: Annotated[Any, Refused(True)] = None
    priority: Annotated[Any, Refused(0)] = None
    embed_dtype: Annotated[Any, Refused("float32")] = None
    endianness: Annotated[Any, Refused("native", "little")] = None
    return_multivector: NotTrue = None
    input_type: NotSupported = None
    messages: NotSupported = None
    add_generation_prompt: NotTrue = None
    continue_final_message: NotTrue = None
    chat_template: NotSupported = None
    chat_template_kwargs: NotFilled = None
    mm_processor_kwargs: NotFilled = None
    media_io_kwargs: NotFilled = None
    padding: NotTrue = None
    lora_path: NotSupported = None
    embed_override_token_id: NotSupported = None
    embed_overrides: NotSupported = None
    additional_data: NotSupported = None
    cache_salt: NotSupported = None
