"""The body of /generate with an audio file, and its reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from triptych.model.api.request import MAX_PRIORITY, MIN_PRIORITY
from triptych.service.schemas.bodies import ModelName, RequestId, Timeout
from triptych.service.schemas.parameters import bounded
from triptych.service.schemas.replies import Finish, ReplyFrame, TimingsReply, TokenLogprobReply, Usage
from triptych.service.schemas.types import MAX_INT, ONE_OR_LIST, TONE, Body, Reply, TokenId

Temperature = Annotated[float, Field(ge=0, le=100)]
Temperatures = Annotated[
    Annotated[Temperature, Tag("<one>")]
    | Annotated[list[Temperature], Field(min_length=1, max_length=16), Tag("<list>")],
    ONE_OR_LIST,
]


class TranscribeBody(Body):
    """Write down what is said in an audio file."""

    list_limits: ClassVar[Mapping[str, str]] = {"suppress_tokens": ""}  # instead of `field_paths.MOST`

    model: ModelName = None
    audio: str = Field(
        min_length=1,
        description="An audio file as base64: WAV, FLAC, MP3 or Ogg; other containers where PyAV is installed.",
        examples=[TONE],
    )
    language: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="What is spoken: a code (`en`) or an English name. Default: the checkpoint's, else the model finds "
        "it out.",
        examples=["en", "german"],
    )
    task: Literal["transcribe", "translate"] | None = Field(
        None,
        description="Write what is said, or translate it to English. Default: the checkpoint's, else transcribe.",
        examples=["transcribe"],
    )
    initial_prompt: str | None = Field(
        None,
        max_length=MAX_INT,
        description="A text that comes before the audio: its words and style are more likely. The end of a long one "
        "counts.",
        examples=["Triptych, Whisper, log-mel."],
    )
    timestamps: Literal["none", "segment", "word"] | None = Field(
        None,
        description="Return segments with their times, or each word's too. Default: `none`; the model writes times all "
        "the same where the checkpoint's `return_timestamps` is true.",
        examples=["segment"],
    )
    chunking: Literal["sequential", "parallel"] = Field(
        "sequential",
        description="Audio longer than a window: one window after the other, each told what was said before, or all "
        "at once as chunks that overlap, which is faster.",
        examples=["parallel"],
    )
    condition_on_previous_text: bool = Field(
        True, description="A window is told what was said in those before it (`sequential`).", examples=[True]
    )
    temperature: Temperatures | None = Field(
        None,
        description="One temperature, or those that a window is decoded at one after the other until its output is "
        "good. Default, and for 0: 0, 0.2, 0.4, 0.6, 0.8, 1; in a stream 0 alone, since its text is shown at once.",
        examples=[0.0, [0.0, 0.4, 0.8]],
    )
    compression_ratio_threshold: float | None = Field(
        2.4, gt=0, description="An output that zlib compresses more has failed; null: never.", examples=[2.4]
    )
    logprob_threshold: float | None = Field(
        -1.0, le=0, description="An output of a lower mean log-probability has failed; null: never.", examples=[-1.0]
    )
    no_speech_threshold: float | None = Field(
        0.6,
        ge=0,
        le=1,
        description="A window whose probability of no speech is above this, and whose output's mean log-probability is "
        "too low, is silence; null: never.",
        examples=[0.6],
    )
    num_beams: int | None = bounded(
        "num_beams", "2 to 8: beam search at temperature 0. Default: the checkpoint's, else 1.", 5
    )
    length_penalty: float | None = bounded("length_penalty", "Of beam search, as for a prompt.", 1.0)
    top_k: int | None = bounded("top_k", "At a temperature above 0: sample among the k most likely.", 40)
    top_p: float | None = bounded("top_p", "At a temperature above 0: among those of this probability.", 0.95)
    seed: int | None = bounded(
        "seed", "Of what is drawn. Default: 0, a random one where the first temperature is above 0.", 7
    )
    max_tokens: int | None = bounded("max_tokens", "Of each window. Default: what the context has room for.", 224)
    suppress_tokens: list[TokenId] = Field(
        default_factory=list,
        max_length=1024,
        description="Ids that are never written, in addition to those of the checkpoint.",
        examples=[[11]],
    )
    logprobs: int | None = bounded("logprobs", "As for a prompt: of each token of the text.", 0)
    return_token_ids: bool = Field(False, description="Return the ids of the text too.", examples=[True])
    stream: bool = Field(False, description="Reply with server-sent events.", examples=[False])
    timeout_s: Timeout = None
    priority: int = Field(0, ge=MIN_PRIORITY, le=MAX_PRIORITY, description="As for a prompt.", examples=[0])
    cache_salt: str | None = bounded("cache_salt", "As for a prompt.", "a")
    request_id: RequestId = None


class SpokenWord(Reply):
    text: str = Field(description="With the space before it and the punctuation at it.", examples=[" seven"])
    start: float = Field(description="Seconds.", examples=[1.2])
    end: float = Field(description="Seconds.", examples=[1.5])


class SpokenSegment(Reply):
    id: int = Field(description="Its number.", examples=[0])
    start: float = Field(description="Seconds.", examples=[0.0])
    end: float = Field(description="Seconds.", examples=[4.2])
    text: str = Field(description="What is said.", examples=[" Good morning."])
    token_ids: list[int] = Field(description="Its text's tokens.", examples=[[42, 17]])
    seek: int = Field(description="First frame of its window.", examples=[0])
    temperature: float = Field(description="That its window was decoded at.", examples=[0.0])
    avg_logprob: float = Field(description="Mean log-probability of its window's tokens.", examples=[-0.2])
    compression_ratio: float = Field(description="Of its window's tokens.", examples=[1.4])
    no_speech_prob: float = Field(description="Of its window.", examples=[0.01])
    words: list[SpokenWord] | None = Field(None, description="If requested.")


class Transcript(Reply):
    index: int = Field(description="Always 0.", examples=[0])
    prompt_index: int = Field(description="Always 0.", examples=[0])
    text: str = Field(description="What is said; in a stream, its new part.", examples=["Good morning."])
    token_ids: list[int] | None = Field(None, description="Its ids, if requested.", examples=[[42]])
    logprobs: list[TokenLogprobReply] | None = Field(None, description="Of each token of the text, if requested.")
    segments: list[SpokenSegment] | None = Field(None, description="If requested; in a stream, those that ended.")
    language: str | None = Field(None, description="The code of what is spoken, once known.", examples=["en"])
    finish_reason: Finish | None = Field(description="Why it ended; null while it continues.", examples=["stop"])


class TranscribeUsage(Usage):
    audio_seconds: float = Field(description="Length of the audio.", examples=[12.5])


class TranscribeReply(ReplyFrame):
    choices: list[Transcript] = Field(description="One.")
    usage: TranscribeUsage = Field(description="Prompt tokens are positions of the encoder.")
    timings: TimingsReply = Field(description="The request's times.")


class TranscribeEvent(ReplyFrame):
    """One event of a stream; the last also has usage and timings, or is an `ErrorReply`. Then comes `[DONE]`."""

    choices: list[Transcript] = Field(description="One.")
    usage: TranscribeUsage | None = Field(None, description="On the last event.")
    timings: TimingsReply | None = Field(None, description="On the last event.")
