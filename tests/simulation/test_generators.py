import pytest

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.generators import GENERATORS, fair_tenants, rag5
from tidemill_scheduler.simulation.workload import Workload


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_gives_the_same_jobs_for_a_seed(name: str) -> None:
    make = GENERATORS[name]
    jobs = list(make(1, 0.01))

    assert jobs == list(make(1, 0.01))
    assert jobs != list(make(2, 0.01))
    assert {job.priority for job in jobs} == {1}
    assert all(len(job.key) // 8 == job.input_tokens // 64 for job in jobs)
    assert all(1 <= job.output_tokens <= job.max_tokens for job in jobs)


# The bounds of scheduling work on these shapes, in percent, for the full number of jobs.
@pytest.mark.parametrize(
    ("name", "least", "most"), [("eval57", 86, 89), ("tenants", 80, 85), ("best-of-8", 87.4, 87.5)]
)
def test_prompts_share_as_much_as_the_shape_says(name: str, least: float, most: float) -> None:
    workload = GENERATORS[name](0, 1.0)

    assert least <= 100 * workload.bound().share <= most


def shared_tokens(workload: Workload) -> int:
    return workload.bound().hit_tokens


def test_passages_in_canonical_order_share_more() -> None:
    plain, canonical = rag5(3, 0.05), rag5(3, 0.05, canonical=True)

    assert plain.bound().input_tokens == canonical.bound().input_tokens
    assert shared_tokens(canonical) > 1.3 * shared_tokens(plain)


def test_one_of_eight_tenants_has_four_times_the_jobs() -> None:
    jobs = list(fair_tenants(0, 0.01))
    counts = [sum(job.tenant == f"tenant{number}" for job in jobs) for number in range(8)]

    assert counts == [60, 15, 15, 15, 15, 15, 15, 15]


def test_tenants_share_nothing_with_each_other() -> None:
    roots: dict[str, set[bytes]] = {}
    for job in fair_tenants(0, 0.05):
        roots.setdefault(job.tenant, set()).add(job.key[:8])

    assert sum(map(len, roots.values())) == len(set().union(*roots.values()))


def test_a_share_of_no_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="scale"):
        rag5(0, 0.0)
