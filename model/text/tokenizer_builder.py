"""Builds a folder's tokenizer: from tokenizer.json and what lies over it, or from the files before tokenizer.json.

Both go the way of `transformers` 5: the tokenizer's class says how texts are normalised and cut, the files which tokens
there are. `triptych.model.text.tokenizer_class` finds the class.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from dataclasses import replace

from tokenizers import Regex, Tokenizer, pre_tokenizers

from triptych.model.errors import ConfigError
from triptych.model.text import byte_level_classes, sentencepiece_classes
from triptych.model.text.piece_tokenizers import PIECE_CLASSES, PieceTokenizer
from triptych.model.text.special_tokens import NAMES, add_special_tokens, token_text
from triptych.model.text.tokenizer_class import TokenizerClass, class_of_older_files, class_over_json
from triptych.model.text.tokenizer_files import SENTENCEPIECE_NAMES, Files, library_errors

# -- Mends how a Mistral folder's tokenizer.json cuts texts, as `transformers` does where `fix_mistral_regex` asks for
# it. Folders saved before version 5 cut letters, digits and spaces otherwise than the tokenizers that the models were
# trained with.

_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MIN_TOKENS = 100_000
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_PATTERN = "|".join(
    (
        rf"{_WORD}[{_CAPITALS}]*[{_SMALL}]+",
        rf"{_WORD}[{_CAPITALS}]+[{_SMALL}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def mend_mistral_cuts(tokenizer: Tokenizer, files: Files) -> None:
    """Replace the pattern that cuts texts, in a folder that this concerns and whose settings ask for it."""
    cuts, config = tokenizer.pre_tokenizer, files.object("config.json")
    if cuts is None or tokenizer.get_vocab_size() <= _MIN_TOKENS or not config or _is_mended(config):
        return
    if config.get("model_type") is not None and config["model_type"] not in _TYPES:
        return
    wanted = files.optional_flag("fix_mistral_regex")
    if not wanted:
        if wanted is None and "\\p{L}" in str(cuts) and _PATTERN not in str(cuts):
            _log.warning(
                "%s: its tokenizer cuts texts otherwise than Mistral's own; transformers mends that where "
                "tokenizer_config.json has `fix_mistral_regex: true`, and so does this service",
                files.folder.name,
            )
        return
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    if isinstance(cuts, pre_tokenizers.Sequence):
        rest = list(cuts)[1:]  # type: ignore[call-overload]
    else:
        spaces = isinstance(cuts, pre_tokenizers.Metaspace)
        rest = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False) if spaces else cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *rest])


def _is_mended(config: dict[str, object]) -> bool:
    """Whether the folder was saved by a version that has the pattern right."""
    found = re.match(r"\d+", str(config.get("transformers_version") or ""))
    return found is not None and int(found[0]) >= 5


_log = logging.getLogger(__name__)
CLASSES = {**byte_level_classes.CLASSES, **sentencepiece_classes.CLASSES}


def build_tokenizer(files: Files) -> Tokenizer | PieceTokenizer | None:
    """Build the tokenizer of a folder; return None if it has no files of one.

    Raises `ConfigError` for files that are damaged or of a class that is not known.
    """
    folder, name = files.folder, class_of_older_files(files)
    if name in PIECE_CLASSES and files.has(*PIECE_CLASSES[name].files):
        return _of_pieces(name, files)
    if files.loaded is not None:
        return _over_json(files.loaded, files)
    marks = ("vocab.txt", "vocab.json", "source.spm", *SENTENCEPIECE_NAMES)
    if not any(files.has(mark) for mark in marks):
        return None
    if name in PIECE_CLASSES:
        return _of_pieces(name, files)
    if name not in CLASSES:
        raise ConfigError(
            f"{folder.name}: a tokenizer of class {files.tokenizer_class or files.model_type!r} needs tokenizer.json; "
            f"built from other files are {', '.join(sorted({*CLASSES, *PIECE_CLASSES}))}"
        )
    kind = CLASSES[name]
    with library_errors(f"{folder.name}: its tokenizer cannot be built"):
        tokenizer = Tokenizer(kind.read(files))
        charsmap = files.sentencepiece.charsmap if kind.reads_sentencepiece else b""
        return _finished(tokenizer, files, kind, charsmap)


def _of_pieces(name: str, files: Files) -> Tokenizer | PieceTokenizer:
    with library_errors(f"{files.folder.name}: its tokenizer cannot be built"):  # SentencePiece's too
        return _with_added(PIECE_CLASSES[name].read(files), files)


def _over_json(loaded: Tokenizer, files: Files) -> Tokenizer:
    """Let the folder's class and its other files change what tokenizer.json holds, as `transformers` does."""
    kind = CLASSES.get(class_over_json(files))
    with library_errors(f"{files.folder.name}: its tokenizer cannot be built"):
        if kind is None or type(loaded.model).__name__ != kind.kind:
            add_special_tokens(loaded, files.special_tokens)
            return _split(loaded, files)
        tokenizer = Tokenizer(loaded.model)
        if loaded.post_processor is not None:
            tokenizer.post_processor = loaded.post_processor
        return _finished(tokenizer, files, kind, _charsmap(loaded))


def _finished(tokenizer: Tokenizer, files: Files, kind: TokenizerClass, charsmap: bytes) -> Tokenizer:
    """Do to a vocabulary what its class does."""
    kind.dress(tokenizer, files, charsmap)
    extra = kind.extra(files) if kind.extra is not None else ()
    reads = kind.reads_sentencepiece and files.loaded is None
    pieces = sentencepiece_classes.model_tokens(files) if reads else ()
    tokens = files.special_tokens
    if reads and not tokens.listed:  # the library takes the model's own instead of the older list of the token map
        tokens = replace(tokens, extra=None)
    texts = add_special_tokens(tokenizer, tokens, kind.specials, extra, pieces)
    if kind.around is not None:
        kind.around(tokenizer, files, texts)
    return _split(tokenizer, files)


def _split(tokenizer: Tokenizer, files: Files) -> Tokenizer:
    mend_mistral_cuts(tokenizer, files)
    tokenizer.encode_special_tokens = files.flag("split_special_tokens", False)
    listed = files.special_tokens.added.items()
    moved = [(added.content, token) for token, added in listed if tokenizer.token_to_id(added.content) != token]
    if moved:
        text, token = moved[0]
        _log.warning(
            "%s: %d added tokens do not have the ids that its files say, and have those that transformers gives them: "
            "%r has %s instead of %d",
            *(files.folder.name, len(moved), text, tokenizer.token_to_id(text), token),
        )
    return tokenizer


def named_texts(files: Files) -> dict[str, str]:
    """Return the special tokens that chat templates may name: those of the files, else of the folder's class.

    A folder may have names of its own (`image_token`).
    """
    kind = CLASSES.get(class_over_json(files) if files.has_json else class_of_older_files(files))
    usual = {} if kind is None else {name: token for name, token in kind.specials.items() if name in NAMES}
    named = {**usual, **files.named_tokens}
    return {name: token_text(token) for name, token in named.items() if token is not None}


def cleans_up(built: Tokenizer | PieceTokenizer, files: Files) -> bool:
    """Whether texts are shown without the spaces before punctuation; those of BPE have none that are not meant."""
    is_bpe = isinstance(built, Tokenizer) and type(built.model).__name__ == "BPE"
    forced = files.flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return files.flag("clean_up_tokenization_spaces", False) and (forced or not is_bpe)


def _charsmap(loaded: Tokenizer) -> bytes:
    """Return the rules of a SentencePiece model's normalizer in tokenizer.json; empty if it has none."""
    if loaded.normalizer is None:
        return b""
    found = json.loads(loaded.normalizer.__getstate__())
    steps = found["normalizers"] if found["type"] == "Sequence" else [found]
    rules = next((step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"), "")
    return base64.b64decode(rules or "")


def _with_added(built: Tokenizer | PieceTokenizer, files: Files) -> Tokenizer | PieceTokenizer:
    """Add the tokens that the folder's files list to the vocabulary of a class with files of its own."""
    tokenizer = built.tokenizer if isinstance(built, PieceTokenizer) else built
    for token, added in sorted(files.special_tokens.added.items()):
        if tokenizer.token_to_id(added.content) is None and token != tokenizer.get_vocab_size():
            raise ConfigError(f"{files.folder.name}: the added token {added.content!r} should have the id {token}")
        tokenizer.add_tokens([added])
    return built
