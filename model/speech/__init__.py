"""Speech: audio files to samples and features, and which windows of an audio are decoded next. No torch."""
