"""The fields of Hugging Face's `/info`, for the first model."""

from __future__ import annotations

from triptych.service.core.models import ServedModel
from triptych.service.http.json_replies import Json
from triptych.service.lifecycle.state import Service

_TAGS = {
    "decoder-only": "text-generation",
    "encoder-decoder": "text2text-generation",
    "encoder-only": "feature-extraction",
}


def huggingface_info(service: Service) -> Json:
    """Return the fields that are added to /info; sizes are 0 while no model is loaded."""
    first = next(iter(service.models.loaded), None)
    info = service.client.models.get(first.name) if first is not None else None
    length = 0 if info is None else info.max_model_len
    threads = service.settings.tokenizer_threads
    return {
        "model_id": "" if first is None else first.name,
        "model_sha": None,
        "model_dtype": info.dtype if info is not None else "" if first is None else first.checkpoint.dtype,
        "model_pipeline_tag": None if first is None else _TAGS.get(first.config.form),
        "model_type": None if first is None else model_kind(first),
        "max_concurrent_requests": 0 if info is None else info.max_queued_requests + info.max_num_seqs,
        "max_best_of": 1,
        "max_stop_sequences": service.limits.max_stop_strings,
        "max_input_length": (first and first.checkpoint.sentences.max_tokens) or length,
        "max_input_tokens": max(0, length - 1),
        "max_total_tokens": length,
        "max_batch_tokens": 0 if info is None else info.max_num_batched_tokens,
        "max_client_batch_size": service.limits.max_encode_inputs,
        "auto_truncate": False,
        "tokenization_workers": threads,
        "validation_workers": threads,
        "router": "triptych",
        "sha": None,
        "docker_label": None,
    }


def model_kind(served: ServedModel) -> Json | None:
    """Return the type of a model as text-embeddings-inference describes it; None for a model that generates."""
    if served.config.can_generate:
        return None
    head = served.config.classifier
    if head is not None and len(head.labels) == 1:
        return {"reranker": {"id2label": {"0": head.labels[0]}, "label2id": {head.labels[0]: 0}}}
    if head is not None:
        names = {str(at): name for at, name in enumerate(head.labels)}
        return {"classifier": {"id2label": names, "label2id": {name: int(at) for at, name in names.items()}}}
    return {"embedding": {"pooling": served.checkpoint.sentences.pooling[0]}}
