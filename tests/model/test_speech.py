"""The windows of a transcription without I/O, compared with those of transformers for the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from transformers.models.whisper import tokenization_whisper as reference

from triptych.model.api.languages import NAMES, language_code
from triptych.model.speech.chunks import ChunkMerger, ChunkOutput, Token, cut_chunks
from triptych.model.speech.segments import Window, compression_ratio, cut_segments, srt, vtt, words_of
from triptych.model.speech.transcription import Attempt, Decoding, Outcome, Segment, SequentialWindows

# Parts of transformers that take 2 s to import are imported where they are used: each worker collects this file.

BEGIN = 100  # the first timestamp; ids of text are smaller
END = 90
DECODING = Decoding(start=(91, 92), previous=93, timestamp_begin=BEGIN, context=40, vocab_size=1600, end=END)


def spoken(draw: random.Random, length: int, *, least: int = 0) -> list[int]:
    """Return tokens with timestamps at random places, as a random model might give them."""
    found = []
    while len(found) < length:
        if draw.random() < 0.3:
            least = min(1500, least + draw.randrange(60))
            found += [BEGIN + least] * draw.choice((1, 2, 2))
        else:
            found.append(draw.randrange(80))
    return found


def test_segments_are_those_of_transformers() -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    for seed in range(150):
        draw = random.Random(seed)
        tokens = spoken(draw, draw.randrange(1, 30))
        window = Window(draw.randrange(5000), draw.choice((3000, 3000, draw.randrange(1, 3000))))
        theirs, advance = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=[None],
            time_offset=torch.tensor([window.seek * 0.01], dtype=torch.float64),
            timestamp_begin=BEGIN,
            seek_num_frames=torch.tensor([window.num_frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )
        ours, frames = cut_segments(tokens, BEGIN, window)
        assert frames == int(advance)
        assert [tokens[span.first : span.last] for span in ours] == [one["tokens"].tolist() for one in theirs]
        for span, one in zip(ours, theirs, strict=True):
            assert span.start * 0.01 == pytest.approx(float(one["start"]))
            assert span.end * 0.01 == pytest.approx(float(one["end"]), abs=0.0201)  # theirs is rounded down


def test_compression_ratio_is_that_of_transformers() -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    draw = random.Random(1)
    for size, ids in ((1600, [7] * 60), (51865, [draw.randrange(51865) for _ in range(50)]), (200, [1, 2, 3])):
        theirs = WhisperGenerationMixin._retrieve_compression_ratio(torch.tensor(ids), size)
        assert compression_ratio(ids, size) == theirs


def windows(num_frames: int = 9000, **changes: Any) -> SequentialWindows:
    fields = {name: getattr(DECODING, name) for name in DECODING.__slots__}
    return SequentialWindows(Decoding(**{**fields, **changes}), num_frames, 3000, 0.01)


def following(one: SequentialWindows) -> Attempt:
    found = one.next()
    assert found is not None
    return found


def said(*ids: int, logprob: float = -0.1, silence: float = 0.0) -> Outcome:
    return Outcome(ids, logprob, silence)


def test_windows_begin_where_the_last_segment_ended_and_carry_what_was_said() -> None:
    one = windows()
    first = following(one)
    assert (first.window, first.prompt, first.max_tokens) == (Window(0, 3000), (91, 92), 38)
    # 10 s, then an incomplete segment, which is left to the next window
    [segment] = one.finish(first, said(BEGIN, 1, 2, BEGIN + 500, BEGIN + 500, 3)) or ()
    assert (segment.start, segment.end) == (0.0, 10.0)
    second = following(one)
    assert second.window == Window(1000, 3000)
    assert second.prompt == (93, BEGIN, 1, 2, BEGIN + 500, 91, 92)  # one of the two timestamps at the end
    one.finish(second, said(BEGIN, 4, BEGIN + 1000))  # a single timestamp: no speech follows it
    third = following(one)
    assert third.window == Window(4000, 3000)
    one.finish(third, said(*range(30)))
    fourth = following(one)
    assert fourth.window == Window(7000, 2000)
    assert fourth.prompt == (93, *range(11, 30), 91, 92)  # half of the context without one
    one.finish(fourth, said(5))
    assert one.next() is None
    assert one.num_windows == 4


def test_a_failed_output_is_decoded_again_at_the_next_temperature() -> None:
    one = windows()
    first = following(one)
    assert one.finish(first, said(1, 2, logprob=-1.5)) is None
    second = following(one)
    assert (second.window, second.temperature, second.number) == (first.window, 0.2, 1)
    assert one.finish(second, said(*[7] * 60)) is None  # it repeats itself
    third = following(one)
    assert third.temperature == 0.4
    assert one.finish(third, said(1, 2)) is not None
    assert following(one).temperature == 0.0
    assert one.num_fallbacks == 2
    only = windows(temperatures=(0.0,))
    assert only.finish(following(only), said(1, 2, logprob=-1.5)) is not None, "the last attempt counts"


def test_the_last_temperature_counts_and_is_no_context() -> None:
    one = windows(temperatures=(0.0, 0.6))
    one.finish(following(one), said(1, logprob=-2))
    assert one.finish(following(one), said(2, logprob=-2)) is not None
    assert following(one).prompt == (91, 92)
    one.finish(following(one), said(3))
    assert following(one).prompt == (93, 2, 3, 91, 92)  # transformers takes everything again


def test_silence_is_skipped_only_if_the_output_is_unlikely() -> None:
    one = windows()
    assert one.finish(following(one), said(1, logprob=-1.2, silence=0.7)) == []
    assert following(one).window.seek == 3000
    [segment] = one.finish(following(one), said(1, logprob=-0.5, silence=0.7)) or ()
    assert segment.token_ids == (1,)
    never = windows(no_speech_threshold=None)
    assert never.finish(following(never), said(1, logprob=-1.2, silence=0.9)) is None


def test_a_prompt_is_the_first_thing_that_was_said() -> None:
    one = windows(prompt=(5, 6))
    assert following(one).prompt == (93, 5, 6, 91, 92)
    one.finish(following(one), said(7))
    assert following(one).prompt == (93, 5, 6, 7, 91, 92)
    alone = windows(prompt=tuple(range(50)), carries_context=False)
    alone.finish(following(alone), said(7))
    assert following(alone).prompt == (93, *range(31, 50), 91, 92)
    without = windows(previous=None, prompt=(5,))
    assert following(without).prompt == (91, 92)


def test_a_window_that_ends_where_it_began_is_left_behind() -> None:
    one = windows()
    one.finish(following(one), said(1, BEGIN, BEGIN))
    assert following(one).window.seek == 3000


@pytest.mark.parametrize("num_samples", [1, 100, 5000, 48_000, 48_001, 80_000, 200_001, 960_000])
def test_chunks_are_those_of_the_pipeline(num_samples: int) -> None:
    from transformers.pipelines.automatic_speech_recognition import chunk_iter

    class Extractor:
        sampling_rate = 1600

        def __call__(self, chunk: Any, **_: Any) -> dict[str, Any]:
            return {"chunk": chunk}

    theirs = list(chunk_iter(torch.arange(num_samples), Extractor(), 48_000, 8000, 8000))
    ours = cut_chunks(num_samples, 48_000)
    assert [(one.end - one.start, one.left, one.right) for one in ours] == [one["stride"] for one in theirs]
    assert [one.start for one in ours] == [int(one["chunk"][0]) for one in theirs]


class Words:
    """The least of a tokenizer: an id's text is its name; some pairs of ids join to one character."""

    all_special_ids = (*range(END, BEGIN),)
    eos_token_id = END
    language = None

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        parts = (" a", " b", "c", ".", " (", ")", " '", "!", " ", "-", " de")
        self.names = {one: draw.choice(parts).encode() for one in range(80)} | {70: b"\xc3", 71: b"\xa9"}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return b"".join(self.names[one] for one in ids).decode(errors="replace")

    def convert_tokens_to_ids(self, name: str) -> int:
        return BEGIN - 1 if name == "<|notimestamps|>" else 94

    def _strip_prompt(self, ids: list[int], *_: int) -> list[int]:
        return ids


@pytest.mark.parametrize("mode", ["text", "segments", "words"])
def test_merged_chunks_are_those_of_the_pipeline(mode: str) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        tokenizer = Words(seed)
        spoken_all = [draw.randrange(70) for _ in range(80)]
        outputs, theirs = [], []
        lengths = [30.0] * draw.randrange(1, 5)
        for place, length in enumerate(lengths):
            left, right = (0.0 if place == 0 else 5.0), (0.0 if place == len(lengths) - 1 else 5.0)
            text = spoken_all[place * 12 : place * 12 + 20]  # the next one repeats some of it
            ids = stamped(draw, text) if mode != "text" else text
            ends = [round(length * (at + 1) / len(ids), 2) for at in range(len(ids))]
            outputs.append(ChunkOutput(length, left, right, tokens_of(ids, ends)))
            stamps = torch.tensor([ends], dtype=torch.float64)
            one: dict[str, Any] = {"tokens": torch.tensor([ids]), "stride": (length, left, right)}
            theirs.append({**one, "token_timestamps": stamps})
        wanted: Any = {"text": False, "segments": True, "words": "word"}[mode]
        text, rest = reference._decode_asr(
            tokenizer, theirs, return_timestamps=wanted, return_language=False, time_precision=0.02
        )
        merger = ChunkMerger(timed=mode == "words")
        found = [segment for output in outputs for segment in merger.add(output)] + merger.rest()
        assert "".join(tokenizer.decode([token.id for token in one.tokens]) for one in found) == text
        if mode == "segments":
            assert [(one.start, one.end) for one in found] == [one["timestamp"] for one in rest["chunks"]]
        if mode == "words":
            words = [
                (word.text, (one.tokens[word.places[0]].start, one.tokens[word.places[-1]].end))
                for one in found
                for word in words_of([token.id for token in one.tokens], None, tokenizer.decode)
            ]
            assert words == [(one["text"], one["timestamp"]) for one in rest["chunks"]]


def stamped(draw: random.Random, text: list[int]) -> list[int]:
    """Insert pairs of timestamps into the text, and one at either end."""
    cuts = sorted(draw.sample(range(1, 1500), 6))
    ids = [BEGIN + cuts[0], *text[:5]]
    ids += [BEGIN + cuts[1], BEGIN + cuts[2], *text[5:12], BEGIN + cuts[3], BEGIN + cuts[4], *text[12:]]
    return [*ids, BEGIN + cuts[5]] if draw.random() < 0.7 else ids


def tokens_of(ids: list[int], ends: list[float]) -> tuple[Token, ...]:
    starts = [0.0, *ends]
    return tuple(
        Token(one, (one - BEGIN) * 0.02) if one >= BEGIN else Token(one, None, start, end)
        for one, start, end in zip(ids, starts, ends, strict=False)
    )


@pytest.mark.parametrize("language", ["en", "ja"])
def test_words_are_those_of_transformers(language: str) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        tokenizer = Words(seed)
        ids = [draw.randrange(80) for _ in range(draw.randrange(1, 40))]
        words, _, places = reference._combine_tokens_into_words(cast(Any, tokenizer), ids, NAMES[language])
        found = words_of(ids, language, tokenizer.decode)
        assert [(one.text, one.places) for one in found] == list(zip(words, places, strict=True))


def test_languages_have_codes_and_names() -> None:
    assert NAMES == reference.LANGUAGES
    for name, code in reference.TO_LANGUAGE_CODE.items():
        assert language_code(name) == code
    assert [language_code(one) for one in ("EN", "pt-BR", "zh_CN", "Haitian Creole", "haitian_creole", "xx")] == [
        *("en", "pt", "zh", "ht", "ht", "xx")
    ]


def test_subtitles_have_no_broken_cues() -> None:
    lines = [(0.0, 1.5, " Hello\nthere "), (3661.25, 3662.0, "a --> b")]
    assert srt(lines) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n\n"
    )
    assert vtt(lines) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there\n\n01:01:01.250 --> 01:01:02.000\na -> b\n\n"
    )


def test_a_segment_says_which_window_it_is_of() -> None:
    one = windows()
    found = one.finish(following(one), Outcome((BEGIN, 1, BEGIN + 5), -0.25, 0.125))
    [segment] = found or ()
    assert isinstance(segment, Segment)
    assert (segment.window, segment.mean_logprob, segment.no_speech_prob) == (Window(0, 3000), -0.25, 0.125)
