"""The command `triptych transcribe`: transcribes an audio file without a server."""

from __future__ import annotations

import argparse

from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.speech.driver import Piece, Transcription
from triptych.model.speech.requests import SpeechOptions
from triptych.model.speech.segments import srt, vtt


def run(arguments: argparse.Namespace, sound: bytes, llm: LLM) -> int:
    """Run the command on the bytes of an audio file. Raises `ConfigError`."""
    prompt = arguments.prompt.strip()
    if prompt and llm.tokenizer is None:
        raise ConfigError("--prompt: the model has no tokenizer")
    options = SpeechOptions(
        language=arguments.language,
        task="translate" if arguments.translate else None,
        timestamps=True if arguments.format != "text" else None,
        parallel=arguments.parallel,
        prompt=llm.tokenizer.encode(f" {prompt}", add_special_tokens=False).ids if llm.tokenizer and prompt else (),
    )
    if arguments.format == "text":
        llm.transcribe(sound, options, _show)
        print()
    else:
        print(_subtitles(llm.transcribe(sound, options), arguments.format), end="")
    return 0


def _show(piece: Piece) -> None:
    print(piece.text, end="", flush=True)


def _subtitles(found: Transcription, format: str) -> str:
    lines = [(one.start, one.end, one.text) for one in found.segments if one.text.strip()]
    return srt(lines) if format == "srt" else vtt(lines)
