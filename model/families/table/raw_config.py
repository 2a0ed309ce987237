"""A raw config.json that records which settings a family's table reads, so that unread ones are refused.

An unread setting could change the computation unnoticed. `refuse_unread` therefore raises for every key that the
table did not read, unless the key is known to concern training, bookkeeping or generation, or is switched off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from model.errors import ConfigError

# Settings that do not change the network's results: bookkeeping, training, and generation (which
# `model.checkpoint.folder` reads). Patterns match suffixes with one meaning in any name: dropout and token ids.
_PATTERNS = ("*dropout", "*dropout_prob", "*dropout_rate", "*_pdrop", "*layerdrop", "*_token_id")
_HARMLESS = frozenset(
    """
    architectures auto_map model_type _name_or_path name_or_path transformers_version _commit_hash torch_dtype dtype
    torchscript attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    use_cache is_encoder_decoder finetuning_task tokenizer_class task_specific_params id2label label2id num_labels
    _num_labels chunk_size_feed_forward chunk_size_lm_head pruned_heads tf_legacy_loss use_bfloat16 prefix n_ctx
    sentence_transformers sbert_ce_default_activation_function
    language model_max_length tie_encoder_decoder tie_word_embeddings tie_weights_
    output_attentions output_hidden_states output_past return_dict keys_to_ignore_at_inference

    gradient_checkpointing initializer_range initializer_factor init init_range init_std embedding_init_std dropatt
    summary_type summary_use_proj summary_activation summary_proj_to_labels start_n_top end_n_top
    mem_len reuse_len use_mems use_mems_eval use_mems_train untie_r encoder_stride generator_size
    force_bos_token_to_be_generated save_step directionality pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type
    output_router_logits router_aux_loss_coef router_jitter_noise
    net_structure_type down_scale_factor gap_size num_memory_blocks vocab_size_or_config_json_file

    bad_words_ids suppress_tokens begin_suppress_tokens max_length min_length max_new_tokens min_new_tokens num_beams
    num_beam_groups do_sample temperature top_k top_p typical_p early_stopping length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size repetition_penalty diversity_penalty num_return_sequences remove_invalid_values
    exponential_decay_length_penalty cache_implementation output_scores return_dict_in_generate
    """.split()  # noqa: SIM905 (a literal would be four pages)
)


# Ends of names. Nothing else looks at an epsilon before a step computes with it, and sizes are computed with at once.
_EPSILONS = ("_eps", "_epsilon")
_SIZES = ("_size", "_heads", "_dim", "_per_tok", "coder_layers", "max_position_embeddings", "d_model", "d_ff", "d_kv")
_COUNTS = ("num_", "n_")  # beginnings of names


class Settings(Mapping[str, Any]):
    """A raw config.json that records the keys that were read."""

    def __init__(self, raw: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._raw = dict(raw)
        self._read = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        value = self._raw[key]
        if key.endswith(_EPSILONS) and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise ConfigError(f"{key} must be a number from 0 on, found {value!r}")
        if (key.endswith(_SIZES) or key.startswith(_COUNTS)) and isinstance(value, bool | float | str):
            raise ConfigError(f"{key} must be a whole number, found {value!r}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def but(self, **changes: Any) -> Settings:
        """Return a copy with other values; a key read from the copy counts as read here."""
        return Settings({**self._raw, **changes}, self._read)

    def otherwise(self, **defaults: Any) -> Settings:
        """Return a copy with values for absent keys; a key read from the copy counts as read here."""
        return Settings({**defaults, **self._raw}, self._read)

    def refuse_unread(self) -> None:
        """Raise `ConfigError` naming every setting that was not read and might change the results."""
        unknown = sorted(
            key
            for key, value in self._raw.items()
            if key not in self._read and value not in (None, False, {}, []) and not _harmless(key)
        )
        if unknown:
            raise ConfigError(
                f"config.json of a {self._raw.get('model_type')} has unknown settings: {', '.join(unknown)}"
            )


def _harmless(key: str) -> bool:
    return key in _HARMLESS or any(fnmatchcase(key, pattern) for pattern in _PATTERNS)
