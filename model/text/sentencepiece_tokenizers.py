"""Tokenizers of SentencePiece models, one function a tokenizer class, computed by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model.errors import ConfigError
from model.text.languages import MBART50_LANGUAGES, MBART_LANGUAGES
from model.text.sentencepiece_model import Algorithm, Piece, PieceKind, SentencePieceModel
from model.text.tokenizer_files import Files

SPACE = "\u2581"  # SentencePiece's visible space
_SPACES = normalizers.Replace(Regex(" {2,}"), " ")
Vocabulary = list[tuple[str, float]]  # pieces by id, with their scores


def with_specials(tokenizer: Tokenizer, files: Files, tokens: Iterable[AddedToken]) -> Tokenizer:
    """Add special tokens, which get new ids where the vocabulary does not have them."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([token for token in (*tokens, *files.additional()) if token.content not in known])
    return tokenizer


def set_template(tokenizer: Tokenizer, single: str, pair: str, tokens: Iterable[AddedToken]) -> None:
    ids = [(token.content, tokenizer.token_to_id(token.content)) for token in tokens]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def put_end_behind_texts(tokenizer: Tokenizer, files: Files) -> None:
    """Put the end token behind texts, whose last token an embedder reads, where the folder's settings ask for it.

    tokenizer.json of e5-mistral does not; transformers before version 5 went by `add_eos_token` all the same.
    """
    text = files.special("eos_token", "</s>")
    end, plain = tokenizer.token_to_id(text.content), tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    if end is None or whole[-1:] == [end]:
        return
    count = len(whole) - len(plain)
    begin = [AddedToken(tokenizer.id_to_token(token)) for token in whole[:count]]
    if whole[count:] != plain:  # something else stands behind texts
        return
    before = "".join(f"{token.content}:0 " for token in begin)
    single = f"{before}$A:0 {text.content}:0"
    set_template(tokenizer, single, f"{single} {single.replace('$A', '$B').replace(':0', ':1')}", (*begin, text))


def put_cls_and_sep(tokenizer: Tokenizer, cls: AddedToken, sep: AddedToken, cls_type: int = 0) -> None:
    """Put `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` of two segments, around texts."""
    single = f"{cls.content}:{cls_type} $A:0 {sep.content}:0"
    set_template(tokenizer, single, f"{single} $B:1 {sep.content}:1", (cls, sep))


def _scored(pieces: Iterable[Piece]) -> Vocabulary:
    return [(piece.text, piece.score) for piece in pieces]


def _unigram(vocabulary: Vocabulary, unknown: int, before: Sequence[Any], *, words: bool = True) -> Tokenizer:
    """The likeliest segmentation; `before` normalizes, and with `words` any white space separates words."""
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    if before:
        tokenizer.normalizer = normalizers.Sequence(list(before))
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    split = [pre_tokenizers.WhitespaceSplit(), metaspace] if words else [metaspace]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    return tokenizer


def _charsmap(model: SentencePieceModel) -> list[Any]:
    return [normalizers.Precompiled(model.charsmap)] if model.charsmap else []


def _model_specials(tokenizer: Tokenizer, model: SentencePieceModel) -> None:
    """Control pieces and those that the user defined are found in a text before it is split."""
    for piece in model.pieces:
        if piece.kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED):
            special = piece.kind is PieceKind.CONTROL
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=special)])


def t5(files: Files) -> Tokenizer:
    """T5: sentinels `<extra_id_99>` to `<extra_id_0>` behind the pieces."""
    model = files.sentencepiece()
    count = files.setting("extra_ids", 100)
    sentinels = [f"<extra_id_{number}>" for number in range(count - 1, -1, -1)]
    vocabulary = _scored(model.pieces)
    known = {text for text, _ in vocabulary}
    vocabulary += [(text, 0.0) for text in sentinels if text not in known]
    tokenizer = _unigram(vocabulary, model.unknown_id, _charsmap(model))
    _model_specials(tokenizer, model)
    specials = [files.special(f"{name}_token", f"<{name}>") for name in ("unk", "pad")]
    eos = files.special("eos_token", "</s>")
    sentinel_tokens = [AddedToken(text, special=True, normalized=False) for text in sentinels]
    with_specials(tokenizer, files, [eos, *specials, *sentinel_tokens])
    set_template(tokenizer, f"$A {eos.content}", f"$A {eos.content} $B {eos.content}", [eos])
    return tokenizer


def unigram(files: Files, around: Sequence[AddedToken]) -> Tokenizer:
    """A unigram model alone; `around` are tokens that a template puts around texts."""
    model = files.sentencepiece()
    tokenizer = _unigram(_scored(model.pieces), model.unknown_id, _charsmap(model))
    _model_specials(tokenizer, model)
    return with_specials(tokenizer, files, around)


def _cased(files: Files, *, lower: bool) -> list[Any]:
    """Normalizers of ALBERT and XLNet in front of the model's own."""
    found: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not files.setting("keep_accents", False):
        found += [normalizers.NFKD(), normalizers.StripAccents()]
    return found + ([normalizers.Lowercase()] if files.setting("do_lower_case", lower) else [])


def albert(files: Files) -> Tokenizer:
    model = files.sentencepiece()
    before = [*_cased(files, lower=True), *_charsmap(model)]
    tokenizer = _unigram(_scored(model.pieces), model.unknown_id, before)
    _model_specials(tokenizer, model)
    cls, sep = files.special("cls_token", "[CLS]"), files.special("sep_token", "[SEP]")
    others = [files.special("unk_token", "<unk>"), files.special("pad_token", "<pad>")]
    with_specials(tokenizer, files, [cls, sep, *others, files.special("mask_token", "[MASK]")])
    put_cls_and_sep(tokenizer, cls, sep)
    return tokenizer


def xlnet(files: Files) -> Tokenizer:
    """XLNet: `A <sep> <cls>`, the class token of a segment of its own."""
    model = files.sentencepiece()
    before = [*_cased(files, lower=False), *_charsmap(model)]
    tokenizer = _unigram(_scored(model.pieces), model.unknown_id, before)
    _model_specials(tokenizer, model)
    sep, cls = files.special("sep_token", "<sep>"), files.special("cls_token", "<cls>")
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    others = [files.special(f"{name}_token", text) for name, text in names.items()]
    with_specials(tokenizer, files, [sep, cls, *others, *map(AddedToken, ("<eop>", "<eod>"))])
    s, c = sep.content, cls.content
    set_template(tokenizer, f"$A:0 {s}:0 {c}:2", f"$A:0 {s}:0 $B:1 {s}:1 {c}:2", (sep, cls))
    return tokenizer


def _fairseq(
    files: Files, extra: Sequence[str], *, normalize: bool = True, words: bool = True
) -> tuple[Tokenizer, dict[str, AddedToken]]:
    """Pieces in fairseq's order: `<s> <pad> </s> <unk>`, the model's behind its own first three, `extra`, `<mask>`."""
    model = files.sentencepiece()
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    tokens = {name: files.special(f"{name}_token", text) for name, text in names.items()}
    vocabulary: Vocabulary = [(tokens[name].content, 0.0) for name in ("bos", "pad", "eos", "unk")]
    vocabulary += _scored(model.pieces[3:])
    vocabulary += [(text, 0.0) for text in (*extra, tokens["mask"].content)]
    before = [*(_charsmap(model) if normalize else ()), *(() if words else (_SPACES,))]
    tokenizer = _unigram(vocabulary, 3, before, words=words)
    languages = [AddedToken(text, special=True, normalized=False) for text in extra]
    with_specials(tokenizer, files, [*tokens.values(), *languages])
    return tokenizer, tokens


def xlm_roberta(files: Files) -> Tokenizer:
    tokenizer, tokens = _fairseq(files, ())
    b, e = tokens["bos"].content, tokens["eos"].content
    set_template(tokenizer, f"{b} $A {e}", f"{b} $A {e} {e} $B {e}", (tokens["bos"], tokens["eos"]))
    return tokenizer


def camembert(files: Files) -> Tokenizer:
    """CamemBERT: five tokens in front of the model's pieces, of which its own unknown piece is left out; `<mask>`."""
    model = files.sentencepiece()
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    tokens = {name: files.special(f"{name}_token", text) for name, text in names.items()}
    unused = ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"]
    first = [unused[0], tokens["pad"].content, unused[1], tokens["unk"].content]
    vocabulary: Vocabulary = [(text, 0.0) for text in first]
    vocabulary += [(unused[2], -100.0), *_scored(model.pieces[1:]), (tokens["mask"].content, 0.0)]
    tokenizer = _unigram(vocabulary, 3, _charsmap(model))
    others = [] if files.additional() else [AddedToken(text, special=True, normalized=False) for text in unused]
    with_specials(tokenizer, files, [*tokens.values(), *others])
    b, e = tokens["bos"].content, tokens["eos"].content
    set_template(tokenizer, f"{b} $A {e}", f"{b} $A {e} {e} $B {e}", (tokens["bos"], tokens["eos"]))
    return tokenizer


def deberta_v2(files: Files) -> Tokenizer:
    """DeBERTa-v2 and v3: `[CLS] A [SEP]`, normalized as the model says; `[MASK]` behind the pieces."""
    model = files.sentencepiece()
    before: list[Any] = [normalizers.Lowercase()] if files.setting("do_lower_case", False) else []
    before += [normalizers.Strip(), *_charsmap(model), _SPACES]
    tokenizer = _unigram(_scored(model.pieces), model.unknown_id, before, words=False)
    if files.setting("split_by_punct", False):
        punctuation = pre_tokenizers.Punctuation(behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([punctuation, tokenizer.pre_tokenizer])
    _model_specials(tokenizer, model)
    names = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}
    tokens = {name: files.special(f"{name}_token", text) for name, text in names.items()}
    with_specials(tokenizer, files, tokens.values())
    put_cls_and_sep(tokenizer, tokens["cls"], tokens["sep"])
    return tokenizer


def mbart(files: Files) -> Tokenizer:
    """mBART, whose languages stand behind the pieces; `model.text.source_languages` puts one beside every text."""
    return _fairseq(files, MBART_LANGUAGES, normalize=False)[0]


def mbart50(files: Files) -> Tokenizer:
    """mBART-50, likewise."""
    return _fairseq(files, MBART50_LANGUAGES, words=False)[0]


def pegasus(files: Files) -> Tokenizer:
    """Pegasus: `offset` tokens of its training between the first two and the model's pieces."""
    model = files.sentencepiece()
    offset = files.setting("offset", 103)
    pad, eos = files.special("pad_token", "<pad>"), files.special("eos_token", "</s>")
    mask, sentence = files.special("mask_token", "<mask_2>"), files.special("mask_token_sent", "<mask_1>")
    unused = [f"<unk_{number}>" for number in range(2, offset)]
    first = [pad.content, eos.content, sentence.content, mask.content, *unused]
    vocabulary: Vocabulary = [(text, 0.0 if place < 4 else -100.0) for place, text in enumerate(first)]
    vocabulary += _scored(model.pieces[2:])
    tokenizer = _unigram(vocabulary, model.unknown_id + offset, [*_charsmap(model), _SPACES], words=False)
    specials = [AddedToken(text, special=True, normalized=False) for text in unused]
    with_specials(tokenizer, files, [pad, eos, files.special("unk_token", "<unk>"), mask, sentence, *specials])
    set_template(tokenizer, f"$A {eos.content}", f"$A $B {eos.content}", [eos])
    return tokenizer


def _merges(pieces: Sequence[Piece], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that SentencePiece's BPE joins, in the order of the scores of what they become."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        for cut in range(1, len(piece.text) if piece.kind is PieceKind.NORMAL else 0):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                found.append((-piece.score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _sentencepiece_bpe(model: SentencePieceModel, ids: dict[str, int], unknown: str) -> Tokenizer:
    if model.algorithm is not Algorithm.BPE:
        raise ConfigError("its SentencePiece model must be of the type BPE")
    bpe = models.BPE(
        ids, _merges(model.pieces, ids), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback
    )
    return Tokenizer(bpe)


def llama(files: Files) -> Tokenizer:
    """Llama and Mistral: BPE with byte fallback, `<s> A`; `legacy` puts a space behind every special token too."""
    model = files.sentencepiece()
    tokenizer = _sentencepiece_bpe(model, {piece.text: token for token, piece in enumerate(model.pieces)}, "<unk>")
    prefix = files.setting("add_prefix_space", True)
    scheme = ("always" if files.setting("legacy", True) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return _around(tokenizer, files, model, files.special("bos_token", "<s>"), files.special("eos_token", "</s>"))


def gemma(files: Files) -> Tokenizer:
    model = files.sentencepiece()
    tokenizer = _sentencepiece_bpe(model, {piece.text: token for token, piece in enumerate(model.pieces)}, "<unk>")
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    bos, eos = files.special("bos_token", "<bos>"), files.special("eos_token", "<eos>")
    others = [files.special("pad_token", "<pad>"), AddedToken(files.special("mask_token", "<mask>").content)]
    return _around(tokenizer, files, model, bos, eos, others)


def _around(
    tokenizer: Tokenizer,
    files: Files,
    model: SentencePieceModel,
    bos: AddedToken,
    eos: AddedToken,
    others: Sequence[AddedToken] = (),
) -> Tokenizer:
    """Put the begin and end tokens around a text that the folder asks for."""
    _model_specials(tokenizer, model)
    with_specials(tokenizer, files, [bos, eos, files.special("unk_token", "<unk>"), *others])
    before = f"{bos.content}:0 " if files.setting("add_bos_token", True) else ""
    after = f" {eos.content}:0" if files.setting("add_eos_token", False) else ""
    pair = f"{before}$A:0{after} {before.replace(':0', ':1')}$B:1{after.replace(':0', ':1')}"
    set_template(tokenizer, f"{before}$A:0{after}", pair, (bos, eos))
    return tokenizer


def nllb(files: Files) -> Tokenizer:
    """NLLB: BPE in fairseq's order and the languages behind it."""
    model = files.sentencepiece()
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    tokens = {name: files.special(f"{name}_token", text) for name, text in names.items()}
    ids = {token.content: place for place, token in enumerate(tokens.values())}
    for piece in model.pieces:
        ids.setdefault(piece.text, len(ids))
    tokenizer = _sentencepiece_bpe(model, ids, tokens["unk"].content)
    tokenizer.normalizer = normalizers.Sequence([*_charsmap(model), _SPACES])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    languages = files.additional()
    if not languages:
        raise ConfigError(f"{files.folder.name}: additional_special_tokens must list NLLB's languages")
    tokenizer.add_special_tokens([*tokens.values(), *languages, files.special("mask_token", "<mask>")])
    return tokenizer
