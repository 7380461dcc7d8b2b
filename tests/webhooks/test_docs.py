"""What docs/webhooks.md says is so."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tidemill_webhooks import metrics
from tidemill_webhooks.events import EVENT_TYPES, TEST_EVENT, Event
from tidemill_webhooks.schedule import PAUSES_SECONDS
from tidemill_webhooks.signing import new_secret, signed_headers

PAGE = (Path(__file__).parents[2] / "docs" / "webhooks.md").read_text()
BLOCKS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "receive" in code]
EVENT = Event("evt_1", "response.completed", "job_1", "default", int(time.time()))


@pytest.mark.parametrize("code", BLOCKS, ids=["openai", "standardwebhooks", "svix"])
def test_each_example_takes_what_is_ours_and_refuses_the_rest(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    secret = new_secret()
    headers = signed_headers((secret,), EVENT.event_id, int(time.time()), EVENT.body)
    assert names["receive"](headers, EVENT.body, secret) == ("response.completed", "job_1")
    with pytest.raises(Exception, match=r"(?i)signature"):
        names["receive"](headers, EVENT.body, new_secret())
    old = signed_headers((secret,), EVENT.event_id, int(time.time()) - 3600, EVENT.body)
    with pytest.raises(Exception, match=r"(?i)timestamp|too old"):
        names["receive"](old, EVENT.body, secret)


def test_the_payload_is_as_shown() -> None:
    [shown] = re.findall(r'^(\{"id":"evt_.*\})$', PAGE, re.MULTILINE)
    assert json.loads(shown).keys() == json.loads(EVENT.body).keys()


def test_every_type_of_event_is_told() -> None:
    table = set(re.findall(r"`((?:response|batch|tidemill)\.[a-z]+)`", PAGE))
    assert {*EVENT_TYPES, TEST_EVENT} <= table


def test_the_pauses_are_as_told() -> None:
    units = {"s": 1, "min": 60, "h": 3600}
    told = re.search(r"at once, then after (.*?): each|at once, then after (.*?), each", PAGE)
    assert told is not None
    pauses = re.findall(r"(\d+) (s|min|h)\b", told.group(0))
    assert tuple(int(number) * units[unit] for number, unit in pauses) == PAUSES_SECONDS


def test_every_metric_is_documented() -> None:
    defined = {
        value._name + ("_total" if type(value).__name__ == "Counter" else "")
        for value in vars(metrics).values()
        if hasattr(value, "_name")
    }
    documented = {
        name.partition("{")[0] for name in re.findall(r"`(tidemill_webhook_[^`]+)`", PAGE)
    }
    assert documented == defined
