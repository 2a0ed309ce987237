"""Why models of often asked types are not served; docs/downloaded.md has the same words."""

from __future__ import annotations

_TYPES = {
    "latent attention is not computed": "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite "
    "minicpm3 longcat_flash",
    "its layers (AltUp, LAuReL) are not computed": "gemma3n gemma3n_text",
    "attention in windows with global tokens is not computed": "longformer led longt5",
    "attention in blocks is not computed": "big_bird bigbird_pegasus",
    "attention in chunks is not computed": "llama4 llama4_text",
    "state-space layers are not computed": "mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba zamba2 nemotron_h "
    "granitemoehybrid plamo2",
    "its recurrent layers are not computed": "recurrent_gemma rwkv xlstm minimax kimi_linear",
    "layers of short convolutions are not computed": "lfm2 lfm2_moe lfm2_vl",
    "experts in an encoder-decoder are not computed": "switch_transformers nllb-moe",
    "weights of three values are not computed": "bitnet",
    "layers of its language model attend to an image": "mllama",
    "it reads prompts in both directions": "paligemma",
    "speech by CTC is not served": "wav2vec2 wav2vec2-bert wav2vec2-conformer hubert wavlm unispeech unispeech-sat sew "
    "sew-d data2vec-audio parakeet_ctc mctct",
    "of the models that write down speech, those of Whisper's type are served": "moonshine speech_to_text seamless_m4t "
    "seamless_m4t_v2 kyutai_speech_to_text granite_speech qwen3_asr",
    "speech out is not served": "speecht5 vits bark csm dia parler_tts fastspeech2_conformer qwen2_5_omni "
    "qwen3_omni_moe",
    "vectors that images and texts share are not served": "blip blip-2 chinese_clip altclip align clap",
    "places of words on a page are not read": "layoutlm layoutlmv2 layoutlmv3 lilt markuplm",
    "text from images is not served": "trocr vision-encoder-decoder donut-swin florence2 pix2struct",
    "two models that are joined are not served": "encoder-decoder rag",
    "its code is in published folders alone": "chatglm baichuan internlm2 qwen minicpm minicpmv minicpmo exaone "
    "internvl_chat phi4mm phi3_v",
}
NOT_SERVED = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}
