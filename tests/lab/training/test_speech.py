"""The recipe of `speech`: what is said, how windows are laid out, the losses, and a folder that other programs read."""

from __future__ import annotations

import random
import re
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from lab.training.speech import clips, evaluate, recipe, synthesis, utterances, windows
from lab.training.speech.windows import Clip, Placed, Window
from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.llm import LLM
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.weights import load_model
from triptych.model.pretrained import CHECKPOINTS
from triptych.model.speech.audio_file import AudioLimits, decode_audio

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return recipe.speech_tokenizer(2000)


@pytest.fixture(scope="module")
def said() -> list[Clip]:
    """Return tones instead of speech: what is said where can be seen in the samples."""
    rng = random.Random(0)
    texts = [utterances.draw(rng, held_out=False) for _ in range(40)]
    lengths = [round(synthesis.RATE * rng.uniform(0.4, 2.8)) for _ in texts]
    return [Clip(text, np.full(length, 16384, np.int16)) for text, length in zip(texts, lengths, strict=True)]


def test_utterances_have_one_spelling_and_no_held_out_text_is_trained_on() -> None:
    rng = random.Random(3)
    trained = {utterances.draw(rng, held_out=False) for _ in range(4000)}
    held_out = set(utterances.held_out_utterances(400))
    assert not trained & held_out
    for text in trained | held_out:
        assert re.fullmatch(r"[a-z']+( [a-z']+)*", text), text
        assert len(text.split()) <= utterances.LONGEST
        assert not re.search(r"\b[ap]m\b", text)
    assert len({word for text in trained for word in text.split()}) < 300


def shown(tokenizer: Tokenizer, window: Window) -> tuple[str, str]:
    """Return the tokens of a window, and those of its targets with a dot where nothing is learnt."""
    example = windows.example(window, tokenizer, 128)
    assert len(example.inputs) == len(example.targets)
    learnt = "".join("." if target < 0 else tokenizer.decode([target], False) for target in example.targets)
    return tokenizer.decode(example.inputs, skip_special_tokens=False), learnt


SILENCE = np.zeros(recipe.SECONDS * synthesis.RATE, np.float32)
FIRST, SECOND = Placed("yes please", 0.5, 1.24), Placed("no thank you", 2.0, 3.101)


@pytest.mark.parametrize(
    ("window", "inputs", "targets"),
    [
        (
            Window(SILENCE, (FIRST, SECOND)),
            "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> yes please no thank you",
            "<|en|>.<|notimestamps|> yes please no thank you<|endoftext|>",
        ),
        (
            Window(SILENCE, (FIRST, SECOND), timestamps=True, task="<|translate|>"),
            "<|startoftranscript|><|en|><|translate|><|0.50|> yes please<|1.24|><|2.00|> no thank you<|3.10|>",
            "<|en|>.<|0.50|> yes please<|1.24|><|2.00|> no thank you<|3.10|><|endoftext|>",
        ),
        (
            Window(SILENCE, (FIRST, Placed("good night", 5.5, None)), previous="yes", timestamps=True),
            "<|startofprev|> yes<|startoftranscript|><|en|><|transcribe|><|0.50|> yes please<|1.24|><|5.50|>",
            "...<|en|>.<|0.50|> yes please<|1.24|><|5.50|><|endoftext|>",
        ),
        (
            Window(SILENCE, (Placed("yes", 1.6, 2.0),), timestamps=True),
            "<|startoftranscript|><|en|><|transcribe|><|1.00|> yes<|2.00|>",  # what Whisper's rules allow at most
            "<|en|>.<|1.00|> yes<|2.00|><|endoftext|>",
        ),
        (Window(SILENCE), "<|startoftranscript|><|nospeech|>", "<|nospeech|><|endoftext|>"),
        (
            Window(SILENCE, timestamps=True),
            "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>",
            "...<|endoftext|>",
        ),
    ],
)
def test_windows_have_whispers_tokens(tokenizer: Tokenizer, window: Window, inputs: str, targets: str) -> None:
    given, learnt = shown(tokenizer, window)
    assert given == inputs
    if window.previous:
        learnt = re.sub(r"^\.+", "...", learnt)  # however many tokens the text before has
    assert learnt == targets


def test_a_cut_utterance_is_not_spelt(tokenizer: Tokenizer) -> None:
    whole, cut = Window(SILENCE, (FIRST, SECOND)), Window(SILENCE, (FIRST, Placed("yes", 5.5, None)), timestamps=True)
    letters = windows.example(whole, tokenizer, 128).letters
    assert "".join(windows.LETTERS[letter] for letter in letters) == "yes please no thank you"
    assert windows.example(cut, tokenizer, 128).letters == []


def test_utterances_are_where_the_timestamps_say(said: list[Clip], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesis, "disturb", lambda samples, rng: samples)
    maker = windows.WindowMaker(said, recipe.SECONDS, seed=5)
    kinds = set()
    for _ in range(60):
        window = maker.draw()
        loud = np.zeros(len(window.samples), bool)
        for placed in window.placed:
            end = recipe.SECONDS if placed.end is None else placed.end
            loud[round(placed.start * synthesis.RATE) : round(end * synthesis.RATE)] = True
        if window.placed:
            np.testing.assert_array_equal(window.samples != 0, loud)
        assert window.timestamps or all(placed.end is not None for placed in window.placed)
        kinds.add((window.timestamps, min(len(window.placed), 2), any(one.end is None for one in window.placed)))
    assert {(True, 2, True), (True, 2, False), (False, 2, False), (False, 1, False), (True, 1, False)} <= kinds


def test_the_batch_of_a_step_is_the_same_again_and_the_losses_fall(
    said: list[Clip], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "BATCH", 2)
    batches = recipe.Batches(said, tokenizer, 0)
    assert batches[recipe.SHORT_STEPS].features.shape == (2, 80, 100 * recipe.SECONDS)
    batch, again = batches[7], recipe.Batches(said, tokenizer, 0)._make(7)
    assert torch.equal(batch.features, again.features) and torch.equal(batch.targets, again.targets)
    assert batch.features.shape == (2, 80, 50 * recipe.SECONDS)  # the short ones come first
    model = recipe.new_speech_model(0, CPU)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), 3e-3)
    losses = []
    for _ in range(8):
        loss = recipe.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses


def test_a_saved_folder_is_one_of_whisper_to_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = recipe.new_speech_model(1, CPU)
    folder = recipe.save(tmp_path / "speech", model, tokenizer)
    ours = load_model(read_checkpoint(folder), SdpaBackend()).float()
    theirs = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = WhisperProcessor.from_pretrained(folder)
    samples = synthesis.noise(3 * synthesis.RATE, np.random.default_rng(0)) * np.float32(0.1)
    features = processor(samples, sampling_rate=synthesis.RATE, return_tensors="pt").input_features
    assert features.shape == (1, 80, 100 * recipe.SECONDS)
    ids = torch.tensor([[recipe.START, recipe.LANGUAGE, recipe.TRANSCRIBE, recipe.NO_TIMESTAMPS, 300, 301]])
    rows = recipe.SPEECH["max_source_positions"]
    one = recipe._packed(1, rows, causal=False, device=CPU)
    with torch.no_grad():
        encoded = ours.encode(StackInput(one.input_ids, one.positions, one.metadata, frames=features))
        prompt = recipe._packed(1, ids.shape[1], causal=True, device=CPU)
        cross = CrossInput(AttentionMetadata((ids.shape[1],), (rows,), causal=False, device=CPU), encoded)
        logits = ours.logits(ours.decode(StackInput(ids.flatten(), prompt.positions, prompt.metadata), cross=cross))
        torch.testing.assert_close(logits, theirs(features, decoder_input_ids=ids).logits[0], rtol=1e-4, atol=1e-4)
    generated = theirs.generate(features, language="en", task="transcribe", return_timestamps=True, max_new_tokens=5)
    assert not set(generated[0].tolist()) & set(range(recipe.START + 1, recipe.NO_TIMESTAMPS + 1)) - {
        recipe.LANGUAGE,
        recipe.TRANSCRIBE,
    }
    assert processor.tokenizer.decode(ids[0], skip_special_tokens=True) == tokenizer.decode([300, 301])


def test_word_errors_are_counted() -> None:
    expected = ["the third of may", "yes please"]
    assert evaluate.word_error_rate(expected, expected) == 0
    assert evaluate.word_error_rate(["the of the may", "yes please do"], expected) == pytest.approx(3 / 6)
    assert evaluate.word_error_rate(["", ""], expected) == 1


@pytest.mark.skipif(which("espeak-ng") is None, reason="espeak-ng is not installed: apt-get install espeak-ng")
def test_clips_are_said_once_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "_SHARD", 4)
    made = clips.training_clips(8, tmp_path, 10.0)
    monkeypatch.setattr(clips, "_say_all", None)  # what is on the disk is not said again
    kept = clips.training_clips(8, tmp_path, 10.0)
    assert [one.text for one in kept] == [one.text for one in made]
    assert all(np.array_equal(one.samples, other.samples) for one, other in zip(kept, made, strict=True))
    assert all(0.2 < len(one.samples) / synthesis.RATE < 10 for one in made)
    assert len(clips.training_clips(8, tmp_path, 1.5)) < 8


@pytest.mark.skipif(not (CHECKPOINTS / "speech").is_dir(), reason="not trained yet: make pretrained ARGS=speech")
def test_the_sample_is_written_down() -> None:
    folder = CHECKPOINTS / "speech"
    assert recipe.SAMPLE in utterances.held_out_utterances(600)
    sound = (folder / "sample.flac").read_bytes()
    assert len(sound) < 100_000
    samples = decode_audio(sound, synthesis.RATE, AudioLimits(seconds=recipe.SECONDS))
    assert evaluate.transcribed(LLM(folder, EngineConfig()), [samples]) == [recipe.SAMPLE]
