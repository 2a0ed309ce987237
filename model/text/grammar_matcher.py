"""Grammars over a model's tokens: which may come next so that the whole output matches. No torch.

A `Matcher` follows one sequence. It lives as long as the sequence, so that nothing is replayed after a preemption; a
beam's continuation takes a copy. `Grammars` compiles aside, in a thread, and keeps what was compiled.

Whether a text matches is llguidance's judgement, byte by byte; this module says what the bytes of a token are. A token
that reads differently as the first of an output has a second entry in the library's vocabulary, behind the model's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from model.errors import ConfigError
from model.text.grammar import GrammarError
from model.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    import llguidance

Mask: TypeAlias = NDArray[np.bool_]

CACHED_GRAMMARS = 64
# Bounds on what a grammar may cost: to compile, and at each token.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


def library() -> type[llguidance.LLMatcher]:
    """The grammar library's matcher; it is optional for an engine that is asked for no grammars."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError("structured output needs the package llguidance: pip install llguidance") from None
    return llguidance.LLMatcher


class Vocabulary:
    """A model's tokens as the library sees them: `[V]`, then other first forms, then the end."""

    def __init__(self, tokens: TokenBytes) -> None:
        library()
        from llguidance import LLTokenizer

        self.size = len(tokens.later)
        differing = [token for token in range(self.size) if tokens.first[token] != tokens.later[token]]
        words = [*tokens.later, *(tokens.first[token] for token in differing), b"</end>"]
        self.first_ids = np.arange(self.size)  # where a token's first form stands
        self.first_ids[differing] = self.size + np.arange(len(differing))
        self.end = len(words) - 1
        self.tokenizer = LLTokenizer(cast(Any, _Words(words, self.end)), n_vocab=len(words), eos_token=self.end)
        self.mask_bytes = 4 * -(-len(words) // 32)


class _Words:
    """The interface that the library expects of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end]

    def __call__(self, text: bytes | str) -> list[int]:
        """How a text is tokenised decides nothing: grammars are written with `no_forcing`."""
        return []


class Matcher:
    """Where one output stands in its grammar. The stop ids that end it are no text of it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: llguidance.LLMatcher,
        stop_token_ids: Iterable[int] = (),
        *,
        begun: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._stops = list(stop_token_ids)
        self._begun = begun
        self._next: tuple[Mask, bool] | None = None

    def fork(self) -> Matcher:
        """The same, to go on from here in another way."""
        copy = Matcher(self._vocabulary, self._matcher.deep_copy(), self._stops, begun=self._begun)
        copy._next = self._next
        return copy

    def ended_by(self, stop_token_ids: Iterable[int]) -> Matcher:
        """The same for an output that these end; raises `GrammarError` where it cannot begin."""
        found = Matcher(self._vocabulary, self._matcher.deep_copy(), stop_token_ids, begun=self._begun)
        if found.is_exhausted:
            raise GrammarError("only the empty output would match" if found.is_complete else found.failure)
        return found

    def accept(self, token_id: int) -> None:
        """Take a token that was allowed."""
        self._matcher.consume_token(token_id if self._begun else int(self._vocabulary.first_ids[token_id]))
        self._begun = True
        self._next = None

    @property
    def tokens(self) -> Mask:
        """Which tokens go on with the text, `[V]`; not to be written to."""
        return self._state()[0]

    def allowed(self, *, may_stop: bool) -> Mask:
        """`tokens` and, where the output is complete, what ends it.

        Before it may stop it ends only when nothing can follow.
        """
        allowed = self.tokens.copy()
        allowed[self._stops] = self.is_complete and (may_stop or self.is_exhausted)
        return allowed

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self._state()[1]

    @property
    def is_exhausted(self) -> bool:
        """Whether no token can follow."""
        return not self._state()[0].any()

    @property
    def failure(self) -> str:
        """Why an output that cannot go on is not complete."""
        if self._matcher.is_error() and not self._matcher.get_error().startswith("NoExtension"):
            return "it takes too much to follow"
        return "no token of the model can come next"

    def _state(self) -> tuple[Mask, bool]:
        if self._next is None:
            vocabulary = self._vocabulary
            bits = np.zeros(vocabulary.mask_bytes, np.uint8)
            if not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():  # by now: a bound was met
                bits[:] = 0
            found = np.unpackbits(bits, bitorder="little").view(np.bool_)
            text = found[: vocabulary.size] if self._begun else found[vocabulary.first_ids]
            text[self._stops] = False
            self._next = text, bool(found[vocabulary.end])
        return self._next


def compiled(grammar: str, vocabulary: Vocabulary) -> Matcher:
    """A matcher at the beginning; raises `GrammarError` for what has no meaning, costs too much or cannot be spelt."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return Matcher(vocabulary, matcher).ended_by(())


def _reason(error: str) -> str:
    """The library's message without what it quotes of the grammar; names of keywords stay."""
    lines = [line.strip() for line in error.splitlines()]
    syntax = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if syntax is not None:  # a regular expression's: the lines before show it
        return syntax
    reason = lines[0]
    for beginning in ("failed to compile JSON schema: ", "(in regex): "):
        reason = reason.rpartition(beginning)[2]
    if reason.startswith("Resource "):
        return "a reference leads out of the schema; none is fetched"
    if reason.startswith(("Unimplemented keys", "Unsatisfiable schema")):
        return reason
    for quoting in (" in regex /", " /", " '", ": ", ", got ", ". Enable "):
        reason = reason.partition(quoting)[0]
    return reason


class Grammars:
    """Compiled grammars of one model, the latest `CACHED_GRAMMARS`.

    `tokens` is called once, before the first: an engine that is asked for none reads no vocabulary.
    """

    def __init__(self, tokens: Callable[[], TokenBytes]) -> None:
        self._tokens = tokens
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, grammar: str) -> Future[Matcher]:
        """A matcher to be forked, at once if the grammar is known; or `GrammarError`, or `ConfigError`."""
        found = self._compiled.get(grammar)
        if found is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="triptych-grammar")
            found = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def _compile(self, grammar: str) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokens())
        return compiled(grammar, self._vocabulary)
