"""Replies of the dialects that transcribe: OpenAI's and Hugging Face's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.schemas.dialect_replies import INDEX, LOGPROB, TOKEN_TEXT, TOTAL_TOKENS
from service.schemas.types import Reply


class OpenAIDuration(Reply):
    type: Literal["duration"] = Field(description="The type of this object.", examples=["duration"])
    seconds: int = Field(description="Length of the audio, rounded up.", examples=[13])


class OpenAITokenLogprob(Reply):
    token: str = TOKEN_TEXT
    bytes: list[int] | None = Field(description="Its text's bytes; null of part of a character.", examples=[[32, 97]])
    logprob: float = LOGPROB


class OpenAITranscript(Reply):
    """A transcription with the format `json`."""

    text: str = Field(description="What is said.", examples=["Good morning."])
    usage: OpenAIDuration = Field(description="Length of the audio.")
    logprobs: list[OpenAITokenLogprob] | None = Field(None, description="If requested.")


class OpenAITranscriptSegment(Reply):
    id: int = INDEX
    seek: int = Field(description="First frame of its window.", examples=[0])
    start: float = Field(description="Seconds.", examples=[0.0])
    end: float = Field(description="Seconds.", examples=[4.2])
    text: str = Field(description="What is said.", examples=[" Good morning."])
    tokens: list[int] = Field(description="Its tokens.", examples=[[42]])
    temperature: float = Field(description="That its window was decoded at.", examples=[0.0])
    avg_logprob: float = Field(description="Of its window's tokens.", examples=[-0.2])
    compression_ratio: float = Field(description="Of its window's tokens.", examples=[1.4])
    no_speech_prob: float = Field(description="Of its window.", examples=[0.01])


class OpenAITranscriptWord(Reply):
    word: str = Field(description="The word.", examples=["Good"])
    start: float = Field(description="Seconds.", examples=[0.0])
    end: float = Field(description="Seconds.", examples=[0.4])


class OpenAIVerboseTranscript(Reply):
    """A transcription with the format `verbose_json`."""

    task: Literal["transcribe", "translate"] = Field(description="What was done.", examples=["transcribe"])
    language: str = Field(description="What is spoken, or english of a translation.", examples=["english"])
    duration: float = Field(description="Seconds of audio.", examples=[12.5])
    text: str = Field(description="What is said.", examples=["Good morning."])
    segments: list[OpenAITranscriptSegment] | None = Field(None, description="If requested.")
    words: list[OpenAITranscriptWord] | None = Field(None, description="If requested.")
    usage: OpenAIDuration = Field(description="Length of the audio.")


class OpenAITranscriptDelta(Reply):
    type: Literal["transcript.text.delta"] = Field(description="The type.", examples=["transcript.text.delta"])
    delta: str = Field(description="New text.", examples=["Good"])
    logprobs: list[OpenAITokenLogprob] | None = Field(None, description="If requested.")


class OpenAIAudioDetails(Reply):
    audio_tokens: int = Field(description="Positions of the encoder that the audio takes.", examples=[625])
    text_tokens: int = Field(description="Always 0.", examples=[0])


class OpenAIAudioUsage(Reply):
    type: Literal["tokens"] = Field(description="The type of this object.", examples=["tokens"])
    input_tokens: int = Field(description="Positions of the encoder that the audio takes.", examples=[625])
    input_token_details: OpenAIAudioDetails = Field(description="Details.")
    output_tokens: int = Field(description="Tokens generated.", examples=[40])
    total_tokens: int = TOTAL_TOKENS


class OpenAITranscriptDone(Reply):
    type: Literal["transcript.text.done"] = Field(description="The type.", examples=["transcript.text.done"])
    text: str = Field(description="What is said.", examples=["Good morning."])
    usage: OpenAIAudioUsage = Field(description="Token counts.")
    logprobs: list[OpenAITokenLogprob] | None = Field(None, description="If requested.")


class HuggingFaceSpokenPart(Reply):
    text: str = Field(description="What is said.", examples=[" Good"])
    timestamp: list[float] = Field(description="Start and end in seconds.", examples=[[0.0, 0.4]])


class HuggingFaceSpeech(Reply):
    text: str = Field(description="What is said.", examples=["Good morning."])
    chunks: list[HuggingFaceSpokenPart] | None = Field(None, description="Segments or words, if requested.")
