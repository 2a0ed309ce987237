"""Incremental detokenisation: no text is lost or repeated, and no part of a stop string is emitted."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from tests.model.texts import (
    CHARACTERS,
    CORPUS,
    bytes_tokenizer,
    fallback_tokenizer,
    literal_tokenizer,
    words_tokenizer,
)
from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.api.sampling_params import LineStop, SamplingParams
from triptych.model.errors import ConfigError, TooManyTokensError
from triptych.model.text.decoders import has_fixed_texts
from triptych.model.text.detokenizer import LINE_STOP, Detokenizer
from triptych.model.text.piece_tokenizers import PieceTokenizer
from triptych.model.text.tokenizer import Tokenizer, free_vocabulary

TEXT = st.one_of(st.sampled_from(CORPUS), st.text(st.sampled_from(CHARACTERS), max_size=30))


TOKENIZERS = {"bytes": bytes_tokenizer, "words": words_tokenizer, "fallback": fallback_tokenizer}


def chunks(ids: tuple[int, ...], sizes: list[int]) -> list[tuple[int, ...]]:
    """Split `ids` into pieces of the given sizes, and into single ids after those."""
    pieces, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(ids[at : at + size])
        at += size
        if at >= len(ids):
            break
    return pieces


def stream(detokenizer: Detokenizer, ids: tuple[int, ...], sizes: list[int] | None = None) -> list[str]:
    deltas = [detokenizer.push(piece) for piece in chunks(ids, sizes or [])]
    return [*deltas, detokenizer.push((), final=True)]


SIZES = st.lists(st.integers(1, 5), max_size=20)


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, sizes=SIZES)
def test_deltas_join_to_the_whole_text_at_any_chunking(make, text: str, sizes: list[int]) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    assert "".join(stream(Detokenizer(tokenizer), ids, sizes)) == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=TEXT, sizes=SIZES)
def test_valid_text_never_shows_half_a_character(text: str, sizes: list[int]) -> None:
    ids = bytes_tokenizer().encode(text).ids
    deltas = stream(Detokenizer(bytes_tokenizer()), ids, sizes)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text


def test_control_characters_are_split_over_tokens() -> None:
    ids = bytes_tokenizer().encode("東👍🏽").ids
    assert len(ids) > 4
    assert any("\ufffd" in bytes_tokenizer().token_text(token) for token in ids)


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(2, 290), st.sampled_from([1, 1, 1, 2, 40])), max_size=30),
    sizes=st.lists(st.sampled_from([1, 2, 3, 5, 30]), max_size=20),
)
def test_any_ids_join_to_their_decoding_even_where_it_is_no_text(runs: list[tuple[int, int]], sizes: list[int]) -> None:
    tokenizer = bytes_tokenizer()
    ids = [token for token, count in runs for _ in range(count)]
    assert "".join(stream(Detokenizer(tokenizer), tuple(ids), sizes)) == tokenizer.decode(ids)


RUNS = st.lists(st.tuples(st.integers(0, 332), st.sampled_from([1, 1, 1, 1, 2, 40])), max_size=30)  # 331: no token


@pytest.mark.parametrize("make", [bytes_tokenizer, fallback_tokenizer, literal_tokenizer])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(runs=RUNS, sizes=st.lists(st.sampled_from([1, 2, 3, 5, 30]), max_size=20))
def test_ids_that_are_no_text_come_out_the_same_at_any_chunking(  # type: ignore[no-untyped-def]
    make, skip: bool, runs: list[tuple[int, int]], sizes: list[int]
) -> None:
    tokenizer = make()
    ids = tuple(token % (tokenizer.vocab_size + 2) for token, count in runs for _ in range(count))
    one_by_one = "".join(stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids))
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids, sizes)) == one_by_one


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=6), sizes=SIZES)
def test_a_replacement_character_that_a_token_spells_is_text(ids: list[int], sizes: list[int]) -> None:
    tokenizer = literal_tokenizer()
    assert "".join(stream(Detokenizer(tokenizer), tuple(ids), sizes)) == tokenizer.decode(ids)


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(("name", "shown"), [("</s>", ""), ("<0xAB>", "\ufffd"), ("", ""), ("\u2581", " ")])
@pytest.mark.parametrize("size", [1, 7])
def test_a_long_run_of_what_is_no_text_costs_the_same_at_each_token(name: str, shown: str, size: int) -> None:
    tokenizer = Counting(fallback_tokenizer()._tokenizer)
    token = {"": 900, "</s>": tokenizer.special_token_id("</s>")}.get(name)
    ids = (tokenizer.token_names(330).index(name) if token is None else token,) * 2_000
    text = "".join(stream(Detokenizer(tokenizer), ids, [size] * 2_000))
    assert text == (shown * 2_000).removeprefix(" ")
    assert tokenizer.decoded < 60 * len(ids)  # with all before it, it would be 1,000 a token


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ("54 AB CD", "T\ufffd\ufffd"),  # the decoder alone takes the T back
        ("54 E6", "T\ufffd"),  # likewise at an end within a character
        ("54 E6 97", "T\ufffd\ufffd"),
        ("E6 97 A5 AB", "\u65e5\ufffd"),
        ("E6 97 A5 AB \u2581The\u2581", "\u65e5\ufffd The "),
        ("AB \u2581The\u2581 E6 97 A5", "\ufffd The \u65e5"),
        ("The\u2581 20 AB", "The  \ufffd"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_wrong_byte_takes_no_text_back(spelled: str, text: str, size: int) -> None:
    tokenizer = fallback_tokenizer()
    names = {name: token for token, name in enumerate(tokenizer.token_names(330))}
    ids = tuple(names[one if len(one) > 2 else f"<0x{one}>"] for one in spelled.split())
    assert "".join(stream(Detokenizer(tokenizer), ids, [size] * 9)) == text


def test_the_decoder_takes_text_back() -> None:
    """A whole decoding may differ from the stream, whose text was sent before its run of bytes became invalid."""
    tokenizer = fallback_tokenizer()
    names = tokenizer.token_names(330)
    ids = [names.index(f"<0x{byte}>") for byte in ("54", "E6")]
    assert (tokenizer.decode(ids[:1]), tokenizer.decode(ids)) == ("T", "\ufffd\ufffd")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_if_asked(skip: bool) -> None:
    tokenizer = bytes_tokenizer()
    ids = (0, *tokenizer.encode("ab").ids, 1)
    shown = "".join(stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids))
    assert shown == ("ab" if skip else "<s>ab</s>")
    for sizes in ([1], [9]):  # one token at a time, and all at once
        some = Detokenizer(tokenizer, skip_special_tokens=skip, shown_special_ids=(1,))
        parts = [some.push(ids[at : at + sizes[0]]) for at in range(0, len(ids), sizes[0])]
        assert "".join([*parts, some.push((), final=True)]) == ("ab</s>" if skip else "<s>ab</s>")


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Apply stop strings one character at a time, as the reference."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=200, deadline=None)
@given(
    text=TEXT,
    sizes=SIZES,
    stops=st.lists(st.text(st.sampled_from("ab .é東👍\n#"), min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_first_stop_string_that_is_complete_ends_the_text(
    text: str, sizes: list[int], stops: list[str], include: bool
) -> None:
    detokenizer = Detokenizer(bytes_tokenizer(), stop=stops, include_stop=include)
    deltas = stream(detokenizer, bytes_tokenizer().encode(text).ids, sizes)
    expected, stop = cut(text, stops, include)
    assert "".join(deltas) == expected  # so no beginning of the stop string was sent
    assert detokenizer.stopped == stop


def test_a_stop_string_across_tokens_is_found_and_never_begun() -> None:
    tokenizer = bytes_tokenizer()
    ids = tuple(token for character in "The end\n\n### Next" for token in tokenizer.encode(character).ids)
    detokenizer = Detokenizer(tokenizer, stop=["\n\n###"])
    deltas = [detokenizer.push([token]) for token in ids]
    assert "".join(deltas) == "The end"
    assert detokenizer.stopped == "\n\n###"
    assert detokenizer.push(tokenizer.encode("more").ids, final=True) == ""


def test_what_only_began_a_stop_string_is_sent_in_the_end() -> None:
    tokenizer = bytes_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop=["###"])
    ids = tokenizer.encode("a ##").ids
    assert "#" not in "".join(detokenizer.push([token]) for token in ids)
    assert detokenizer.push((), final=True) == "##"
    assert detokenizer.stopped is None


@pytest.mark.parametrize("sizes", [[1], [3], [100]])
def test_before_min_tokens_no_stop_string_counts(sizes: list[int]) -> None:
    tokenizer = bytes_tokenizer()
    ids = tuple(tokenizer.encode(character).ids[0] for character in "a#b#c")
    detokenizer = Detokenizer(tokenizer, stop=["#"], min_tokens=2)
    assert "".join(stream(detokenizer, ids, sizes * 5)) == "a#b"


@pytest.mark.parametrize("sizes", [[1], [3], [100]])
@pytest.mark.parametrize(
    ("text", "shown"), [("a#!b", "a"), ("#!#!b", "#!"), ("a##!b", "a#"), ("a#b", "a#b"), ("a#", "a#"), ("###!", "##")]
)
def test_a_stop_string_that_is_complete_after_min_tokens_counts(text: str, shown: str, sizes: list[int]) -> None:
    tokenizer = bytes_tokenizer()
    ids = tuple(tokenizer.encode(character).ids[0] for character in text)
    assert "".join(stream(Detokenizer(tokenizer, stop=["#!"], min_tokens=2), ids, sizes * 5)) == shown


@pytest.mark.parametrize(("text", "shown"), [("ba!x", "ba!x"), ("ba!#x", "b"), ("baxac", "bax")])
def test_a_stop_string_within_min_tokens_does_not_count_because_it_begins_another(text: str, shown: str) -> None:
    tokenizer = bytes_tokenizer()
    ids = tuple(tokenizer.encode(character).ids[0] for character in text)
    assert "".join(stream(Detokenizer(tokenizer, stop=["a!#", "a"], min_tokens=2), ids, [1] * 9)) == shown


def filled(params: SamplingParams, output: TokenOutput) -> tuple[TokenOutput, bool]:
    told = Detokenizer.of(bytes_tokenizer(), params).fill(output)
    return output, told


def test_a_stop_string_ends_the_output_and_the_engine_is_told() -> None:
    ids = list(bytes_tokenizer().encode("a#b").ids)
    output, told = filled(SamplingParams(stop=("#",)), TokenOutput("r", token_ids=ids))
    assert (output.text, output.finish_reason, output.stop_reason, told) == ("a", FinishReason.STOP, "#", True)


def test_a_stop_string_in_the_last_token_needs_no_word_to_the_engine() -> None:
    ids = list(bytes_tokenizer().encode("a#").ids)
    output, told = filled(SamplingParams(stop=("#",)), TokenOutput("r", 0, ids, finish_reason=FinishReason.LENGTH))
    assert (output.text, output.finish_reason, told) == ("a", FinishReason.STOP, False)


@pytest.mark.parametrize("sizes", [[1], [3], [100]])
@pytest.mark.parametrize(
    ("text", "indent", "shown"),
    [
        ("a\n    b\n  c", 4, "a\n    b\n  "),
        ("a\n    b\n\t\t\t\tc\n\nd", 4, "a\n    b\n\t\t\t\tc\n"),
        ("  a\n b", 1, "  a\n b"),
        ("a\n   ", 4, "a\n   "),
        ("a\nb#", 0, "a\nb"),
    ],
)
def test_a_line_that_is_indented_too_little_ends_the_text(text: str, indent: int, shown: str, sizes: list[int]) -> None:
    detokenizer = Detokenizer(bytes_tokenizer(), stop=["#"], line_stop=LineStop(indent))
    assert "".join(stream(detokenizer, bytes_tokenizer().encode(text).ids, sizes * 9)) == shown
    ends = {"#"} if "#" in text else {None} if shown == text else {LINE_STOP}
    assert detokenizer.stopped in ends


def test_a_line_break_ends_a_text_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tokenizer = bytes_tokenizer()
    detokenizer = Detokenizer(tokenizer, line_stop=LineStop(seconds=1.0))
    assert detokenizer.push(tokenizer.encode("a\nb").ids) == "a\nb"
    now[0] = 7.0
    assert detokenizer.push(tokenizer.encode("cd").ids) == "cd"
    assert detokenizer.push(tokenizer.encode("e\nf").ids) == "e\n"
    assert detokenizer.stopped == LINE_STOP


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_tokens_text_is_left_out_unless_asked_for(include: bool) -> None:
    ids = list(bytes_tokenizer().encode("a#").ids)
    output = TokenOutput("r", 0, ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1])
    filled(SamplingParams(include_stop=include), output)
    assert output.text == ("a#" if include else "a")
    assert output.token_ids == ids


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("template", [None, processors.TemplateProcessing("$A", "$A $B:1", [])], ids=["plain", "typed"])
def test_encoding_without_token_texts_gives_the_library_s_ids_and_types(
    make: Callable[[], Tokenizer], template: processors.PostProcessor | None
) -> None:
    built = make()._tokenizer
    built.post_processor = template
    tokenizer = Tokenizer(built)
    for text in (*CORPUS, "", " ", "a  b"):
        for pair in (None, "b a"):
            for special in (True, False):
                expected = built.encode(text, pair, add_special_tokens=special)
                found = tokenizer.encode(text, pair, add_special_tokens=special)
                assert (list(found.ids), list(found.type_ids)) == (expected.ids, expected.type_ids)
                assert tokenizer.count(text, pair, add_special_tokens=special) == len(expected.ids)


def test_more_tokens_than_asked_for_are_counted_and_not_made() -> None:
    tokenizer = bytes_tokenizer()
    size = len(tokenizer.encode("abc").ids)
    assert tokenizer.encode("abc", most=size).ids
    for ask in (tokenizer.encode, tokenizer.count, tokenizer.locate):
        with pytest.raises(TooManyTokensError) as error:
            ask("abc", most=size - 1)
        assert error.value.count == size


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXT, count=st.integers(1, 9))
def test_first_tokens_end_where_the_last_of_them_does(make, text: str, count: int) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    found = tokenizer.locate(text)
    ends = [end for (_, end), of in zip(found.offsets, found.texts, strict=True) if of is not None]
    assert tokenizer.first_tokens(text, count) == (text if len(ends) <= count else text[: ends[count - 1]])


def test_long_texts_of_piece_tokenizers_are_split_at_spaces_that_change_nothing() -> None:
    asked: list[str] = []

    def joined(text: str) -> str:
        return re.sub("z (?=z)", "z_", text)

    def split(text: str) -> list[str]:  # as SentencePiece does; but pieces reach over a space between z and z
        asked.append(text)
        return [f"\u2581{word}" for word in joined(text).split()]

    words = PieceTokenizer(bytes_tokenizer()._tokenizer, split, {}, 0, re.compile("(<s>)"), (), ())
    for text in ("ab " * 20_000, "ab  cd " * 9_000, "a" * 40_000, "z " * 20_000):
        asked.clear()
        assert words._pieces(text) == [f"\u2581{word}" for word in joined(text).split()]
        assert (max(map(len, asked)) <= 16_384) is ("b" in text)


def test_batches_and_pairs_encode_like_single_texts() -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode_batch(CORPUS) == [tokenizer.encode(text) for text in CORPUS]
    assert set(tokenizer.encode("ab", "cd").type_ids) == {0, 1}


def gives_way(work: Callable[[], object], seconds: float = 10) -> bool:
    """Whether another thread can run while `work` does; here no thread takes the interpreter's lock by force.

    The thread needs a free core at that moment, so the work is repeated for some seconds.
    """
    work()  # the first time a tokenizer is trained
    ran: list[bool] = []
    go = threading.Lock()
    go.acquire()
    other = threading.Thread(target=lambda: ran.append(go.acquire()))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        other.start()
        go.release()
        end = time.monotonic() + seconds
        while not ran and time.monotonic() < end:
            work()
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        other.join()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: bytes_tokenizer().encode("lorem ipsum " * 20), True),
        (lambda: bytes_tokenizer().encode("lorem", "ipsum " * 40), True),
        (lambda: bytes_tokenizer().decode([40] * 600), True),
        (lambda: bytes_tokenizer().decode([40] * 5), False),
    ],
    ids=["text", "pair", "ids", "few ids"],
)
def test_a_long_text_does_not_stop_other_threads(work: Callable[[], object], expected: bool) -> None:
    assert gives_way(work, 10 if expected else 0.2) is expected


@pytest.mark.parametrize("skip", [True, False])
def test_many_ids_read_as_few_do(skip: bool) -> None:
    tokenizer = bytes_tokenizer()
    ids = [*tokenizer.encode("na\u00efve caf\u00e9").ids, 1]
    assert tokenizer.decode(ids * 100, skip_special_tokens=skip) == 100 * tokenizer.decode(
        ids, skip_special_tokens=skip
    )


def test_a_large_vocabulary_is_freed_in_a_thread_that_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []

    def free(tokenizer: tokenizers.Tokenizer) -> None:
        assert gives_way(lambda: free_vocabulary(tokenizer))
        emptied.append(tokenizer.get_vocab_size(with_added_tokens=False))

    def drop() -> None:
        names = {f"<{number}>": number for number in range(60_000)}
        Tokenizer(tokenizers.Tokenizer(models.BPE(names, [])))

    monkeypatch.setattr("triptych.model.text.tokenizer.free_vocabulary", free)
    drop()
    gc.collect()
    deadline = time.monotonic() + 20
    while not emptied and time.monotonic() < deadline:
        time.sleep(0.01)
    assert emptied == [0]


def test_a_process_ends_while_it_has_a_large_vocabulary() -> None:
    program = """
import tokenizers
from triptych.model.text.tokenizer import Tokenizer
names = {f"<{number}>": number for number in range(60_000)}
whole = [Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(names, []))) for _ in range(3)]
whole.append(whole)  # which only the end of the process frees
del whole[0]
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_library_is_not_asked_for_all_tokens_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bytes_tokenizer()
    library = tokenizer._tokenizer
    added = {known.content: token for token, known in library.get_added_tokens_decoder().items()}
    decoder = json.loads(library.to_str())["decoder"]
    monkeypatch.setattr(tokenizer, "_tokenizer", SimpleNamespace(decoder=library.decoder, get_vocab_size=lambda: 0))
    assert tokenizer.decoder == decoder
    assert added and {text: tokenizer.special_token_id(text) for text in added} == added
    assert tokenizer.special_token_id("none") is None


def test_a_huge_tokenizer_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 1048576 MiB; at most 128 are read"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
def test_the_text_of_an_end_forced_by_the_length_is_left_out(include_stop: bool, text: str) -> None:
    tokenizer = bytes_tokenizer()
    first, last = (tokenizer.encode(one, add_special_tokens=False).ids[0] for one in "ab")
    detokenizer = Detokenizer.of(tokenizer, SamplingParams(include_stop=include_stop))
    outputs = [
        TokenOutput("r", token_ids=[first]),
        TokenOutput("r", token_ids=[last], finish_reason=FinishReason.LENGTH, stop_reason=last),
    ]
    assert not any([detokenizer.fill(output) for output in outputs])
    assert "".join(output.text for output in outputs) == text
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("decoder", "fixed"),
    [
        (None, True),
        (decoders.ByteLevel(), True),
        (decoders.Metaspace(), True),
        (decoders.WordPiece(), True),
        (decoders.BPEDecoder(), False),
        (decoders.CTC(), False),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]), False),
    ],
)
def test_decoders_that_look_at_neighbours_are_known(decoder: decoders.Decoder | None, fixed: bool) -> None:
    assert has_fixed_texts(decoder) is fixed


def test_most_tokens_are_detokenised_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode("naïve and plain text, twice: naïve and plain text", add_special_tokens=False).ids
    expected = stream(Detokenizer(tokenizer), ids)  # which fills the table
    asked: list[int] = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda *given, **named: asked.append(1) or decode(*given, **named))
    assert stream(Detokenizer(tokenizer), ids) == expected
    assert len(asked) < len(ids) / 3  # the first token, and the parts of a character
