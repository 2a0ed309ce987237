"""Every key of sentence-transformers' files, and what is done with it: a table that the documentation shows.

Keys that no version of the library writes are named in a warning, as those that it computes with and we do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from model.errors import listed

MODEL, NETWORK = "config_sentence_transformers.json", "sentence_bert_config.json"


class Fate(StrEnum):
    """What is done with a key."""

    SERVED = "served"
    WITHOUT_EFFECT = "without effect on vectors"
    WARNED = "not applied, with a warning"


def _of(fate: Fate, *keys: str) -> dict[str, Fate]:
    return dict.fromkeys(keys, fate)


# By file, or by the kind of the module whose config.json it is. A served key has its bad values refused.
KEYS: Mapping[str, Mapping[str, Fate]] = {
    MODEL: {
        **_of(Fate.SERVED, "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"),
        **_of(Fate.SERVED, "query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion"),
        **_of(Fate.SERVED, "attend_to_expansion_tokens", "skiplist_words", "max_active_dims"),
        **_of(Fate.WITHOUT_EFFECT, "__version__", "model_type", "keep_in_fp32_modules"),
    },
    NETWORK: {
        **_of(Fate.SERVED, "max_seq_length", "do_lower_case", "transformer_task", "modality_config"),
        **_of(Fate.SERVED, "processing_kwargs"),
        **_of(Fate.WITHOUT_EFFECT, "unpad_inputs", "module_output_name"),
        **_of(Fate.WARNED, "query_length", "document_length", "query_expansion", "model_kwargs", "processor_kwargs"),
        **_of(Fate.WARNED, "config_kwargs", "model_args", "tokenizer_args", "config_args"),
    },
    "Pooling": {
        **_of(Fate.SERVED, "pooling_mode", "include_prompt", "pooling_mode_cls_token", "pooling_mode_max_tokens"),
        **_of(Fate.SERVED, "pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens"),
        **_of(Fate.SERVED, "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
        **_of(Fate.WITHOUT_EFFECT, "embedding_dimension", "word_embedding_dimension"),
    },
    "Dense": _of(
        Fate.SERVED,
        *("in_features", "out_features", "bias", "activation_function", "use_residual"),
        *("module_input_name", "module_output_name"),
    ),
    "LayerNorm": _of(Fate.SERVED, "dimension"),
    "Normalize": _of(Fate.SERVED, "module_input_name", "module_output_name"),
    "SpladePooling": {
        **_of(Fate.SERVED, "pooling_strategy", "activation_function"),
        **_of(Fate.WITHOUT_EFFECT, "embedding_dimension", "word_embedding_dimension"),
    },
    "LogitScore": _of(Fate.SERVED, "true_token_id", "false_token_id", "module_input_name"),
}


def key_warnings(where: str, kind: str, config: Mapping[str, Any]) -> list[str]:
    """Return a warning for the keys of a file that are not applied; `where` names the file."""
    fates = KEYS[kind]
    given = [key for key, value in config.items() if value not in (None, False, {}, [])]
    found = sorted(key for key in given if fates.get(key, Fate.WARNED) is Fate.WARNED)
    return [f"{where}: keys that are not applied: {listed(found)}"] if found else []
