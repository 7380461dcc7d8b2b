"""How long a new job would wait: pure."""

from dataclasses import replace

from tidemill.protocol.calls import Backlog


def at_pace(backlog: Backlog, jobs_per_second: float, mean_tokens: float = 0.0) -> Backlog:
    """Return the backlog with its rate as measured in jobs, of the mean work of those that wait.

    Where none waits a job is work of 1 + ``mean_tokens``, prompt and longest output together, as
    for ``waiting_seconds``.  The pace of earlier jobs is none at which workers could compute larger
    ones: the rate never exceeds that of the workers' steps, nor is there one without workers.
    """
    if jobs_per_second <= 0:
        return backlog
    num_jobs = sum(backlog.num_jobs_by_class)
    mean = sum(backlog.work_by_class) / num_jobs if num_jobs else 1.0 + mean_tokens
    rate = min(jobs_per_second * mean, backlog.tokens_per_second)
    return replace(backlog, tokens_per_second=rate)


def waiting_seconds(
    backlog: Backlog,
    priority_class: int,
    num_own_jobs: int,
    weight: float = 1.0,
    *,
    cost: int = 0,
    mean_tokens: float = 0.0,
) -> float | None:
    """Return how long a tenant's next job of a class waits, None if no rate is known.

    ``num_own_jobs`` are the tenant's jobs that wait in the class, which the backlog may not know
    yet, ``cost`` the prompt tokens of the new one, and ``weight`` is its share beside other tenants
    with 1.  All of these go first, each of the mean work of the class, else of all classes, else 1
    + ``mean_tokens``: ``own``.  The other tenants of the class, be they n, meanwhile get n * own /
    weight, and the other classes their weights' share of all that; nobody gets more than there is.
    This is what fair sharing comes to where shares are fluid and nothing else arrives.  A job whose
    prefix comes up earlier in the order of its class waits less.
    """
    if backlog.tokens_per_second <= 0:
        return None
    own = num_own_jobs * _mean_work(backlog, priority_class, 1.0 + mean_tokens) + cost
    num_others = backlog.num_tenants_by_class[priority_class] - (1 if num_own_jobs else 0)
    served = min(
        max(backlog.work_by_class[priority_class] + cost, own),
        own * (1.0 + max(0, num_others) / weight),
    )
    rounds = served / backlog.class_weights[priority_class]
    total = served + sum(
        min(waiting, rounds * share)
        for other, (waiting, share) in enumerate(
            zip(backlog.work_by_class, backlog.class_weights, strict=True)
        )
        if other != priority_class
    )
    return total / backlog.tokens_per_second


def _mean_work(backlog: Backlog, priority_class: int, unknown: float) -> float:
    work, jobs = backlog.work_by_class, backlog.num_jobs_by_class
    if jobs[priority_class]:
        return work[priority_class] / jobs[priority_class]
    return sum(work) / sum(jobs) if sum(jobs) else unknown
