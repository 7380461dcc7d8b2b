"""A seed tells everything that a run will try."""

from collections import Counter

from chaos.plan import FAULTS, TENANTS, make_plan


def test_the_same_seed_makes_the_same_plan_and_another_seed_another_one() -> None:
    assert make_plan(7, 300, 20.0) == make_plan(7, 300, 20.0)
    assert make_plan(7, 300, 20.0) != make_plan(8, 300, 20.0)


def test_every_prompt_is_unlike_all_others_so_that_mixed_up_outputs_show() -> None:
    plan = make_plan(7, 20_000, 20.0)
    assert len({job.prompt for job in plan.jobs}) == len(plan.jobs) == 20_000


def test_a_long_plan_tries_every_fault_and_kind_of_job() -> None:
    plan = make_plan(7, 5_000, 300.0)
    assert {fault.name for fault in plan.faults} == set(FAULTS)
    assert {job.tenant for job in plan.jobs} == set(TENANTS)
    kinds = (
        "rival",
        "conflict",
        "cancel_after",
        "delay",
        "deadline",
        "max_queue",
        "stall",
        "batch",
    )
    missing = {kind for kind in kinds if not any(getattr(job, kind) for job in plan.jobs)}
    assert not missing


def test_jobs_and_faults_lie_within_the_time_of_the_plan() -> None:
    plan = make_plan(7, 500, 30.0)
    assert all(0 <= job.at <= 30 for job in plan.jobs)
    assert all(1 <= fault.at <= 30 for fault in plan.faults)


def test_faults_can_be_chosen_without_changing_the_jobs() -> None:
    chosen = make_plan(7, 100, 60.0, ["kill_worker"])
    assert Counter(fault.name for fault in chosen.faults).keys() == {"kill_worker"}
    assert chosen.jobs == make_plan(7, 100, 60.0).jobs
    assert not make_plan(7, 100, 60.0, []).faults
