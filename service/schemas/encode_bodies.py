"""The body of /encode. The table in `triptych.service.planning.outputs` lists the fields that each output reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from triptych.service.schemas.bodies import ModelName, RequestId, Timeout
from triptych.service.schemas.types import MAX_INT, Body, EncodeInput, Texts

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
        description="Text, token ids, or up to 2,048 texts, id lists or text pairs (300,000 tokens in all). Images and "
        "inputs whose output has a part for each token: up to 256 (16,384 tokens in all, unless the model reads texts "
        "too).",
        examples=["a cat", ["a cat", "a dog"], [101, 4937, 102], [{"text": "a cat?", "text_pair": "a dog"}]],
    )
    output: OutputName = Field(
        "embedding",
        description="`embedding`: a vector for each input. `tokens`: a vector for each token. `logits`: a classifier's "
        "logits for the reply's `labels`. `scores`: the same after the checkpoint's activation. `sparse`: weights of "
        "vocabulary entries. `multi_vector`: vectors of tokens for late interaction. `fill_mask`: candidates for mask "
        "tokens. `token_classification`: entities with their places. `question_answering`: answers with their places; "
        "`text` is the question, `text_pair` the context. `zero_shot`: scores of any `labels` by an entailment model, "
        "or of an image by CLIP and SigLIP. /info lists the outputs of each model.",
        examples=["embedding", "fill_mask"],
    )
    pooling: Literal["default", "mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean", "pooler"] = Field(
        "default",
        description="How token vectors are combined into one; `default`: as in the checkpoint, with its projections.",
        examples=["default", "mean"],
    )
    prompt_name: str | None = Field(
        None,
        max_length=128,
        description="The model's prompt that is put before each text; default: the checkpoint's setting. /info lists "
        "the prompts.",
        examples=["query"],
    )
    task: str | None = Field(
        None,
        max_length=128,
        description="The purpose of the vectors: chooses the model's adapter of this name, and its prompt of this name "
        "unless `prompt_name` is given. Default: no adapter. /info lists the tasks.",
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
        description="Which end of an input that is too long is truncated; false: the input is refused. Special tokens "
        "are kept. The item of a truncated input has `truncated`.",
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
        description="embedding of one text: return a vector for each of these parts as `embeddings`. A part is `[first "
        "character, character after the last]`; its tokens attend to the whole text (late chunking). At most "
        "`max_encode_inputs` parts.",
        examples=[[[0, 120], [120, 260]]],
    )
    split: Literal["pooled", "separate"] | None = Field(
        None,
        description="embedding of texts that are too long: read them in windows. `pooled`: return the mean of the "
        "windows' vectors, weighted by their tokens; `separate`: return all of them as `embeddings`. The item has the "
        "number of `windows`. Default: such texts are refused, or truncated.",
        examples=["pooled"],
    )
    input_type: Literal["query", "document"] | None = Field(
        None,
        description="multi_vector: whether the texts are queries or documents; default: document.",
        examples=["query"],
    )
    embedding_type: Literal["float", "int8", "uint8", "binary", "ubinary"] = Field(
        "float",
        description="The type of the numbers of an `embedding`. `int8` and `uint8` divide a range of each dimension "
        "into 256 steps: `ranges`, or -1 to 1 for vectors of length 1. `binary` and `ubinary` keep signs only, 8 in a "
        "signed or unsigned number, with the first dimension in the highest bit. In base64 each number is a byte.",
        examples=["float", "int8"],
    )
    ranges: Ranges | None = Field(
        None,
        description="For `int8` and `uint8`: the lowest and the highest value of each dimension, measured on your own "
        "vectors. Values outside are clipped.",
        examples=[[[-0.2, -0.1], [0.2, 0.3]]],
    )
    top_k: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="fill_mask: number of candidates for each mask, by default 5. question_answering: number of "
        "answers, by default 1. Both at most 100. sparse: keep only this many entries, those with the largest weights.",
        examples=[5],
    )
    targets: Texts | None = Field(
        None,
        description="fill_mask: the candidates to score, at most 1,000, each a single token of the vocabulary; "
        "default: all tokens.",
        examples=[["cat", "dog"]],
    )
    aggregation: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None,
        description="token_classification: `none` (default) returns tokens, `simple` joins adjacent tokens of one "
        "label. The others first give each word one label: of its first token (`first`), of the mean of its scores "
        "(`average`), or of its token with the highest score (`max`).",
        examples=["simple"],
    )
    ignore_labels: list[str] | None = Field(
        None, description="token_classification: labels to omit; default: `O`.", examples=[["O"]]
    )
    labels: Texts | None = Field(
        None,
        description="zero_shot: the labels to score. Each pair of a text and a label is one input of the model.",
        examples=[["sports", "politics"]],
    )
    hypothesis_template: str | None = Field(
        None,
        max_length=1024,
        description="zero_shot: the sentence made from a label, which replaces `{}`; default: `This example is {}.`, "
        "of images `This is a photo of {}.`",
        examples=["This text is about {}."],
    )
    multi_label: bool | None = Field(
        None,
        description="zero_shot: score each label independently; default: false, labels exclude each other.",
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
        description="question_answering: also return an empty answer, with the probability that the context has no "
        "answer; default: false.",
        examples=[True],
    )
    align_to_words: bool | None = Field(
        None, description="question_answering: extend answers to whole words; default: true.", examples=[True]
    )
    stride: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="question_answering, token_classification, `split`: tokens that two adjacent windows of a long "
        "text share; default: 128, at most half a window.",
        examples=[64],
    )
    timeout_s: Timeout = None
    request_id: RequestId = None
