"""The ASGI application: routes, and what surrounds them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from tidemill._version import __version__
from tidemill.gateway.body_limit import BodyLimit
from tidemill.gateway.body_values import check_json
from tidemill.gateway.document import DocumentedApp
from tidemill.gateway.errors import handle_error
from tidemill.gateway.failures import Failures
from tidemill.gateway.identity import MEASURING_PATHS, OPEN_PATHS, Authentication
from tidemill.gateway.key_limits import HEADERS, KeyLimitHeaders
from tidemill.gateway.metrics import Counting
from tidemill.gateway.openai_models.errors import ErrorResponse
from tidemill.gateway.permissions import enforce
from tidemill.gateway.request_ids import RequestIds
from tidemill.gateway.routes import (
    audio,
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    jobs,
    messages,
    models,
    responses,
    scores,
    tokenize,
)
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.requests import MAX_STORED_AUDIO_BYTES

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    models.router,
    completions.router,
    chat.router,
    embeddings.router,
    scores.router,
    audio.router,
    messages.router,
    jobs.router,
    responses.router,
    tokenize.router,
    files.router,
    batches.router,
)

#: Paths, by their beginnings, whose bodies are files, and bounds of their own; None is the
#: setting's.
UPLOAD_PATHS = {"/v1/files": None, "/v1/audio": MAX_STORED_AUDIO_BYTES}
#: What a form has besides its file.
_FORM_BYTES = 256 * 1024

#: Paths, by their beginnings, whose bodies are one prompt: of the longest text there may be each
#: character takes up to six bytes.  Reading JSON holds up everybody, so no more than that is read.
PROMPT_PATHS = (
    *("/v1/chat", "/v1/jobs", "/v1/messages", "/v1/responses"),
    *("/tokenize", "/detokenize"),
)
MAX_PROMPT_BODY_BYTES = 8 << 20

#: What a route may raise: ours, the framework's, texts that are no Unicode, and anything else.
_HANDLED = (TidemillError, HTTPException, RequestValidationError, UnicodeEncodeError, Exception)

_DESCRIPTION = """\
OpenAI's API, and extensions of vLLM's, over Tidemill's queue. Fields that are not known are
ignored; `null` is the same as a field left out.
"""
_ERRORS: dict[int | str, dict[str, object]] = {
    "default": {"model": ErrorResponse, "description": "An error, in OpenAI's form"}
}


def create_app(state: GatewayState) -> FastAPI:
    """Return the application of one gateway; it closes ``state`` when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.close()

    app = DocumentedApp(
        title="Tidemill",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        responses=_ERRORS,
        root_path=state.settings.root_path,
        dependencies=[Depends(enforce), Depends(check_json)],
    )
    app.state.gateway = state
    for router in ROUTERS:
        app.include_router(router)
    for kind in _HANDLED:
        app.add_exception_handler(kind, handle_error)
    _surround(app, state)
    return app


def _surround(app: FastAPI, state: GatewayState) -> None:
    """Add the middleware, the innermost first."""
    settings = state.settings
    bounds = {path: min(MAX_PROMPT_BODY_BYTES, settings.body_bytes) for path in PROMPT_PATHS}
    bounds |= {
        path: min(bound or settings.upload_bytes, settings.upload_bytes) + _FORM_BYTES
        for path, bound in UPLOAD_PATHS.items()
    }
    app.add_middleware(
        BodyLimit,
        num_bytes=settings.body_bytes,
        bounds=bounds,
        silence_seconds=settings.body_seconds,
    )
    app.add_middleware(KeyLimitHeaders)
    app.add_middleware(
        Authentication,
        authenticator=state.authenticator,
        open_paths=OPEN_PATHS - MEASURING_PATHS if settings.protect_metrics else OPEN_PATHS,
    )
    app.add_middleware(Failures, state=state)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *HEADERS],
        )
    app.add_middleware(Counting, metrics=state.metrics)
    app.add_middleware(RequestIds)
