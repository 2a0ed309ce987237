"""Decoding of audio files and log-mel features: exact results, bounds, and files with false headers."""

from __future__ import annotations

import io
import random
import struct
import sys
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from triptych.model.errors import ConfigError
from triptych.model.speech.audio_file import AudioError, AudioLimits, decode_audio
from triptych.model.speech.chunks import Spectrogram
from triptych.model.speech.log_mel import LogMel, read_log_mel
from triptych.model.speech.resampling import Resampler, resample
from triptych.model.speech.segments import Window

RATE = 16000
LIMITS = AudioLimits(seconds=20.0, file_bytes=1_000_000)


def tone(seconds: float, rate: int = RATE, frequency: float = 440.0, level: float = 0.5) -> NDArray[np.float32]:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * frequency * time)).astype(np.float32)


def audio_file(samples: NDArray[np.float32], rate: int = RATE, form: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


# --- features -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count"),
    [((80, 400, 160, 30), 123_457), ((128, 400, 160, 8), 128_000), ((80, 400, 160, 4), 16_001), ((40, 512, 200, 3), 9)],
)
def test_features_are_those_of_transformers(shape: tuple[int, int, int, int], count: int) -> None:
    bins, n_fft, hop, seconds = shape
    rng = np.random.default_rng(count)
    samples = tone(count / RATE) + 0.01 * rng.standard_normal(count).astype(np.float32)
    samples[count // 2 : count // 2 + 4000] = 0.0  # far below the loudest value
    reference = WhisperFeatureExtractor(feature_size=bins, n_fft=n_fft, hop_length=hop, chunk_length=seconds)
    ours = read_log_mel(reference.to_dict())
    window = ours.window(samples)
    assert window.shape == (bins, ours.window_frames)
    # In float32, by torch, the reference itself is inexact where a band is weak.
    by_torch = reference(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(window, by_torch, atol=1e-4)
    padded = np.pad(samples, (0, ours.window_samples - count))
    by_numpy = reference._np_extract_fbank_features(padded[None], "cpu")[0]
    np.testing.assert_allclose(window, by_numpy, atol=1e-6)
    if count > n_fft:
        whole = reference(samples, sampling_rate=RATE, padding="longest", truncation=False, return_tensors="np")
        np.testing.assert_allclose(ours.features(samples), whole.input_features[0], atol=1e-4)


@pytest.mark.parametrize(("n_fft", "hop"), [(400, 160), (41, 7), (9, 100)])
@pytest.mark.parametrize("count", [250, 1601, 90_001])
def test_parts_of_features_are_those_of_the_whole_bit_for_bit(n_fft: int, hop: int, count: int) -> None:
    log_mel, rng = LogMel(num_mel_bins=8, n_fft=n_fft, hop_length=hop), np.random.default_rng(count)
    loud = np.sin(np.arange(count) ** 1.2 / 7) * (np.arange(count) > count - 600) * 0.5
    for samples in (loud, loud + rng.normal(0, 1e-4, count), rng.normal(0, 0.1, count), np.zeros(count)):
        samples = samples.astype(np.float32)
        whole, loudest = log_mel.features(samples), log_mel.loudest(samples)
        for first in rng.integers(0, whole.shape[1], 4).tolist():
            last = int(rng.integers(first + 1, whole.shape[1] + 1))
            np.testing.assert_array_equal(log_mel.part(samples, loudest, first, last), whole[:, first:last])


def test_features_of_long_audio_take_memory_for_a_window() -> None:
    log_mel, samples = LogMel(chunk_length=2), tone(200.0)
    tracemalloc.start()
    spectrogram = Spectrogram.of(log_mel, samples)
    spectrogram.source(Window(15_000, 200))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < samples.nbytes / 2, most  # a block of float64, and a few numbers for each frame


def test_a_window_holds_no_more_than_a_window_and_no_samples_have_no_features() -> None:
    log_mel = LogMel(chunk_length=1)
    assert log_mel.features(np.zeros(159, np.float32)).shape == (80, 0)
    assert log_mel.window(np.zeros(0, np.float32)).shape == (80, 100)
    with pytest.raises(ValueError, match="16001 samples"):
        log_mel.window(np.zeros(16001, np.float32))


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"dither": 0.1}, "dither"),
        ({"padding_value": 1.0}, "padding_value"),
        ({"feature_size": 0}, "feature_size"),
        ({"hop_length": "160"}, "hop_length"),
        ({"sampling_rate": 8000}, "sampling_rate"),
        ({"chunk_length": True}, "chunk_length"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(raw: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_log_mel(raw)


# --- resampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000])
def test_resampling_keeps_what_both_rates_hold_and_removes_the_rest(rate: int) -> None:
    half = min(rate, RATE) / 2
    for frequency in (60.0, 0.5 * half, 0.9 * half):
        resampled = resample(tone(0.5, rate, frequency, 1.0), rate, RATE)
        assert len(resampled) == RATE // 2
        error = resampled - tone(0.5, RATE, frequency, 1.0)
        assert np.abs(error[1000:-1000]).max() < 2e-4  # -74 dB
    if rate > RATE:
        for frequency in (1.08 * half, min(1.5 * half, 0.49 * rate)):
            folded = resample(tone(0.5, rate, frequency, 1.0), rate, RATE)
            assert np.abs(folded[1000:-1000]).max() < 2e-4


def test_parts_do_not_show_in_a_resampled_signal() -> None:
    samples = np.random.default_rng(0).standard_normal(30_011).astype(np.float32)
    resampler = Resampler(44_100, RATE)
    cuts = [0, 1, 2, 700, 701, 20_000, len(samples)]
    parts = [resampler.feed(samples[start:end]) for start, end in pairwise(cuts)]
    joined = np.concatenate([*parts, resampler.finish()])
    np.testing.assert_allclose(joined, resample(samples, 44_100, RATE), atol=1e-5)
    assert len(joined) == -(-len(samples) * RATE // 44_100)


@pytest.mark.parametrize("rate", [44_099, 767_999, 7919])
def test_an_odd_rate_has_small_filters_and_hardly_drifts(rate: int) -> None:
    resampler = Resampler(rate, RATE)
    assert resampler._filters.size < 3_000_000
    assert abs(resampler._step / resampler._outputs / (rate / RATE) - 1) < 5e-5
    samples = resample(tone(0.25, rate, 100.0), rate, RATE)
    np.testing.assert_allclose(samples[1000:3000], tone(0.25, RATE, 100.0)[1000:3000], atol=0.005)


@pytest.mark.parametrize(("rate", "seconds"), [(8001, 120), (16_001, 180), (15_999, 180), (16_008, 30)])
def test_long_audio_of_a_rate_next_to_a_usual_one_is_read_to_its_end(rate: int, seconds: int) -> None:
    samples = resample(tone(seconds, rate, 100.0), rate, RATE)
    assert abs(len(samples) / RATE / seconds - 1) < 6e-4
    assert np.abs(samples[-RATE // 2 : -RATE // 4]).max() > 0.4


# --- files --------------------------------------------------------------------------------------------------------

WRITTEN = [
    *(("WAV", subtype) for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")),
    *(("WAVEX", subtype) for subtype in ("PCM_16", "PCM_24", "FLOAT")),
    *(("FLAC", subtype) for subtype in ("PCM_16", "PCM_24")),
    *(("RF64", subtype) for subtype in ("PCM_16",)),
    *(("OGG", subtype) for subtype in ("VORBIS", "OPUS")),
    ("MP3", "MPEG_LAYER_III"),
]
INEXACT = {"PCM_U8": 0.01, "VORBIS": 0.05, "OPUS": 0.05, "MPEG_LAYER_III": 0.05}


@pytest.mark.parametrize(("form", "subtype"), WRITTEN)
def test_every_format_is_read(form: str, subtype: str) -> None:
    expected = tone(0.5)
    samples = decode_audio(audio_file(expected, form=form, subtype=subtype), RATE, LIMITS)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(
        samples[2000 : len(expected) - 2000], expected[2000:-2000], atol=INEXACT.get(subtype, 1e-4)
    )
    assert len(expected) <= len(samples) <= len(expected) + 2000  # an encoder's padding


def test_channels_are_averaged_and_rates_converted() -> None:
    stereo = np.stack((tone(1.0, 48_000), np.zeros(48_000, np.float32)), axis=1)
    samples = decode_audio(audio_file(stereo, 48_000, "FLAC"), RATE, LIMITS)
    assert len(samples) == RATE
    np.testing.assert_allclose(samples[1000:-1000], tone(1.0, level=0.25)[1000:-1000], atol=1e-3)


def wav(content: bytes, size: int | None = None, before: bytes = b"", **header: int) -> bytes:
    """Return a WAV file of 16 bits with the header that the test asks for."""
    fields = {"tag": 1, "channels": 1, "rate": RATE, "bytes": 2 * RATE, "align": 2, "bits": 16} | header
    form = struct.pack("<HHIIHH", *fields.values())
    size = len(content) if size is None else size
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + before + b"data" + struct.pack("<I", size) + content
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVE" + chunks


PCM = (tone(0.25) * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize(
    "file",
    [
        wav(PCM),
        wav(PCM, size=0),  # written to a pipe
        wav(PCM, size=0xFFFFFFFF),  # likewise
        wav(PCM, size=0x7FFFFFFF),
        wav(PCM, size=len(PCM) + 5000),  # cut off
        wav(PCM, before=b"LIST" + struct.pack("<I", 3) + b"abc\0"),  # an odd size
        wav(PCM) + b"LIST" + struct.pack("<I", 4) + b"abcd",
    ],
)
def test_sizes_that_streams_leave_wrong_do_not_matter(file: bytes) -> None:
    np.testing.assert_allclose(decode_audio(file, RATE, LIMITS)[:4000], tone(0.25), atol=1e-3)


def flac_of_unknown_length(samples: NDArray[np.float32]) -> bytes:
    file = bytearray(audio_file(samples, form="FLAC"))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    return bytes(file)


def test_a_stream_of_unknown_length_is_read_to_its_end() -> None:
    assert len(decode_audio(flac_of_unknown_length(tone(3.0)), RATE, LIMITS)) == 3 * RATE


SILENCE = np.zeros(60 * RATE, np.float32)
NAN = np.full(100, np.nan, np.float32)
LOUD = float(np.finfo(np.float32).max)
SQUARE = np.repeat(np.float32([LOUD, -LOUD] * 50), 40)  # resampling overshoots
REFUSED = {
    "empty": (b"", "not an audio file"),
    "text": (b"hello, hello", "not an audio file"),
    "only a header": (wav(b""), "no samples"),
    "half a header": (wav(PCM)[:30], "broken"),
    "no rate": (wav(PCM, rate=0), "broken|samples a second"),
    "a huge rate": (wav(PCM, rate=4_000_000_000), "broken|samples a second"),
    "no channel": (wav(PCM, channels=0), "broken"),
    "too many channels": (wav(PCM * 10, channels=65535, align=65534), "broken|channels"),
    "33 channels": (wav(PCM * 10, channels=33, align=66), "33 channels"),
    "no numbers": (audio_file(NAN, subtype="FLOAT"), "no numbers"),
    "no sum of channels": (audio_file(np.full((100, 2), LOUD, np.float32), subtype="FLOAT"), "no numbers"),
    "no sum of the resampler": (audio_file(SQUARE, 44_100, subtype="FLOAT"), "no numbers"),
    "long by its header": (audio_file(SILENCE, form="FLAC"), "longer than 20 seconds"),
    "long in truth": (flac_of_unknown_length(SILENCE), "longer than 20 seconds"),
    "half of a FLAC": (audio_file(tone(3.0), form="FLAC")[:30_000], "broken|cut off"),
    "a lying FLAC": (audio_file(tone(0.1), form="FLAC")[:21] + b"\xf0\x00\x04\xe2\x00" + b"\0" * 500, "broken|cut off"),
    "half of an Ogg": (audio_file(tone(3.0), form="OGG", subtype="VORBIS")[:3000], "broken"),
    "too many bytes": (wav(bytes(1_000_001)), "1000045 bytes"),
    "a playlist": (b"#EXTM3U\nhttp://127.0.0.1/audio.ts\n", "not an audio file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_file_is_said(name: str) -> None:
    file, reason = REFUSED[name]
    with pytest.raises(AudioError, match=reason):
        decode_audio(file, RATE, LIMITS)


def test_a_container_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(AudioError, match="lacks the extra `audio`"):
        decode_audio(b"\0\0\0\x20ftypM4A " + bytes(100), RATE, LIMITS)


def container(form: str, codec: str, samples: NDArray[np.float32], rate: int = 48_000) -> bytes:
    av = pytest.importorskip("av", reason="the extra `audio` is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        for part in (*av.AudioResampler("fltp" if codec == "aac" else "flt").resample(frame), None):
            for packet in stream.encode(part):
                output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(("form", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("adts", "aac")])
def test_containers_are_read_with_the_extra(form: str, codec: str) -> None:
    samples = decode_audio(container(form, codec, tone(1.0, 48_000)), RATE, LIMITS)
    assert abs(len(samples) - RATE) < 3000
    assert np.argmax(np.abs(np.fft.rfft(samples[4000:12_000]))) == 440 // 2  # in half a second
    with pytest.raises(AudioError, match="longer than"):
        decode_audio(container(form, codec, tone(21.0, 48_000)), RATE, LIMITS)


def tag(size: int, *, footer: bool = False) -> bytes:
    """Return a tag of ID3v2 with `size` bytes, such as a picture."""
    head = bytes([4, 0, 0x10 * footer, *(size >> shift & 0x7F for shift in (21, 14, 7, 0))])
    return b"ID3" + head + bytes(size) + (b"3DI" + head) * footer


@pytest.mark.parametrize("footer", [False, True])
@pytest.mark.parametrize("form", ["MP3", "FLAC", "AAC"])
def test_a_tag_may_stand_before_the_sound(form: str, footer: bool) -> None:
    if form == "AAC":
        file = container("adts", "aac", tone(1.0, 48_000))
    else:
        file = audio_file(tone(1.0), form=form, subtype="MPEG_LAYER_III" if form == "MP3" else "PCM_16")
    samples = decode_audio(tag(70_000, footer=footer) + file, RATE, LIMITS)
    assert abs(len(samples) - RATE) < 3000 and np.abs(samples).max() > 0.3


def test_a_file_that_begins_with_silence_is_not_taken_for_a_long_one() -> None:
    loud = np.random.default_rng(0).uniform(-0.9, 0.9, 14 * 48_000).astype(np.float32)
    file = container("adts", "aac", np.concatenate((np.zeros(5 * 48_000, np.float32), loud)))
    assert abs(len(decode_audio(file, RATE, LIMITS)) - 19 * RATE) < 3000


def test_a_stream_may_end_within_a_frame_and_not_go_on_after_a_broken_one() -> None:
    file = container("adts", "aac", np.random.default_rng(0).uniform(-0.9, 0.9, 2 * 48_000).astype(np.float32))
    for size in (len(file) - 10, len(file) // 2 + 5):
        samples = decode_audio(file[:size], RATE, LIMITS)
        assert abs(len(samples) - 2 * RATE * size / len(file)) < 2000
    half = len(file) // 2
    with pytest.raises(AudioError, match="broken"):
        decode_audio(file[:half] + bytes(range(256)) * 20 + file[half:], RATE, LIMITS)


def mp3(samples: NDArray[np.float32], rate: int = 48_000) -> bytes:
    """Return MP3 of variable bit rate, whose first frame says how many follow."""
    file = io.BytesIO()
    soundfile.write(
        file,
        samples,
        rate,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="VARIABLE",
        compression_level=0.5,
    )
    return file.getvalue()


def without_first_frame(file: bytes) -> bytes:
    return file[file.index(file[:2], 4) :]


def test_mp3_without_its_length_is_read_to_its_end() -> None:
    """A guess by the first frames, which are large or small, would end a sixth of the way or refuse the file."""
    loud = np.random.default_rng(0).uniform(-0.9, 0.9, 3 * 48_000).astype(np.float32)
    quiet = tone(16.0, 48_000, level=0.01)
    for parts in ((loud, quiet), (quiet, loud)):
        samples = decode_audio(without_first_frame(mp3(np.concatenate(parts))), RATE, LIMITS)
        assert abs(len(samples) - 19 * RATE) < 4000
        assert abs(np.abs(samples[-RATE // 2 :]).max() - np.abs(parts[1]).max()) < 0.3


ID3V1 = b"TAG" + bytes(125)


@pytest.mark.parametrize(
    "between", [b"", tag(3000), ID3V1, ID3V1 + tag(10) + tag(3000)], ids=["nothing", "ID3v2", "ID3v1", "several"]
)
def test_mp3_files_that_were_joined_are_read_to_the_end(between: bytes) -> None:
    first, second = mp3(tone(2.0, 48_000)), mp3(tone(1.0, 24_000), 24_000)
    samples = decode_audio(first + between + second, RATE, LIMITS)
    assert abs(len(samples) - 3 * RATE) < 2000
    assert np.argmax(np.abs(np.fft.rfft(samples[-RATE // 2 - 1000 : -1000]))) == 440 // 2
    tagged = decode_audio(between + without_first_frame(first), RATE, LIMITS)
    assert abs(len(tagged) - 2 * RATE) < 2000
    with pytest.raises(AudioError, match="longer than"):
        decode_audio(mp3(tone(12.0, 48_000)) * 2, RATE, LIMITS)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chain_of_ogg_is_read_to_its_last_link(subtype: str) -> None:
    links = [audio_file(tone(1.5, rate), rate, "OGG", subtype) for rate in (48_000, 24_000, 16_000)]
    samples = decode_audio(b"".join(links), RATE, LIMITS)
    assert abs(len(samples) - 4.5 * RATE) < 2000
    for start in range(4000, len(samples) - RATE, 3 * RATE // 2):
        assert np.argmax(np.abs(np.fft.rfft(samples[start : start + RATE // 2]))) == 440 // 2
    cut = decode_audio(b"".join(links)[: -len(links[2]) + 200], RATE, LIMITS)
    assert abs(len(cut) - 3 * RATE) < 2000
    with pytest.raises(AudioError, match="broken"):
        decode_audio(links[0] + links[1][:28] + bytes(8) + links[1][36:] + links[2], RATE, LIMITS)
    with pytest.raises(AudioError, match="longer than"):
        decode_audio(audio_file(tone(8.0), form="OGG", subtype=subtype) * 3, RATE, LIMITS)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_links_of_ogg_without_sound_are_passed_over(subtype: str) -> None:
    """A radio that reconnects leaves such; libsndfile refuses those of Opus, and links that they follow."""
    link, silent = (audio_file(tone(seconds), form="OGG", subtype=subtype) for seconds in (0.5, 0.0))
    begun = silent[: silent.index(b"OggS", silent.index(b"OggS", 4) + 4)] if subtype == "VORBIS" else silent
    for without in (silent, begun):
        for file, count in ((link + without + link, 2), (without + link, 1), (link + without, 1)):
            assert abs(len(decode_audio(file, RATE, LIMITS)) - count * RATE / 2) < 500
    for size in range(1, len(link), 7):  # wherever a recording is cut off
        found = decode_audio(link + link[:size], RATE, LIMITS)
        assert RATE / 2 - 500 < len(found) < RATE + 500


def test_a_stream_may_change_its_rate() -> None:
    fast, slow = (container("adts", "aac", tone(2.0, rate), rate) for rate in (48_000, 24_000))
    for file in (fast + slow, slow + fast):
        samples = decode_audio(file, RATE, LIMITS)
        assert abs(len(samples) - 4 * RATE) < 6000
        for start in (RATE // 2, 3 * RATE - RATE // 2):
            assert np.argmax(np.abs(np.fft.rfft(samples[start : start + RATE // 2]))) == 440 // 2


SEEDS = [
    wav(PCM, before=b"LIST" + struct.pack("<I", 3) + b"abc\0"),
    *(audio_file(tone(0.3), form=form, subtype=subtype) for form, subtype in WRITTEN[6:]),
]


@settings(max_examples=80, deadline=None, database=None)
@given(st.integers(0, len(SEEDS) - 1), st.randoms(use_true_random=False))
def test_mutated_files_are_read_or_refused_within_a_second(seed: int, rng: random.Random) -> None:
    file = bytearray(SEEDS[seed])
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(min(len(file), 200) if rng.random() < 0.7 else len(file))
        if rng.random() < 0.2:
            del file[place : place + rng.randint(1, 50)]
        file[place : place + 1] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", rng.randbytes(1), rng.randbytes(4)))
    start, reason = time.process_time(), ""
    try:
        assert len(decode_audio(bytes(file), RATE, LIMITS)) <= 20 * RATE + RATE
    except AudioError as error:
        reason = str(error)
    assert "object at 0x" not in reason
    assert time.process_time() - start < 1.0
