"""Audio files to mono samples at a model's rate, within bounds.

The format is known by the first bytes alone, or those after tags of ID3. WAV, FLAC, Ogg (Vorbis, Opus) and MP3 are
decoded by libsndfile (the package soundfile); MP4 and M4A, WebM and Matroska, and AAC by FFmpeg's libraries (the
package av, the optional extra `audio`), with the one demultiplexer for that format: playlists and other formats that
name further files or addresses are never opened.

A file is decoded block by block and mixed and resampled at once, so memory is bounded by the result. Bounds are
checked in the header first, then on what is decoded, as headers lie. Time is not bounded here: files of strangers
belong in a process that can be killed (`triptych.service.speech.audio_pool`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.model.speech.resampling import Resampler

FORMATS = ("WAV", "FLAC", "Ogg", "MP3")
EXTRA_FORMATS = ("MP4", "WebM", "AAC")  # with the extra `audio`
_BLOCK = 1 << 15  # frames decoded at a time
_UNKNOWN = 1 << 36  # frames: a header that says this many or more does not know


class AudioError(ValueError):
    """An audio file was refused; the message says why and may be shown to the client."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What an audio file may have."""

    seconds: float = 3600.0
    file_bytes: int = 100_000_000
    channels: int = 32
    lowest_rate: int = 1000  # samples a second
    highest_rate: int = 768_000


def decode_audio(data: bytes, sampling_rate: int, limits: AudioLimits) -> NDArray[np.float32]:
    """Return mono samples `[n]` at `sampling_rate`, the mean of all channels; raises `AudioError`.

    Full scale is 1, also for integers. Samples that are no numbers, and none at all, are errors.
    """
    if len(data) > limits.file_bytes:
        raise AudioError(f"the audio file has {len(data)} bytes, more than {limits.file_bytes} are not taken")
    mono, rate = bytearray(), 0
    resampler: Resampler | None = None
    before, count = 0.0, 0  # seconds of earlier rates, samples of this one
    with np.errstate(over="ignore", invalid="ignore"):  # what becomes too large for float32 is refused
        for block in _blocks(data, limits):
            if isinstance(block, int):
                if block == rate:
                    continue
                if resampler is not None:
                    before, count = before + count / rate, 0
                    mono += _checked_samples(resampler.finish()).tobytes()
                rate, resampler = block, Resampler(block, sampling_rate)
                continue
            assert resampler is not None
            count += len(block)
            if before + count / rate > limits.seconds:
                raise _too_long(limits)
            mixed = block.mean(axis=1, dtype=np.float32) if block.shape[1] > 1 else block[:, 0]
            mono += _checked_samples(resampler.feed(_checked_samples(mixed))).tobytes()
        if resampler is None or not (before or count):
            raise AudioError("the audio file has no samples")
        mono += _checked_samples(resampler.finish()).tobytes()
    return np.frombuffer(mono, np.float32)


def _checked_samples(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the samples; raises `AudioError` for what is no number or too large for one."""
    if not np.isfinite(samples).all():
        raise AudioError("the audio file has samples that are no numbers")
    return samples


def _blocks(data: bytes, limits: AudioLimits) -> Iterator[int | NDArray[np.float32]]:
    """Yield the rate, then blocks `[frames, channels]`; another rate before those that have it."""
    if data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE":
        return _sound_file_blocks(_with_data_size(data), "WAV", limits)
    if data[:4] == b"OggS":
        return _ogg_blocks(data, limits)
    if data[4:8] == b"ftyp":
        return _container_blocks(data, "mp4", "MP4", limits)
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return _container_blocks(data, "matroska", "WebM", limits)
    sound = data[_tags_size(data) :]
    head = sound[:4].ljust(4, b"\0")
    if head == b"fLaC":
        return _sound_file_blocks(sound, "FLAC", limits)
    if head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return _container_blocks(sound, "aac", "AAC", limits)
    if len(sound) < len(data) or _begins_with_mp3(sound):
        return _mp3_blocks(sound, limits)
    raise AudioError(
        f"not an audio file of {', '.join(FORMATS)} or, with the extra `audio`, {', '.join(EXTRA_FORMATS)}"
    )


def _tags_size(data: bytes) -> int:
    """Return how many bytes the tags of ID3 take that stand before the sound: titles, pictures; 0: there are none."""
    at = 0
    while True:
        if data[at : at + 3] == b"TAG":  # ID3v1, at the end of the first of joined files
            at += 128
        elif data[at : at + 3] == b"ID3" and len(data) >= at + 10:
            size = sum((one & 0x7F) << 7 * place for place, one in enumerate(data[at + 9 : at + 5 : -1]))
            at += 10 + size + 10 * bool(data[at + 5] & 0x10)
        else:
            return at


def _ogg_blocks(data: bytes, limits: AudioLimits) -> Iterator[int | NDArray[np.float32]]:
    """Read the links of a chain one after the other, as recordings of a radio have them: libsndfile reads the first."""
    for link in _ogg_links(data):
        yield from _sound_file_blocks(data[link], "Ogg", limits)


def _ogg_links(data: bytes) -> list[slice]:
    """Return the links: each begins with one or several pages that begin streams, after others.

    Those without a whole page of sound are left out: a radio that reconnects, or a recording that is cut off.
    """
    starts, with_sound, at, begins = list[int](), set[int](), 0, False
    while data[at : at + 4] == b"OggS":
        head = data[at : at + 27].ljust(27, b"\0")
        before, begins = begins, bool(head[5] & 2)
        if not starts or (begins and not before):
            starts.append(at)
        samples = int.from_bytes(head[6:14], "little", signed=True)  # up to here; in headers 0
        table = data[at + 27 : at + 27 + head[26]]
        at += 27 + head[26] + sum(table)
        if samples > 0 and at <= len(data):
            with_sound.add(starts[-1])
    links = (slice(start, end) for start, end in pairwise((*starts, len(data))) if start in with_sound)
    return [*links] or [slice(None)]


def _mp3_blocks(data: bytes, limits: AudioLimits) -> Iterator[int | NDArray[np.float32]]:
    """Read MP3 to its end; libsndfile stops at the end that the first of several joined files has.

    What is left is read as a file of its own, unless it is none: other tags may stand there.
    """
    rest = data
    while True:
        whole = _with_any_length(rest)
        try:
            used = yield from _sound_file_blocks(whole, "MP3", limits)
        except AudioError:
            if rest is data:
                raise
            return
        left = whole[used:]
        left = left[_tags_size(left) :]
        if len(left) >= len(rest) or not _begins_with_mp3(left):
            return
        rest = left


def _with_any_length(data: bytes) -> bytes:
    """Return MP3 that says how many frames it has; one that does not gets a first frame with the largest number.

    Otherwise libsndfile divides the file's size by that of its first frame, and reads no more frames than that. Of a
    variable bit rate these are too few if the first frame is larger than most.
    """
    is_layer_3 = _begins_with_mp3(data) and data[1] & 6 == 2
    if not is_layer_3 or re.search(b"Xing|Info|VBRI", data[:200]):
        return data
    is_first, is_mono = data[1] & 8, data[3] & 0xC0 == 0xC0
    side = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
    rate = (44_100, 48_000, 32_000, 0)[data[2] >> 2 & 3] >> (0 if is_first else 1 if data[1] & 16 else 2)
    size = (144 if is_first else 72) * 64_000 // (rate or 32_000)
    head = bytes([0xFF, data[1] | 1, (0x50 if is_first else 0x80) | data[2] & 0x0C, data[3]])  # 64 kbit/s
    return (head + bytes(side) + b"Xing" + b"\0\0\0\1" + b"\x7f\xff\xff\xff").ljust(size, b"\0") + data


def _begins_with_mp3(data: bytes) -> bool:
    return len(data) > 3 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _sound_file_blocks(data: bytes, name: str, limits: AudioLimits) -> Generator[int | NDArray[np.float32], None, int]:
    """Yield what `_blocks` does, and return how many bytes were read."""
    import soundfile  # imported where audio is read: text models do not need it

    class Stream(soundfile.SoundFile):  # type: ignore[misc, unused-ignore]
        def seekable(self) -> bool:
            """Say no, so that it is read through without seeking, which fails in files of unknown length."""
            return False

    try:
        with Stream(stream := io.BytesIO(data)) as file:
            yield _checked_rate(file.samplerate, file.channels, 0 if name == "MP3" else file.frames, limits)
            missing = file.frames
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                missing -= len(block)
                yield block
            if name == "FLAC" and 0 < missing < _UNKNOWN // 2:
                raise AudioError("the FLAC file is cut off")
            return stream.tell()
    except (soundfile.LibsndfileError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, AudioError):
            raise
        raise AudioError(f"the audio file is no {name} file that can be decoded: it is broken or cut off") from None


def _container_blocks(data: bytes, demuxer: str, name: str, limits: AudioLimits) -> Iterator[int | NDArray[np.float32]]:
    try:
        import av  # imported where such a file is read: an optional extra
    except ImportError:
        raise AudioError(
            f"{name} files are not decoded by this installation, which lacks the extra `audio`; "
            f"it takes {', '.join(FORMATS)}"
        ) from None
    try:
        with closing(av.open(io.BytesIO(data), mode="r", format=demuxer, metadata_errors="ignore")) as container:
            if not container.streams.audio:
                raise AudioError(f"the {name} file has no audio")
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            declared = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            if name == "AAC":  # FFmpeg guesses the length by the first frames: after silence it is hours
                declared = 0.0
            rate = _checked_rate(stream.rate, stream.channels, int(declared * stream.rate), limits)
            yield rate
            for frame in _frames(container, stream, may_be_cut=name == "AAC"):
                channels = frame.layout.nb_channels
                if channels > limits.channels:
                    raise _too_many_channels(channels, limits)
                if frame.sample_rate != rate:  # a stream may change it
                    rate = _checked_rate(frame.sample_rate, channels, 0, limits)
                    yield rate
                yield _floats(frame.to_ndarray(), channels)
    except (av.FFmpegError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, AudioError):
            raise
        raise AudioError(f"the audio file is no {name} file that can be decoded: it is broken or cut off") from None


def _frames(container: Any, stream: Any, *, may_be_cut: bool) -> Iterator[Any]:
    """Yield the frames of a stream, which `may_be_cut` within the last one, as recordings of a radio are."""
    import av

    failed: Exception | None = None
    for packet in container.demux(stream):
        if failed is not None and packet.size:
            raise failed
        try:
            yield from packet.decode()
        except av.FFmpegError as error:
            if not may_be_cut:
                raise
            failed = error


def _floats(samples: NDArray[Any], channels: int) -> NDArray[np.float32]:
    """Return samples `[frames, channels]` of FFmpeg's, which are `[channels, frames]`, or one row for all channels."""
    samples = samples.reshape(-1, channels) if len(samples) < channels else samples.T
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    scale = np.float32(2.0 ** (1 - 8 * samples.dtype.itemsize))
    return samples.astype(np.float32) * scale - np.float32(samples.dtype.kind == "u")


def _checked_rate(rate: int, channels: int, frames: int, limits: AudioLimits) -> int:
    """Return the rate; raises `AudioError` for what the header says."""
    if not limits.lowest_rate <= rate <= limits.highest_rate:
        raise AudioError(
            f"the audio file has {rate} samples a second, it must be {limits.lowest_rate} to {limits.highest_rate}"
        )
    if channels > limits.channels:
        raise _too_many_channels(channels, limits)
    if limits.seconds * rate < frames < _UNKNOWN:
        raise _too_long(limits)
    return rate


def _too_long(limits: AudioLimits) -> AudioError:
    return AudioError(f"the audio is longer than {limits.seconds:g} seconds, which are the most that are taken")


def _too_many_channels(channels: int, limits: AudioLimits) -> AudioError:
    return AudioError(f"the audio file has {channels} channels, more than {limits.channels} are not taken")


def _with_data_size(data: bytes) -> bytes:
    """Return a WAV file in which a size of 0, that programs write to pipes, stands for the rest of the file."""
    order: Any = "big" if data[:4] == b"RIFX" else "little"
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], order)
        if data[place : place + 4] == b"data":
            if size or place + 8 == len(data):
                return data
            return data[: place + 4] + min(len(data) - place - 8, 0xFFFFFFFF).to_bytes(4, order) + data[place + 8 :]
        place += 8 + size + size % 2
    return data
