"""Settings of config.json: known ones are read, harmless ones ignored, and all others refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.model import config_keys
from tests.model.checkpoints import saved
from tests.model.test_published import NOMIC, PUBLISHED
from triptych.model.config.attention import RopeScaling, RotaryConfig
from triptych.model.config.model import GenerationRules, ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, config_from_raw, family_for, read_settings
from triptych.model.families.table.known_keys import PATH, known_keys
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.wholes import WHOLES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Types whose default configuration is invalid: without a number of experts, with an odd number of rotary dimensions,
# or dependent on timm.
_INCOMPLETE = {"dots1", "glm4_moe", "fast_vlm", "perception_lm"}
CLASSES = tuple(
    dict.fromkeys(
        CONFIG_MAPPING_NAMES[one].removesuffix("Config")
        for one in (*FAMILIES, *WHOLES)
        if one in CONFIG_MAPPING_NAMES and one not in _INCOMPLETE
    )
)


def defaults(name: str) -> dict[str, Any]:
    return copy.deepcopy(_defaults(name))


@cache
def _defaults(name: str) -> dict[str, Any]:
    import transformers

    needed = {"Esm": dict(vocab_size=33, pad_token_id=1)}  # its class has no defaults for these
    needed |= {"HunYuanMoEV1": dict(num_experts=2)}  # the default of one expert leaves no choice
    found: dict[str, Any] = getattr(transformers, f"{name}Config")(**needed.get(name, {})).to_dict()
    return found


def read_without(raw: dict[str, Any], key: str) -> ModelConfig | None:
    """Return the configuration, or None if the key is needed."""
    try:
        return config_from_raw({other: value for other, value in raw.items() if other != key})
    except ConfigError as error:
        if key not in str(error):
            raise
        return None


def mathematics(model: ModelConfig) -> ModelConfig:
    """Return the configuration without the settings of generation_config.json."""
    return replace(
        model,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        decoder_start_token_id=0,
        generation=GenerationRules(),
    )


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_folder_does_not_say_is_as_in_transformers_or_refused(name: str) -> None:
    """Tensors and `*_token_id` are exceptions: those that a folder does not name, it does not have."""
    raw = defaults(name)
    full = mathematics(config_from_raw(raw))
    for key in raw:
        if key == "tie_word_embeddings" or key.endswith("_token_id"):
            continue
        found = read_without(raw, key)
        assert found is None or mathematics(found) == full, key


def inner(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the part of a file that has the layers' settings, and its key."""
    part = next((part for part in ("text_config", "decoder") if isinstance(raw.get(part), dict)), None)
    return (f"{part}.", raw[part]) if part else ("", raw)


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_understood_and_what_the_class_does_not_know_is_ignored_and_named(name: str) -> None:
    raw = defaults(name)
    expected = config_from_raw(raw)
    assert expected.model_type == raw["model_type"]
    place, part = inner(raw)
    part |= {"logit_softcap": 30.0, "attention_sinks": 4, "is_llama_config": True, "off": False, "empty": None}
    model, ignored = read_settings(raw)
    assert model == expected
    assert ignored == tuple(place + key for key in ("attention_sinks", "is_llama_config", "logit_softcap"))
    _a_folder_with_code_of_its_own_has_no_unknown_settings({**defaults(name)})


def _a_folder_with_code_of_its_own_has_no_unknown_settings(raw: dict[str, Any]) -> None:
    raw["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    config_from_raw(raw)
    place, part = inner(raw)
    part |= {"logit_softcap": 30.0, "attention_sinks": 4}
    with pytest.raises(ConfigError, match=f"unknown settings: {place}attention_sinks, {place}logit_softcap"):
        config_from_raw(raw)


@pytest.mark.parametrize("model_type", ["transformer", "new"])
def test_a_type_that_the_library_does_not_have_has_no_unknown_settings(model_type: str) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    raw = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 64, "logit_softcap": 1.0, "bos_token_id": 0}
    with pytest.raises(ConfigError, match=r"unknown settings: .*logit_softcap"):
        config_from_raw({**raw, "model_type": model_type})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Llama", "per_layer_config", {"0": {"head_dim": 4}}),
        ("GPT2", "is_causal", False),
        ("Bloom", "is_causal", None),
        ("Llama", "is_causal", None),
        ("Mistral3", "is_causal", False),
        ("Bert", "is_decoder", True),
        ("Mpt", "is_causal", False),
    ],
)
def test_what_the_class_knows_and_is_not_computed_is_refused(name: str, key: str, value: Any) -> None:
    raw = defaults(name)
    inner(raw)[1][key] = value
    with pytest.raises(ConfigError, match=key):
        config_from_raw(raw)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Bart", {"static_position_embeddings": True}),
        ("Blenderbot", {"layernorm_variant": "xlm"}),
        ("Starcoder2", {"scale_attn_weights": False}),
        ("MBart", {"normalize_before": False}),
        ("Gemma", {"mlp_bias": True}),
        ("Llama", {"sliding_window": 8}),
    ],
)
def test_what_only_other_classes_know_is_ignored_too(name: str, change: dict[str, Any]) -> None:
    raw = defaults(name)
    assert read_settings({**raw, **change}) == (config_from_raw(raw), tuple(change))
    with pytest.raises(ConfigError, match=next(iter(change))):
        config_from_raw({**raw, **change, "auto_map": {"AutoModel": "modeling_own.OwnModel"}})


@pytest.mark.parametrize(
    ("name", "former", "now"),
    [("GPT2", "hidden_size", "n_embd"), ("Bart", "num_hidden_layers", "encoder_layers"), ("T5", "head_dim", "d_kv")],
)
def test_other_names_of_the_class_are_its_keys_and_win(name: str, former: str, now: str) -> None:
    raw = defaults(name)
    changed = 2 * raw[now]
    assert config_from_raw({**raw, former: changed}) == config_from_raw({**raw, now: changed})
    del raw[now]
    assert config_from_raw({**raw, former: changed}) == config_from_raw({**raw, now: changed})


@pytest.mark.parametrize("name", CLASSES)
def test_null_stands_for_the_default_where_the_class_has_no_null(name: str) -> None:
    raw = defaults(name)
    expected, keys = mathematics(config_from_raw(raw)), known_keys(raw["model_type"])
    assert keys is not None
    for key in filter(keys.has_default, raw.keys() - {"tie_word_embeddings"}):  # the tensors decide that
        found = read_null(raw, key)
        assert found is None or mathematics(found) == expected, key


def read_null(raw: dict[str, Any], key: str) -> ModelConfig | None:
    """Return the configuration, or None if the key is needed."""
    try:
        return config_from_raw({**raw, key: None})
    except ConfigError as error:
        if key not in str(error):
            raise
        return None


def test_attention_of_encoders_does_not_read_whether_it_is_causal() -> None:
    assert config_from_raw({**defaults("Bert"), "is_causal": False}) == config_from_raw(defaults("Bert"))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Bart", {"classif_dropout": 0.1, "output_past": True, "prefix": " ", "save_step": 58, "_num_labels": 3}),
        ("Bert", {"directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform"}),
        ("Albert", {"net_structure_type": 0, "gap_size": 0, "num_memory_blocks": 0, "down_scale_factor": 1}),
        ("GPT2", {"n_ctx": 1024, "summary_type": "cls_index", "summary_first_dropout": 0.1, "resid_pdrop": 0.1}),
        ("XLNet", {"mem_len": 512, "reuse_len": 64, "use_mems_eval": True, "dropatt": 0.1, "init_std": 0.02}),
        ("Electra", {"generator_size": "0.25", "summary_last_dropout": 0.1, "summary_activation": "gelu"}),
        ("DistilBert", {"tie_weights_": True, "qa_dropout": 0.1, "seq_classif_dropout": 0.2}),
        ("T5", {"task_specific_params": {"summarization": {"num_beams": 4}}, "output_past": True}),
        ("Llama", {"_attn_implementation_autoset": True, "return_dict_in_generate": True, "cache_implementation": "x"}),
        ("Blenderbot", {"layernorm_variant": "prelayernorm", "do_blenderbot_90_layernorm": True}),
        ("OPT", {"output_projection": True, "prefix": "</s>"}),
        ("Falcon", {"ff_factor": 4}),
        ("Starcoder2", {"activation_function": "gelu", "attention_softmax_in_fp32": True, "scale_attn_weights": True}),
        ("Starcoder2", {"layer_norm_epsilon": 1e-5, "scale_attention_softmax_in_fp32": True}),
    ],
)
def test_what_published_folders_hold_beside_their_mathematics_is_passed_over(
    name: str, published: dict[str, Any]
) -> None:
    raw = defaults(name)
    assert config_from_raw({**raw, **published}) == config_from_raw(raw)


@pytest.mark.parametrize("model_type", ["rwkv7", None, 7])
def test_an_unknown_type_is_refused_by_name(model_type: object) -> None:
    with pytest.raises(
        ConfigError, match=f"model_type {model_type!r} is none of the {len(FAMILIES) + len(WHOLES)} types"
    ):
        config_from_raw({"model_type": model_type})


def test_a_misspelt_type_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"nearest are .*deberta-v2"):
        config_from_raw({"model_type": "deberta_v2"})


@pytest.mark.parametrize("value", [None, False, 0, 0.0, {}, []])
def test_an_unknown_setting_that_is_off_is_passed_over(value: object) -> None:
    assert config_from_raw({**LLAMA, "logit_softcap": value}) == config_from_raw(LLAMA)


def test_what_is_about_training_and_bookkeeping_is_passed_over() -> None:
    noise = {
        "_name_or_path": "somewhere",
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.1,
        "gradient_checkpointing": True,
        "initializer_range": 0.02,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "num_beams": 4,
        "use_cache": True,
    }
    assert config_from_raw({**LLAMA, **noise}) == config_from_raw(LLAMA)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen3", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}),
        ("GPTNeoX", {"hidden_act": "snake"}),
        ("Bert", {"is_decoder": True}),
        ("Bert", {"position_embedding_type": "relative_key"}),
        ("Albert", {"num_hidden_groups": 2}),
        ("Albert", {"inner_group_num": 2}),
        ("XLNet", {"attn_type": "uni"}),
        ("XLNet", {"clamp_len": 5}),
        ("XLNet", {"architectures": ["XLNetForSequenceClassification"], "summary_type": "mean"}),
        ("XLNet", {"architectures": ["XLNetForSequenceClassification"], "summary_activation": "relu"}),
        ("ViT", {"pooler_act": "relu"}),
        ("Gemma2", {"use_bidirectional_attention": True}),
        ("MPNet", {"relative_attention_num_buckets": 16}),
        ("EuroBert", {"architectures": ["EuroBertForSequenceClassification"], "classifier_pooling": "max"}),
        ("NomicBert", {"n_embd": 8, "activation_function": "snake"}),
        ("NomicBert", {"auto_map": {"AutoModel": "x"}, "n_embd": 8, "prenorm": True}),
        ("Gte", {"auto_map": {"AutoModel": "x"}, "logn_attention_scale": True}),
        ("Gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.625}, "mixed_b": 0}),
        ("JinaEmbeddingsV3", {"position_embedding_type": "absolute"}),
        ("ModernBert", {"position_embedding_type": "relative_key"}),
        ("ModernBert", {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "max"}),
        ("ModernBert", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("T5", {"feed_forward_proj": "gated-snake"}),
        ("T5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"}),
        ("T5", {"feed_forward_proj": "relu", "is_gated_act": True}),
    ],
)
def test_a_known_setting_that_is_not_computed_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    setting = list(change)[-1]
    with pytest.raises(ConfigError, match="snake" if "snake" in str(change) else setting):
        config_from_raw({**defaults(name), **change})


# Settings that the code in Hunyuan-A13B-Instruct's folder reads and the library's class does not.
HUNYUAN: dict[str, Any] = {
    "auto_map": {"AutoModelForCausalLM": "hunyuan.HunYuanMoEV1ForCausalLM"},
    **dict(
        add_classification_head=False, attention_head_dim=128, cla_share_factor=2, class_num=0, dense_list=[4096, 0]
    ),
    **dict(
        group_limited_greedy=False, im_end_id=6, im_newline_id=12, im_start_id=5, kv_lora_rank=None, mask_init_id=12
    ),
    **dict(mlp_bias=False, moe_drop_tokens=False, moe_intermediate_size=[3072] * 32, moe_layer_num_skipped=0),
    **dict(moe_random_routing_dropped_token=False, n_group=None, norm_topk_prob=True, norm_type="rms", pad_id=127961),
    **dict(num_media_embeds=257, num_shared_expert=[1] * 32, org_vocab_size=128167, pool_type="last", q_lora_rank=None),
    **dict(position_embedding_xdrope=False, qk_nope_head_dim=None, routed_scaling_factor=1.0, skip_cls_token=False),
    **dict(text_end_id=8, text_start_id=7, topk_group=None, use_cla=False, use_mixed_mlp_moe=True, use_mla=False),
    **dict(use_qk_norm=True, use_rotary_pos_emb=True, v_head_dim=None),
}


def test_the_settings_of_hunyuans_own_code_are_read() -> None:
    raw = json.loads(PUBLISHED["Hunyuan-A13B-Instruct"].config)
    assert read_settings({**raw, **HUNYUAN}) == (config_from_raw(raw), ())


@pytest.mark.parametrize(
    ("key", "value"), [("use_cla", True), ("num_shared_expert", [1] * 31 + [2]), ("norm_type", "layer"), ("new_one", 3)]
)
def test_what_only_hunyuans_own_code_computes_is_refused_by_name(key: str, value: object) -> None:
    raw = json.loads(PUBLISHED["Hunyuan-A13B-Instruct"].config)
    assert read_settings({**raw, key: value}) == (config_from_raw(raw), (key,))  # for the library's class
    with pytest.raises(ConfigError, match=key):
        config_from_raw({**raw, **HUNYUAN, key: value})


def test_what_a_class_has_and_its_model_does_not_compute_with_is_ignored() -> None:
    raw = defaults("Gemma3Text")
    assert read_settings({**raw, "attn_logit_softcapping": 50.0}) == (config_from_raw(raw), ("attn_logit_softcapping",))


@pytest.mark.parametrize("value", ["1e-6", -1e-6, float("nan"), True])
@pytest.mark.parametrize(("name", "setting"), [("Gemma4Text", "rms_norm_eps"), ("GPT2", "layer_norm_epsilon")])
def test_an_epsilon_that_is_no_small_number_is_refused_by_name(name: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be a number from 0 on, found"):
        config_from_raw({**defaults(name), setting: value})


@pytest.mark.parametrize("value", ["768", 768.0, True])
@pytest.mark.parametrize(
    ("name", "setting"), [("Llama", "hidden_size"), ("Bert", "max_position_embeddings"), ("GPT2", "n_layer")]
)
def test_a_size_that_is_no_whole_number_is_refused_by_name(name: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be a whole number, found"):
        config_from_raw({**defaults(name), setting: value})


@pytest.mark.parametrize("name", ["Mistral", "Phi3"])
def test_a_window_of_nothing_is_refused(name: str) -> None:
    """The C kernels took 0 for no window, torch's for no keys."""
    with pytest.raises(ConfigError, match=r"^config\.json: sliding_window = 0: window must be positive, found 0$"):
        config_from_raw({**defaults(name), "sliding_window": 0})


def _numbers(raw: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in raw.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from _numbers(value, (*before, key))
        elif type(value) in (int, float):
            yield (*before, key)


@pytest.mark.parametrize("name", ["Llama", "Mpt", "Gemma2", "Qwen2Moe", "Bert", "T5", "ViT"])
def test_every_refusal_of_a_value_names_its_key_and_no_class_of_ours(name: str) -> None:
    assert _refused(defaults(name)) > 20


def _refused(raw: dict[str, Any]) -> int:
    refused = 0
    for path in _numbers(raw):
        for value in (0, -1, 7, "nonsense", {"a": 1}):
            changed = copy.deepcopy(raw)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            try:
                config_from_raw(changed)
            except ConfigError as error:
                refused += 1
                message = str(error)
                assert path[-1] in message or ("layer_types" in message and "layer" in path[-1]), (path, message)
                assert not re.search(r"\w+Config\b|Error|NoneType|argument|attribute", message), message
                assert len(message) <= 600 and message.isprintable(), message
    return refused


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gpt2", {"n_head": 5}, "config.json: n_head = 5: hidden size 32 is not a multiple of 5 heads"),
        (
            "gpt-neox",
            {"num_attention_heads": -1},
            "config.json: num_attention_heads = -1: dim must be positive, found -16",
        ),
        ("modernbert", {"num_hidden_layers": 0}, "config.json: num_hidden_layers = 0: the number of layers must be"),
        ("qwen3", {"num_hidden_layers": {"a": 1}}, "has a value of the wrong kind: num_hidden_layers = {'a': 1}"),
        ("deberta-v2", {"pos_att_type": [0]}, "has a value of the wrong kind: pos_att_type = [0]"),
        ("bert-sequence", {"id2label": [1]}, "has a value of the wrong kind: id2label = [1]"),
        ("vit", {"architectures": [1]}, "config.json: architectures must be a list of names, found [1]"),
        ("marian", {"architectures": {"a": 1}}, "config.json: architectures must be a list of names, found {'a': 1}"),
    ],
)
def test_a_tiny_models_key_is_named_though_the_classs_default_does_not_fit_it(
    kind: str, change: dict[str, Any], message: str
) -> None:
    raw = json.loads((saved(kind).path / "config.json").read_text())
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_raw({**raw, **change})


def test_the_keys_that_do_not_fit_each_other_are_named_with_their_values() -> None:
    raw = {**defaults("Mpt"), "n_heads": 7}
    with pytest.raises(ConfigError, match=r"^config\.json: n_heads = 7: "):
        config_from_raw(raw)
    raw = defaults("Gemma3Text")
    raw["rope_parameters"]["full_attention"]["rope_theta"] = -1.0
    place = r"rope_parameters\.full_attention\.rope_theta = -1\.0"
    with pytest.raises(ConfigError, match=rf"^config\.json: {place}: theta must be positive, found -1\.0$"):
        config_from_raw(raw)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Marian", {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3}),
        ("M2M100", {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3}),
        ("XLNet", {"d_model": 33, "n_head": 3, "d_head": 11}),
    ],
)
def test_sinusoids_of_an_odd_width_are_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pairs of dimensions, found 33"):
        config_from_raw({**defaults(name), **change})


def rotary(model: ModelConfig) -> RotaryConfig:
    assert model.decoder is not None
    [rotary] = model.decoder.rotaries
    return rotary


class TestRope:
    @pytest.mark.parametrize("kind", ["su", "spiral", "ntk"])
    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_types_that_are_not_served(self, kind: str, key: str) -> None:
        with pytest.raises(ConfigError, match=f"rope type '{kind}' is not served; served are default, linear, dynamic"):
            config_from_raw({**LLAMA, "rope_scaling": {key: kind, "factor": 2.0}})

    def test_settings_that_the_library_only_warns_of_are_ignored(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 2.0}
        more = {"attn_factor": 1.0, "finetuned": True, "short_factor": [1.0], "llama_4_scaling_beta": 0.5}
        found = read_settings({**LLAMA, "rope_scaling": {**yarn, **more}})
        ignored = tuple(f"rope_scaling.{key}" for key in sorted(more))
        assert found == (config_from_raw({**LLAMA, "rope_scaling": yarn}), ignored)
        with pytest.raises(ConfigError, match=r"rope_scaling.attn_factor = 1.0 is not known for 'llama'"):
            config_from_raw({**LLAMA, "rope_scaling": {**yarn, **more}, "auto_map": {"AutoModel": "own.Own"}})

    def test_the_older_settings_win_and_leftovers_beside_the_newer_are_read(self) -> None:
        linear = {"rope_type": "linear", "factor": 2.0}
        both = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": linear}
        assert config_from_raw(both) == config_from_raw({**LLAMA, "rope_scaling": linear})
        del both["rope_scaling"]
        assert read_settings({**both, "rope_theta": 7.0}) == (config_from_raw(both), ())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta of rope type yarn must not be 1"),
            ({"rope_type": "default", "rope_theta": -1.0}, "theta must be positive"),
            ({"rope_type": "linear", "factor": 0.0}, "factor must be positive"),
            ({"rope_type": "linear", "factor": "2"}, "factor must be a number, found '2'"),
            ({"rope_type": "linear"}, "rope type 'linear' lacks its factor"),
            ({"rope_type": "yarn", "factor": float("nan")}, "factor must be a number, found nan"),
            ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}, "must be a number from 1"),
            (
                {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
                "below high_freq",
            ),
            ({"rope_type": ["yarn"]}, "is not served; served are default"),
        ],
    )
    def test_numbers_that_cannot_be_computed_with_are_refused_by_name(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            config_from_raw({**LLAMA, "rope_parameters": settings})

    @pytest.mark.parametrize(
        "scaling",
        [
            {"factor": 2.0, "type": "linear"},
            {"factor": 2.0, "type": "dynamic"},
            {"factor": 2.0, "type": "yarn", "original_max_position_embeddings": 32},
        ],
    )
    def test_the_old_way_of_writing_says_the_same_as_the_new(self, scaling: dict[str, Any]) -> None:
        old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}
        new = dict(scaling)
        new["rope_type"] = new.pop("type")
        found = config_from_raw({**LLAMA, "rope_parameters": {**new, "rope_theta": 5e5}})
        assert config_from_raw(old) == found
        assert (rotary(found).theta, rotary(found).scaling) == (5e5, RopeScaling(scaling["type"]))

    @pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
    def test_longrope_as_the_first_files_of_phi3_have_it(self, kind: str) -> None:
        """The temperature follows from the longer context, as no factor is set."""
        lists = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
        raw = {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}
        found = rotary(config_from_raw({**raw, "rope_scaling": {"type": kind, **lists}}))
        assert (found.scaling, found.original_max_positions, found.factor) == (RopeScaling.LONGROPE, 16, 4.0)
        assert (found.short_factors, found.long_factors) == ((1.0, 1.5), (2.0, 4.0))
        assert found.attention_factor == pytest.approx(1.5**0.5)

    def test_longrope_says_what_is_missing(self) -> None:
        lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 3}
        with pytest.raises(ConfigError, match=r"longrope needs two lists of 4 factors, found \[4, 3\]"):
            config_from_raw({**LLAMA, "rope_scaling": {"type": "longrope", **lists}})

    def test_phi_moe_has_temperatures_of_its_own(self) -> None:
        """transformers 5.23 computes its frequencies without the length: the short list also holds beyond it."""
        lists = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 5.0, 6.0]}
        scaling = {"type": "longrope", **lists, "short_mscale": 1.2, "long_mscale": 1.4}
        raw = {**LLAMA, "model_type": "phimoe", "original_max_position_embeddings": 16, "num_key_value_heads": 4}
        config = config_from_raw({**raw, "rope_scaling": scaling})
        found = rotary(config)
        assert (found.attention_factor, found.long_attention_factor) == (1.2, 1.4)
        assert found.long_factors == found.short_factors == tuple(lists["short_factor"])
        assert config.short_context == 16
        same = config_from_raw({**raw, "rope_scaling": {**scaling, "long_mscale": 1.2}})
        assert same.short_context is None

    def test_hunyuan_chooses_experts_layer_by_layer(self) -> None:
        raw = {**LLAMA, "model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 4}
        decoder = config_from_raw({**raw, "moe_topk": [1, 3]}).decoder
        assert decoder is not None
        assert [layer.feed_forward.per_token for layer in decoder.layers] == [1, 3]  # type: ignore[union-attr]
        with pytest.raises(
            ConfigError, match=r"moe_topk of a hunyuan_v1_moe must be a whole number or one for each of 2"
        ):
            config_from_raw({**raw, "moe_topk": [1, 3, 1]})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.short_mscale of a phimoe must be a"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0, "short_mscale": 1.0, "long_mscale": 1.0}},
                "rope_scaling of a phimoe must be of type 'default' or 'longrope', found 'linear'",
            ),
        ],
    )
    def test_what_phi_moe_is_not_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config_from_raw({**LLAMA, "model_type": "phimoe", "num_key_value_heads": 4, **changes})

    def test_a_part_of_a_head_turns(self) -> None:
        for where in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
            assert rotary(config_from_raw({**LLAMA, "model_type": "phi3", **where})).dim == 4
            # Llama's model does not read it.
            assert read_settings({**LLAMA, **where}) == (config_from_raw(LLAMA), ("partial_rotary_factor",))
            assert rotary(config_from_raw({**LLAMA, **where}, strict=True)).dim == 4
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0.5 is not served with rope type 'linear'"):
            config_from_raw({**LLAMA, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}})

    def test_one_set_of_olmo3_is_of_the_layers_without_a_window(self) -> None:
        raw = {key: value for key, value in defaults("Olmo3").items() if key != "rope_parameters"}
        stretched = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
        plain = {"rope_type": "default", "rope_theta": 1e6}
        sets = {"full_attention": {**stretched, "rope_theta": 1e6}, "sliding_attention": plain}
        each = config_from_raw({**raw, "rope_parameters": sets})
        assert config_from_raw({**raw, "rope_parameters": {**stretched, "rope_theta": 1e6}}) == each
        assert config_from_raw({**raw, "rope_theta": 1e6, "rope_scaling": stretched}) == each

    def test_nomic_bert_says_the_same_in_the_words_of_gpt2(self) -> None:
        assert config_from_raw(json.loads(NOMIC)) == config_from_raw(
            {**defaults("NomicBert"), "max_position_embeddings": 8192}
        )

    def test_old_files_of_modernbert_have_a_base_for_each_kind_of_layer(self) -> None:
        new = defaults("ModernBert")
        old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
        old |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
        old |= {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5, "reference_compile": True}
        assert config_from_raw(old) == config_from_raw(new)
        local = {"rope_type": "default", "rope_theta": 160_000.0}
        same = {"full_attention": local, "sliding_attention": local}
        assert config_from_raw({**old, "local_rope_theta": None}) == config_from_raw({**new, "rope_parameters": same})


@pytest.mark.parametrize(
    ("name", "settings", "scale"),
    [
        ("t5", {}, 64**-0.5),
        ("t5", {"tie_word_embeddings": False}, 1.0),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1.0),  # as the library saves the former
        ("umt5", {"tie_word_embeddings": False}, 1.0),
        ("umt5", {}, 64**-0.5),
        ("mt5", {}, 1.0),
    ],
)
@pytest.mark.parametrize("names", [set(), {"shared.weight", "lm_head.weight"}], ids=["tied", "untied"])
def test_which_heads_of_t5_are_scaled(name: str, settings: dict[str, Any], scale: float, names: set[str]) -> None:
    sizes = {"model_type": name, "vocab_size": 100, "d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 1}
    head = config_from_raw({**sizes, "num_heads": 4, **settings}, names).head
    assert head is not None
    assert (head.scale, head.tied) == (scale, not names)


@pytest.mark.parametrize(
    ("name", "head"),
    [("Gemma3", "Sequence"), ("Ministral3", "Sequence"), ("Ministral3", "Token"), ("Qwen3Next", "Token")],
)
def test_heads_of_newer_decoders_are_called_score(name: str, head: str) -> None:
    labels = {"0": "a", "1": "b", "2": "c"}
    model = config_from_raw({**defaults(name), "architectures": [f"{name}For{head}Classification"], "id2label": labels})
    assert model.classifier is not None and model.classifier.labels == ("a", "b", "c")
    rules = family_for(model).tensor_rules(model)
    found = [rule.source for rule in rules if rule.target.startswith("classifier")]
    assert found == ["score.weight", "score.bias"][: 1 + (head == "Token")]  # as their classes have them


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Gemma2", "final_logit_softcapping", 3.0),
        ("Gemma3Text", "final_logit_softcapping", 3.0),
        ("Phimoe", "lm_head_bias", True),
    ],
)
def test_settings_of_a_head_do_not_hinder_a_model_without_it(name: str, key: str, value: Any) -> None:
    model = config_from_raw({**defaults(name), "architectures": [f"{name}ForSequenceClassification"], key: value})
    assert model.head is None and model.classifier is not None


@pytest.mark.slow  # it reads the sources of all models
def test_the_list_of_known_keys_is_that_of_the_library() -> None:
    """`python -m tests.model.config_keys` writes it anew."""
    found = config_keys.known_keys()
    assert PATH.read_text(encoding="utf-8") == config_keys.written(found)
    assert {*FAMILIES, *WHOLES} - set(found) == {"transformer", "new"}


class TestReading:
    def test_what_is_read_of_a_changed_copy_counts_as_read(self) -> None:
        settings = Settings({"model_type": "x", "a": 1, "b": 2})
        assert settings.but(a=5)["a"] == 5
        assert settings.otherwise(a=7, c=3)["b"] == 2
        settings.refuse_unread()

    def test_a_look_at_whether_it_is_there_is_no_reading(self) -> None:
        settings = Settings({"model_type": "x", "a": 1})
        assert len(settings) == 2 and list(settings) == ["model_type", "a"]
        with pytest.raises(ConfigError, match="unknown settings: a"):
            settings.refuse_unread()


class TestBounds:
    """Numbers that no tensor's shape bounds are refused by their keys before anything is computed from them."""

    @pytest.mark.parametrize("value", [2**31, 2**62, 2**64 + 4, 10**4000])
    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("Mistral", "sliding_window"),
            ("ModernBert", "local_attention"),
            ("T5", "relative_attention_max_distance"),
            ("T5", "relative_attention_num_buckets"),
            ("DebertaV2", "position_buckets"),
            ("Llama", "max_position_embeddings"),
            ("Bert", "vocab_size"),
            ("Qwen3Next", "linear_conv_kernel_dim"),
            ("ViT", "image_size"),
            ("Gemma3", "sliding_window"),
        ],
    )
    def test_a_number_beyond_32_bits_is_refused_by_its_key(self, name: str, key: str, value: int) -> None:
        raw = defaults(name)
        inner(raw)[1][key] = value
        with pytest.raises(ConfigError, match=rf"{key} must be at most 2147483647, found \d{{10,81}}") as error:
            config_from_raw(raw)
        assert len(str(error.value)) < 600

    @pytest.mark.parametrize(
        ("name", "key"), [("Bloom", "n_head"), ("Mpt", "n_heads"), ("Falcon", "num_attention_heads")]
    )
    def test_slopes_of_too_many_heads_are_not_made(self, name: str, key: str) -> None:
        raw = {**defaults(name), "hidden_size": 10**7, "d_model": 10**7, key: 10**7, "alibi": True}
        with pytest.raises(ConfigError, match=f"{key} must be at most 65536, found 10000000"):
            config_from_raw(raw)

    @pytest.mark.parametrize(("buckets", "distance"), [(32, 2), (32, 16), (2, 128), (32, 65_537)])
    def test_buckets_of_distances_that_have_no_logarithm_are_refused(self, buckets: int, distance: int) -> None:
        raw = {**defaults("T5"), "relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance}
        with pytest.raises(ConfigError, match=f"distance.*{distance}"):
            config_from_raw(raw)

    def test_a_value_that_does_not_fit_is_told_by_its_key(self) -> None:
        with pytest.raises(ConfigError, match=r"wrong kind: decoder_sparse_step = 0$"):
            config_from_raw({**defaults("Qwen2Moe"), "decoder_sparse_step": 0})


@pytest.mark.parametrize(
    ("kind", "key"), [("esm", "vocab_size"), ("dots1", "n_routed_experts"), ("llama-gqa", "hidden_size")]
)
def test_null_is_no_size(kind: str, key: str) -> None:
    raw = json.loads((saved(kind).path / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"{key} must be a whole number, found null|lacks '{key}'"):
        config_from_raw({**raw, key: None})
