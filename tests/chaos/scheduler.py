"""The scheduler daemon, unchanged but for two witnesses: whom it gave jobs to, and when it led."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.history import Recorder
from chaos.plan import LEADER_LEASE_SECONDS, LEASE_SECONDS
from chaos.process import ProcessSpec
from tidemill.protocol import calls
from tidemill.protocol.functions import Call


def main(spec: ProcessSpec) -> int:
    """Serve until drained."""
    leads = Recorder(Path(spec.directory) / "leads.jsonl")
    witness(spec.recorder, leads, spec.name)
    from tidemill_scheduler.__main__ import main as run_daemon

    return run_daemon(
        [
            "--redis-url",
            spec.url,
            "--lease-seconds",
            str(LEASE_SECONDS),
            "--leader-lease-seconds",
            str(LEADER_LEASE_SECONDS),
        ]
    )


def witness(recorder: Recorder, leads: Recorder, name: str) -> None:
    """Record the replies to this process's dispatches and its changes of epoch."""
    led = {"epoch": 0}

    def dispatched(fields: dict[str, Any], reply: Any) -> None:
        if reply.fence:
            recorder.record(
                "dispatch",
                job=fields["job_id"],
                worker=fields["worker_id"],
                epoch=fields["epoch"],
                fence=reply.fence,
                command=reply.command_id,
            )

    def leading(_fields: dict[str, Any], epoch: Any) -> None:
        if epoch != led["epoch"]:
            led["epoch"] = epoch
            leads.record("lead", epoch=epoch, name=name)

    calls.dispatch = _observed(calls.dispatch, dispatched)
    calls.lead = _observed(calls.lead, leading)


def _observed(
    build: Callable[..., Call[Any]], tell: Callable[[dict[str, Any], Any], None]
) -> Callable[..., Call[Any]]:
    @functools.wraps(build)
    def observed(*args: Any, **fields: Any) -> Call[Any]:
        call = build(*args, **fields)

        def parse(reply: Any) -> Any:
            result = call.parse(reply)
            tell(fields, result)
            return result

        return replace(call, parse=parse)

    return observed
