"""The list of models, and the endpoints of probes."""

import httpx2 as httpx

from gateway.conftest import MODEL, Site
from support.tiny_chat_model import MAX_MODEL_LEN


def test_models_are_listed_and_described(site: Site) -> None:
    listed = httpx.get(f"{site.url}/v1/models").json()
    one = httpx.get(f"{site.url}/v1/models/{MODEL}").json()
    assert listed["object"] == "list" and one in listed["data"]
    assert one["id"] == MODEL and one["object"] == "model" and one["max_model_len"] == MAX_MODEL_LEN


def test_an_unknown_model_is_told_as_openai_does(site: Site) -> None:
    answer = httpx.get(f"{site.url}/v1/models/nobody")
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error["code"] == "model_not_found" and error["type"] == "invalid_request_error"
    assert error["param"] == "model" and "nobody" in error["message"]
