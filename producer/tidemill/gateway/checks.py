"""Checks that endpoints share; pure."""

from tidemill._terms import checked_callback
from tidemill.gateway.openai_models.sampling import GenerationRequest
from tidemill.protocol.errors import InvalidRequest
from tidemill.service.web_targets import Blocked, check_target


def refuse(field: str, reason: str, fix: str = "") -> InvalidRequest:
    """Return the error for a field that is wrong."""
    return InvalidRequest(f"{field}: {reason}", field=field, fix=fix)


def valid_text(field: str, text: str) -> str:
    """Return a text; raises ``InvalidRequest`` if it cannot be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse(field, f"its character {error.start} is half of a surrogate pair") from error
    return text


def check_callback(url: str | None, *, allow_private: bool) -> None:
    """Raise ``InvalidRequest`` for an address that no webhook may go to, whatever it answers."""
    if not url:
        return
    try:
        check_target(checked_callback(url), allow_private=allow_private)
    except Blocked as error:
        fix = "Give one such as https://example.com/hooks."
        raise refuse("callback_url", str(error), fix) from error


def check_streaming(body: GenerationRequest) -> None:
    """Raise ``InvalidRequest`` for what goes only with a stream, or only without one."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "it is of streams alone", "Set stream, or leave it out.")
    if body.prompt_logprobs is not None and body.stream:
        raise refuse("prompt_logprobs", "they cannot be streamed", "Leave stream out.")
