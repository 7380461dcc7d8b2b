"""``tidemill webhooks``."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest
import redis
import redis.asyncio
import standardwebhooks
from click.testing import Result as Outcome

from support.fake_mill import KEYS, FakeMill
from support.hook_sink import Answer, HookSink, hook_sink
from tidemill import ConfigError, InvalidRequest, Producer
from tidemill.service.redis import connect_async
from tidemill_webhooks.courier import Courier
from tidemill_webhooks.delivery import Deliverer
from tidemill_webhooks.settings import DeliverySettings

Tidemill = Callable[..., Outcome]
URL = "https://example.com/hooks"


@pytest.fixture
def sink() -> Iterator[HookSink]:
    with hook_sink() as sink:
        yield sink


@pytest.fixture
def deliver(redis_url: str) -> Callable[[], None]:
    """Delivers what is due, as the leader does."""

    async def run() -> None:
        async with connect_async(redis_url) as client:
            deliverer = Deliverer(client, KEYS, DeliverySettings(allow_private=True))
            courier = Courier(client, KEYS, deliverer)
            while await courier.turn() or courier.num_running:
                await asyncio.sleep(0.001)

    return lambda: asyncio.run(run())


def add(tidemill: Tidemill, url: str = URL, *options: str) -> tuple[str, str]:
    """Id and secret of a new endpoint."""
    outcome = tidemill("webhooks", "add", url, "--json", *options)
    assert outcome.exit_code == 0, outcome.output
    added = json.loads(outcome.stdout)
    return added["endpoint"], added["secret"]


def listed(tidemill: Tidemill, *options: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(
        tidemill("webhooks", "list", "--json", *options).stdout
    )
    return rows


def deliveries(tidemill: Tidemill, *options: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(
        tidemill("webhooks", "deliveries", "--json", *options).stdout
    )
    return rows


def test_endpoints_are_added_and_listed_by_tenant_and_without_their_secrets(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    first, secret = add(tidemill, URL, "--event", "batch.*", "--description", "ours")
    add(tidemill, URL, "--tenant", "red")
    [row] = listed(tidemill)
    assert (row["endpoint"], row["url"], row["events"]) == (first, URL, ["batch.*"])
    assert (row["description"], row["off"]) == ("ours", "")
    text = tidemill("webhooks", "list").stdout
    assert first in text and "ours" in text and secret not in text
    assert len(listed(tidemill, "--tenant", "red")) == 1


def test_what_was_printed_at_first_is_the_secret(tidemill: Tidemill) -> None:
    endpoint, secret = tidemill("webhooks", "add", URL).stdout.split()
    assert endpoint.startswith("we_") and secret.startswith("whsec_")


def test_an_endpoint_is_switched_off_and_on_and_removed(tidemill: Tidemill) -> None:
    endpoint, _ = add(tidemill)
    assert tidemill("webhooks", "disable", endpoint, "--reason", "moving").exit_code == 0
    assert listed(tidemill)[0]["off"] == "moving"
    assert tidemill("webhooks", "enable", endpoint).exit_code == 0
    assert listed(tidemill)[0]["off"] == ""
    assert tidemill("webhooks", "remove", endpoint).exit_code == 0
    assert listed(tidemill) == []


def test_a_rotation_prints_a_new_secret_that_signs_beside_the_old_one(
    tidemill: Tidemill, sink: HookSink, deliver: Callable[[], None]
) -> None:
    endpoint, old = add(tidemill, sink.url, "--allow-private")
    new = tidemill("webhooks", "rotate", endpoint).stdout.strip()
    delivery = tidemill("webhooks", "test", endpoint).stdout.strip()
    deliver()
    [request] = sink.received
    for secret in (old, new):
        payload = standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))
    assert payload["type"] == "tidemill.test" and payload["data"]["id"] == endpoint
    assert [row["delivery_id"] for row in deliveries(tidemill)] == [delivery]
    last = tidemill("webhooks", "rotate", endpoint, "--grace-hours", "0").stdout.strip()
    tidemill("webhooks", "test", endpoint)
    deliver()
    request = sink.received[-1]
    standardwebhooks.Webhook(last).verify(request.body, dict(request.headers))
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(new).verify(request.body, dict(request.headers))


def test_the_secret_of_callbacks_is_made_once_and_rotated_on_demand(tidemill: Tidemill) -> None:
    first = tidemill("webhooks", "secret").stdout.strip()
    assert tidemill("webhooks", "secret").stdout.strip() == first
    assert tidemill("webhooks", "secret", "--tenant", "red").stdout.strip() != first
    second = tidemill("webhooks", "secret", "--rotate").stdout.strip()
    assert second != first and tidemill("webhooks", "secret").stdout.strip() == second
    own = "whsec_" + "YWJj" * 10
    assert tidemill("webhooks", "secret", "--secret", own).stdout.strip() == own


def test_deliveries_tell_how_each_try_went_and_can_be_replayed(
    tidemill: Tidemill,
    producer: Producer,
    mill: FakeMill,
    sink: HookSink,
    deliver: Callable[[], None],
) -> None:
    sink.answer = lambda _: Answer(410 if len(sink.received) == 1 else 200)
    endpoint, _ = add(tidemill, sink.url, "--allow-private")
    job = producer.submit([1])
    producer.cancel(job.id)
    deliver()
    [row] = deliveries(tidemill, "--state", "failed")
    assert (row["about"], row["event_type"]) == (job.id, "response.cancelled")
    assert [attempt["status"] for attempt in row["attempts"]] == [410]  # type: ignore[attr-defined]
    assert deliveries(tidemill, "--state", "delivered") == []
    assert "410" in tidemill("webhooks", "deliveries").stdout
    assert "410 Gone" in str(listed(tidemill)[0]["off"])
    tidemill("webhooks", "enable", endpoint)
    told = tidemill("webhooks", "replay", "--failed").stdout
    assert told == "1 of 1 will be delivered again\n"
    deliver()
    assert len(set(sink.ids)) == 1 and len(sink.received) == 2
    assert tidemill("webhooks", "replay", str(row["delivery_id"])).exit_code == 0
    deliver()
    assert len(sink.received) == 3
    [row] = deliveries(tidemill)
    assert row["state"] == "delivered" and row["due_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (["add", "http://example.com/"], InvalidRequest, "only https is allowed"),
        (["add", "https://example.com:22/"], InvalidRequest, "only the ports"),
        (["add", URL, "--event", "job.done"], InvalidRequest, "there is no 'job.done'"),
        (["add", URL, "--secret", "abc"], InvalidRequest, "secret: "),
        (["add", URL, "--tenant", "a b"], InvalidRequest, "tenant: "),
        (["rotate", "we_1"], InvalidRequest, "none called 'we_1'"),
        (["remove", "we_1"], InvalidRequest, "none called 'we_1'"),
        (["enable", "we_1"], InvalidRequest, "none called 'we_1'"),
        (["test", "we_1"], InvalidRequest, "none called 'we_1'"),
        (["replay", "evt_1-we_1"], InvalidRequest, "none called 'evt_1-we_1'"),
        (["replay"], ConfigError, "say which"),
        (["replay", "x", "--failed"], ConfigError, "say which"),
    ],
)
def test_mistakes_are_told(
    tidemill: Tidemill, redis_client: redis.Redis, arguments: list[str], kind: type, says: str
) -> None:
    outcome = tidemill("webhooks", *arguments)
    assert isinstance(outcome.exception, kind), outcome.output
    assert says in str(outcome.exception)


def test_another_tenants_delivery_cannot_be_replayed(
    tidemill: Tidemill, sink: HookSink, deliver: Callable[[], None]
) -> None:
    endpoint, _ = add(tidemill, sink.url, "--allow-private")
    delivery = tidemill("webhooks", "test", endpoint).stdout.strip()
    deliver()
    outcome = tidemill("webhooks", "replay", delivery, "--tenant", "red")
    assert isinstance(outcome.exception, InvalidRequest)


def test_a_tenant_has_a_bounded_number_of_endpoints(
    tidemill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.protocol.calls.webhooks.MAX_ENDPOINTS", 2)
    for _ in range(2):
        add(tidemill)
    outcome = tidemill("webhooks", "add", URL)
    assert isinstance(outcome.exception, InvalidRequest)
    assert "the tenant has 2 already" in str(outcome.exception)
