"""Which modules of tests are run by one process, where several processes run them.

Their tests share something that is expensive to make, or would starve each other side by side.

pytest-xdist 3.8 tells its groups by a suffix of a test's id that pytest 9.2 does not read any more:
its marker ``xdist_group`` does nothing.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

GROUPS = {
    "tests/benchmarks/test_daemon_cost.py": "daemon cost",
    "tests/benchmarks/test_engine_overheads.py": "overheads",
    "tests/benchmarks/test_queue_bench.py": "benchmark",
    "tests/benchmarks/test_rag_e2e.py": "rag",
    "tests/benchmarks/test_scheduling_bench.py": "scheduling",
    "tests/chaos/test_chaos.py": "chaos",
    "tests/chaos/test_scenarios.py": "chaos",
    "tests/e2e/test_bad_input.py": "stack",
    "tests/e2e/test_best_of.py": "stack",
    "tests/e2e/test_bulk.py": "stack",
    "tests/e2e/test_commands.py": "stack",
    "tests/e2e/test_rag_example.py": "stack",
    "tests/e2e/test_sampling.py": "stack",
    "tests/gateway/test_audio.py": "gateway",
    "tests/gateway/test_chat.py": "gateway",
    "tests/gateway/test_clients_that_leave.py": "gateway",
    "tests/gateway/test_completions.py": "gateway",
    "tests/gateway/test_embeddings.py": "gateway",
    "tests/gateway/test_errors.py": "gateway",
    "tests/gateway/test_files_and_batches.py": "gateway",
    "tests/gateway/test_jobs.py": "gateway",
    "tests/gateway/test_keys.py": "gateway",
    "tests/gateway/test_messages.py": "gateway",
    "tests/gateway/test_models.py": "gateway",
    "tests/gateway/test_openai_client.py": "gateway",
    "tests/gateway/test_process.py": "gateway",
    "tests/gateway/test_responses.py": "gateway",
    "tests/gateway/test_tokenize.py": "gateway",
    "tests/golden/test_two_ranks.py": "two ranks",
    "tests/model/test_exactness.py": "exactness",
    "tests/model/test_loading.py": "loading",
    "tests/parallel/test_pipelines.py": "pipelines",
    "tests/parallel/test_ranks.py": "ranks",
    "tests/parallel/test_splits.py": "splits",
    "tests/pooling/test_end_to_end.py": "pooling",
    "tests/service/test_cluster.py": "cluster",
    "tests/service/test_sentinel.py": "sentinel",
    "tests/service/test_tls.py": "tls",
}

#: What their tests share would be made again in each process that runs one of them.
WHOLE_MODULES = frozenset(
    {
        "tests/golden/test_feature_pairs.py",
        "tests/lora/test_adapted_models.py",
        "tests/lora/test_adapters.py",
        "tests/model/test_beam_search.py",
        "tests/model/test_quantised_kv.py",
        "tests/model/test_sampled_generation.py",
        "tests/model/test_several_answers.py",
        "tests/openai/test_forced_calls.py",
        "tests/scheduler/test_tokenize_pool.py",
        "tests/speculation/test_guided_drafts.py",
        "tests/speculation/test_same_output.py",
        "tests/speech/test_model.py",
        "tests/speech/test_transcript.py",
        "tests/structured/test_guides.py",
        "tests/structured/test_json_schemas.py",
        "tests/text/test_tokenizer.py",
    }
)

#: Single tests of these take so long that nothing else would be left beside a late one.
LONG_MODULES = (
    "tests/chaos/test_chaos.py",
    "tests/e2e/test_kills.py",
    "tests/e2e/test_demo.py",
    "tests/worker/test_worker_process.py",
    "tests/worker/test_takeover.py",
    "tests/worker/test_crashes.py",
    "tests/simulation/test_scale.py",
    "tests/crash/test_scheduler_crashes.py",
    "tests/crash/test_worker_crashes.py",
    "tests/scheduler/test_failover.py",
)


def group_of(test_id: str) -> str:
    """Return the group of a test; one that is in none is a group of its own."""
    module = test_id.partition("::")[0]
    return module if module in WHOLE_MODULES else GROUPS.get(module, test_id)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests in front: among groups of one size the first one begins first."""
    places = {module: place for place, module in enumerate(LONG_MODULES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Scheduling | None":
    """Take the place of what ``--dist loadgroup`` would do: the largest groups go first."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)
