"""A raw config.json that records which settings a family's table reads, so that no other one is passed over unnoticed.

`refuse_unread` raises for every key that the table did not read and the reference's configuration class knows, unless
the key has the class's default, or concerns training, bookkeeping or generation. What that class does not know cannot
change its results: such keys are ignored, and `ignored` names them. Where a folder has code of its own (`auto_map`), or
there is no such class, keys that nothing reads are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

from triptych.model.config.bounds import MOST, MOST_HEADS
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.families.table.known_keys import UNCOMPUTED, KnownKeys, known_keys

# Settings that do not change the network's results: bookkeeping, training, and generation (which
# `triptych.model.checkpoint.folder` reads). Patterns match suffixes with one meaning in any name: dropout and token
# ids.
_PATTERNS = ("*dropout", "*dropout_prob", "*dropout_rate", "*_pdrop", "*layerdrop", "*_token_id")
_HARMLESS = frozenset(
    """
    architectures auto_map model_type _name_or_path name_or_path transformers_version _commit_hash torch_dtype dtype
    torchscript attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    use_cache is_encoder_decoder finetuning_task tokenizer_class task_specific_params id2label label2id num_labels
    _num_labels problem_type chunk_size_feed_forward chunk_size_lm_head pruned_heads tf_legacy_loss use_bfloat16
    prefix n_ctx transformers_weights sentence_transformers sbert_ce_default_activation_function
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

# The library computed these once: a model that sets one was trained so, and is another one without.
_FORMER = frozenset({"position_embedding_type"})

# Ends of names. Nothing else looks at an epsilon before a step computes with it, and sizes are computed with at once.
_EPSILONS = ("_eps", "_epsilon")
_SIZES = ("_size", "_heads", "_dim", "_per_tok", "coder_layers", "max_position_embeddings", "d_model", "d_ff", "d_kv")
_HEADS = ("head", "heads")
_COUNTS = ("num_", "n_", "sliding_window")  # beginnings of names


class Settings(Mapping[str, Any]):
    """A raw config.json that records the keys that were read.

    `known` are the keys of the reference's class; None: it has no such class, or the settings are not of its making
    (GGUF). `strict` settings have no key that nothing reads. `place` is where they stand in the file: "text_config.".
    """

    def __init__(
        self, raw: Mapping[str, Any], known: KnownKeys | None = None, *, strict: bool = True, place: str = ""
    ) -> None:
        self._raw, self._known, self._place = _in_its_own_names(raw, known), known, place
        self._strict = strict or known is None
        self._read: dict[str, None] = {}  # in order
        self.ignored: list[str] = []

    def __getitem__(self, key: str) -> Any:
        value = self._checked(key)
        if value is None and (key.endswith(_SIZES) or key.startswith(("num_", "n_"))):
            raise ConfigError(f"{self._place}{key} must be a whole number, found null")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, which may be null; `default` where the key is absent."""
        return self._checked(key) if key in self._raw else default

    def _checked(self, key: str) -> Any:
        self._read.pop(key, None)
        self._read[key] = None
        value = self._raw[key]
        if key.endswith(_EPSILONS) and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise ConfigError(f"{self._place}{key} must be a number from 0 on, found {shown(value)}")
        if (key.endswith(_SIZES) or key.startswith(_COUNTS)) and isinstance(value, bool | float | str):
            raise ConfigError(f"{self._place}{key} must be a whole number, found {shown(value)}")
        most = MOST_HEADS if key.endswith(_HEADS) else MOST
        if isinstance(value, int) and abs(value) > most:
            raise ConfigError(f"{self._place}{key} must be at most {most}, found {shown(value)}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def but(self, **changes: Any) -> Settings:
        """Return a copy with other values; a key read from the copy counts as read here."""
        changed = copy(self)
        changed._raw = {**self._raw, **changes}
        return changed

    def otherwise(self, **defaults: Any) -> Settings:
        """Return a copy with values for absent keys; a key read from the copy counts as read here."""
        return self.but(**{key: value for key, value in defaults.items() if key not in self._raw})

    def part(self, key: str, raw: object, model_type: str) -> Settings:
        """Return the settings of a part that stands at `key`, of the type that they name, else `model_type`.

        What is ignored there is named here. Raises `ConfigError` where the part is no object.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{self._place}{key} must be an object, found {shown(raw)}")
        keys = None if self._known is None else known_keys(raw.get("model_type") or model_type)
        found = Settings({"model_type": model_type, **raw}, keys, strict=self._strict, place=f"{self._place}{key}.")
        found.ignored = self.ignored
        return found

    def as_type(self, model_type: str) -> Settings:
        """Return a copy as the class of another type reads it; a key read from the copy counts as read here."""
        changed = self.but(model_type=model_type)
        changed._known = None if self._known is None else known_keys(model_type)
        changed._raw = _in_its_own_names(changed._raw, changed._known)
        return changed

    def class_defaults(self) -> dict[str, Any]:
        """Return what the class takes for keys that a file does not have."""
        known = self._known
        if known is None:
            return {}
        return {key: value for key, value in known.defaults.items() if value is not None and key not in known.renamed}

    def pass_over_known(self) -> None:
        """Let every key that the class knows count as read: nothing of it is computed."""
        if self._known is not None:
            self._read.update(dict.fromkeys(self._raw.keys() & self._known.defaults.keys()))

    def ignore(self, key: str, value: object) -> None:
        """Note a key that the reference does not use; raises `ConfigError` where a folder's own code may use it."""
        if self._strict:
            raise ConfigError(f"{self._place}{key} = {shown(value)} is not known for {self._raw.get('model_type')!r}")
        if f"{self._place}{key}" not in self.ignored:
            self.ignored.append(f"{self._place}{key}")

    def without_effect(self, key: str) -> bool:
        """Whether the reference makes nothing of a key, as its class does not know it."""
        return not self._strict and not self.knows(key)

    def knows(self, key: str) -> bool:
        """Whether the reference's class knows a key, or once computed it."""
        return self._known is not None and (key in self._known.defaults or key in _FORMER)

    @property
    def follows_class(self) -> bool:
        """Whether a class of the reference says what the settings mean."""
        return self._known is not None

    @property
    def last_read(self) -> str:
        """The keys that were read last, to say about where a value does not fit."""
        return listed(list(self._read)[-3:])

    def refuse_unread(self) -> None:
        """Raise `ConfigError` naming every setting that was not read and might change the results."""
        known = {} if self._known is None else self._known.defaults
        uncomputed = UNCOMPUTED.get(str(self._raw.get("model_type")), frozenset())
        refused = []
        for key in sorted(self._raw.keys() - self._read.keys()):
            value, default = self._raw[key], known.get(key)
            if value is None and key != "is_causal":  # whose null is not the default
                continue
            if _harmless(key) or value == default or not (value or default):
                continue
            if self._strict or (key in known and key not in uncomputed):
                refused.append(key)
            else:
                self.ignore(key, value)
        if refused:
            names = listed(f"{self._place}{key}" for key in refused)
            what = "unknown settings" if self._strict else "settings that are not served"
            raise ConfigError(f"config.json of a {self._raw.get('model_type')} has {what}: {names}")


def _in_its_own_names(raw: Mapping[str, Any], known: KnownKeys | None) -> dict[str, Any]:
    """Return settings by the names of the reference's class, as it reads them: other names win, and null is a value
    only where the class says so."""
    if known is None:
        return dict(raw)
    found = {key: value for key, value in raw.items() if key not in known.renamed}
    found |= {known.renamed[key]: raw[key] for key in known.renamed if raw.get(key) is not None}
    return {key: value for key, value in found.items() if value is not None or not known.has_default(key)}


def _harmless(key: str) -> bool:
    return key in _HARMLESS or any(fnmatchcase(key, pattern) for pattern in _PATTERNS)
