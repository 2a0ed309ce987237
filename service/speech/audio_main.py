"""The process that decodes audio files: `python -m triptych.service.speech.audio_main`.

A decoder is a large program in C that reads bytes of a stranger, and a small file may decode to days of silence. So
each file gets a process of its own, which `triptych.service.sandbox.worker_main` confines and the kernel ends in time.

A request `{sampling_rate, limits, seconds}` with a file gets one reply: `{}` with mono samples in float32
(little-endian), or `{"error", "message"}` without bytes; the error is refused (by `AudioError`) or memory.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from triptych.model.speech.audio_file import AudioError, AudioLimits, decode_audio
from triptych.service.sandbox import worker_main

_LIBRARIES = 1 << 30  # address space of the interpreter and the decoders' libraries, mostly unused


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a reply and the samples."""
    try:
        samples = decode_audio(data, request["sampling_rate"], AudioLimits(**request["limits"]))
    except AudioError as error:
        return {"error": "refused", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory", "message": "decoding the audio takes too much memory"}, b""
    return {}, samples.astype("<f4", copy=False).tobytes()


def memory(request: dict[str, Any]) -> int:
    """Return what the largest allowed file and its samples take, three times over."""
    limits = AudioLimits(**request["limits"])
    return _LIBRARIES + 3 * (limits.file_bytes + 4 * int(limits.seconds * request["sampling_rate"]))


def main() -> None:
    """Answer requests until the other side closes."""
    # Now, as no file can be opened later: `av.open` imports the third, and for subtitles the last one.
    for library in ("soundfile", "av", "av.subtitles.stream", "av.subtitles.codeccontext"):
        with suppress(ImportError):
            importlib.import_module(library)
    worker_main.serve_forking(answer, memory)


if __name__ == "__main__":
    main()
