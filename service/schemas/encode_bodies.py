"""The body of /encode. `service.planning.outputs` says which fields each output reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.schemas.bodies import ModelName, RequestId, Timeout
from service.schemas.types import MAX_INT, Body, EncodeInput, Texts

Chunk = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=2, max_length=2)]
Ranges = Annotated[list[list[float]], Field(min_length=2, max_length=2)]
OutputName = Literal[
    "embedding",
    "tokens",
    "logits",
    "scores",
    "sparse",
    "multi_vector",
    "fill_mask",
    "token_classification",
    "question_answering",
    "zero_shot",
]


class EncodeBody(Body):
    """Turn inputs into vectors."""

    model: ModelName = None
    input: EncodeInput = Field(
        description="Text, token ids, or up to 2,048 texts, id lists or text pairs (300,000 tokens in all); up to 256 "
        "images, or inputs of outputs that have something for each token (16,384 tokens).",
        examples=["a cat", ["a cat", "a dog"], [101, 4937, 102], [{"text": "a cat?", "text_pair": "a dog"}]],
    )
    output: OutputName = Field(
        "embedding",
        description="One vector for each input (`embedding`), one for each token (`tokens`), a classifier's logits "
        "over the reply's `labels` (`logits`), or its scores by the activation that its folder says (`scores`), "
        "weights of vocabulary entries (`sparse`), vectors of tokens for late interaction (`multi_vector`), candidates "
        "for mask tokens (`fill_mask`), entities with their places (`token_classification`), answers with their places "
        "(`question_answering`: `text` is the question, `text_pair` the context), or scores of any `labels` by a model "
        "of entailment (`zero_shot`). /info lists what each model has.",
        examples=["embedding", "fill_mask"],
    )
    pooling: Literal["default", "mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean", "pooler"] = Field(
        "default",
        description="How token vectors are combined into one; `default` is the checkpoint's, with its projections.",
        examples=["default", "mean"],
    )
    prompt_name: str | None = Field(
        None,
        max_length=128,
        description="Which of the model's prompts is put in front of each text; default: the checkpoint's setting. "
        "/info lists them.",
        examples=["query"],
    )
    task: str | None = Field(
        None,
        max_length=128,
        description="What the vectors are for: the model's adapter of this name, and its prompt of this name if it has "
        "one and the request names none. Default: no adapter. /info lists them.",
        examples=["retrieval.query"],
    )
    normalize: bool | None = Field(
        None, description="Scale vectors to length 1; default: the checkpoint's setting.", examples=[True]
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="Number of leading dimensions to keep (for models trained for it).",
        examples=[128],
    )
    truncate: Literal[False, "left", "right"] = Field(
        False,
        description="Which end of a too long input is truncated; false: it is refused. Special tokens are kept, and "
        "the item of a truncated input has `truncated`.",
        examples=[False, "right"],
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float",
        description="Numbers (as many digits as float32 needs), or base64 of little-endian float32.",
        examples=["float"],
    )
    chunks: list[Chunk] | None = Field(
        None,
        min_length=1,
        description="embedding of one text: return a vector for each of these parts, `[first character, character "
        "behind the last]`, pooled from tokens that have read the whole text (late chunking), as `embeddings`. At most "
        "as many as inputs (`max_encode_inputs`).",
        examples=[[[0, 120], [120, 260]]],
    )
    split: Literal["pooled", "separate"] | None = Field(
        None,
        description="embedding of texts that are too long: read them in windows, and return the mean of the windows' "
        "vectors by their number of tokens, or all of them as `embeddings`. The item has the `windows`. Default: such "
        "texts are refused, or truncated.",
        examples=["pooled"],
    )
    input_type: Literal["query", "document"] | None = Field(
        None,
        description="multi_vector: how the texts are read, where the model tells the two apart; default: document.",
        examples=["query"],
    )
    embedding_type: Literal["float", "int8", "uint8", "binary", "ubinary"] = Field(
        "float",
        description="What the numbers of an `embedding` are. `int8` and `uint8` divide a range of each dimension into "
        "256 steps: `ranges`, or -1 to 1 for vectors of length 1. `binary` and `ubinary` keep the signs, 8 in a number "
        "from -128 or from 0, the first dimension in the highest bit. In base64 each number is a byte.",
        examples=["float", "int8"],
    )
    ranges: Ranges | None = Field(
        None,
        description="For `int8` and `uint8`: the lowest and the highest value of each dimension, from vectors of your "
        "own; what is outside gets the nearest step.",
        examples=[[[-0.2, -0.1], [0.2, 0.3]]],
    )
    top_k: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="fill_mask: candidates for each mask, by default 5. question_answering: answers, by default 1. "
        "sparse: keep the heaviest entries alone. At most 100; sparse: any number.",
        examples=[5],
    )
    targets: Texts | None = Field(
        None,
        description="fill_mask: the tokens to choose among, at most 1,000, each a single token of the vocabulary; "
        "default: all.",
        examples=[["cat", "dog"]],
    )
    aggregation: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None,
        description="token_classification: `none` (the default) gives tokens, `simple` joins neighbours of one label, "
        "the others first give each word the label of its first token, of the mean, or of the most certain one.",
        examples=["simple"],
    )
    ignore_labels: list[str] | None = Field(
        None, description="token_classification: labels that are left out; default: `O`.", examples=[["O"]]
    )
    labels: Texts | None = Field(
        None,
        description="zero_shot: what the text may be about. Each text and label is one input of the model.",
        examples=[["sports", "politics"]],
    )
    hypothesis_template: str | None = Field(
        None,
        max_length=1024,
        description="zero_shot: the sentence that a label makes, with `{}` in its place; default: "
        "`This example is {}.`",
        examples=["This text is about {}."],
    )
    multi_label: bool | None = Field(
        None,
        description="zero_shot: score each label by itself; default: false, they exclude each other.",
        examples=[False],
    )
    max_answer_length: int | None = Field(
        None,
        ge=1,
        le=512,
        description="question_answering: maximum tokens of an answer, by default 15.",
        examples=[15],
    )
    no_answer: bool | None = Field(
        None,
        description="question_answering: also return the empty answer, with the probability that the context has none; "
        "default: false.",
        examples=[True],
    )
    align_to_words: bool | None = Field(
        None, description="question_answering: widen answers to whole words; default: true.", examples=[True]
    )
    stride: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="question_answering, token_classification, `split`: tokens that two windows of a long text have in "
        "common; default: 128, at most half a window.",
        examples=[64],
    )
    timeout_s: Timeout = None
    request_id: RequestId = None
