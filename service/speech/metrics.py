"""Counts transcriptions and their windows of audio."""

from __future__ import annotations

from triptych.service.core.models import Models
from triptych.service.observability.metric_parts import TokenTally
from triptych.service.observability.metrics import Metrics

_OUTCOMES = ("text", "silence", "repeated")
_FACTORS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)


class SpeechMetrics:
    """The counters of speech, which every model that reads sound has from the moment it is loaded."""

    def __init__(self, metrics: Metrics, models: Models) -> None:
        self._models = models
        self._generated = metrics.generated
        self._seconds = metrics.counter("audio_seconds_total", "Seconds of audio that were transcribed.", "model")
        self._windows = metrics.counter(
            "audio_windows_total",
            "Outputs for windows of audio: text, silence, or repeated (decoded again at the next temperature).",
            *("model", "outcome"),
        )
        self._real_time = metrics.histogram(
            "audio_real_time_factor", "Seconds of a transcription over seconds of its audio.", buckets=_FACTORS
        )
        metrics.at_load(self._begin)

    def _begin(self, name: str) -> None:
        model = self._models[name].served
        if model is None or model.reads_text:
            return
        self._seconds.labels(name)
        self._real_time.labels(name)
        for outcome in _OUTCOMES:
            self._windows.labels(name, outcome)

    def generated(self, model: str) -> TokenTally:
        """Return the tally of the tokens that `model` generates."""
        return self._generated(model)

    def transcribed(self, model: str, audio_seconds: float, seconds: float) -> None:
        """Count a transcription that took `seconds` for `audio_seconds` of audio."""
        self._seconds.labels(model).inc(audio_seconds)
        self._real_time.labels(model).observe(seconds / audio_seconds)

    def windows(self, model: str, *, spoken: int, silent: int, repeated: int) -> None:
        """Count windows of audio by outcome: text, silence, or decoded again."""
        for outcome, count in zip(_OUTCOMES, (spoken, silent, repeated), strict=True):
            self._windows.labels(model, outcome).inc(count)
