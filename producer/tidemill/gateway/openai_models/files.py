"""``/v1/files``."""

from typing import Any, Literal

from tidemill.gateway.openai_models.base import ApiResponse

#: The body of an upload, which is read as it comes and so not by FastAPI.
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {
                            "type": "string",
                            "enum": [
                                *("batch", "assistants", "evals"),
                                *("fine-tune", "user_data", "vision"),
                            ],
                        },
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2592000,
                        },
                    },
                }
            }
        },
    }
}

CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The content",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class FileObject(ApiResponse):
    """A file; its content is at ``/v1/files/{id}/content``."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    status_details: str | None = None


class FileList(ApiResponse):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ApiResponse):
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
