"""Processes that decode untrusted audio files: results, refusals, and files that take too much time or memory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

from triptych.model.speech.audio_file import AudioError, AudioLimits, decode_audio
from triptych.service.sandbox.process_pool import WorkerError
from triptych.service.speech.audio_pool import AudioPool, AudioWorker

LIMITS = AudioLimits(seconds=30.0, file_bytes=3_000_000)


def flac(seconds: float, rate: int = 16_000, *, unknown: bool = False) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(round(seconds * rate), 0.25, np.float32), rate, format="FLAC", subtype="PCM_16")
    data = bytearray(file.getvalue())
    if unknown:  # the length that the header declares
        data[21] &= 0xF0
        data[22:26] = bytes(4)
    return bytes(data)


@pytest.fixture(scope="module")
def worker() -> Iterator[AudioWorker]:
    worker = AudioWorker(5.0, LIMITS)
    yield worker
    worker.close()


def test_a_process_returns_the_same_samples(worker: AudioWorker) -> None:
    for rate in (16_000, 44_100):
        file = flac(2.0, rate)
        expected = decode_audio(file, 16_000, LIMITS)
        # its environment is its own: numpy may compute with other instructions there (OPENBLAS_CORETYPE)
        np.testing.assert_allclose(worker.decode(file, 16_000), expected, rtol=0, atol=1e-6)


SUBTITLES = """[Script Info]
[V4+ Styles]
Format: Name
Style: Default
[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""


def encoded(form: str, codec: str) -> bytes:
    """Return two seconds of a tone in a container, of Matroska with subtitles."""
    av = pytest.importorskip("av", reason="the extra `audio` is not installed")
    made, seconds = io.BytesIO(), np.arange(2 * 48_000) / 48_000
    tone = (0.5 * np.sin(2 * np.pi * 440 * seconds)).astype(np.float32)
    with av.open(made, "w", format=form) as output:
        stream = output.add_stream(codec, rate=48_000, layout="stereo")
        if form == "matroska":
            output.add_stream("subrip").codec_context.subtitle_header = SUBTITLES.encode()
        frame = av.AudioFrame.from_ndarray(np.stack((tone, tone)), format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        for part in (frame, None):
            for packet in stream.encode(part):
                output.mux(packet)
    return made.getvalue()


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        *(("mp4", codec) for codec in ("aac", "alac")),
        *(("matroska", codec) for codec in ("libopus", "pcm_u8", "pcm_s24le", "pcm_f64le")),
        ("adts", "aac"),
    ],
)
def test_containers_are_decoded_by_a_process_that_opens_no_file(form: str, codec: str, worker: AudioWorker) -> None:
    file = encoded(form, codec)
    samples = worker.decode(file, 16_000)
    np.testing.assert_allclose(samples, decode_audio(file, 16_000, LIMITS), rtol=0, atol=1e-6)
    assert abs(len(samples) - 32_000) < 1500
    assert abs(np.abs(samples[8_000:24_000]).max() - 0.5) < 0.02
    assert np.argmax(np.abs(np.fft.rfft(samples[8_000:24_000]))) == 440


def test_a_process_that_waits_holds_nothing_of_a_file(worker: AudioWorker) -> None:
    def resident() -> int:
        assert worker._process is not None
        status = Path(f"/proc/{worker._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    file = flac(29.0, 8_000)
    worker.decode(flac(0.1, 8_000), 192_000)
    before = resident()
    assert len(worker.decode(file, 192_000)) * 4 > 20_000_000
    assert resident() < before + 5_000_000


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (lambda: b"", "not an audio file"),
        (lambda: flac(1.0)[:60], "broken|cut off"),
        (lambda: flac(300.0, unknown=True), "longer than 30 seconds"),
        (lambda: bytes(3_000_001), "3000001 bytes"),
    ],
)
def test_a_file_that_is_not_taken_leaves_the_process_alive(
    worker: AudioWorker, file: Callable[[], bytes], reason: str
) -> None:
    worker.decode(flac(0.1), 16_000)
    before = worker._process
    with pytest.raises(AudioError, match=reason):
        worker.decode(file(), 16_000)
    assert worker._process is before and before is not None and before.poll() is None


def child_of(worker: AudioWorker) -> int:
    """The process that decodes a file, once there is one."""
    assert worker._process is not None
    children = Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.001)
    return int(found[0])


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSEGV, "its decoder failed"), (signal.SIGSTOP, r"more than 0\.5 s")]
)
def test_a_process_that_ends_or_hangs_is_its_files_fault_alone(number: signal.Signals, reason: str) -> None:
    worker = AudioWorker(0.5, LIMITS)
    worker.decode(flac(0.1), 16_000)
    before = worker._process
    child = 0

    def end_child() -> None:
        nonlocal child
        child = child_of(worker)
        os.kill(child, number)

    killer = threading.Thread(target=end_child)
    killer.start()
    with pytest.raises(AudioError, match=reason):
        worker.decode(flac(29.0, 8_000) * 10, 192_000)
    killer.join()
    if number == signal.SIGSTOP:
        with suppress(ProcessLookupError):  # one that stops before it has asked to end with its parent outlives it
            os.kill(child, signal.SIGKILL)
    assert len(worker.decode(flac(0.1), 16_000)) == 1600
    assert worker._process is before or number == signal.SIGSTOP  # no other file waits for a new start
    worker.close()


def test_each_file_has_a_process_of_its_own_that_ends_with_it(worker: AudioWorker) -> None:
    seen = []
    for _ in range(2):
        watcher = threading.Thread(target=lambda: seen.append(child_of(worker)))
        watcher.start()
        worker.decode(flac(29.0, 8_000), 192_000)
        watcher.join()
    assert len(set(seen)) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in seen)


def test_a_pool_decodes_beside_the_event_loop_and_says_when_no_process_starts() -> None:
    async def work() -> None:
        pool = AudioPool(5.0, LIMITS)
        try:
            results = await asyncio.gather(*(pool.decode(flac(seconds), 16_000) for seconds in (1.0, 2.0, 3.0)))
        finally:
            pool.close()
        assert [len(samples) for samples in results] == [16_000, 32_000, 48_000]

    asyncio.run(work())
    worker = AudioWorker(5.0, LIMITS)
    worker._command = ["/bin/false"]
    with pytest.raises(WorkerError, match="did not start"):
        worker.decode(flac(0.1), 16_000)


def test_a_process_has_neither_torch_nor_open_ended_memory() -> None:
    code = "import sys, json; from dataclasses import asdict; from triptych.service.speech import audio_main as m; "
    code += "from triptych.model.speech.audio_file import AudioLimits; "
    code += "request = {'limits': asdict(AudioLimits(seconds=60)), "
    code += "'sampling_rate': 16000}; print(json.dumps([sorted({'torch', 'fastapi'} & sys.modules.keys()), "
    code += "m.memory(request)]))"
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    modules, memory = json.loads(reply.stdout)
    assert modules == [] and memory < 1.5 * 2**30
