"""Tiny random checkpoints, written by `transformers` and read by our loader: one row of `KINDS` for each kind.

Weights are drawn anew with a standard deviation of about 0.3, because the library's own initialisation is so small that
all outputs look alike. A checkpoint is made once a test run: processes that share the suite out share the folders.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.model.decoder_rows import (
    BLOOM,
    DENSE_DECODERS,
    EXPERTS,
    LLAMA,
    RECURRENT,
    SIZES,
    T5GEMMA,
    VOCAB,
    Rows,
    random_model,
)
from tests.model.picture_models import PICTURE_MODELS, pictures_for_reference, write_processor
from triptych.model.api.request import ImageSpan, Source, SourceKind, audio_source, token_source
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.native import NativeBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.selection import Selection, select_layers
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.config.model import AudioConfig, ModelConfig
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.native.library import Library, native
from triptych.model.network.build import plain_parameters
from triptych.model.network.native_stack import attach_native_stacks, native_linears
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model

torch.set_num_threads(1)

START = 0  # decoder_start_token_id of the encoder-decoders
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Saved:
    """A checkpoint folder, and on request the `transformers` model that wrote it."""

    kind: str
    path: Path

    @cached_property
    def reference(self) -> Any:
        return _random(self.kind).float().eval().requires_grad_(False)


def _marian(**changes: Any) -> Callable[[], Any]:
    """Return a maker of a Marian model; with an untied head the library also unties the stacks' tables."""

    def make() -> Any:
        silu = dict(decoder_vocab_size=VOCAB, activation_function="silu")
        model = random_model("MarianMTModel", {**BART, **silu}, **changes)()
        model.model.encoder.embed_tokens.weight = model.model.decoder.embed_tokens.weight = model.model.shared.weight
        return model

    return make


def _marian_two() -> Callable[[], Any]:
    apart = dict(share_encoder_decoder_embeddings=False, vocab_size=VOCAB + 12, decoder_vocab_size=VOCAB)
    return random_model("MarianMTModel", {**BART, "activation_function": "silu"}, **apart)


def _t5_untied(architecture: str, **changes: Any) -> Callable[[], Any]:
    """Return a maker of an untied T5: the library would tie the head, but published untied folders store their own."""

    def make() -> Any:
        model = random_model(architecture, T5, tie_word_embeddings=False, feed_forward_proj="gated-gelu", **changes)()
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 32))
        return model

    return make


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1000.0, **settings))


# Windows shorter than prompts, a scale that is not 1 / sqrt(head size), head sizes other than width / heads.
GEMMA: dict[str, Any] = {
    **LLAMA,
    **dict(head_dim=12, query_pre_attn_scalar=20, sliding_window=5, final_logit_softcapping=3.0),
    **dict(tie_word_embeddings=True, attn_implementation="eager"),
}
_GEMMA3: dict[str, Any] = dict(
    sliding_window_pattern=3,
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
        sliding_attention=dict(rope_type="default", rope_theta=300.0),
    ),
)
NEOX = dict(**SIZES, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GPT2 = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
BERT = dict(**SIZES, max_position_embeddings=64, type_vocab_size=2)
ROBERTA = dict(**SIZES, max_position_embeddings=66, type_vocab_size=1)  # the first two rows belong to no position
# The embedding of a masked token is zeros; the mask's id is one that texts contain.
ESM = dict(**SIZES, max_position_embeddings=66, pad_token_id=1, mask_token_id=40, token_dropout=True)
ESM |= dict(position_embedding_type="rotary")
MPNET = dict(**SIZES, max_position_embeddings=66, pad_token_id=1)
# Fewer buckets than positions, so that some are logarithmic, and inputs beyond the longest distance.
DEBERTA: dict[str, Any] = dict(**BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16)
DEBERTA_V2: dict[str, Any] = {
    **DEBERTA,
    **dict(type_vocab_size=0, position_biased_input=False, position_buckets=6, norm_rel_ebd="layer_norm"),
    **dict(share_att_key=True),
}
_UNSHARED = dict(share_att_key=False, type_vocab_size=2, position_biased_input=True, embedding_size=12)
_CONVOLVED = dict(conv_kernel_size=3, conv_act="gelu", num_hidden_layers=3, attention_head_size=8)
# Windows shorter than texts on both sides, and two layers of each kind.
MODERNBERT: dict[str, Any] = {
    **SIZES,
    **dict(num_hidden_layers=5, max_position_embeddings=64, local_attention=6, pad_token_id=0),
}
_MODERNBERT_ROPES = dict(
    full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=300.0),
)
DISTILBERT = dict(vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64)
XLNET = dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48)
VIT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
)
# Two stacks of odd sizes; an image has pixels beyond the last whole patch.
_TOWER = dict(num_hidden_layers=2, intermediate_size=52)
_TOWERS: dict[str, Any] = dict(
    vision_config=dict(_TOWER, hidden_size=48, num_attention_heads=3, image_size=34, patch_size=8),
    text_config=dict(_TOWER, vocab_size=96, hidden_size=40, num_attention_heads=5, eos_token_id=2, bos_token_id=1),
)
CLIP: dict[str, Any] = dict(
    vision_config=_TOWERS["vision_config"],
    text_config=dict(_TOWERS["text_config"], max_position_embeddings=20, eos_token_id=3),
    projection_dim=24,
)
SIGLIP: dict[str, Any] = dict(
    vision_config=_TOWERS["vision_config"],
    text_config=dict(_TOWERS["text_config"], max_position_embeddings=16, projection_size=48),
)
_ANY_SHAPE = {key: value for key, value in SIGLIP["vision_config"].items() if key != "image_size"}
SIGLIP2: dict[str, Any] = dict(
    vision_config=dict(_ANY_SHAPE, num_patches=25), text_config=dict(SIGLIP["text_config"], max_position_embeddings=40)
)
DINOV2 = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, mlp_ratio=2)
BART = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=128,
    scale_embedding=True,
    pad_token_id=1,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=START,
)
# Different numbers of layers in the two stacks, and an odd number of positions.
WHISPER = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=40,
    num_mel_bins=10,
    max_source_positions=13,
    max_target_positions=128,
    pad_token_id=1,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=START,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
AUDIO = {"whisper": AudioConfig(num_mel_bins=10, num_positions=13)}  # by kind
T5 = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=12,  # of its own: heads x d_kv is not d_model
    d_ff=48,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=START,
    eos_token_id=2,
    pad_token_id=START,
)

_DECODERS: Rows = {
    "llama": random_model("LlamaForCausalLM", LLAMA, num_key_value_heads=4),
    "llama-tied": random_model("LlamaForCausalLM", LLAMA, tie_word_embeddings=True),
    "llama-gqa": random_model("LlamaForCausalLM", LLAMA, rope_theta=500.0),
    "llama-mqa-head-dim": random_model("LlamaForCausalLM", LLAMA, num_key_value_heads=1, head_dim=12),
    "llama-bias": random_model("LlamaForCausalLM", LLAMA, attention_bias=True),
    "llama-sharded": random_model("LlamaForCausalLM", LLAMA, num_key_value_heads=4, num_hidden_layers=3),
    "llama-linear": random_model("LlamaForCausalLM", LLAMA, **_rope("linear", factor=4.0)),
    "llama-dynamic": random_model("LlamaForCausalLM", LLAMA, **_rope("dynamic", factor=2.0)),
    "llama-llama3": random_model(
        "LlamaForCausalLM",
        LLAMA,
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-yarn": random_model(
        "LlamaForCausalLM", LLAMA, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "mistral": random_model("MistralForCausalLM", LLAMA, sliding_window=4),
    "qwen2": random_model("Qwen2ForCausalLM", LLAMA),
    "qwen3": random_model("Qwen3ForCausalLM", LLAMA, head_dim=12),
    "phi3": random_model("Phi3ForCausalLM", LLAMA, partial_rotary_factor=0.5),
    "gemma": random_model("GemmaForCausalLM", LLAMA, head_dim=16, tie_word_embeddings=True),
    "gemma2": random_model("Gemma2ForCausalLM", GEMMA, num_hidden_layers=3, attn_logit_softcapping=2.0),
    "gemma3": random_model("Gemma3ForCausalLM", GEMMA, num_hidden_layers=5, **_GEMMA3),
    "gpt2": random_model("GPT2LMHeadModel", GPT2),
    "gpt-neox": random_model("GPTNeoXForCausalLM", NEOX, rotary_pct=0.5),
    "gpt-neox-sequential": random_model("GPTNeoXForCausalLM", NEOX, use_parallel_residual=False, attention_bias=False),
    **DENSE_DECODERS,
}
_ENCODER_DECODERS: Rows = {
    "marian": _marian(),
    # Sides with vocabularies of their own (opus-mt-tc-big).
    "marian-two-vocabularies": _marian_two(),
    "marian-unscaled-relu": _marian(scale_embedding=False, activation_function="relu"),
    "marian-untied": _marian(tie_word_embeddings=False),
    "bart": random_model("BartForConditionalGeneration", BART, scale_embedding=False),
    "mvp": random_model("MvpForConditionalGeneration", BART, scale_embedding=False),
    "plbart": random_model("PLBartForConditionalGeneration", BART),
    "mbart": random_model("MBartForConditionalGeneration", BART),
    "m2m-100": random_model("M2M100ForConditionalGeneration", BART),
    "m2m-100-other-pad": random_model("M2M100ForConditionalGeneration", BART, pad_token_id=2, eos_token_id=1),
    "blenderbot": random_model("BlenderbotForConditionalGeneration", BART),
    "blenderbot-small": random_model("BlenderbotSmallForConditionalGeneration", BART),
    "pegasus": random_model("PegasusForConditionalGeneration", BART),
    "whisper": random_model("WhisperForConditionalGeneration", WHISPER),
    "t5gemma": random_model("T5GemmaForConditionalGeneration", T5GEMMA),
    "t5-relu": random_model("T5ForConditionalGeneration", T5),
    "t5-gated-untied": _t5_untied("T5ForConditionalGeneration", num_decoder_layers=3),
    "mt5": _t5_untied("MT5ForConditionalGeneration"),
    "mt5-tied": random_model("MT5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu"),
    "umt5": _t5_untied("UMT5ForConditionalGeneration"),
    "umt5-tied": random_model("UMT5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu"),
}
_ENCODERS: Rows = {
    "t5-encoder": random_model("T5EncoderModel", T5),
    "bert": random_model("BertModel", BERT),
    "bert-no-pooler": random_model("BertForMaskedLM", BERT),
    "roberta": random_model("RobertaModel", ROBERTA),
    "xlm-roberta": random_model("XLMRobertaModel", ROBERTA),
    "camembert": random_model("CamembertModel", ROBERTA),
    "xlm-roberta-xl": random_model("XLMRobertaXLModel", ROBERTA),
    "mpnet": random_model("MPNetModel", MPNET),
    "modernbert": random_model("ModernBertModel", MODERNBERT, rope_parameters=_MODERNBERT_ROPES),
    "modernbert-biases": random_model(
        "ModernBertForMaskedLM",
        MODERNBERT,
        **dict(local_attention=9, norm_bias=True, attention_bias=True, mlp_bias=True),
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    ),
    "eurobert": random_model("EuroBertModel", LLAMA),
    "nomic-bert": random_model("NomicBertModel", BERT),
    "gte": random_model("GteModel", BERT, pad_token_id=0),
    "gte-no-types": random_model("GteForMaskedLM", BERT, pad_token_id=0, type_vocab_size=0),
    "jina-v3": random_model("JinaEmbeddingsV3Model", ROBERTA),
    "data2vec-text": random_model("Data2VecTextModel", ROBERTA),
    "megatron-bert": random_model("MegatronBertModel", BERT),
    "roberta-prelayernorm": random_model("RobertaPreLayerNormModel", ROBERTA),
    "rembert": random_model("RemBertModel", BERT, input_embedding_size=12),
    "ernie": random_model("ErnieModel", BERT, use_task_id=True),
    "esm": random_model("EsmModel", ESM),
    "esm-learned": random_model(
        "EsmModel", ESM, position_embedding_type="absolute", emb_layer_norm_before=True, token_dropout=False
    ),
    "distilbert": random_model("DistilBertModel", DISTILBERT),
    "albert": random_model("AlbertModel", BERT, embedding_size=12),
    "electra": random_model("ElectraModel", BERT, embedding_size=12),
    "xlnet": random_model("XLNetModel", XLNET),
    "gemma3-both-ways": random_model(
        "Gemma3TextModel", GEMMA, num_hidden_layers=5, use_bidirectional_attention=True, **_GEMMA3
    ),
    "qwen2-both-ways": random_model("Qwen2Model", LLAMA, is_causal=False, attn_implementation="eager"),
    "mistral-both-ways": random_model(
        "MistralModel", LLAMA, is_causal=False, sliding_window=4, attn_implementation="eager"
    ),
    "deberta": random_model("DebertaModel", DEBERTA),
    "deberta-p2c": random_model("DebertaModel", DEBERTA, pos_att_type=["p2c"], max_relative_positions=-1),
    "deberta-v2": random_model("DebertaV2Model", DEBERTA_V2),
    "deberta-v2-convolution": random_model("DebertaV2Model", DEBERTA_V2, **_CONVOLVED, pos_att_type="c2p"),
    "deberta-v2-unshared": random_model("DebertaV2Model", DEBERTA_V2, **_UNSHARED),
    "vit": random_model("ViTModel", VIT),
    "deit": random_model("DeiTModel", VIT),
    "dinov2": random_model("Dinov2Model", DINOV2),
    "dinov2-gated": random_model("Dinov2Model", DINOV2, use_swiglu_ffn=True),
    "dinov2-registers": random_model("Dinov2WithRegistersModel", DINOV2, num_register_tokens=3),
}
_LABELS = dict(num_labels=3)
_CLASSIFIERS: Rows = {
    "bert-sequence": random_model("BertForSequenceClassification", BERT, **_LABELS),
    "bert-token": random_model("BertForTokenClassification", BERT, **_LABELS),
    "roberta-sequence": random_model("RobertaForSequenceClassification", ROBERTA, **_LABELS),
    "roberta-token": random_model("RobertaForTokenClassification", ROBERTA, **_LABELS),
    "xlm-roberta-xl-sequence": random_model("XLMRobertaXLForSequenceClassification", ROBERTA, **_LABELS),
    "mpnet-sequence": random_model("MPNetForSequenceClassification", MPNET, **_LABELS),
    "modernbert-sequence": random_model("ModernBertForSequenceClassification", MODERNBERT, **_LABELS),
    "modernbert-sequence-mean": random_model(
        "ModernBertForSequenceClassification",
        MODERNBERT,
        **dict(classifier_pooling="mean", classifier_bias=True, classifier_activation="silu", norm_bias=True),
        **_LABELS,
    ),
    "modernbert-token": random_model("ModernBertForTokenClassification", MODERNBERT, **_LABELS),
    "eurobert-sequence": random_model("EuroBertForSequenceClassification", LLAMA, **_LABELS),
    "eurobert-sequence-mean": random_model(
        "EuroBertForSequenceClassification", LLAMA, classifier_pooling="mean", **_LABELS
    ),
    "nomic-bert-sequence": random_model("NomicBertForSequenceClassification", BERT, **_LABELS),
    "gte-sequence": random_model("GteForSequenceClassification", BERT, pad_token_id=0, **_LABELS),
    "jina-v3-sequence": random_model("JinaEmbeddingsV3ForSequenceClassification", ROBERTA, **_LABELS),
    "data2vec-text-sequence": random_model("Data2VecTextForSequenceClassification", ROBERTA, **_LABELS),
    "megatron-bert-sequence": random_model("MegatronBertForSequenceClassification", BERT, **_LABELS),
    "roberta-prelayernorm-sequence": random_model("RobertaPreLayerNormForSequenceClassification", ROBERTA, **_LABELS),
    "rembert-sequence": random_model("RemBertForSequenceClassification", BERT, input_embedding_size=12, **_LABELS),
    "ernie-token": random_model("ErnieForTokenClassification", BERT, use_task_id=True, **_LABELS),
    "esm-sequence": random_model("EsmForSequenceClassification", ESM, **_LABELS),
    "esm-token": random_model("EsmForTokenClassification", ESM, **_LABELS),
    "distilbert-sequence": random_model("DistilBertForSequenceClassification", DISTILBERT, **_LABELS),
    "distilbert-token": random_model("DistilBertForTokenClassification", DISTILBERT, **_LABELS),
    "albert-sequence": random_model("AlbertForSequenceClassification", BERT, embedding_size=12, **_LABELS),
    "albert-token": random_model("AlbertForTokenClassification", BERT, embedding_size=12, **_LABELS),
    "electra-sequence": random_model("ElectraForSequenceClassification", BERT, embedding_size=12, **_LABELS),
    "electra-token": random_model("ElectraForTokenClassification", BERT, embedding_size=12, **_LABELS),
    "deberta-sequence": random_model("DebertaForSequenceClassification", DEBERTA, **_LABELS),
    "deberta-v2-sequence": random_model(
        "DebertaV2ForSequenceClassification", DEBERTA_V2, pooler_hidden_act="tanh", **_LABELS
    ),
    "deberta-v2-token": random_model("DebertaV2ForTokenClassification", DEBERTA_V2, **_LABELS),
    "xlnet-sequence": random_model("XLNetForSequenceClassification", XLNET, **_LABELS),
    "llama-sequence": random_model("LlamaForSequenceClassification", LLAMA, **_LABELS),
    "llama-token": random_model("LlamaForTokenClassification", LLAMA, **_LABELS),
    "gpt2-sequence": random_model("GPT2ForSequenceClassification", GPT2, **_LABELS),
    "gpt2-token": random_model("GPT2ForTokenClassification", GPT2, **_LABELS),
    "gpt-neox-token": random_model("GPTNeoXForTokenClassification", NEOX, **_LABELS),
    "phi-sequence": random_model("PhiForSequenceClassification", LLAMA, num_key_value_heads=4, **_LABELS),
    "bloom-token": random_model("BloomForTokenClassification", BLOOM, **_LABELS),
    "deit-image": random_model("DeiTForImageClassification", VIT, **_LABELS),
    "deit-teacher": random_model("DeiTForImageClassificationWithTeacher", VIT, **_LABELS),
    "dinov2-image": random_model("Dinov2ForImageClassification", DINOV2, **_LABELS),
    "dinov2-registers-image": random_model(
        "Dinov2WithRegistersForImageClassification", DINOV2, num_register_tokens=3, **_LABELS
    ),
    "vit-image": random_model("ViTForImageClassification", VIT, **_LABELS),
}
_VERDICTS = ("contradiction", "neutral", "ENTAILMENT")
_NLI = dict(id2label=dict(enumerate(_VERDICTS)), label2id={name: at for at, name in enumerate(_VERDICTS)})
_NER = dict(id2label=dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))))
# Heads that only tests of their outputs use; the networks below them are those of `KINDS`.
HEADS: Rows = {
    "bert-masked": random_model("BertForMaskedLM", BERT),
    "qwen3-5-sequence": random_model("Qwen3_5TextForSequenceClassification", RECURRENT, **_LABELS),
    "clip": random_model("CLIPModel", CLIP),
    "siglip": random_model("SiglipModel", SIGLIP),
    "siglip2": random_model("Siglip2Model", SIGLIP2),
    # With experts in every layer, as GGUF has them.
    "qwen2-moe-every": random_model("Qwen2MoeForCausalLM", LLAMA, **EXPERTS, shared_expert_intermediate_size=28),
    "qwen3-moe-every": random_model("Qwen3MoeForCausalLM", LLAMA, **EXPERTS, norm_topk_prob=True),
    # As llama.cpp converts them: every fourth layer of Cohere 2 has full attention, and its head is tied.
    "cohere2-windows": random_model(
        "Cohere2ForCausalLM", LLAMA, num_hidden_layers=4, sliding_window=5, logit_scale=0.5, tie_word_embeddings=True
    ),
    "qwen3-5-thrice": random_model("Qwen3_5ForCausalLM", RECURRENT, linear_num_value_heads=6, linear_value_head_dim=32),
    "qwen3-next-every": random_model("Qwen3NextForCausalLM", RECURRENT, **EXPERTS, shared_expert_intermediate_size=24),
    "modernbert-plain": random_model("ModernBertModel", MODERNBERT),
    "bert-masked-untied": random_model("BertForMaskedLM", BERT, tie_word_embeddings=False),
    "roberta-masked": random_model("RobertaForMaskedLM", ROBERTA),
    "xlm-roberta-masked": random_model("XLMRobertaForMaskedLM", ROBERTA),
    "data2vec-text-masked": random_model("Data2VecTextForMaskedLM", ROBERTA),
    "megatron-bert-masked": random_model("MegatronBertForMaskedLM", BERT),
    "roberta-prelayernorm-masked": random_model("RobertaPreLayerNormForMaskedLM", ROBERTA),
    "rembert-masked": random_model("RemBertForMaskedLM", BERT, input_embedding_size=12, output_embedding_size=20),
    "ernie-masked": random_model("ErnieForMaskedLM", BERT, use_task_id=True),
    "ernie-answers": random_model("ErnieForQuestionAnswering", BERT),
    "esm-masked": random_model("EsmForMaskedLM", ESM),
    "distilbert-masked": random_model("DistilBertForMaskedLM", DISTILBERT),
    "albert-masked": random_model("AlbertForMaskedLM", BERT, embedding_size=12),
    "electra-masked": random_model("ElectraForMaskedLM", BERT, embedding_size=12),
    "mpnet-masked": random_model("MPNetForMaskedLM", MPNET),
    "modernbert-masked": random_model("ModernBertForMaskedLM", MODERNBERT),
    "modernbert-masked-no-bias": random_model("ModernBertForMaskedLM", MODERNBERT, decoder_bias=False),
    "eurobert-masked": random_model("EuroBertForMaskedLM", LLAMA),
    "eurobert-masked-tied": random_model("EuroBertForMaskedLM", LLAMA, tie_word_embeddings=True),
    "nomic-bert-masked": random_model("NomicBertForMaskedLM", BERT),
    "gte-masked": random_model("GteForMaskedLM", BERT, pad_token_id=0),
    "jina-v3-masked": random_model("JinaEmbeddingsV3ForMaskedLM", ROBERTA),
    "deberta-v2-masked": random_model("DebertaV2ForMaskedLM", DEBERTA_V2),
    "deberta-masked-not-legacy": random_model("DebertaForMaskedLM", DEBERTA, legacy=False),
    "bert-entities": random_model("BertForTokenClassification", BERT, **_NER),
    "bert-answers": random_model("BertForQuestionAnswering", BERT),
    "bert-long-answers": random_model("BertForQuestionAnswering", {**BERT, "max_position_embeddings": 512}),
    "roberta-answers": random_model("RobertaForQuestionAnswering", ROBERTA),
    "distilbert-answers": random_model("DistilBertForQuestionAnswering", DISTILBERT),
    "albert-answers": random_model("AlbertForQuestionAnswering", BERT, embedding_size=12),
    "electra-answers": random_model("ElectraForQuestionAnswering", BERT, embedding_size=12),
    "modernbert-answers": random_model("ModernBertForQuestionAnswering", MODERNBERT),
    "deberta-v2-answers": random_model("DebertaV2ForQuestionAnswering", DEBERTA_V2),
    "bert-nli": random_model("BertForSequenceClassification", BERT, **_NLI),
    "bart-nli": random_model("BartForSequenceClassification", BART, scale_embedding=False, **_NLI),
}
KINDS: Rows = {**_DECODERS, **_ENCODER_DECODERS, **_ENCODERS, **_CLASSIFIERS}
DECODERS, ENCODER_DECODERS, ENCODERS, CLASSIFIERS = map(tuple, (_DECODERS, _ENCODER_DECODERS, _ENCODERS, _CLASSIFIERS))


@cache
def saved(kind: str) -> Saved:
    """Return the checkpoint of a kind; tests share it and must not write into its folder (see `copied`)."""
    path = _root() / kind
    found = Saved(kind, path)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=_root()) as made:
            model = _random(kind)
            model.save_pretrained(made, max_shard_size="20KB" if kind.endswith("sharded") else "1GB")
            write_processor(kind, Path(made))
            with suppress(OSError):  # another process was faster
                Path(made).rename(path)
        found.__dict__["reference"] = model.float().eval().requires_grad_(False)
    return found


def _random(kind: str) -> Any:
    """Return the `transformers` model of a kind, the same in every run and in any order of calls."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(len(kind))
        model = {**KINDS, **HEADS, **PICTURE_MODELS}[kind]()
        # T5 does not scale its scores: 0.3 would saturate its softmax. After Qwen3.5's norms, whose gains are then
        # around 2, experts would amplify rounding: the last bits of the embeddings would move the logits of
        # `transformers` by 3e-4.
        randomise(model, std=0.2 if kind.startswith(("t5", "mt5", "umt5", "qwen3-5-moe")) else 0.3)
    return model


def copied(kind: str, into: Path) -> Path:
    """Return a copy of the folder that a test may change."""
    return Path(shutil.copytree(saved(kind).path, into / kind))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@cache
def _root() -> Path:
    """Return the folder that all processes of a test run share (tests/workers.py), or one of this process."""
    if shared := os.environ.get("CHECKPOINTS_OF_TRIPTYCH_TESTS"):
        return Path(shared)
    root = tempfile.mkdtemp(prefix="triptych-tests-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@torch.no_grad()
def randomise(model: torch.nn.Module, std: float = 0.3) -> None:
    """Randomise all weights, norms around 1; keep sinusoidal tables."""
    computed = {f"{name}.weight" for name, module in model.named_modules() if "Sinusoidal" in type(module).__name__}
    for name, parameter in model.named_parameters():
        if name not in computed:
            is_norm = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=std)


def loaded(kind: str, backend: AttentionBackend | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
    """Load the kind's checkpoint with our loader; C computes it where the backend runs whole stacks."""
    checkpoint = read_checkpoint(saved(kind).path)
    if isinstance(backend, NativeBackend):
        return load_native(checkpoint, backend.library, dtype)
    return load_model(checkpoint, by_layer(backend or SdpaBackend(), checkpoint.config, dtype), LinearFactory(dtype))


def by_layer(backend: AttentionBackend, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend, with torch's backend for the layers that it cannot compute."""
    return select_layers(Selection(backend, "asked for"), config, dtype, dtype).backend


def load_native(
    checkpoint: Checkpoint, library: Library, dtype: torch.dtype = torch.float32, *, quantization: str = "none"
) -> Transformer:
    """Load the network of a checkpoint for computation in C."""
    linear = native_linears(checkpoint.config, dtype, library, quantization=quantization)
    model = load_model(checkpoint, by_layer(NativeBackend(library), checkpoint.config, dtype), linear)
    attach_native_stacks(model)
    return model


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters of a torch network into a stack or network, whatever class its projections have."""
    parameters = {name: parameter.detach() for name, parameter in source.named_parameters()}
    for linear in linears(target):
        for name in linear.tensors():
            linear.fill(name, (slice(0, len(parameters[name])),), parameters[name])
        linear.finish()
    target.load_state_dict({name: parameters[name] for name in plain_parameters(target)}, strict=False, assign=True)


def native_backends() -> tuple[NativeBackend, ...]:
    """Return the native backend if this machine has it: a library, or GCC and a cache folder."""
    found = native()
    return (NativeBackend(found),) if isinstance(found, Library) else ()


def contents(model: Transformer) -> dict[str, Tensor]:
    """Return the parameters and the packed arrays of a model."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for linear in linears(model):
        if isinstance(linear, NativeLinear):
            found |= {f"{linear.spec.name}: {part}": array for part, array in linear.arrays.items()}
    return found


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids other than the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


def source_of(audio: AudioConfig | None, length: int, seed: int = 0) -> Source:
    """Return a random source: `length` tokens, or a window of sound, whose length is fixed."""
    if audio is None:
        return token_source(prompt(length, seed))
    shape = (audio.num_mel_bins, audio.num_frames)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + length))
    return audio_source(features.numpy().tobytes(), shape, audio.num_positions)


def reference_input(source: Source) -> dict[str, Tensor]:
    """Return the source as `transformers` takes it."""
    if source.kind is SourceKind.AUDIO:
        frames = torch.frombuffer(bytearray(source.features), dtype=torch.float32)
        return {"input_features": frames.view(1, *source.shape)}
    return {"input_ids": torch.tensor([list(source.token_ids)])}


_LOGITS: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}


def reference_logits(
    kind: str, ids: Sequence[int], source: Source | None = None, images: Sequence[ImageSpan] = ()
) -> Tensor:
    """Return the logits `[L, V]` of `transformers` after each of the decoder's `ids`, in one full forward pass."""
    key = (kind, tuple(ids), b"".join(one.digest for one in (source, *(span.source for span in images)) if one))
    if key not in _LOGITS:
        given = {"input_ids": torch.tensor([key[1]])}
        if source is not None:
            given = {**reference_input(source), "decoder_input_ids": given["input_ids"]}
        if images:
            given |= pictures_for_reference(kind, images, ids)
        with torch.inference_mode():
            _LOGITS[key] = saved(kind).reference(**given).logits[0]
    return _LOGITS[key]
