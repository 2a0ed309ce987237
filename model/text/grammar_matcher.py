"""Grammar matchers compute the masks of tokens that a grammar allows next. No torch.

A `Matcher` follows one sequence and lives as long as it, so a preemption replays nothing. A beam's continuation gets a
copy. `Grammars` compiles grammars in a thread and caches them.

llguidance matches texts byte by byte; this module gives it the bytes of each token. A token with different bytes at
the beginning of an output has a second entry in llguidance's vocabulary, after the model's own tokens.
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
# Bounds on a grammar's cost, for compilation and for each token.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


def require_llguidance() -> type[llguidance.LLMatcher]:
    """Import llguidance, which is optional without grammars; raises `ConfigError` if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError("structured output needs the package llguidance: pip install llguidance") from None
    return llguidance.LLMatcher


class Vocabulary:
    """A model's tokens in llguidance: `[V]` tokens, then differing first forms, then an end token."""

    def __init__(self, tokens: TokenBytes) -> None:
        require_llguidance()
        from llguidance import LLTokenizer

        self.size = len(tokens.later)
        differing = [token for token in range(self.size) if tokens.first[token] != tokens.later[token]]
        entries = [*tokens.later, *(tokens.first[token] for token in differing), b"</end>"]
        self.first_ids = np.arange(self.size)  # the entry of each token's first form
        self.first_ids[differing] = self.size + np.arange(len(differing))
        self.end = len(entries) - 1
        wrapper = cast(Any, _TokenizerWrapper(entries, self.end))
        self.tokenizer = LLTokenizer(wrapper, n_vocab=len(entries), eos_token=self.end)
        self.mask_bytes = 4 * -(-len(entries) // 32)


class _TokenizerWrapper:
    """The interface that llguidance expects of a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenise a text; the result is never used, since grammars are written with `no_forcing`."""
        return []


class Matcher:
    """The grammar state of one output. Stop ids are not part of the text that must match."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: llguidance.LLMatcher,
        stop_token_ids: Iterable[int] = (),
        *,
        has_output: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._stop_ids = list(stop_token_ids)
        self._has_output = has_output
        self._cached_state: tuple[Mask, bool] | None = None

    def fork(self) -> Matcher:
        """Return an independent copy for another continuation."""
        copy = Matcher(self._vocabulary, self._matcher.deep_copy(), self._stop_ids, has_output=self._has_output)
        copy._cached_state = self._cached_state
        return copy

    def with_stop_tokens(self, stop_token_ids: Iterable[int]) -> Matcher:
        """Return a copy with these stop ids; raises `GrammarError` if no token can begin the output."""
        copy = Matcher(self._vocabulary, self._matcher.deep_copy(), stop_token_ids, has_output=self._has_output)
        if copy.is_exhausted:
            raise GrammarError("only the empty output would match" if copy.is_complete else copy.failure)
        return copy

    def accept(self, token_id: int) -> None:
        """Advance the state by a token, which must have been allowed."""
        self._matcher.consume_token(token_id if self._has_output else int(self._vocabulary.first_ids[token_id]))
        self._has_output = True
        self._cached_state = None

    @property
    def tokens(self) -> Mask:
        """The mask `[V]` of the tokens that can continue the text; read-only."""
        return self._state()[0]

    def allowed(self, *, may_stop: bool) -> Mask:
        """Return the mask `[V]` of the allowed tokens: `tokens`, and the stop ids if the output is complete.

        Without `may_stop` the stop ids are allowed only if no token can follow.
        """
        allowed = self.tokens.copy()
        allowed[self._stop_ids] = self.is_complete and (may_stop or self.is_exhausted)
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
        """The reason why an incomplete output cannot continue."""
        if self._matcher.is_error() and not self._matcher.get_error().startswith("NoExtension"):
            return "it takes too much to follow"
        return "no token of the model can come next"

    def _state(self) -> tuple[Mask, bool]:
        """Return the mask of `tokens` and whether the output may end here."""
        if self._cached_state is None:
            vocabulary = self._vocabulary
            bits = np.zeros(vocabulary.mask_bytes, np.uint8)
            if not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():  # computing the mask exceeded one of `LIMITS`
                bits[:] = 0
            entries = np.unpackbits(bits, bitorder="little").view(np.bool_)
            mask = entries[: vocabulary.size] if self._has_output else entries[vocabulary.first_ids]
            mask[self._stop_ids] = False
            self._cached_state = mask, bool(entries[vocabulary.end])
        return self._cached_state


def compile_grammar(grammar: str, vocabulary: Vocabulary) -> Matcher:
    """Compile a grammar to a matcher in its initial state.

    Raises `GrammarError` for a grammar that is invalid, costs too much or matches no sequence of tokens.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise GrammarError(_redact(matcher.get_error()))
    return Matcher(vocabulary, matcher).with_stop_tokens(())


def _redact(error: str) -> str:
    """Remove quotations of the grammar from llguidance's message; names of keywords stay."""
    lines = [line.strip() for line in error.splitlines()]
    syntax = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if syntax is not None:  # of a regular expression, which the lines before quote
        return syntax
    reason = lines[0]
    for prefix in ("failed to compile JSON schema: ", "(in regex): "):
        reason = reason.rpartition(prefix)[2]
    if reason.startswith("Resource "):
        return "a reference leads out of the schema; none is fetched"
    if reason.startswith(("Unimplemented keys", "Unsatisfiable schema")):
        return reason
    for quotation in (" in regex /", " /", " '", ": ", ", got ", ". Enable "):
        reason = reason.partition(quotation)[0]
    return reason


class Grammars:
    """Compiles the grammars of one model and caches the `CACHED_GRAMMARS` most recently used.

    `tokens` is called once, for the first grammar, so an engine without grammars never reads the vocabulary.
    """

    def __init__(self, tokens: Callable[[], TokenBytes]) -> None:
        self._tokens = tokens
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None

    def compile(self, grammar: str) -> Future[Matcher]:
        """Return the future of a matcher to fork; the future may raise `GrammarError` or `ConfigError`."""
        future = self._compiled.get(grammar)
        if future is None:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="triptych-grammar")
            future = self._compiled[grammar] = self._executor.submit(self._compile, grammar)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: str) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokens())
        return compile_grammar(grammar, self._vocabulary)
