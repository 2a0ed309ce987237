"""The languages of a translation: tokens that mark the source and begin the output, by the codes of a request."""

from __future__ import annotations

from model.text.source_languages import SourceLanguages
from service.core.errors import invalid, shorten
from service.core.models import ServedModel
from service.schemas.bodies import GenerateBody

_SHOWN = 6  # languages in an error


def source_language(body: GenerateBody, served: ServedModel) -> int | None:
    """Return the token of `source_language`, which marks the sources; None if it is not given."""
    code = body.source_language
    if code is None:
        return None
    languages = served.require_tokenizer("source_language").source_languages
    if languages is None:
        raise invalid(f"source_language: model {served.name} does not mark the language of a source", "source_language")
    token = languages.token(code)
    if token is None:
        message = f"source_language: model {served.name} has no language {shorten(code)}; it has {_some(languages)}"
        raise invalid(message, "source_language")
    if not isinstance(body.prompt, str) and not isinstance(body.prompt[0], str):
        raise invalid("source_language: token ids are taken as they are; send texts", "source_language")
    return token


def target_language(body: GenerateBody, served: ServedModel) -> tuple[int, ...]:
    """Return the token of `target_language`, which the decoder then starts with; none if it is not given."""
    code = body.target_language
    if code is None:
        return ()
    tokenizer = served.require_tokenizer("target_language")
    token = tokenizer.language_token(code)
    ends = {served.config.bos_token_id, served.config.pad_token_id, *served.config.eos_token_ids}
    if not served.is_encoder_decoder or token is None or token in ends:
        languages = tokenizer.source_languages
        known = "" if languages is None else f"; it has {_some(languages)}"
        raise invalid(f"target_language: model {served.name} has no such language token{known}", "target_language")
    return (token,)


def _some(languages: SourceLanguages) -> str:
    codes = languages.codes
    shown = ", ".join(codes[:_SHOWN])
    return f"{shown} and {len(codes) - _SHOWN} more" if len(codes) > _SHOWN else shown
