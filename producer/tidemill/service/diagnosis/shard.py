"""Does work get on: leader, workers, leases, queues, counters."""

from tidemill.protocol.functions import LIBRARY
from tidemill.service.diagnosis.finding import Finding, duration, failure, ok, warning
from tidemill.service.diagnosis.shard_facts import LONG_PENDING_MS, ShardFacts

#: What a leader that has just taken over may still owe: a lease of grace and a pass.
_OVERDUE_FAILURE_MS = 30_000
#: What a lease of an attempt, and a queue of them, may take.
_HOOKS_LATE_MS = 120_000
#: A job that waits longer than this is worth a look, by priority class.
_LONG_WAIT_MS = {"p0": 60_000, "p1": 3_600_000, "p2": 86_400_000}


def check_shard_facts(facts: ShardFacts) -> list[Finding]:
    """Judge whether work gets on."""
    return [
        _leader(facts),
        _workers(facts),
        _leases(facts),
        _queues(facts),
        _delayed(facts),
        _pending(facts),
        _front_door(facts),
        _webhooks(facts),
        _counters(facts),
        _dead_letters(facts),
        _old_functions(facts),
    ]


def _leader(facts: ShardFacts) -> Finding:
    fix = "Start a scheduler: `tidemill up`, or `tidemill scheduler`."
    if facts.leader is None:
        return failure("leader", "none: nothing is dispatched", fix)
    finding = f"{facts.leader} in epoch {facts.epoch}"
    if facts.leader_lease_ms == -1:
        return failure("leader", f"{finding} with a lease that never ends", fix)
    return ok("leader", f"{finding}, lease for another {duration(facts.leader_lease_ms)}")


def _workers(facts: ShardFacts) -> Finding:
    served = {info.model for info in facts.workers if info}
    idle = sorted(set(facts.models) - served)
    finding = f"{len(facts.workers)} live, serving {', '.join(sorted(served)) or 'nothing'}"
    if not facts.workers and facts.num_queued:
        fix = "Start a worker: `tidemill up`, or `tidemill worker --model DIR`."
        return failure("workers", f"none, but {facts.num_queued} jobs wait", fix)
    if None in facts.workers:
        return warning(
            "workers",
            f"{finding}; {facts.workers.count(None)} cannot be read",
            "Run the same version of Tidemill everywhere.",
        )
    if idle or not facts.workers:
        unserved = f"; nobody serves {', '.join(idle)}" if idle else ""
        return warning("workers", finding + unserved, "Start workers for what clients may ask for.")
    return ok("workers", finding)


def _leases(facts: ShardFacts) -> Finding:
    running = f"{facts.num_running} jobs run"
    if facts.overdue_ms is None or facts.overdue_ms <= 0:
        return ok("leases", f"{running}, no lease is overdue")
    finding = f"{running}, the oldest lease ran out {duration(facts.overdue_ms)} ago"
    if facts.overdue_ms < _OVERDUE_FAILURE_MS:
        return warning("leases", finding, "Look again in a moment: the scheduler requeues it.")
    return failure("leases", finding, "See why the leading scheduler does not reap: its log.")


def _queues(facts: ShardFacts) -> Finding:
    waiting = [queue for queue in facts.queues if queue.age_ms is not None]
    if not waiting:
        return ok("queues", "no job waits")
    oldest = max(waiting, key=lambda queue: queue.age_ms or 0)
    finding = (
        f"{facts.num_queued} jobs wait in {len(waiting)} queues, the oldest for"
        f" {duration(oldest.age_ms or 0)} in {oldest.name}"
    )
    late = [queue.name for queue in waiting if (queue.age_ms or 0) > _limit(queue.name)]
    if not late:
        return ok("queues", finding)
    return warning(
        "queues",
        f"{finding}; too long in {', '.join(late[:5])}",
        "Add workers, or see with `tidemill status` why those there are get no jobs.",
    )


def _delayed(facts: ShardFacts) -> Finding:
    finding = f"{facts.num_delayed} jobs wait for their time"
    if facts.late_ms is None or facts.late_ms <= 0:
        return ok("delayed", finding)
    finding += f", the first could have run {duration(facts.late_ms)} ago"
    if facts.late_ms < _OVERDUE_FAILURE_MS:
        return ok("delayed", finding)
    return failure("delayed", finding, "See why the leading scheduler does not promote: its log.")


def _limit(queue_name: str) -> int:
    return _LONG_WAIT_MS.get(queue_name.partition(":")[0], 0)


def _pending(facts: ShardFacts) -> Finding:
    check = "pending entries"
    num = sum(queue.num_pending for queue in facts.queues)
    ages = [queue.pending_age_ms for queue in facts.queues if queue.pending_age_ms is not None]
    finding = f"{num} read and not dispatched"
    if ages:
        finding += f", the oldest for {duration(max(ages))}"
    gone = [queue.name for queue in facts.queues if queue.num_pending > queue.num_entries]
    if gone and facts.leader is None:
        return warning(
            check,
            f"{finding}; some of {', '.join(gone[:5])} are deleted",
            "Start a scheduler: it clears them when it takes over.",
        )
    return ok(check, finding)


def _front_door(facts: ShardFacts) -> Finding:
    front = facts.front
    if not front.num_late:
        return ok("front door", "no entry has been pending for long")
    return warning(
        "front door",
        f"{front.num_late} entries pending for more than {duration(LONG_PENDING_MS)}, the longest"
        f" for {duration(front.oldest_ms)}: {', '.join(front.examples)}",
        "They wait for room, a rate or a model: see `tidemill tenant list` and `tidemill status`;"
        " if for none of these, the scheduler's log tells what fails.",
    )


def _webhooks(facts: ShardFacts) -> Finding:
    hooks = facts.hooks
    finding = f"{hooks.num_events} ends to tell, {hooks.num_deliveries} deliveries on their way"
    late = max(hooks.event_ms or 0, hooks.overdue_ms or 0)
    if late < _HOOKS_LATE_MS:
        return ok("webhooks", finding)
    return warning(
        "webhooks",
        f"{finding}, the oldest is late by {duration(late)}",
        "The leading scheduler delivers them: see its log, and for slow receivers add"
        " `tidemill webhooks worker`.",
    )


def _counters(facts: ShardFacts) -> Finding:
    if not facts.miscounts:
        return ok("counters", "they agree with the queues")
    shown = ", ".join(f"{name} by {by:+d}" for name, by in sorted(facts.miscounts.items())[:5])
    return warning(
        "counters",
        f"{len(facts.miscounts)} off: {shown}",
        "Correct them with HINCRBY on the shard's `cnt`; a tenant's bound depends on it.",
    )


def _dead_letters(facts: ShardFacts) -> Finding:
    if not facts.num_dead_letters:
        return ok("dead letters", "none")
    return warning(
        "dead letters",
        f"{facts.num_dead_letters} jobs or entries were given up",
        "See `tidemill dlq`: it tells their reasons, and puts back or drops them.",
    )


def _old_functions(facts: ShardFacts) -> Finding:
    check = "old functions"
    others = sorted(facts.libraries.keys() - {LIBRARY})
    unused = [name for name in others if not facts.libraries[name]]
    if not unused:
        return ok(check, f"in use: {', '.join(others)}" if others else "none")
    return warning(
        check,
        f"no process of this shard has used {', '.join(unused)} for a day",
        "None if the leader's user may delete functions; else, as the deploy user and if no other"
        f" shard uses them: redis-cli FUNCTION DELETE {unused[0]}.",
    )
