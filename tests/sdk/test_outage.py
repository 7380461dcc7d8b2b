"""Everything a client was doing goes on when the server comes back after a while."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_mill import KEYS, FakeMill, text_of
from support.lossy_broker import LossyBroker
from support.twins import MakeTwin
from support.wait import wait_until
from tidemill import Chunk, Result
from tidemill.service.redis import connect

pytestmark = pytest.mark.slow

_OUTAGE_SECONDS = 10.0
_NUM_ITEMS = 200
_NUM_SUBMITS = 150


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LossyBroker]:
    with LossyBroker(tmp_path / "broker") as broker:
        yield broker


class Background:
    """Something that runs on a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(work()))
        self._thread.start()

    def outcome(self) -> Any:
        self._thread.join(90)
        assert self._outcome, "it failed or hangs"
        return self._outcome[0]


def test_submits_streams_results_and_maps_outlast_an_absence_of_ten_seconds(
    make_twin: MakeTwin, broker: LossyBroker
) -> None:
    producer = make_twin(broker.url, timeout=50.0)
    with connect(broker.url, retries=20) as client:
        mill = FakeMill(client)
        streamed, awaited = producer.submit([1]), producer.submit([2])
        attempts = [mill.claim(), mill.claim()]
        attempts[0].say(2)
        chunks = Background(lambda: list(streamed.stream()))
        result = Background(lambda: awaited.result(90))
        prompts = [[3, number] for number in range(_NUM_ITEMS)]
        mapped = Background(lambda: list(producer.map(prompts, max_in_flight=50)))
        submitted = Background(lambda: [producer.submit([4]) for _ in range(_NUM_SUBMITS)])
        wait_until(lambda: int(client.hget(KEYS.counters, "q:default") or 0) > 60, 30, "a queue")
        broker.kill()
        cpu_before = time.process_time()
        threading.Event().wait(_OUTAGE_SECONDS)
        cpu_seconds = time.process_time() - cpu_before
        broker.restart()
        stop = threading.Event()
        serving = Background(lambda: mill.serve(lambda attempt: attempt.finish(3), stop))
        for attempt in attempts:
            attempt.finish(2)
        answers: list[Result] = mapped.outcome()
        handles = submitted.outcome()
        late = [handle.result(30) for handle in handles]
        stop.set()
        serving.outcome()
    told: list[Chunk] = chunks.outcome()
    assert "".join(chunk.text for chunk in told) == "".join(map(text_of, range(4)))
    assert result.outcome().token_ids == (0, 1)
    assert len({answer.job_id for answer in answers}) == _NUM_ITEMS
    assert len({answer.job_id for answer in late}) == _NUM_SUBMITS
    print(f"\nCPU time of an outage of {_OUTAGE_SECONDS:.0f} s: {cpu_seconds:.2f} s")
    # One thread that does not wait between its tries would take all of it.
    assert cpu_seconds < _OUTAGE_SECONDS / 2
