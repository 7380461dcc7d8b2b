"""Signatures that other people's libraries accept."""

import base64
import json
import time

import pytest
import standardwebhooks
import svix.webhooks

import openai
from openai import InvalidWebhookSignatureError
from tidemill.protocol.errors import InvalidRequest
from tidemill_webhooks.events import Event
from tidemill_webhooks.signing import check_secret, new_secret, signature, signed_headers

EVENT = Event("evt_1", "response.completed", "job_1", "default", int(time.time()))


def headers_for(*secrets: str, at: int | None = None) -> dict[str, str]:
    return signed_headers(secrets, EVENT.event_id, at or int(time.time()), EVENT.body)


def test_the_published_example_of_the_specification_is_signed_as_there() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_openai_unwraps_an_event_into_its_own_type() -> None:
    secret = new_secret()
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(EVENT.body, headers_for(secret))
    assert event.type == "response.completed"
    assert (event.id, event.data.id, event.object) == ("evt_1", "job_1", "event")
    assert event.created_at == EVENT.created


def test_standardwebhooks_accepts_an_event() -> None:
    secret = new_secret()
    webhook = standardwebhooks.Webhook(secret)
    assert webhook.verify(EVENT.body, headers_for(secret)) == json.loads(EVENT.body)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        webhook.verify(EVENT.body, headers_for(new_secret()))


def test_svix_accepts_an_event() -> None:
    secret = new_secret()
    webhook = svix.webhooks.Webhook(secret)
    webhook.verify(EVENT.body, headers_for(secret))
    with pytest.raises(svix.webhooks.WebhookVerificationError):
        webhook.verify(EVENT.body, headers_for(new_secret()))


def test_during_a_rotation_the_old_and_the_new_secret_both_verify() -> None:
    new, old = new_secret(), new_secret()
    headers = headers_for(new, old)
    for secret in (new, old):
        standardwebhooks.Webhook(secret).verify(EVENT.body, headers)
        svix.webhooks.Webhook(secret).verify(EVENT.body, headers)
        openai.OpenAI(api_key="none").webhooks.unwrap(EVENT.body, headers, secret=secret)


@pytest.mark.parametrize("change", ["body", "secret", "time"])
def test_what_was_changed_or_is_old_is_refused_by_openai(change: str) -> None:
    secret = new_secret()
    at = int(time.time()) - 3600 if change == "time" else None
    headers = headers_for(new_secret() if change == "secret" else secret, at=at)
    body = EVENT.body.replace(b"job_1", b"job_2") if change == "body" else EVENT.body
    with pytest.raises(InvalidWebhookSignatureError):
        openai.OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=secret)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_!!!",
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        base64.b64encode(bytes(32)).decode(),
    ],
)
def test_a_secret_of_another_form_or_length_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(InvalidRequest, match="base64 of 24 to 64 bytes") as refusal:
        check_secret(secret)
    assert len(secret) < 10 or secret not in str(refusal.value)


def test_new_secrets_differ_and_are_valid() -> None:
    secrets = {check_secret(new_secret()) for _ in range(10)}
    assert len(secrets) == 10
