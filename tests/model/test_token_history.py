"""A history that is kept says what one made anew says, whatever was asked when and however a text went on."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from model.api.token_history import History, TokenCounts


def repeating(tokens: list[int], size: int) -> set[int]:
    """By the definition: what would make the last `size` tokens a run that was there before."""
    runs = {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}
    begun = tuple(tokens[len(tokens) - size + 1 :]) if len(tokens) >= size - 1 else None
    return {run[-1] for run in runs if size and run[:-1] == begun}


def check(history: History, tokens: list[int], prompt: int, size: int, asked: str) -> None:
    if asked in ("repeating", "all"):
        found = history.repeating(tokens)
        assert set(found) == repeating(tokens, size)
        assert len(found) == len(set(found))
    if asked in ("output", "all"):
        output = history.output(tokens)
        assert dict(zip(output.tokens.tolist(), output.counts.tolist(), strict=True)) == Counter(tokens[prompt:])
    if asked in ("seen", "all"):
        assert set(history.seen(tokens).tolist()) == set(tokens)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
steps = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from(["", "repeating", "output", "seen", "all"])),
    max_size=30,
)


@settings(deadline=None)
@given(texts, st.integers(0, 5), steps)
def test_it_is_what_one_made_anew_is(prompt: list[int], size: int, script: list[tuple[int, int, str]]) -> None:
    """Each step goes on with one of the texts there are, as a new text beside it."""
    there = [(list(prompt), History(len(prompt), size))]
    for which, token, asked in script:
        tokens, history = there[which % len(there)]
        longer, fork = [*tokens, token], history.fork()
        there.append((longer, fork))
        check(fork, longer, len(prompt), size, asked)
    for tokens, history in there:
        check(history, tokens, len(prompt), size, "all")


@settings(deadline=None)
@given(texts, st.integers(0, 5), st.lists(st.integers(0, 3), max_size=40))
def test_it_follows_a_text_that_grows(prompt: list[int], size: int, output: list[int]) -> None:
    history = History(len(prompt), size)
    for count in range(len(output) + 1):
        check(history, [*prompt, *output[:count]], len(prompt), size, "all")


def test_pieces_of_a_prompt_may_come_before_it_and_again() -> None:
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    history = History(len(prompt), 3)
    for end in (2, 5, 1, 8, 4):
        history.read(prompt[:end])
    check(history, prompt, len(prompt), 3, "all")
    check(history, [*prompt, 3], len(prompt), 3, "all")


def test_counts_grow_beyond_what_was_kept_for_them() -> None:
    counts = TokenCounts()
    counts.add(range(100))
    copy = counts.copy()
    counts.add([7, 7, 200])
    assert counts.tokens.tolist() == [*range(100), 200]
    assert counts.counts[7] == 3
    assert copy.counts.tolist() == [1] * 100


def test_a_token_more_costs_no_more_in_a_long_text() -> None:
    """Against making it anew: once for the text, then for what is new."""
    tokens = [at % 977 for at in range(100_000)]
    history = History(len(tokens), 3)

    def seconds(made: History) -> float:
        began = time.thread_time()
        made.repeating(tokens)
        made.output(tokens)
        return time.thread_time() - began

    anew = seconds(history)
    for token in range(20):
        tokens.append(token)
        assert seconds(history) < anew / 20
