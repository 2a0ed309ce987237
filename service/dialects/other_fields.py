"""Fields of OpenAI's routes that change no output, and fields of other servers that are not supported here.

vLLM, SGLang, llama.cpp and Hugging Face's servers have the same routes with more fields, which their clients send.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from triptych.service.dialects.common import DialectBody, Ignored, NotFilled, NotSupported, NotTrue, Refused

Cached = Annotated[Any, Ignored("prefixes are cached without marks")]


class Routed(DialectBody):
    """The fields with which SGLang's router chooses a process, or separates prefill from decode."""

    data_parallel_rank: Annotated[Any, Ignored("the service chooses the replica; SGLang's")] = None
    routed_dp_rank: Annotated[Any, Ignored("the service chooses the replica; SGLang's")] = None
    disagg_prefill_dp_rank: NotSupported = None
    bootstrap_host: NotSupported = None
    bootstrap_port: NotSupported = None
    bootstrap_room: NotSupported = None


class Transferred(DialectBody):
    """The fields with which vLLM's processes pass parts of a request to each other."""

    kv_transfer_params: NotFilled = None
    ec_transfer_params: NotFilled = None
    mm_payload: NotSupported = None
    return_mm_kwargs: NotTrue = None
    vllm_xargs: NotFilled = None
    watermarking: NotTrue = None


class Harmless(Routed):
    """The fields that completions and chats ignore."""

    user: Annotated[Any, Ignored("no output depends on the end user")] = None
    safety_identifier: Annotated[Any, Ignored("no output depends on the end user")] = None
    metadata: Annotated[Any, Ignored("nothing is stored")] = None
    store: Annotated[Any, Ignored("nothing is stored")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    prompt_cache_key: Cached = None
    prompt_cache_options: Cached = None
    prompt_cache_retention: Cached = None
    cache_prompt: Annotated[Any, Ignored("prefixes are cached; llama.cpp's")] = None
    rid: Annotated[Any, Ignored("`request_id` names the request; SGLang's")] = None
    session_id: Annotated[Any, Ignored("prefixes are found without it; vLLM's and SGLang's")] = None
    custom_labels: Annotated[Any, Ignored("metrics have no labels of clients; SGLang's")] = None
    stream_interval: Annotated[Any, Ignored("events are sent as tokens are generated; vLLM's")] = None
    guided_decoding_backend: Annotated[Any, Ignored("there is one backend; vLLM's")] = None
    return_cached_tokens_details: Annotated[Any, Ignored("usage has the cached tokens; SGLang's")] = None
    return_spec_tokens_details: Annotated[Any, Ignored("usage has accepted drafts; SGLang's")] = None


class LoraPath(DialectBody):
    """SGLang's field for an adapter."""

    lora_path: str | None = Field(
        None, min_length=1, description="A LoRA adapter, by its name, as `model` names it. SGLang's.", examples=[None]
    )

    def adapter_named(self) -> tuple[str, str] | None:
        return None if self.lora_path is None else ("lora_path", self.lora_path)


class NotServed(Transferred, LoraPath):
    """The fields of other servers that completions and chats refuse by name."""

    use_beam_search: NotTrue = None
    length_penalty: Annotated[Any, Refused(1, 1.0)] = None
    early_stopping: NotTrue = None
    truncate_prompt_tokens: NotSupported = None
    truncation_side: NotSupported = None
    spaces_between_special_tokens: Annotated[Any, Refused(True)] = None
    bad_words: NotFilled = None
    prompt_logprobs: NotSupported = None
    logprob_token_ids: NotFilled = None
    logits_processors: NotFilled = None
    repetition_detection: NotSupported = None
    thinking_token_budget: NotSupported = None
    mm_processor_kwargs: NotFilled = None
    return_token_ids: NotTrue = None
    return_tokens_as_token_ids: NotTrue = None
    return_token_offsets: NotTrue = None
    return_weight_versions: NotTrue = None
    routed_experts_prompt_start: NotSupported = None

    no_stop_trim: NotTrue = None
    stop_regex: NotFilled = None
    session_params: NotFilled = None
    custom_params: NotFilled = None
    custom_logit_processor: NotFilled = None
    watermark: NotTrue = None
    extra_key: NotFilled = None
    images_config: NotFilled = None
    return_hidden_states: NotTrue = None
    return_routed_experts: NotTrue = None
    routed_experts_start_len: Annotated[Any, Refused(0)] = None


class OtherNames(DialectBody):
    """Names in other APIs of fields that are supported; the error gives the name to use."""

    format: Annotated[Any, Refused(instead="response_format")] = None
    response_schema: Annotated[Any, Refused(instead="response_format")] = None
    choice: Annotated[Any, Refused(instead="structured_outputs.choice")] = None
    stop_sequences: Annotated[Any, Refused(instead="stop")] = None
    max_new_tokens: Annotated[Any, Refused(instead="max_tokens")] = None
    max_output_tokens: Annotated[Any, Refused(instead="max_tokens")] = None
    max_length: Annotated[Any, Refused(instead="max_tokens")] = None
    n_predict: Annotated[Any, Refused(instead="max_tokens")] = None
    num_return_sequences: Annotated[Any, Refused(instead="n")] = None
    repeat_penalty: Annotated[Any, Refused(instead="repetition_penalty")] = None
    random_seed: Annotated[Any, Refused(instead="seed")] = None


class ChatNotServed(DialectBody):
    """The fields of other servers that only chats have, and that are refused by name."""

    best_of: Annotated[Any, Refused(1)] = None
    tool_prompt: NotSupported = None
    media_io_kwargs: NotFilled = None
    return_prompt_text: NotTrue = None
    return_prompt_token_ids: NotTrue = None
    return_meta_info: NotTrue = None
    return_input_ids_in_sglext: NotTrue = None
    return_output_ids_in_sglext: NotTrue = None
    return_sampling_mask: NotTrue = None
    sampling_logprobs_mode: NotSupported = None
    return_flat_raw_output_top_logprobs: NotTrue = None
    return_flat_raw_top_logprobs_b64: NotTrue = None
    separate_reasoning: Annotated[Any, Refused(True)] = None
    stream_reasoning: Annotated[Any, Refused(True)] = None
    task: NotSupported = None
    input_ids: NotSupported = None
    max_dynamic_patch: NotSupported = None
    min_dynamic_patch: NotSupported = None
    use_audio_in_video: NotTrue = None
    video_config: NotFilled = None
