"""An incremental token history equals one computed from scratch, after any order of queries, growth and forks."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.model.api.token_history import History, TokenCounts


def repeating(tokens: list[int], size: int) -> set[int]:
    """Return, by the definition, the tokens that would repeat an n-gram of `size` tokens."""
    ngrams = {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}
    context = tuple(tokens[len(tokens) - size + 1 :]) if len(tokens) >= size - 1 else None
    return {ngram[-1] for ngram in ngrams if size and ngram[:-1] == context}


def check(history: History, tokens: list[int], prompt: int, size: int, asked: str) -> None:
    if asked in ("repeating", "all"):
        found = history.repeating(tokens)
        assert set(found) == repeating(tokens, size)
        assert len(found) == len(set(found))
    if asked in ("output", "all"):
        found, counts = (one.tolist() for one in history.counted(tokens))
        assert dict(zip(found, counts, strict=True)) == Counter(tokens[prompt:])
    if asked in ("seen", "all"):
        assert set(history.seen(tokens).tolist()) == set(tokens)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
steps = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from(["", "repeating", "output", "seen", "all"])),
    max_size=30,
)


@settings(deadline=None)
@given(texts, st.integers(0, 5), steps)
def test_forks_equal_a_history_from_scratch(prompt: list[int], size: int, script: list[tuple[int, int, str]]) -> None:
    """Each step forks one of the existing histories and adds a token to the fork."""
    branches = [(list(prompt), History(len(prompt), size))]
    for which, token, asked in script:
        tokens, history = branches[which % len(branches)]
        longer, fork = [*tokens, token], history.fork()
        branches.append((longer, fork))
        check(fork, longer, len(prompt), size, asked)
    for tokens, history in branches:
        check(history, tokens, len(prompt), size, "all")


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=99), st.integers(1, 9), steps)
def test_a_window_has_the_last_tokens(prompt: list[int], window: int, script: list[tuple[int, int, str]]) -> None:
    branches = [(list(prompt), History(len(prompt), window=window))]
    for which, token, asked in script:
        tokens, history = branches[which % len(branches)]
        branches.append(([*tokens, token], history.fork()))
        for tokens, history in branches if asked else ():
            found, counts = (one.tolist() for one in history.counted(tokens))
            assert dict(zip(found, counts, strict=True)) == Counter(tokens[-window:])
            assert set(history.seen(tokens).tolist()) == set(tokens[-window:])


@settings(deadline=None)
@given(texts, st.integers(0, 5), st.lists(st.integers(0, 3), max_size=40))
def test_growing_output_is_followed(prompt: list[int], size: int, output: list[int]) -> None:
    history = History(len(prompt), size)
    for count in range(len(output) + 1):
        check(history, [*prompt, *output[:count]], len(prompt), size, "all")


def test_prompt_chunks_may_be_read_early_and_again() -> None:
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    history = History(len(prompt), 3)
    for end in (2, 5, 1, 8, 4):
        history.read(prompt[:end])
    check(history, prompt, len(prompt), 3, "all")
    check(history, [*prompt, 3], len(prompt), 3, "all")


def test_counts_grow_beyond_their_initial_capacity() -> None:
    counts = TokenCounts()
    counts.add(range(100))
    copy = counts.copy()
    counts.add([7, 7, 200])
    assert counts.tokens.tolist() == [*range(100), 200]
    assert counts.counts[7] == 3
    assert copy.counts.tolist() == [1] * 100


def test_cost_of_a_new_token_does_not_grow_with_the_text() -> None:
    """Compares a step of one token with the first read of the whole text."""
    tokens = [at % 977 for at in range(100_000)]
    history = History(len(tokens), 3)

    def seconds(history: History) -> float:
        began = time.thread_time()
        history.repeating(tokens)
        history.counted(tokens)
        return time.thread_time() - began

    first_read = seconds(history)
    for token in range(20):
        tokens.append(token)
        assert seconds(history) < first_read / 20
