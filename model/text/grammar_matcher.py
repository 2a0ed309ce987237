"""Grammar matchers compute the masks of tokens that a grammar allows next. No torch.

A `Matcher` follows one sequence and lives as long as it, so a preemption replays nothing. A beam's continuation gets a
copy. `Grammars` compiles grammars in a thread and caches them.

Copies of llguidance's matcher share the states of its lexer, whose number is limited. Their number grows with every
text that is followed. So a compiled grammar is used for a limited number of tokens, and a sequence that meets the limit
goes on with a lexer of its own.

llguidance matches texts byte by byte; this module gives it the bytes of each token. A token with different bytes at
the beginning of an output has a second entry in llguidance's vocabulary, after the model's own tokens.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from triptych.model.errors import ConfigError, GrammarError
from triptych.model.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    import llguidance

Mask: TypeAlias = NDArray[np.bool_]

CACHED_GRAMMARS = 64
TOKENS_PER_LEXER = 5_000  # followed by all copies together; then the grammar is compiled anew
LEXER_STATES = 100_000  # about 70 MB
LEXER_FUEL = 1_000_000  # of a step: about 150 ms
ROW_ITEMS = 5_000  # what can come next: four for each property that may be left out
CACHED_SECONDS = 20.0  # of processor time that was spent on cached grammars, whose memory grows by about 30 MB each
# Processor time for the masks of a sequence. Most masks take less than 10 ms; an ambiguous grammar's may take 200 ms,
# and other sequences wait for it. So what a mask takes beyond `SLOW_MASK` counts `SLOW_FACTOR` times.
MASK_SECONDS, MASK_SECONDS_PER_TOKEN = 2.0, 0.005
SLOW_MASK, SLOW_FACTOR = 0.02, 10
# Messages of llguidance about its limits, and the messages that replace them.
_LIMITS = {
    "too many states": "counts and lengths are too large together",
    "too many expressions": "an expression is too complex",
    "Current row has": "too much can come next at one place, such as properties that may be left out",
    "Too many items": "too much can come next at one place, such as properties that may be left out",
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


class _Compiled:
    """A compiled grammar with the lexer that all copies of its matcher share."""

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.grammar = grammar
        self.vocabulary = vocabulary
        self.num_tokens = 0
        self.is_full = False
        limits = LLParserLimits(
            max_lexer_states=LEXER_STATES,
            max_items_in_row=ROW_ITEMS,
            step_lexer_fuel=LEXER_FUEL,
            verbose_errors=False,
        )
        began = time.thread_time()
        self.start = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if self.start.is_error():
            raise GrammarError(_redact(self.start.get_error()))
        self.seconds = time.thread_time() - began  # spent on it by all that follow it

    @property
    def is_used_up(self) -> bool:
        return self.is_full or self.num_tokens > TOKENS_PER_LEXER


_Path: TypeAlias = tuple[Any, int] | None  # the entries of an output's tokens, the last one first


class Matcher:
    """The grammar state of one output. Stop ids are not part of the text that must match."""

    def __init__(self, compiled: _Compiled, stop_token_ids: Iterable[int] = ()) -> None:
        self._vocabulary = compiled.vocabulary
        self._compiled = compiled
        self._matcher = compiled.start.deep_copy()
        self._stop_ids = list(stop_token_ids)
        self._path: _Path = None
        self._cached_state: tuple[Mask, bool] | None = None
        self._seconds_left = MASK_SECONDS

    def fork(self) -> Matcher:
        """Return an independent copy for another continuation."""
        found = copy(self)
        found._matcher = self._matcher.deep_copy()
        return found

    def with_stop_tokens(self, stop_token_ids: Iterable[int]) -> Matcher:
        """Return a copy with these stop ids; raises `GrammarError` if no token can begin the output."""
        found = Matcher(self._compiled, stop_token_ids)
        if found.is_exhausted:
            raise GrammarError("only the empty output would match" if found.is_complete else found.failure)
        return found

    def accept(self, token_id: int) -> None:
        """Advance the state by a token, which must have been allowed."""
        entry = token_id if self._path is not None else int(self._vocabulary.first_ids[token_id])
        self._path = self._path, entry
        self._cached_state = None
        self._seconds_left += MASK_SECONDS_PER_TOKEN
        self._compiled.num_tokens += 1
        with self._counted():
            if not self._matcher.consume_token(entry) and self._is_too_much:
                self._take_own_lexer()

    @property
    def is_used_up(self) -> bool:
        """Whether the grammar should be compiled anew for other sequences."""
        return self._compiled.is_used_up

    @property
    def seconds(self) -> float:
        """Processor time that was spent on the grammar by all that follow it."""
        return self._compiled.seconds

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
        if self._is_too_much or self._seconds_left < 0:
            error = self._matcher.get_error() if self._is_too_much else ""
            why = next(
                (said for begin, said in _LIMITS.items() if begin in error), "what comes next is found too slowly"
            )
            return f"it takes too much to follow: {why}"
        return "no token of the model can come next"

    @property
    def _is_too_much(self) -> bool:
        """Whether one of llguidance's limits was met."""
        return self._matcher.is_error() and not self._matcher.get_error().startswith("NoExtension")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the processor time of the block."""
        began = time.thread_time()
        yield
        spent = time.thread_time() - began
        self._compiled.seconds += spent
        self._seconds_left -= spent + (SLOW_FACTOR - 1) * max(0.0, spent - SLOW_MASK)

    def _take_own_lexer(self) -> None:
        """Follow the output so far again with a new lexer, as the shared one is full."""
        self._compiled.is_full = True
        self._compiled = _Compiled(self._compiled.grammar, self._vocabulary)
        self._matcher = self._compiled.start.deep_copy()
        entries, path = list[int](), self._path
        while path is not None:
            path, entry = path
            entries.append(entry)
        self._matcher.consume_tokens(entries[::-1])

    def _state(self) -> tuple[Mask, bool]:
        """Return the mask of `tokens` and whether the output may end here."""
        if self._cached_state is None:
            vocabulary = self._vocabulary
            with self._counted():
                bits = self._mask_bits()
                if self._is_too_much:
                    self._take_own_lexer()
                    bits = self._mask_bits()
            entries = np.unpackbits(bits, bitorder="little").view(np.bool_)
            mask = entries[: vocabulary.size] if self._path is not None else entries[vocabulary.first_ids]
            mask[self._stop_ids] = False
            self._cached_state = mask, bool(entries[vocabulary.end])
        return self._cached_state

    def _mask_bits(self) -> NDArray[np.uint8]:
        """Return a bit for each entry of the vocabulary; none is set where the grammar cannot be followed further."""
        bits = np.zeros(self._vocabulary.mask_bytes, np.uint8)
        if self._seconds_left >= 0 and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():
                bits[:] = 0
        return bits


def compile_grammar(grammar: str, vocabulary: Vocabulary) -> Matcher:
    """Compile a grammar to a matcher in its initial state.

    Raises `GrammarError` for a grammar that is invalid, costs too much or matches no sequence of tokens.
    """
    return Matcher(_Compiled(grammar, vocabulary)).with_stop_tokens(())


# Messages of llguidance about a whole schema, with replacements. A translated schema meets no other of its refusals.
_OF_SCHEMAS = {
    "patternProperty regexes": "patternProperties whose patterns may match the same name are not served",
    "Unsatisfiable schema": "no value is accepted by the schema",
    "circular references with sibling keys": "$ref that leads back to itself is not served next to other keywords",
    "Schema intersection stack": "allOf, anyOf and $ref are nested too deeply within each other",
    "schema too large": "allOf, anyOf and $ref make the schema too large",
    "Unable to determine if regex is empty": "pattern, format and lengths of a string take too much together",
}


_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_LINES_BEFORE = 2  # a client's own grammar, which alone has several lines


def _redact(error: str) -> str:
    """Remove quotations of the grammar from llguidance's message; names of keywords stay."""
    if "failed to compile JSON schema: " in error:
        found = next((said for begin, said in _OF_SCHEMAS.items() if begin in error), None)
        if found is not None:
            return f"#: {found}"
    lines = [line.strip() for line in error.splitlines()]
    syntax = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if syntax is not None:  # of a regular expression, which the lines before quote
        return syntax
    reason, is_schema = lines[0], "failed to compile JSON schema: " in lines[0]
    place = _PLACE.match(reason)
    if place is not None and not is_schema:
        reason = reason[place.end() :]
    for prefix in ("failed to compile JSON schema: ", "(in regex): "):
        reason = reason.rpartition(prefix)[2]
    for quotation in (" in regex /", " /", " '", ": ", ", got ", ". Enable "):
        reason = reason.partition(quotation)[0]
    if is_schema:
        return f"#: {reason}"
    line = int(place[1]) - _LINES_BEFORE if place is not None else 0
    return f"{reason} (line {line})" if line > 0 else reason


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
        if future is None or ((matcher := _result(future)) is not None and matcher.is_used_up):
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="triptych-grammar")
            future = self._compiled[grammar] = self._executor.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > 1 and (len(self._compiled) > CACHED_GRAMMARS or self._seconds() > CACHED_SECONDS):
            self._compiled.popitem(last=False)
        return future

    def _seconds(self) -> float:
        return sum(matcher.seconds for future in self._compiled.values() if (matcher := _result(future)) is not None)

    def _compile(self, grammar: str) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokens())
        return compile_grammar(grammar, self._vocabulary)


def _result(future: Future[Matcher]) -> Matcher | None:
    """Return the matcher of a grammar that was compiled without an error."""
    is_there = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if is_there else None
