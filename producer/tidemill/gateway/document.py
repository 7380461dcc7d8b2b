"""The OpenAPI document, with what FastAPI does not know: where ids come from."""

from typing import Any

from fastapi import FastAPI

#: What makes each kind of thing: the path, the status, and what other paths call its id.
_MAKERS = (
    ("/v1/files", "200", "file_id"),
    ("/v1/batches", "200", "batch_id"),
    ("/v1/jobs", "202", "job_id"),
    ("/v1/responses", "200", "response_id"),
)
_ID = "$response.body#/id"


class DocumentedApp(FastAPI):
    """An application whose document links whatever makes a thing to what can be done with it."""

    def openapi(self) -> dict[str, Any]:
        """Return the document; it is made once."""
        if self.openapi_schema is None:
            paths = super().openapi()["paths"]
            for path, status, name in _MAKERS:
                paths[path]["post"]["responses"][status]["links"] = _links(paths, name)
            batch = paths["/v1/batches"]["post"]["operationId"]
            file_links = paths["/v1/files"]["post"]["responses"]["200"]["links"]
            file_links[batch] = {
                "operationId": batch,
                "requestBody": {"input_file_id": _ID, "endpoint": "/v1/completions"},
            }
        document: dict[str, Any] = super().openapi()
        return document


def _links(paths: dict[str, Any], name: str) -> dict[str, Any]:
    targets = [
        operation["operationId"]
        for path, operations in paths.items()
        if f"{{{name}}}" in path
        for operation in operations.values()
    ]
    return {
        target: {"operationId": target, "parameters": {name: _ID}} for target in sorted(targets)
    }
