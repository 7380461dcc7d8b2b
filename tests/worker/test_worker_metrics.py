"""What a worker tells Prometheus."""

import redis
from prometheus_client import REGISTRY

from support.worker_rig import Rig, make_request

UNITS = ("_total", "_seconds", "_ratio", "_running", "_waiting", "_unpublished")


def _value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tidemill_worker_{name}", labels) or 0.0


def _figures() -> dict[str, float]:
    return {
        "prompt": _value("prompt_tokens_total"),
        "cached": _value("cached_tokens_total"),
        "generated": _value("generated_tokens_total"),
        "first": _value("time_to_first_token_seconds_count"),
        "steps": _value("step_seconds_count"),
        "done": _value("jobs_ended_total", state="done"),
        "failed": _value("jobs_ended_total", state="failed"),
        "claimed": _value("jobs_claimed_total"),
    }


def test_a_worker_counts_tokens_steps_and_ends(redis_client: redis.Redis, rig: Rig) -> None:
    before = _figures()
    rig.runner.run_free()
    prompt = tuple(range(1, 10))
    for _ in range(2):
        job_id = rig.give(make_request(prompt, num_tokens=8))
        rig.wait_for(job_id, "done")
    rig.wait_for(rig.give(make_request(model="other")), "failed")
    rig.wait_for_status(lambda status: status.num_running == 0)
    after = _figures()
    counted = {name: after[name] - before[name] for name in before}
    # The second job finds the two full blocks of its prompt in the cache.
    assert counted == {
        "prompt": 10,
        "cached": 8,
        "generated": 16,
        "first": 2,
        "steps": 16,
        "done": 2,
        "failed": 1,
        "claimed": 2,
    }
    assert _value("sequences_running") == 0
    assert _value("tokens_unpublished") == 0


def test_names_carry_their_unit() -> None:
    names = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in REGISTRY.collect()
        if metric.name.startswith("tidemill_worker_")
    }
    assert len(names) > 15
    assert all(name.endswith(UNITS) for name in names)
