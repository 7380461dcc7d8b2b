"""What a worker counts and measures, for Prometheus."""

from dataclasses import replace
from itertools import chain, repeat

from prometheus_client import Counter, Gauge, Histogram

from tidemill.protocol.kv_use import KvUse
from tidemill_gpuworker.engine.engine import EngineFigures
from tidemill_gpuworker.engine.job_engine import JobEngine
from tidemill_gpuworker.speculation.figures import SpeculationFigures

_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

RUNNING = Gauge("tidemill_worker_sequences_running", "Sequences that hold KV blocks")
WAITING = Gauge("tidemill_worker_sequences_waiting", "Sequences that wait for KV blocks")
KV_USAGE = Gauge("tidemill_worker_kv_cache_usage_ratio", "Share of the KV blocks in use")
KV_UTILISATION = Gauge(
    "tidemill_worker_kv_utilisation_ratio",
    "Share of the slots in the KV blocks of running jobs that hold a token",
)
KV_EMPTY_SLOTS = Gauge(
    "tidemill_worker_kv_empty_slots", "Slots without a token in the KV blocks of running jobs"
)
KV_MOST_EMPTY_SLOTS = Gauge(
    "tidemill_worker_kv_most_empty_slots", "The most of them that a single job has"
)
KV_CACHED_BLOCKS = Gauge(
    "tidemill_worker_kv_cached_blocks", "KV blocks that no job holds and that hold a known prefix"
)
KV_SWAP_BLOCKS = Gauge("tidemill_worker_kv_swap_blocks", "KV blocks kept in host memory")
KV_COPIES = Counter(
    "tidemill_worker_kv_block_copies_total",
    "KV blocks copied, by the way they went: out, in (host memory) or fork (on write)",
    ["way"],
)
UNPUBLISHED = Gauge(
    "tidemill_worker_tokens_unpublished", "Generated tokens not yet known to be in a token log"
)

PROMPT_TOKENS = Counter("tidemill_worker_prompt_tokens_total", "Prompt tokens computed")
CACHED_TOKENS = Counter("tidemill_worker_cached_tokens_total", "Tokens found in the prefix cache")
GENERATED_TOKENS = Counter("tidemill_worker_generated_tokens_total", "Tokens generated")
DRAFTS = Counter("tidemill_worker_spec_decode_drafts_total", "Guesses of a sequence's next tokens")
DRAFT_TOKENS = Counter("tidemill_worker_spec_decode_draft_tokens_total", "Tokens that were guessed")
ACCEPTED_TOKENS = Counter(
    "tidemill_worker_spec_decode_accepted_tokens_total", "Guessed tokens that came true"
)
ACCEPTED_PER_POSITION = Counter(
    "tidemill_worker_spec_decode_accepted_tokens_per_pos_total",
    "Guessed tokens that came true, by their place in the guess",
    ["position"],
)
PREEMPTIONS = Counter("tidemill_worker_preemptions_total", "Sequences that gave up their blocks")

STEP_SECONDS = Histogram(
    "tidemill_worker_step_seconds", "Duration of an engine step", buckets=_STEP_BUCKETS
)
FIRST_TOKEN_SECONDS = Histogram(
    "tidemill_worker_time_to_first_token_seconds",
    "From the claim of a job to its first new token",
    buckets=_TTFT_BUCKETS,
)

CLAIMED_JOBS = Counter("tidemill_worker_jobs_claimed_total", "Jobs taken up")
RESUMED_JOBS = Counter("tidemill_worker_jobs_resumed_total", "Jobs continued from their token log")
ENDED_JOBS = Counter("tidemill_worker_jobs_ended_total", "Jobs ended here, by state", ["state"])
LOST_JOBS = Counter("tidemill_worker_jobs_lost_total", "Attempts that ended before we were done")
RETRIED_JOBS = Counter(
    "tidemill_worker_jobs_retried_total",
    "Jobs given back after an error that may pass, by what became of them",
    ["outcome"],
)
RELEASED_JOBS = Counter("tidemill_worker_jobs_released_total", "Jobs given back to the queue")

STEP_FAILURES = Counter("tidemill_worker_step_failures_total", "Engine steps that raised")
CLAIM_ERRORS = Counter("tidemill_worker_claim_errors_total", "Prompts that could not be prepared")
LOG_REPAIRS = Counter(
    "tidemill_worker_log_repairs_total", "Writes that found another position or had to be repeated"
)
REFUSED_WRITES = Counter(
    "tidemill_worker_refused_writes_total", "Batches that the server refused, by kind", ["kind"]
)
BAD_COMMANDS = Counter("tidemill_worker_bad_commands_total", "Commands that made no sense")
SKIPPED_BEATS = Counter(
    "tidemill_worker_heartbeats_skipped_total", "Heartbeats left out because the worker hung"
)


class EngineMeter:
    """Carries an engine's own counts over to the metrics."""

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine
        self._seen = EngineFigures()
        self._seen_use = KvUse()

    def observe(self) -> None:
        """Bring the metrics up to date after a step."""
        figures, seen = self._engine.figures, self._seen
        PROMPT_TOKENS.inc(figures.num_prompt_tokens - seen.num_prompt_tokens)
        CACHED_TOKENS.inc(figures.num_cached_tokens - seen.num_cached_tokens)
        GENERATED_TOKENS.inc(figures.num_generated_tokens - seen.num_generated_tokens)
        PREEMPTIONS.inc(figures.num_preemptions - seen.num_preemptions)
        self._observe_speculation(figures.speculation, seen.speculation)
        self._seen = replace(figures)
        scheduler = self._engine.step_scheduler
        RUNNING.set(len(scheduler.running))
        WAITING.set(len(scheduler.waiting))
        KV_USAGE.set(scheduler.block_manager.usage)
        if (use := scheduler.kv_use) is not None:
            self._observe_kv(use)

    def _observe_speculation(self, now: SpeculationFigures, seen: SpeculationFigures) -> None:
        DRAFTS.inc(now.num_drafts - seen.num_drafts)
        DRAFT_TOKENS.inc(now.num_draft_tokens - seen.num_draft_tokens)
        ACCEPTED_TOKENS.inc(now.num_accepted_tokens - seen.num_accepted_tokens)
        before = chain(seen.accepted_per_position, repeat(0))
        for position, count in enumerate(now.accepted_per_position):
            ACCEPTED_PER_POSITION.labels(str(position)).inc(count - next(before))

    def _observe_kv(self, use: KvUse) -> None:
        seen = self._seen_use
        KV_UTILISATION.set(use.utilisation)
        KV_EMPTY_SLOTS.set(use.empty_slots)
        KV_MOST_EMPTY_SLOTS.set(use.most_empty_slots)
        KV_CACHED_BLOCKS.set(use.cached_blocks)
        KV_SWAP_BLOCKS.set(use.used_swap_blocks)
        KV_COPIES.labels("out").inc(use.swapped_out - seen.swapped_out)
        KV_COPIES.labels("in").inc(use.swapped_in - seen.swapped_in)
        KV_COPIES.labels("fork").inc(use.forked - seen.forked)
        self._seen_use = use
