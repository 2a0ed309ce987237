"""What a tokenizer class of `transformers` does to a vocabulary, and the helpers that its entries share.

A class decides how texts are normalised and cut, whatever tokenizer.json says, and often what stands around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

from model.text.special_tokens import Token
from model.text.tokenizer_files import Files

Texts = Mapping[str, str]  # the special tokens' texts by name


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A tokenizer class: its vocabulary's files, its steps, its special tokens, and the settings that change ids."""

    kind: str  # of the model in tokenizer.json: "BPE", "Unigram" or "WordPiece"
    read: Callable[[Files], Any]  # the model from the files before tokenizer.json
    dress: Callable[[Tokenizer, Files, bytes], None]  # sets the steps; the bytes are a SentencePiece normalizer
    specials: Mapping[str, Token]
    around: Callable[[Tokenizer, Files, Texts], None] | None = None  # sets what stands around texts
    extra: Callable[[Files], Sequence[Token]] | None = None  # special tokens without a name
    settings: frozenset[str] = frozenset()  # of tokenizer_config.json
    reads_sentencepiece: bool = False


# Settings of all classes that are served.
SERVED = frozenset(
    """
    added_tokens_decoder additional_special_tokens extra_special_tokens add_bos_token add_eos_token split_special_tokens
    fix_mistral_regex fast_tokenizer_files
    clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    """.split()  # noqa: SIM905
)

# Parameters of classes there that change neither ids nor texts of what is served here.
HARMLESS = frozenset(
    """
    errors trim_offsets use_default_system_prompt return_token_type_ids remove_space unk_id tgt_lang vocab merges
    vocab_file merges_file normalizer_file spm_file _spm_precompiled_charsmap
    """.split()  # noqa: SIM905
)


def set_template(tokenizer: Tokenizer, single: str, pair: str, tokens: Iterable[str]) -> None:
    """Put special tokens around texts, by the library's templates; `tokens` are the texts of those in them."""
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(tokens)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def put_cls_and_sep(tokenizer: Tokenizer, cls: str, sep: str, cls_type: int = 0) -> None:
    """Put `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` of two segments, around texts."""
    single = f"{cls}:{cls_type} $A:0 {sep}:0"
    set_template(tokenizer, single, f"{single} $B:1 {sep}:1", (cls, sep))


def known(tokenizer: Tokenizer, texts: Texts, *names: str) -> list[tuple[str, int]]:
    """Return the tokens of these names with their ids; empty unless the tokenizer has them all."""
    found = [(texts[name], tokenizer.token_to_id(texts[name])) for name in names if name in texts]
    whole = [(text, token) for text, token in found if token is not None]
    return whole if len(whole) == len(names) else []


def around_cls_and_sep(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put `[CLS] A [SEP]` around texts where the class has both tokens."""
    if "cls_token" in texts and "sep_token" in texts:
        put_cls_and_sep(tokenizer, texts["cls_token"], texts["sep_token"])


def put_begin_and_end(tokenizer: Tokenizer, files: Files, texts: Texts, *, begins: bool = False) -> None:
    """Put the begin and end tokens around texts, as `add_bos_token` (else `begins`) and `add_eos_token` say."""
    wanted = (("add_bos_token", begins, "bos_token"), ("add_eos_token", False, "eos_token"))
    begin, end = (texts.get(name, "") if files.flag(setting, default) else "" for setting, default, name in wanted)
    before, after = f"{begin}:0 " if begin else "", f" {end}:0" if end else ""
    pair = f"{before}$A:0{after} {before.replace(':0', ':1')}$B:1{after.replace(':0', ':1')}"
    set_template(tokenizer, f"{before}$A:0{after}", pair, [token for token in (begin, end) if token])


def put_end_after_texts(tokenizer: Tokenizer, end: str) -> None:
    """Put the end token after texts, whose last token an embedder reads, where the folder's settings ask for it.

    tokenizer.json of e5-mistral does not; transformers before version 5 went by `add_eos_token` all the same.
    """
    token, plain = tokenizer.token_to_id(end), tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    if token is None or whole[-1:] == [token]:
        return
    count = len(whole) - len(plain)
    begin = [tokenizer.id_to_token(token) or "" for token in whole[:count]]
    if whole[count:] != plain:  # something else stands after texts
        return
    before = "".join(f"{token}:0 " for token in begin)
    single = f"{before}$A:0 {end}:0"
    set_template(tokenizer, single, f"{single} {single.replace('$A', '$B').replace(':0', ':1')}", (*begin, end))


def mask(text: str, **flags: bool) -> AddedToken:
    """Return a mask token, which takes the space before it."""
    return AddedToken(text, lstrip=True, **flags)


def bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    return models.BPE(ids, merges, **options)


def set_bpe(tokenizer: Tokenizer, **options: Any) -> None:
    """Set the options of a BPE model as its class does; those that are not given are off."""
    model = tokenizer.model
    model.dropout = None
    model.unk_token = options.get("unk_token")
    for name in ("fuse_unk", "byte_fallback", "ignore_merges"):
        setattr(model, name, options.get(name, False))
