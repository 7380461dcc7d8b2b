"""Whether answers are what the gateway's own document says."""

from functools import cache
from typing import Any

import httpx2 as httpx
import jsonschema


@cache
def document(url: str) -> dict[str, Any]:
    """What a gateway says of itself."""
    told: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    return told


def check(url: str, path: str, told: Any, *, method: str = "post", status: str = "200") -> None:
    """Fail if an answer is not as the document has it, or has fields that it does not name."""
    whole = document(url)
    answer = whole["paths"][path][method]["responses"][status]
    schema = answer["content"]["application/json"]["schema"]
    jsonschema.validate(told, {**schema, "components": whole["components"]})
    name = schema["$ref"].rpartition("/")[2]
    unknown = told.keys() - whole["components"]["schemas"][name]["properties"].keys()
    assert not unknown, f"{path} does not tell of {unknown}"
