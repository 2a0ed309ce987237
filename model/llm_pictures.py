"""Pictures in prompts of `LLM`: each takes the place of one mark of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.model.api.request import ImageSpan, Source
from triptych.model.api.stats import ModelInfo
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.errors import ConfigError
from triptych.model.text.tokenizer import Tokenizer
from triptych.model.vision.decoding import ImageError
from triptych.model.vision.pictures import PreparedPicture, image_spans

Prompt = str | Sequence[int]
File = str | Path | bytes


class PromptPictures:
    """The pictures of one call, for each of its prompts. Raises `ConfigError` where the model reads none."""

    def __init__(
        self, info: ModelInfo, checkpoint: Checkpoint, tokenizer: Tokenizer | None, images: Any, num_prompts: int
    ) -> None:
        """`images` has a list of files for each prompt: paths, or contents of files."""
        self._tokenizer = tokenizer
        self._name = info.name
        if isinstance(images, str | bytes | Path) or not all(isinstance(one, list | tuple) for one in images):
            raise ConfigError("images: expected a list of files for each prompt")
        if len(images) != num_prompts:
            found = f"{len(images)} lists for {num_prompts} prompts"
            raise ConfigError(f"images: expected a list of files for each prompt, found {found}")
        if checkpoint.pictures is None or checkpoint.config.pictures is None or not info.reads_pictures:
            raise ConfigError(f"images: {info.name} does not read pictures in prompts")
        self._processing, self._token_id = checkpoint.pictures, checkpoint.config.pictures.token_id
        self._images = images

    def put(self, place: int, prompt: Prompt | Source) -> tuple[Prompt, list[PreparedPicture]]:
        """Return a prompt with the places of its pictures, and these; raises `ConfigError`."""
        if isinstance(prompt, Source):
            raise ConfigError(f"images: prompt {place} is no text")
        pictures = [self._prepared(place, file) for file in self._images[place]]
        marks = [self._processing.placeholder(one) for one in pictures]
        if isinstance(prompt, str):
            texts = prompt.split(self._processing.mark)
            self._check(place, len(texts) - 1, self._processing.mark)
            return texts[0] + "".join(mark + text for mark, text in zip(marks, texts[1:], strict=True)), pictures
        self._check(place, list(prompt).count(self._token_id), f"token {self._token_id}")
        found, left = list[int](), iter(zip(marks, pictures, strict=True))
        for token in prompt:
            found += self._tokens(*next(left)) if token == self._token_id else (token,)
        return found, pictures

    def spans(self, place: int, ids: Sequence[int], pictures: Sequence[PreparedPicture]) -> tuple[ImageSpan, ...]:
        """Return where the pictures are in the token ids of a prompt; raises `ConfigError`."""
        try:
            return image_spans(ids, self._token_id, pictures)
        except ValueError as error:
            raise ConfigError(f"images: prompt {place}: {error}") from None

    def _check(self, place: int, marks: int, mark: str) -> None:
        if marks != (count := len(self._images[place])):
            raise ConfigError(f"images: prompt {place} has {count} files and {marks} places for them ({mark})")

    def _tokens(self, text: str, picture: PreparedPicture) -> Sequence[int]:
        """Return the tokens that stand for a picture."""
        if text == self._processing.token * picture.num_positions:
            return (self._token_id,) * picture.num_positions
        if self._tokenizer is None:
            raise ConfigError(f"images: {self._name} has no tokenizer, which its pictures need")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _prepared(self, place: int, file: File) -> PreparedPicture:
        where = f"images: prompt {place}: " + ("" if isinstance(file, bytes) else f"{file}: ")
        try:
            return self._processing.prepare_picture(file if isinstance(file, bytes) else Path(file).read_bytes())
        except OSError as error:
            raise ConfigError(f"{where}{error.strerror}") from None
        except ImageError as error:
            raise ConfigError(f"{where}{error}") from None
