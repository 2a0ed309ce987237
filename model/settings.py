"""config.json as a family reads it: remembers what was looked at, so that what was not can be refused.

A setting that nobody reads could change the mathematics unnoticed. `refuse_unread` therefore raises for every key that
the family's table did not look at, unless it is one of those known to be about training, bookkeeping or generation, or
is switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from model.config import ConfigError

# About bookkeeping, training and generation (which generation_config.json, or `model.checkpoint`, takes care of).
_HARMLESS = """
    architectures auto_map model_type _name_or_path name_or_path transformers_version _commit_hash torch_dtype dtype
    torchscript
    *attn_implementation* use_cache cache_* output_* return_dict* keys_to_ignore* is_encoder_decoder finetuning_task
    tokenizer_class task_specific_params id2label label2id num_labels _num_labels chunk_size_* pruned_heads
    tf_legacy_loss use_bfloat16 prefix n_ctx language model_max_length gradient_checkpointing tie_encoder_decoder
    tie_word_embeddings

    *dropout* *drop_prob* *layerdrop* *_pdrop initializer_* init_* summary_* start_n_top end_n_top mem_len reuse_len
    use_mems* classif_* router_* dropatt gen_* untie_r force_bos_token_to_be_generated save_step directionality pooler_*
    net_structure_type down_scale_factor gap_size num_memory_blocks vocab_size_or_config_json_file encoder_stride
    embedding_init_std tie_weights_

    *_token_id *_tokens bad_words_ids max_length min_length max_new_tokens num_beams num_beam_groups do_sample
    temperature top_k top_p typical_p early_stopping length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    repetition_penalty diversity_penalty num_return_sequences remove_invalid_values exponential_decay_length_penalty
""".split()  # noqa: SIM905 (a literal would be four pages)


class Settings(Mapping[str, Any]):
    """A raw config.json."""

    def __init__(self, raw: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._raw = dict(raw)
        self._read = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def but(self, **changes: Any) -> Settings:
        """The same with other values; what is read there counts as read here."""
        return Settings({**self._raw, **changes}, self._read)

    def otherwise(self, **defaults: Any) -> Settings:
        """The same with values for keys that are absent."""
        return Settings({**defaults, **self._raw}, self._read)

    def refuse_unread(self) -> None:
        """Raise `ConfigError` naming every setting that was not looked at and might matter."""
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
    return any(fnmatchcase(key, pattern) for pattern in _HARMLESS)
