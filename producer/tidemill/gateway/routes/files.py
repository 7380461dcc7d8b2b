"""``/v1/files``: inputs and outputs of batches."""

from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from tidemill.gateway.answering import json_response
from tidemill.gateway.call import CurrentCall
from tidemill.gateway.openai_models.files import (
    CONTENT,
    UPLOAD_BODY,
    DeletedFile,
    FileList,
    FileObject,
)
from tidemill.gateway.uploads import UploadForm

router = APIRouter(tags=["files"])


@router.post("/v1/files", response_model=FileObject, openapi_extra=UPLOAD_BODY)
async def create_file(call: CurrentCall) -> Response:
    """Store a file: for a batch of at most 200 MB, for others what the gateway allows."""
    form = UploadForm(call.request.headers.get("content-type", ""))
    batches = call.state.batches(call.identity.tenant)
    async with batches.begin_upload(call.state.settings.upload_bytes) as upload:
        async for data in call.request.stream():
            pieces = form.feed(data)
            # Clients may send the purpose behind the file as well.
            upload.bound_for(form.fields.get("purpose", ""))
            for piece in pieces:
                await upload.write(piece)
        form.finish()
        file = await batches.finish_upload(
            upload,
            filename=form.filename,
            purpose=form.fields.get("purpose", ""),
            expires_after=form.nested("expires_after"),
        )
    return json_response(file.plain())


@router.get("/v1/files", response_model=FileList)
async def list_files(
    call: CurrentCall,
    after: str | None = None,
    limit: str | None = None,
    order: str | None = None,
    purpose: str | None = None,
) -> Response:
    """List files, the newest first unless ``order`` is ``asc``."""
    batches = call.state.batches(call.identity.tenant)
    page = await batches.files(after=after, limit=limit, order=order, purpose=purpose)
    return json_response(page.plain())


@router.get("/v1/files/{file_id}", response_model=FileObject)
async def get_file(call: CurrentCall, file_id: str) -> Response:
    """Describe a file."""
    return json_response((await call.state.batches(call.identity.tenant).file(file_id)).plain())


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=CONTENT)
async def get_content(call: CurrentCall, file_id: str) -> Response:
    """Return what a file holds."""
    file, content = await call.state.batches(call.identity.tenant).content(file_id)
    headers = {
        "content-length": str(file.num_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
    }
    return StreamingResponse(content, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}", response_model=DeletedFile)
async def delete_file(call: CurrentCall, file_id: str) -> DeletedFile:
    """Delete a file; a batch that reads it goes on."""
    await call.state.batches(call.identity.tenant).delete_file(file_id)
    return DeletedFile(id=file_id)
