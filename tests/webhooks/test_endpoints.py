"""How endpoints and secrets are stored and change."""

import pytest

from tidemill.protocol.errors import InvalidRequest
from tidemill_webhooks.endpoints import (
    MAX_SECRETS,
    Endpoint,
    Secret,
    active_values,
    new_endpoint,
    read_hooks,
    rotated,
    stored_secrets,
)


def make(url: str = "https://example.com/", **options: object) -> Endpoint:
    given = {"events": (), "description": "", "secret": None, "now_ms": 5, "allow_private": False}
    return new_endpoint(url, **{**given, **options})  # type: ignore[arg-type]


def test_what_is_stored_is_read_back() -> None:
    endpoint = make(events=("batch.*",), description="ours")
    secrets = (Secret("whsec_b", 0), Secret("whsec_a", 99))
    hooks = read_hooks(
        {
            endpoint.field.encode(): endpoint.stored().encode(),
            b"on": b"1",
            b"cb": stored_secrets(secrets).encode(),
        }
    )
    assert hooks.endpoint(endpoint.endpoint_id) == endpoint
    assert hooks.callback_secrets == secrets


def test_an_endpoint_that_is_off_tells_why() -> None:
    endpoint = make()
    off = f"off:{endpoint.endpoint_id}".encode()
    hooks = read_hooks({endpoint.field.encode(): endpoint.stored().encode(), off: b"410"})
    found = hooks.endpoint(endpoint.endpoint_id)
    assert not found.is_on and found.off_reason == "410" and endpoint.is_on


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"url":5}', b"\xff"])
def test_an_endpoint_that_cannot_be_read_is_left_out(value: bytes) -> None:
    assert read_hooks({b"e:we_1": value}).endpoints == {}


def test_an_unknown_endpoint_is_named() -> None:
    with pytest.raises(InvalidRequest, match="we_none"):
        read_hooks({}).endpoint("we_none")


def test_after_a_rotation_both_secrets_are_used_until_the_old_one_is_over() -> None:
    secrets = rotated((Secret("old"),), "new", now_ms=1000, grace_seconds=10)
    assert active_values(secrets, 1000) == active_values(secrets, 10_999) == ("new", "old")
    assert active_values(secrets, 11_000) == ("new",)


def test_a_rotation_without_grace_drops_the_old_secrets_at_once() -> None:
    assert rotated((Secret("old"),), "new", now_ms=1, grace_seconds=0) == (Secret("new"),)


def test_a_second_rotation_does_not_prolong_the_oldest_secret_and_their_number_is_bounded() -> None:
    secrets: tuple[Secret, ...] = (Secret("0"),)
    for number in range(1, 9):
        secrets = rotated(secrets, str(number), now_ms=number, grace_seconds=100)
    assert [secret.value for secret in secrets] == ["8", "7", "6", "5"] and len(
        secrets
    ) == MAX_SECRETS
    assert [secret.until_ms for secret in secrets] == [0, 100_008, 100_007, 100_006]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"url": "http://example.com/"}, "url"),
        ({"url": "https://example.com:22/"}, "url"),
        ({"events": ("response.done",)}, "events"),
    ],
)
def test_what_cannot_work_is_refused_when_an_endpoint_is_made(
    options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: ") as refusal:
        make(**options)  # type: ignore[arg-type]
    assert refusal.value.field == field
