"""Which tokenizer class of `transformers` a folder has, by its files' names for it and its model's type."""

from __future__ import annotations

from model.text.tokenizer_files import Files

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
    phi3_v ernie4_5 phi3 vipllava paddleocr_vl step3_vl hyperclovax_vlm siglip2
    """.split()  # noqa: SIM905
)

# Types whose published folders name a wrong class: the type's own is taken.
_FORCED = frozenset(("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2"))

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
    if named and not known and named not in _GENERIC and files.model_type not in _FORCED:
        return ""
    return known or _BY_TYPE.get(files.model_type, "") or _OLDER_TYPES.get(files.model_type, "")
