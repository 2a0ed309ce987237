"""Tokenizer classes of `transformers`: which one a folder has, and what it does to a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

from triptych.model.text.special_tokens import Token
from triptych.model.text.tokenizer_files import SENTENCEPIECE_NAMES, Files

# -- What a tokenizer class of `transformers` does to a vocabulary, and the helpers that its entries share. A class
# decides how texts are normalised and cut, whatever tokenizer.json says, and often what stands around them.

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

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `read` needs: all of them, or one SentencePiece model."""
        if self.reads_sentencepiece:
            return SENTENCEPIECE_NAMES
        return ("vocab.json", "merges.txt") if self.kind == "BPE" else ("vocab.txt",)


# Settings of all classes that are served.
SERVED = frozenset(
    """
    added_tokens_decoder additional_special_tokens extra_special_tokens model_specific_special_tokens add_bos_token
    add_eos_token split_special_tokens fix_mistral_regex fast_tokenizer_files
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


# -- Which tokenizer class of `transformers` a folder has, by its files' names for it and its model's type.

# The classes that are built here, each with the types of models that have it.
_TYPES = {
    "Albert": "albert fnet yoso",
    "Bert": "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git grounding-dino "
    "layoutlm lxmert megatron-bert mm-grounding-dino mobilebert nezha nomic_bert qdqbert realm retribert squeezebert "
    "tvp vilt visual_bert dpr",
    "Blenderbot": "blenderbot",
    "ByT5": "byt5",
    "CLIP": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
    "Camembert": "camembert",
    "CodeLlama": "code_llama",
    "Cohere": "aya_vision cohere cohere2",
    "Deberta": "deberta",
    "DebertaV2": "deberta-v2",
    "Esm": "esm",
    "Funnel": "funnel",
    "GPT2": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt "
    "phi starcoder2",
    "GPTNeoX": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "Gemma": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 "
    "t5gemma zaya",
    "Llama": "idefics idefics2",
    "M2M100": "m2m_100",
    "MBart": "mbart",
    "MBart50": "mbart50",
    "MPNet": "mpnet",
    "Marian": "marian",
    "Nllb": "nllb nllb-moe",
    "Pegasus": "pegasus",
    "Qwen2": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
    "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
    "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "Roberta": "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mega mra mvp roberta "
    "roberta-prelayernorm",
    "Siglip": "siglip",
    "Siglip2": "siglip2",
    "T5": "mt5 musicgen musicgen_melody switch_transformers t5",
    "Whisper": "whisper",
    "XGLM": "xglm",
    "XLMRoberta": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    "XLNet": "xlnet",
}
_BY_TYPE = {model_type: name for name, types in _TYPES.items() for model_type in types.split()}

# Types whose tokenizer.json is used as it is, whatever class the folder names.
_AS_WRITTEN = frozenset(
    """
    EvollaModel aria beam bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image
    glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared kimi_k25
    kimi_linear kosmos-2 mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 ministral ministral3 mistral mistral3
    mistral_large4 mixtral nemo_speechlm nystromformer olmo2 olmo3 olmo_hybrid pegasus_x persimmon pix2struct
    pixtral pocket_tts stablelm umt5 voxtral voxtral_realtime xlm-roberta-xl fuyu llava_next iquestcoder openvla
    cohere_asr hyperclovax minicpmv nemotron smolvlm llava molmo internlm3 ernie4_5_moe minicpm3 molmo2 minimax_m2
    phimoe internlm2 modernbert-decoder nvfp4 camembertv2-base h2ovl_chat jamba arctic chatlm modernbert opencua
    phi3_v ernie4_5 phi3 vipllava paddleocr_vl step3_vl hyperclovax_vlm
    """.split()  # noqa: SIM905
)

# Types whose published folders name a wrong class: the type's own is taken.
_FORCED = frozenset(
    ("siglip2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2")
)

# Names that say nothing of a class.
_GENERIC = frozenset(("PreTrained", "TokenizersBackend", "PythonBackend", "SentencePieceBackend", "Auto"))

_ALIASES = {
    **dict.fromkeys(("DistilBert", "Electra", "MobileBert", "SqueezeBert", "LayoutLM", "Lxmert", "ConvBert"), "Bert"),
    **dict.fromkeys(("DPRContextEncoder", "DPRQuestionEncoder", "DPRReader"), "Bert"),
    **dict.fromkeys(("Bart", "Longformer", "LED", "Mvp"), "Roberta"),
    **{"FNet": "Albert", "CodeGen": "GPT2"},
}

# Types without a class of their own there, whose folders from before tokenizer.json have one.
_OLDER_TYPES = {"llama": "Llama", "mistral": "Llama", "mixtral": "Llama", "umt5": "T5", "xlm-roberta-xl": "XLMRoberta"}


def class_over_json(files: Files) -> str:
    """Return the class that decides how a folder's tokenizer.json is used, as in `transformers`; "" for none."""
    named, model_type = files.tokenizer_class, files.model_type
    registered = _BY_TYPE.get(model_type, "")
    known = _ALIASES.get(named, named if named in _TYPES else "")
    if not named or model_type in _FORCED:
        return registered
    if model_type in _AS_WRITTEN or (known == "Llama" and files.json_is_byte_level):
        return ""
    return known


def class_of_older_files(files: Files) -> str:
    """Return the class that tells which other files a folder has instead of tokenizer.json; "" if none is known.

    A class that the folder names and that is not built here (BertJapanese, which needs a dictionary of words) is not
    replaced by the usual one of the model's type: ids would be wrong.
    """
    named = files.tokenizer_class
    known = _ALIASES.get(named, named if named in _TYPES else "")
    if files.model_type in _FORCED:
        known = _BY_TYPE[files.model_type]
    if named and not known and named not in _GENERIC:
        return ""
    return known or _BY_TYPE.get(files.model_type, "") or _OLDER_TYPES.get(files.model_type, "")
