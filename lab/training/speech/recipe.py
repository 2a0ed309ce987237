"""The recipe of `speech`: configuration, batches, losses, training plan, and the saved folder, laid out as Whisper's.

The first steps of the training have windows of half the length with one utterance each, from which it learns quicker
where to look. A head that spells what the encoder heard, with the CTC loss (Graves et al., 2006), helps it further, as
in Watanabe et al. (2017), and is dropped at the end.
"""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from lab.training import recipes
from lab.training.speech import clips, synthesis, tokens, utterances, windows
from lab.training.trainer import TrainingPlan, cross_entropy, new_model, train
from triptych.model.attention.base import AttentionMetadata
from triptych.model.families import config_from_raw
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.pretrained import CHECKPOINTS
from triptych.model.speech.log_mel import LogMel

SECONDS = 6  # of a window
TEXT_TOKENS = 700
END = TEXT_TOKENS  # the first id after those of texts
START = END + 1
LANGUAGE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = (
    END + tokens.SPECIAL.index(name)
    for name in (
        tokens.LANGUAGE,
        tokens.TRANSLATE,
        tokens.TRANSCRIBE,
        tokens.PREVIOUS,
        tokens.NO_SPEECH,
        tokens.NO_TIMESTAMPS,
    )
)
SPEECH: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": TEXT_TOKENS + len(tokens.SPECIAL) + round(SECONDS / tokens.TIMESTAMP) + 1,
    "num_mel_bins": 80,
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_source_positions": 50 * SECONDS,
    "max_target_positions": 128,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "dtype": "float16",
}
GENERATION: dict[str, Any] = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "max_length": SPEECH["max_target_positions"],
    "is_multilingual": True,
    "lang_to_id": {tokens.LANGUAGE: LANGUAGE},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": 50,
    "return_timestamps": False,
    "suppress_tokens": list(range(START, NO_TIMESTAMPS)),
    "begin_suppress_tokens": [],
    "alignment_heads": [[1, head] for head in range(SPEECH["decoder_attention_heads"])],
}
PREPROCESSOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": SPEECH["num_mel_bins"],
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": SECONDS,
    "n_samples": 16000 * SECONDS,
    "nb_max_frames": 100 * SECONDS,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "WhisperTokenizer",
    "processor_class": "WhisperProcessor",
    "bos_token": tokens.END,
    "eos_token": tokens.END,
    "unk_token": tokens.END,
    "pad_token": tokens.END,
    "model_max_length": SPEECH["max_target_positions"],
}
PLAN = TrainingPlan(steps=6000, learning_rate=2e-3, warmup=200, dropout=0.0, label_smoothing=0.05, weight_decay=0.05)
BATCH = 12  # windows
CLIPS = 10_000
SAMPLE = "the meeting is on the fifth of july at eighteen twenty three"  # held out; said in the folder's sample.flac
SHORT_STEPS = 600  # of windows with half the length
_CTC = "recogniser"  # the head's name while the model is trained
_AHEAD = 4  # batches that are prepared while others are trained on


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one length with their tokens."""

    features: Tensor  # [B, mel bins, frames]
    inputs: Tensor  # [B, L]
    targets: Tensor  # [B, L]
    letters: list[list[int]]  # of each window; empty where the CTC loss does not apply


def train_speech(work: Path, device: torch.device) -> Path:
    """Train `speech` on speech that espeak-ng makes and save it."""
    tokenizer = speech_tokenizer()
    said = clips.training_clips(CLIPS, work / "speech", SECONDS - 0.1)
    model = new_speech_model(PLAN.seed, device)
    batches = Batches(said, tokenizer, PLAN.seed)

    def loss_of(model: Transformer, step: object) -> Tensor:
        assert isinstance(step, int)
        return loss(model, batches[step])

    train(model, PLAN, itertools.count(), loss_of, work / "speech.state")
    delattr(model, _CTC)
    folder = save(CHECKPOINTS / "speech", model, tokenizer)
    speech = synthesis.say(SAMPLE, synthesis.Voice("en-gb")) * np.float32(0.5)
    soundfile.write(folder / "sample.flac", np.pad(speech, synthesis.RATE // 4), synthesis.RATE, subtype="PCM_16")
    return folder


def speech_tokenizer(count: int = 30_000) -> Tokenizer:
    """Train the tokenizer on `count` utterances."""
    rng = random.Random(PLAN.seed)
    texts = (utterances.draw(rng, held_out=False) for _ in range(count))
    return tokens.speech_tokenizer(texts, TEXT_TOKENS, SECONDS)


def new_speech_model(seed: int, device: torch.device) -> Transformer:
    """Create the network with random weights, Whisper's sinusoids as the encoder's positions, and the CTC head."""
    model = new_model(config_from_raw(SPEECH), seed, device)
    positions = model.get_parameter("encoder.positions.weight")
    length, width = positions.shape
    scales = torch.exp(-np.log(10_000.0) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * scales
    with torch.no_grad():
        positions.copy_(torch.cat((angles.sin(), angles.cos()), dim=1))
    positions.requires_grad_(False)
    model.add_module(_CTC, nn.Linear(width, len(windows.LETTERS) + 1, device=device))  # the last is the blank
    return model


class Batches:
    """Makes the batch of any step, and those of the next few steps in a thread."""

    def __init__(self, said: list[windows.Clip], tokenizer: Tokenizer, seed: int) -> None:
        self._clips = said
        self._short = [clip for clip in said if len(clip.samples) < synthesis.RATE * (SECONDS // 2 - 0.1)]
        self._tokenizer = tokenizer
        self._seed = seed
        self._log_mel = LogMel(SPEECH["num_mel_bins"], chunk_length=SECONDS)
        self._threads = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Batch]] = {}

    def __getitem__(self, step: int) -> Batch:
        for later in range(step, min(step + _AHEAD, PLAN.steps)):
            if later not in self._ahead:
                self._ahead[later] = self._threads.submit(self._make, later)
        return self._ahead.pop(step).result()

    def _make(self, step: int) -> Batch:
        seed = self._seed * 1_000_003 + step
        if step < SHORT_STEPS:
            maker = windows.WindowMaker(self._short, SECONDS // 2, seed, many=0.0)
        else:
            maker = windows.WindowMaker(self._clips, SECONDS, seed)
        drawn = [maker.draw() for _ in range(BATCH)]
        examples = [windows.example(window, self._tokenizer, SPEECH["max_target_positions"]) for window in drawn]
        inputs, targets = windows.pad(examples, END)
        features = np.stack([self._log_mel.features(window.samples) for window in drawn])
        letters = [example.letters for example in examples]
        return Batch(torch.from_numpy(features), torch.tensor(inputs), torch.tensor(targets), letters)


def loss(model: Transformer, batch: Batch) -> Tensor:
    """Return the decoder's cross entropy and the CTC loss of the encoder."""
    positions = model.get_parameter("encoder.positions.weight")
    device = positions.device
    features, inputs, targets = (one.to(device) for one in (batch.features, batch.inputs, batch.targets))
    size, rows = len(features), features.shape[2] // 2
    packed = _packed(size, rows, causal=False, device=device)
    encoded = model.encode(StackInput(packed.input_ids, packed.positions, packed.metadata, frames=features))
    lens = (inputs.shape[1],) * size, (rows,) * size
    cross = CrossInput(AttentionMetadata(*lens, causal=False, device=device), encoded)
    prompt = _packed(size, inputs.shape[1], causal=True, device=device)
    hidden = model.decode(StackInput(inputs.flatten(), prompt.positions, prompt.metadata), cross=cross)
    learnt = targets.flatten() >= 0
    result = cross_entropy(model.logits(hidden[learnt]), targets.flatten()[learnt], PLAN.label_smoothing)
    return result + _ctc(model, encoded.unflatten(0, (size, rows)), batch.letters)


def _ctc(model: Transformer, encoded: Tensor, letters: list[list[int]]) -> Tensor:
    """Return the CTC loss of the windows that have letters, over the encoder's rows `[B, rows, d]`."""
    chosen = [place for place, text in enumerate(letters) if text]
    if not chosen:
        return encoded.new_zeros(())
    scores = model.get_submodule(_CTC)(encoded[chosen]).float().log_softmax(-1).transpose(0, 1)  # [rows, B', letters]
    sizes = torch.tensor([len(letters[place]) for place in chosen])
    joined = torch.tensor([letter for place in chosen for letter in letters[place]], device=scores.device)
    lens = torch.full((len(chosen),), scores.shape[0])
    return nn.functional.ctc_loss(scores, joined, lens, sizes, blank=len(windows.LETTERS), zero_infinity=True)


def _packed(size: int, length: int, *, causal: bool, device: torch.device) -> StackInput:
    lens = (length,) * size
    positions = torch.arange(length, device=device).repeat(size)
    return StackInput(positions, positions, AttentionMetadata(lens, lens, causal=causal, device=device))


def save(folder: Path, model: Transformer, tokenizer: Tokenizer) -> Path:
    """Write a folder laid out as those of published Whispers, with float16 weights."""
    recipes.save(folder, model, SPEECH, GENERATION, tokenizer)
    for name, content in (("preprocessor_config", PREPROCESSOR), ("tokenizer_config", TOKENIZER)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return folder
