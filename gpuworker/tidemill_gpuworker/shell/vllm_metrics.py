"""A worker's metrics under the names that vLLM gives its own, for dashboards made for those."""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemill_gpuworker.shell import metrics

#: Labels that all of vLLM's metrics have; a worker has one engine.
_LABELS = ("model_name", "engine")

_GAUGES: Mapping[str, MetricWrapperBase] = {
    "num_requests_running": metrics.RUNNING,
    "num_requests_waiting": metrics.WAITING,
    "kv_cache_usage_perc": metrics.KV_USAGE,
}
#: Name -> what is added up: vLLM counts tokens of prompts whether or not they were cached.
_COUNTERS: Mapping[str, tuple[MetricWrapperBase, ...]] = {
    "prompt_tokens": (metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS),
    "prompt_tokens_cached": (metrics.CACHED_TOKENS,),
    "generation_tokens": (metrics.GENERATED_TOKENS,),
    "prefix_cache_queries": (metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS),
    "prefix_cache_hits": (metrics.CACHED_TOKENS,),
    "num_preemptions": (metrics.PREEMPTIONS,),
    "spec_decode_num_drafts": (metrics.DRAFTS,),
    "spec_decode_num_draft_tokens": (metrics.DRAFT_TOKENS,),
    "spec_decode_num_accepted_tokens": (metrics.ACCEPTED_TOKENS,),
}
_FIRST_TOKEN = "vllm:time_to_first_token_seconds"


class VllmMetrics(Collector):
    """Tells the process's metrics once more; keeps nothing of its own."""

    def __init__(self, model: str) -> None:
        self._values = (model, "0")

    def collect(self) -> Iterator[Metric]:
        """Yield gauges, counters and the histogram of the time to the first token."""
        for name, source in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", _told(source), labels=_LABELS)
            gauge.add_metric(self._values, _value(source))
            yield gauge
        for name, sources in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", _told(sources[0]), labels=_LABELS)
            counter.add_metric(self._values, sum(map(_value, sources)))
            yield counter
        yield self._first_token()

    def _first_token(self) -> Metric:
        [source] = metrics.FIRST_TOKEN_SECONDS.collect()
        told = Metric(_FIRST_TOKEN, source.documentation, source.type)
        labels = dict(zip(_LABELS, self._values, strict=True))
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            if suffix != "_created":
                told.add_sample(
                    f"{_FIRST_TOKEN}{suffix}", {**labels, **sample.labels}, sample.value
                )
        return told


def _value(source: MetricWrapperBase) -> float:
    [family] = source.collect()
    [sample] = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return float(sample.value)


def _told(source: MetricWrapperBase) -> str:
    [family] = source.collect()
    return family.documentation
