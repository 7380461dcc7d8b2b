"""Kinds of values that fields of wire messages hold."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

MAX_COUNT = 2**31 - 1
#: Longest name of a model, a job, a worker.
MAX_NAME_CHARS = 256


def _check_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which UTF-8 cannot carry") from error
    return text


#: Longest address of a callback or of a webhook's endpoint.
MAX_URL_CHARS = 2048
_URL = re.compile(r"https?://[!-~]+")


def check_http_url(url: str) -> str:
    """Return ``url`` if it can be posted to; raises ``ValueError`` saying why not.

    Whether its host may be reached is decided when that is done.
    """
    if len(url) > MAX_URL_CHARS:
        raise ValueError(f"it has {len(url)} characters, the limit is {MAX_URL_CHARS}")
    if not _URL.fullmatch(url) or "\\" in url:
        raise ValueError("it is not an http or https address in ASCII")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError("its host or port is not valid") from error
    if not host or "%" in parts.netloc:
        raise ValueError("it names no host")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name or a password")
    return url


def _check_optional_url(url: str) -> str:
    return check_http_url(url) if url else url


#: Bounds on what callers keep with their work, as OpenAI's API has them.
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

#: An address to post to, "" for none.
OptionalUrl = Annotated[str, AfterValidator(_check_optional_url)]
AnyText = Annotated[str, AfterValidator(_check_utf8)]
Text = Annotated[AnyText, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, le=MAX_COUNT)]
Name = Annotated[AnyText, Field(min_length=1, max_length=MAX_NAME_CHARS)]
ShortName = Annotated[AnyText, Field(min_length=1, max_length=128)]
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
Metadata = Annotated[
    dict[
        Annotated[AnyText, Field(min_length=1, max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[AnyText, Field(strict=True, max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=MAX_METADATA),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = tuple[TokenId, ...]
