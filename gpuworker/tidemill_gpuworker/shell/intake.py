"""From commands to messages for the step loop, on the command reader's thread."""

import logging
from collections.abc import Sequence

from tidemill.protocol.messages import CommandKind
from tidemill.service.runtime import crash_point
from tidemill_gpuworker.shell.claims import Claim, ClaimLoader, KindClaim, Refusal
from tidemill_gpuworker.shell.commands import Command
from tidemill_gpuworker.shell.inbox import Cancelled, Claimed, DrainAsked, Hinted, Inbox, Message
from tidemill_gpuworker.shell.jobs import JobTable

_log = logging.getLogger(__name__)


class Intake:
    """Loads claims off the step loop's thread, so that it never waits for the broker.

    A claimed job is in the job table, its lease renewed, before the step loop sees it.
    """

    def __init__(self, loader: ClaimLoader, jobs: JobTable, inbox: Inbox) -> None:
        self._loader = loader
        self._jobs = jobs
        self._inbox = inbox

    def __call__(self, commands: Sequence[Command]) -> None:
        """Handle commands in their order; without effect if it raises."""
        runs = [command for command in commands if command.kind is CommandKind.RUN]
        claims = dict(zip((c.entry_id for c in runs), self._loader.load(runs), strict=True))
        for command in commands:
            if command.kind is CommandKind.RUN:
                self._inbox.put(self._claimed(command, claims[command.entry_id]))
            else:
                self._inbox.put(_other(command))

    def _claimed(self, command: Command, claim: Claim | KindClaim | Refusal | None) -> Claimed:
        if claim is None:
            _log.info("%s: attempt %d is over already", command.job_id, command.fence)
        else:
            self._jobs.add(claim.job)
            crash_point("worker.claimed")
        return Claimed(command.entry_id, claim)


def _other(command: Command) -> Message:
    if command.kind is CommandKind.DRAIN:
        return DrainAsked(command_id=command.entry_id)
    if command.kind is CommandKind.HINT:
        return Hinted(command.entry_id, command.refs)
    return Cancelled(command.entry_id, command.job_id, command.fence)
