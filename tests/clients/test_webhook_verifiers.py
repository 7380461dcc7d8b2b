"""Libraries that check webhooks, each with the very requests that a live Tidemill has sent."""

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import standardwebhooks
import svix.webhooks
from openai.types.webhooks import BatchCompletedWebhookEvent

import openai
from clients.mill import Mill
from support.hook_sink import HookSink, Received, hook_sink
from support.shard import KEYS
from support.wait import wait_until
from tidemill._link import Link
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.signing import new_secret


@dataclass(frozen=True)
class Delivered:
    """What was sent at the end of a response and of a batch, and how it was signed."""

    secret: str
    response_id: str
    response: Received
    batch_id: str
    batch: Received

    @property
    def requests(self) -> tuple[Received, Received]:
        """All that was sent."""
        return self.response, self.batch


@pytest.fixture(scope="module")
def delivered(mill: Mill) -> Iterator[Delivered]:
    """A response in the background and a batch, which have told of their ends."""
    client = openai.OpenAI(base_url=mill.url, api_key="none")
    with hook_sink() as sink, closing(Link(mill.stack.url, KEYS.shard, 10.0)) as link:
        admin = HookAdmin(link, KEYS, "default")
        endpoint = admin.add(sink.url, allow_private=True)
        response = client.responses.create(
            model=mill.model, input="What is the capital of France?", background=True
        )
        batch_id = small_batch(client, mill.model)
        yield Delivered(
            endpoint.secrets[0].value,
            response.id,
            arrived(sink, "response.completed"),
            batch_id,
            arrived(sink, "batch.completed"),
        )
        admin.remove(endpoint.endpoint_id)


def small_batch(client: openai.OpenAI, model: str) -> str:
    """Submit a batch of one line; returns its id."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    data = json.dumps(line).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def arrived(sink: HookSink, kind: str) -> Received:
    """The only request of a kind of event."""

    def found() -> list[Received]:
        return [each for each in sink.received if json.loads(each.body)["type"] == kind]

    wait_until(found, timeout=90, what=kind)
    [request] = found()
    return request


@pytest.mark.clients("openai (Python)")
def test_openai_unwraps_events_that_lead_to_what_ended(
    mill: Mill, delivered: Delivered, note_client: Callable[..., None]
) -> None:
    client = openai.OpenAI(base_url=mill.url, api_key="none", webhook_secret=delivered.secret)
    event = client.webhooks.unwrap(delivered.response.body, dict(delivered.response.headers))
    assert event.type == "response.completed"
    told = client.responses.retrieve(event.data.id)
    assert told.id == delivered.response_id and "Paris" in told.output_text
    event = client.webhooks.unwrap(delivered.batch.body, dict(delivered.batch.headers))
    assert isinstance(event, BatchCompletedWebhookEvent) and event.data.id == delivered.batch_id
    assert client.batches.retrieve(event.data.id).status == "completed"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(
            delivered.batch.body + b" ", dict(delivered.batch.headers), secret=delivered.secret
        )
    note_client("openai", openai.__version__, "webhooks")


@pytest.mark.clients("standardwebhooks")
def test_standardwebhooks_verifies_what_was_sent(
    delivered: Delivered, note_client: Callable[..., None]
) -> None:
    for request in delivered.requests:
        payload = standardwebhooks.Webhook(delivered.secret).verify(
            request.body, dict(request.headers)
        )
        assert payload == json.loads(request.body)
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(new_secret()).verify(request.body, dict(request.headers))
    note_client("standardwebhooks", importlib.metadata.version("standardwebhooks"), "webhooks")


@pytest.mark.clients("svix")
def test_svix_verifies_what_was_sent(
    delivered: Delivered, note_client: Callable[..., None]
) -> None:
    for request in delivered.requests:
        svix.webhooks.Webhook(delivered.secret).verify(request.body, dict(request.headers))
        with pytest.raises(svix.webhooks.WebhookVerificationError):
            svix.webhooks.Webhook(new_secret()).verify(request.body, dict(request.headers))
    note_client("svix", importlib.metadata.version("svix"), "webhooks")
