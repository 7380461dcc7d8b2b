"""A runner dies at every point of its work: each line is still written once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from crash.points import BATCH_POINTS
from support.actors import Troupe
from support.batch_shop import create, outcome, request_line, serving
from support.fake_mill import Attempt
from support.shard import KEYS
from tidemill.batches.client import AsyncBatches
from tidemill.service.runtime import CRASH_STATUS

RUNNER = "support.batch_runner:main"
NUM_LINES = 64


@pytest.fixture
def troupe(tmp_path: Path) -> Iterator[Troupe]:
    found = Troupe(tmp_path)
    yield found
    found.close()


@pytest.mark.xdist_group("processes")
async def test_a_runner_that_dies_anywhere_leaves_every_line_written_once(
    client: AsyncBatches,
    redis_url: str,
    redis_client: redis.Redis,
    troupe: Troupe,
    tmp_path: Path,
) -> None:
    """Each runner of one batch gets a little further than the one before."""

    def work(attempt: Attempt) -> None:
        odd = (attempt.request.prompt_ids or (0,))[-1] % 7 == 0
        attempt.finish(1, state="failed" if odd else "done")

    batch = await create(client, [request_line(n) for n in range(NUM_LINES)])
    with serving(redis_url, work):
        for number, point in enumerate(BATCH_POINTS):
            blob_url = str(tmp_path / "blobs")
            runner = troupe.start(RUNNER, redis_url, blob_url, crash_at=point, name=str(number))
            status = await asyncio.to_thread(runner.wait)
            assert status == CRASH_STATUS, f"{point}: {runner.log}"
    batch = await client.batch(batch.batch_id)
    assert batch.plain()["request_counts"] == {"total": 64, "completed": 54, "failed": 10}
    output, errors = await outcome(client, batch)
    assert (len(output), len(errors)) == (54, 10)
    found = [line["custom_id"] for line in (*output, *errors)]
    assert sorted(found) == sorted(f"id-{n}" for n in range(NUM_LINES))
    # Nobody ran a line a second time.
    assert len(list(redis_client.scan_iter(KEYS.job("*")))) == NUM_LINES
    assert not redis_client.exists(KEYS.active_batches)
