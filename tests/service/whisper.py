"""A tiny random Whisper in a folder like published ones: windows of two seconds, two languages, and a tokenizer."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.service.speech import (
    BEGIN,
    DE,
    EN,
    END,
    NO_TIMESTAMPS,
    PREVIOUS,
    RATE,
    START,
    TRANSCRIBE,
    TRANSLATE,
    raw_speech_tokenizer,
)
from triptych.model.speech.log_mel import LogMel

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

SECONDS = 2  # of a window
POSITIONS = 50 * SECONDS
LOG_MEL = LogMel(num_mel_bins=8, chunk_length=SECONDS)
SHAPE: dict[str, Any] = dict(
    vocab_size=BEGIN + POSITIONS + 1,
    num_mel_bins=8,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=40,
    max_source_positions=POSITIONS,
    max_target_positions=48,
    pad_token_id=END,
    bos_token_id=END,
    eos_token_id=END,
    decoder_start_token_id=START,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
GENERATION: dict[str, Any] = dict(
    decoder_start_token_id=START,
    eos_token_id=END,
    pad_token_id=END,
    bos_token_id=END,
    is_multilingual=True,
    lang_to_id={"<|en|>": EN, "<|de|>": DE},
    task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    no_timestamps_token_id=NO_TIMESTAMPS,
    prev_sot_token_id=PREVIOUS,
    max_initial_timestamp_index=50,
    suppress_tokens=[1, 7, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, PREVIOUS + 1],
    begin_suppress_tokens=[3, END],
    alignment_heads=[[0, 1], [1, 2]],
    max_length=48,
)


def whisper(folder: Path, seed: int = 0, **shape: Any) -> WhisperForConditionalGeneration:
    """Save the model, and return it for comparison; its weights are large enough that its outputs differ."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**SHAPE, **shape})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.mul_(3.0)
    model.generation_config = GenerationConfig(**GENERATION)
    model.save_pretrained(folder)
    raw_speech_tokenizer(POSITIONS).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    extractor(shape.get("num_mel_bins", 8)).save_pretrained(folder)
    return model


def extractor(num_mel_bins: int = 8) -> WhisperFeatureExtractor:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=SECONDS)


def write_tokenizer_files(folder: Path) -> None:
    """Write the tokenizer of fine-tunes of 2022: without tokenizer.json, with all special tokens in one file."""
    raw = raw_speech_tokenizer(POSITIONS)
    added = {raw.id_to_token(token): token for token in range(END + 1, raw.get_vocab_size())}
    vocabulary = {raw.id_to_token(token): token for token in range(END + 1)}
    settings = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", "errors": "replace"}
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    files = {"vocab": vocabulary, "added_tokens": added, "tokenizer_config": settings, "special_tokens_map": tokens}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "normalizer.json").write_text('{"colour": "color"}')
    (folder / "merges.txt").write_text("#version: 0.2\n")


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """Return sound that changes all the time."""
    draw = np.random.default_rng(seed)
    count = int(seconds * RATE)
    pitch = np.interp(np.arange(count), np.linspace(0, count, 12), draw.uniform(100, 4000, 12))
    sound = np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * 0.4 + draw.normal(0, 0.05, count)
    return (np.round(sound.clip(-1, 1) * 32767) / 32768).astype(np.float32)


def wave_file(samples: NDArray[np.float32]) -> bytes:
    """Return samples as a WAV file of 16 bits, which has exactly the values of `noise`."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()
