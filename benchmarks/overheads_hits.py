"""What a hit in the prefix cache saves: the same prompts cold, and with most of them cached."""

import statistics
from dataclasses import dataclass

from overheads_model import BLOCK_SIZE, ServedAgain, Serving, draw_requests
from workloads import Request

#: The share of each prompt that is cached; in whole blocks where lengths are multiples of 80.
HIT_SHARE = 0.8


@dataclass(frozen=True)
class Prompts:
    """So many prompts that arrive at once."""

    number: int
    length: int

    @property
    def title(self) -> str:
        """How many prompts of which length."""
        return f"{self.number} x {self.length:,} tokens"


PROMPTS = (Prompts(1, 480), Prompts(1, 960), Prompts(1, 1920), Prompts(8, 480))


@dataclass(frozen=True)
class HitCosts:
    """Seconds of pairs of runs of the same prompts, and how many first tokens were the same."""

    title: str
    cold: list[float]
    warm: list[float]
    cold_cpu: list[float]
    warm_cpu: list[float]
    num_same: int
    num_prompts: int

    @property
    def saved(self) -> float:
        """By which share the time to the first token falls: the median of the pairs."""
        return _saved(self.cold, self.warm)

    @property
    def saved_cpu(self) -> float:
        """The same of the CPU time of the whole run."""
        return _saved(self.cold_cpu, self.warm_cpu)


def measure_hits(model: ServedAgain, prompts: Prompts, repeat: int) -> HitCosts:
    """Serve each draw of the prompts twice, cold and with their beginnings cached, by turns."""
    pairs = [_pair(model, prompts, number) for number in range(repeat)]
    return HitCosts(
        prompts.title,
        cold=[cold.first_token_p50 for cold, _ in pairs],
        warm=[warm.first_token_p50 for _, warm in pairs],
        cold_cpu=[cold.cpu_seconds for cold, _ in pairs],
        warm_cpu=[warm.cpu_seconds for _, warm in pairs],
        num_same=sum(
            cold.first_ids[seq_id] == warm.first_ids[seq_id]
            for cold, warm in pairs
            for seq_id in cold.first_ids
        ),
        num_prompts=repeat * prompts.number,
    )


def _pair(model: ServedAgain, prompts: Prompts, number: int) -> tuple[Serving, Serving]:
    requests = draw_requests(prompts.number, prompts.length, 1, model.vocab_size, seed=number)
    if number % 2:
        warm = _serve_warm(model, requests)
        return _serve_cold(model, requests), warm
    return _serve_cold(model, requests), _serve_warm(model, requests)


def _serve_cold(model: ServedAgain, requests: list[Request]) -> Serving:
    model.empty(caching=True)
    cold = model.serve(requests)
    assert not model.num_hit_tokens, "the cache was empty"
    return cold


def _serve_warm(model: ServedAgain, requests: list[Request]) -> Serving:
    model.empty(caching=True)
    num_cached = [int(HIT_SHARE * len(request.prompt)) // BLOCK_SIZE for request in requests]
    model.serve(
        [
            Request(request.prompt[: count * BLOCK_SIZE], 1)
            for request, count in zip(requests, num_cached, strict=True)
        ]
    )
    warm = model.serve(requests)
    assert model.num_hit_tokens == sum(num_cached) * BLOCK_SIZE, "all of it was found, no more"
    return warm


def _saved(cold: list[float], warm: list[float]) -> float:
    return 1.0 - statistics.median(w / c for c, w in zip(cold, warm, strict=True))
