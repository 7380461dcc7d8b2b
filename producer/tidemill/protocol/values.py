"""Kinds of values that fields of wire messages hold."""

from typing import Annotated

from pydantic import AfterValidator, Field

MAX_COUNT = 2**31 - 1


def _check_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which UTF-8 cannot carry") from error
    return text


AnyText = Annotated[str, AfterValidator(_check_utf8)]
Text = Annotated[AnyText, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, le=MAX_COUNT)]
Name = Annotated[AnyText, Field(min_length=1, max_length=256)]
ShortName = Annotated[AnyText, Field(min_length=1, max_length=128)]
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = tuple[TokenId, ...]
