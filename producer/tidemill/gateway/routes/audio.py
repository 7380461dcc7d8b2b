"""``/v1/audio``: speech to text."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.openai_models.audio import AUDIO_ANSWERS, Transcription, form_of
from tidemill.gateway.transcribing import answer_speech

router = APIRouter(tags=["audio"])


@router.post(
    "/v1/audio/transcriptions",
    response_model=Transcription,
    responses=AUDIO_ANSWERS,
    openapi_extra=form_of(translates=False),
)
async def create_transcription(call: CurrentCall) -> Response:
    """Write down what is said, in its own language."""
    return await answer_speech(call, "transcribe")


@router.post(
    "/v1/audio/translations",
    response_model=Transcription,
    responses=AUDIO_ANSWERS,
    openapi_extra=form_of(translates=True),
)
async def create_translation(call: CurrentCall) -> Response:
    """Write down in English what is said."""
    return await answer_speech(call, "translate")
