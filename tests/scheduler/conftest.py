"""Fixtures that start scheduler daemons and end them after the test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.scheduler_process import (
    SchedulerProcess,
    StartScheduler,
    spawn_scheduler,
    wait_for_leader,
)


@pytest.fixture
def start_scheduler(redis_url: str, tmp_path: Path) -> Iterator[StartScheduler]:
    """Starts daemons; takes the options of ``spawn_scheduler``."""
    started: list[SchedulerProcess] = []

    def start(**options: Any) -> SchedulerProcess:
        log_path = tmp_path / f"scheduler-{len(started)}.log"
        started.append(spawn_scheduler(redis_url, log_path, **options))
        return started[-1]

    yield start
    for scheduler in started:
        scheduler.kill()


@pytest.fixture
def leader(redis_client: redis.Redis, start_scheduler: StartScheduler) -> SchedulerProcess:
    """A daemon that leads."""
    scheduler = start_scheduler()
    wait_for_leader(redis_client)
    return scheduler
