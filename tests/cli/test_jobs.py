"""``tidemill jobs``."""

import json
from collections.abc import Callable

from click.testing import Result as Outcome

from support.fake_mill import FakeMill
from tidemill import Producer

Tidemill = Callable[..., Outcome]


def test_jobs_are_listed_for_people_and_for_programs(
    tidemill: Tidemill, mill: FakeMill, producer: Producer
) -> None:
    done = producer.submit([1], metadata={"of": "[/]"})
    mill.claim().finish()
    waiting = tidemill(
        "submit", "x", "--raw", "--detach", "--metadata", "a=b=c", "--batch", "night"
    ).stdout.strip()
    shown = tidemill("jobs")
    assert shown.exit_code == 0, shown.exception
    first, second = (line for line in shown.stdout.splitlines() if "job_" in line)
    assert waiting in first and "queued" in first and "batch night, a=b=c" in first
    assert done.id in second and "done" in second and "of=[/]" in second
    lines = tidemill("jobs", "--json", "--state", "queued").stdout.splitlines()
    [told] = map(json.loads, lines)
    assert (told["job_id"], told["state"], told["metadata"]) == (waiting, "queued", {"a": "b=c"})
    assert done.id not in tidemill("jobs", "-n", "1").stdout
    assert "job_" not in tidemill("jobs", "--batch", "day").stdout
    assert "job_" not in tidemill("jobs", "--tenant", "other").stdout
