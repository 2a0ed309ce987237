"""Writes the card of `speech`: README.md in its folder."""

from __future__ import annotations

from pathlib import Path

from lab.training.speech import recipe
from lab.training.speech.evaluate import HELD_OUT, NOISE, WordErrors

_CARD = """\
# speech

A very small Whisper that writes down what the voices of espeak-ng say: English digits, numbers, dates, times, amounts
of money, and simple sentences around them, in lower-case words. It exists so that transcription can be seen and tested
without a download. Its text is what `normalize` reads: "the third of march at half past nine" becomes "03-03 09:30".

| | |
|---|---|
| shape | Whisper: {encoder_layers} + {decoder_layers} layers, width {d_model}, {encoder_attention_heads} heads, \
MLP of {encoder_ffn_dim}, {parameters:.2f} M parameters, float16 |
| sound | windows of {seconds} s, {num_mel_bins} mel bins, 16 kHz |
| tokenizer | byte-level BPE, {text_tokens} entries, then Whisper's special tokens and timestamps of 0.02 s |
| data | {clips} utterances said by espeak-ng 1.51 (`apt-get install espeak-ng`), with echoes, noise and narrow \
bands; the texts are the project's own. espeak-ng is GPL-3.0-or-later; that covers the program, not the sound it makes |
| training | `make pretrained ARGS=speech`: {plan}, a CTC loss on the encoder |
| held-out word error rate | **{known:.2%}** of {count} utterances, {noisy:.2%} with noise {noise:g} dB below, \
{unknown:.2%} said by voices that training never heard |

`sample.flac` is "{sample}", said by espeak-ng.

Held out are values: a date, a number or an amount of the held-out utterances is never said in training. It knows a
few hundred words and nothing of human voices.
"""


def write_speech_card(folder: Path, parameters: int, errors: WordErrors) -> None:
    text = _CARD.format(
        **recipe.SPEECH,
        parameters=parameters / 1e6,
        seconds=recipe.SECONDS,
        text_tokens=recipe.TEXT_TOKENS,
        clips=f"{recipe.CLIPS:,}",
        plan=recipe.PLAN.described(f"{recipe.BATCH} windows"),
        known=errors.known,
        noisy=errors.noisy,
        unknown=errors.unknown,
        count=HELD_OUT,
        noise=NOISE,
        sample=recipe.SAMPLE,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
