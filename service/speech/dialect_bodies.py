"""Request bodies of OpenAI's audio routes, which are forms, and of Hugging Face's task for audio."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag

from triptych.service.dialects.common import DialectBody, Ignored, NotSupported, Refused
from triptych.service.dialects.huggingface import HuggingFaceBody
from triptych.service.schemas.bodies import RequestId
from triptych.service.schemas.types import MAX_INT, ONE_OR_LIST, TONE, Body

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
_FILE = Field(
    description="An audio file: WAV, FLAC, MP3 or Ogg; other containers where PyAV is installed.",
    json_schema_extra={"type": "string", "format": "binary"},
    examples=["@speech.wav"],
)


Temperature = Annotated[float, Field(ge=0, le=1)]
Temperatures = Annotated[
    Annotated[Temperature, Tag("<one>")]
    | Annotated[list[Temperature], Field(min_length=1, max_length=16), Tag("<list>")],
    ONE_OR_LIST,
]


class AudioForm(Body):
    """Is the base of OpenAI's forms, whose values are texts: `2` is read as a number where one is expected."""

    model_config = ConfigDict(strict=False)

    file: Any = _FILE
    model: str | None = Field(
        None, description="Which model answers; may be left out when only one transcribes audio.", examples=["speech"]
    )
    prompt: str | None = Field(
        None, max_length=MAX_INT, description="A text that comes before the audio.", examples=["Triptych, Whisper."]
    )
    response_format: AudioFormat = Field("json", description="The shape of the reply.", examples=["verbose_json"])
    temperature: Temperatures | None = Field(
        None,
        description="0 (default): 0, and the next higher ones for a window whose output has failed, but in a stream 0 "
        "alone. Several (`temperature[]`): these, one after the other, in a stream too.",
        examples=[0, [0, 0.4]],
    )
    num_beams: int | None = Field(None, ge=1, le=MAX_INT, description="As in /generate.", examples=[5])
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="As in /generate.", examples=[7])
    chunking: Literal["sequential", "parallel"] | None = Field(
        None, description="As in /generate.", examples=["parallel"]
    )
    condition_on_previous_text: bool = Field(True, description="As in /generate.", examples=[True])
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="As in /generate.", examples=[30.0])
    request_id: RequestId = None


class TranslationForm(AudioForm):
    """Translate speech to English, as OpenAI has it."""


class TranscriptionForm(AudioForm):
    """Transcribe speech, as OpenAI has it."""

    language: str | None = Field(
        None, min_length=1, max_length=64, description="As in /generate.", examples=["en", "german"]
    )
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default_factory=list,
        max_length=2,
        description="With `verbose_json`: times of segments (default), of words, or of both.",
        examples=[["word"]],
    )
    include: list[Literal["logprobs"]] = Field(
        default_factory=list, max_length=1, description="With `json`: log-probabilities.", examples=[["logprobs"]]
    )
    stream: bool | None = Field(
        None,
        description="Reply with `transcript.text.delta` events, the last is `transcript.text.done`.",
        examples=[False],
    )
    chunking_strategy: Literal["auto"] | NotSupported = Field(
        None, description="`auto`: all windows at once, as with chunking: parallel. Voice detection is not served."
    )
    keywords: NotSupported = None
    languages: NotSupported = None
    known_speaker_names: NotSupported = None
    known_speaker_references: NotSupported = None


class SpeechGeneration(DialectBody):
    """How text is generated."""

    do_sample: bool | None = Field(None, description="Sample, at `temperature`.", examples=[False])
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="As in /generate; with `do_sample` 1 is the default.", examples=[0.4]
    )
    num_beams: int | None = Field(None, description="As in /generate.", examples=[5])
    max_new_tokens: int | None = Field(None, description="Of each window.", examples=[224])
    top_k: int | None = Field(None, description="As in /generate.", examples=[40])
    top_p: float | None = Field(None, description="As in /generate.", examples=[0.95])
    language: str | None = Field(None, description="As in /generate.", examples=["en"])
    task: Literal["transcribe", "translate"] | None = Field(
        None, description="As in /generate.", examples=["transcribe"]
    )
    max_length: NotSupported = None
    min_length: NotSupported = None
    min_new_tokens: NotSupported = None
    num_beam_groups: NotSupported = None
    penalty_alpha: NotSupported = None
    typical_p: NotSupported = None
    epsilon_cutoff: NotSupported = None
    eta_cutoff: NotSupported = None
    early_stopping: Annotated[Any, Refused(False)] = None
    use_cache: Annotated[Any, Ignored("the KV cache is always used, and changes no output")] = None


class SpeechParameters(DialectBody):
    """Parameters of automatic-speech-recognition."""

    return_timestamps: bool | Literal["word"] | None = Field(
        None, description="Return `chunks` with their times, or words.", examples=[True]
    )
    generation_parameters: SpeechGeneration | None = Field(None, description="How text is generated.")
    generate_kwargs: SpeechGeneration | None = Field(None, description="The same, by another name.")


class SpeechBody(HuggingFaceBody):
    """Transcribe speech, as InferenceClient asks for it where there are parameters."""

    inputs: str = Field(min_length=1, description="The file as base64.", examples=[TONE])
    parameters: SpeechParameters | None = Field(None, description="Parameters.")
