"""A worker's metrics under vLLM's names."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.vllm_metrics import VllmMetrics

LABELS = {"model_name": "tiny", "engine": "0"}


def scraped() -> dict[str, float]:
    """What Prometheus reads, by sample; fails if a sample lacks a label of vLLM's."""
    registry = CollectorRegistry()
    registry.register(VllmMetrics("tiny"))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert {name: sample.labels.get(name) for name in LABELS} == LABELS
            found[f"{sample.name}{sample.labels.get('le', '')}"] = sample.value
    return found


def test_the_same_counts_are_told_under_vllms_names() -> None:
    before = scraped()
    metrics.PROMPT_TOKENS.inc(10)
    metrics.CACHED_TOKENS.inc(6)
    metrics.GENERATED_TOKENS.inc(4)
    metrics.PREEMPTIONS.inc()
    metrics.FIRST_TOKEN_SECONDS.observe(0.2)
    after = scraped()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    first = "vllm:time_to_first_token_seconds"
    # Whether cached or not, a token of a prompt is one to vLLM.
    assert grown.pop("vllm:prompt_tokens_total") == grown.pop("vllm:prefix_cache_queries_total")
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 16
    assert grown.pop("vllm:prompt_tokens_cached_total") == 6
    assert grown.pop("vllm:prefix_cache_hits_total") == 6
    assert grown.pop("vllm:generation_tokens_total") == 4
    assert grown.pop("vllm:num_preemptions_total") == 1
    assert grown.pop(f"{first}_count") == 1
    assert abs(grown.pop(f"{first}_sum") - 0.2) < 1e-9
    assert set(grown) == {f"{first}_bucket{le}" for le in BUCKETS if float(le) >= 0.2}


BUCKETS = ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "+Inf")


def test_gauges_have_vllms_names_too() -> None:
    told = {}
    for value in (3, 0):
        metrics.RUNNING.set(value)
        metrics.WAITING.set(2 * value)
        metrics.KV_USAGE.set(value / 4)
        told[value] = scraped()
    assert told[3]["vllm:num_requests_running"] == 3
    assert told[3]["vllm:num_requests_waiting"] == 6
    assert told[3]["vllm:kv_cache_usage_perc"] == 0.75
    assert told[0]["vllm:num_requests_running"] == 0
