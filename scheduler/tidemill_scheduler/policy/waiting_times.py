"""How long a new job would wait: pure."""

from dataclasses import replace

from tidemill.protocol.calls import Backlog


def at_pace(backlog: Backlog, jobs_per_second: float) -> Backlog:
    """Return the backlog with its rate as measured in jobs, of the mean work of those that wait."""
    num_jobs = sum(backlog.num_jobs_by_class)
    if jobs_per_second <= 0 or not num_jobs:
        return backlog
    rate = jobs_per_second * sum(backlog.work_by_class) / num_jobs
    return replace(backlog, tokens_per_second=rate)


def waiting_seconds(
    backlog: Backlog, priority_class: int, num_own_jobs: int, weight: float = 1.0
) -> float | None:
    """Return how long a tenant's next job of a class waits, None if no rate is known.

    ``num_own_jobs`` are the tenant's jobs that wait in the class, ``weight`` is its share beside
    other tenants with 1.  All its jobs go first, each of the mean work of the class: ``own``.  The
    other tenants of the class, be they n, meanwhile get n * own / weight, and the other classes
    their weights' share of all that; nobody gets more than there is.  This is what fair sharing
    comes to where shares are fluid and nothing else arrives.  A job whose prefix comes up earlier
    in the order of its class waits less.
    """
    if backlog.tokens_per_second <= 0:
        return None
    work, num_jobs = (
        backlog.work_by_class[priority_class],
        backlog.num_jobs_by_class[priority_class],
    )
    own = min(work, num_own_jobs * work / num_jobs) if num_jobs else 0.0
    num_others = backlog.num_tenants_by_class[priority_class] - (1 if num_own_jobs else 0)
    served = min(work, own * (1.0 + max(0, num_others) / weight))
    rounds = served / backlog.class_weights[priority_class]
    total = served + sum(
        min(waiting, rounds * share)
        for other, (waiting, share) in enumerate(
            zip(backlog.work_by_class, backlog.class_weights, strict=True)
        )
        if other != priority_class
    )
    return total / backlog.tokens_per_second
