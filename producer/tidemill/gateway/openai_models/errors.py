"""Errors, as OpenAI's clients read them."""

from tidemill.gateway.openai_models.base import ApiResponse


class ErrorDetail(ApiResponse):
    """What went wrong; ``param`` names the field, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ApiResponse):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail
