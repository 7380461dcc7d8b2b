"""Made-up bulk workloads whose prompts share prefixes the way common uses do.

All are shuffled, belong to the batch class and are fixed by their seed; ``scale`` is the share of
the jobs to make.  They show how policies compare on a shape of sharing, not what any service sees.
"""

import random
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.workload import Table, Workload

#: Tokens for each routing hash: four blocks of 16 tokens.
TOKENS_PER_HASH = 64

_BULK_PRIORITY = 1


class _Prompts:
    """Builds the table of prompts that are made of texts, each given by a name and a length.

    A hash id stands for the texts up to its end, so equal beginnings get equal ids.
    """

    def __init__(self, seed: int, scale: float, tenant_names: list[str] | None = None) -> None:
        if not 0 < scale <= 1:
            raise ConfigError(f"scale: {scale} is not a share", fix="Give more than 0, at most 1.")
        self._scale = scale
        self.rng = random.Random(seed)
        self.table = Table(tenant_names=tenant_names or ["default"])
        # (parent's id, place and names of the texts in the block) -> id.
        self._ids: dict[tuple[object, ...], int] = {}
        self._chains: dict[tuple[tuple[object, int], ...], list[int]] = {}
        self._num_ids = 0

    def count(self, everything: int) -> int:
        """Return the share of so many jobs, at least one."""
        return max(1, round(everything * self._scale))

    def add(
        self, texts: list[tuple[object, int]], private: int, output_tokens: int, tenant: int = 0
    ) -> None:
        """Add a job whose prompt is these texts and then ``private`` tokens of its own."""
        key = tuple(texts)
        if key not in self._chains:
            self._chains[key] = self._chain(texts)
        shared = self._chains[key]
        length = sum(size for _, size in texts) + private
        first = self._num_ids
        self._num_ids += length // TOKENS_PER_HASH - len(shared)
        ids = [*shared, *range(first, self._num_ids)]
        self.table.append(ids, (length, output_tokens), tenant=tenant)

    def _chain(self, texts: list[tuple[object, int]]) -> list[int]:
        """The ids of the blocks that these texts fill."""
        ends = list(accumulate(size for _, size in texts))
        ids: list[int] = []
        parent = -1
        for end in range(TOKENS_PER_HASH, ends[-1] + 1, TOKENS_PER_HASH):
            start = end - TOKENS_PER_HASH
            first, last = bisect(ends, start), bisect(ends, end - 1)
            place = start - (ends[first] - texts[first][1])
            block = (parent, place, *[name for name, _ in texts[first : last + 1]])
            parent = self._ids.setdefault(block, self._num_ids)
            self._num_ids += parent == self._num_ids
            ids.append(parent)
        return ids

    def workload(self, name: str, max_tokens: int) -> Workload:
        """Return what was added, shuffled."""
        view = Workload(name, self.table, TOKENS_PER_HASH, max_tokens=max_tokens)
        return view.as_bulk(_BULK_PRIORITY).shuffled(self.rng.randrange(1 << 32))


class _Zipf:
    """Draws the numbers below ``count``, the ``i``-th with a weight of ``(i + 1) ** -exponent``."""

    def __init__(self, count: int, exponent: float, rng: random.Random) -> None:
        self._rng = rng
        self._sums = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(self) -> int:
        return bisect(self._sums, self._rng.random() * self._sums[-1])


def eval57(seed: int = 0, scale: float = 1.0) -> Workload:
    """Make an evaluation: 57 subjects with few-shot examples, 250 questions on each."""
    prompts = _Prompts(seed, scale)
    rng = prompts.rng
    shots = [rng.randint(600, 1200) for _ in range(57)]
    for subject, length in enumerate(shots):
        for _ in range(prompts.count(250)):
            prompts.add([(subject, length)], rng.randint(40, 140), rng.randint(1, 24))
    return prompts.workload("eval57", 24)


def rag1(seed: int = 0, scale: float = 1.0) -> Workload:
    """Make questions on one long document each: 3,000 documents of 4k to 8k tokens, Zipf 0.7."""
    prompts = _Prompts(seed, scale)
    rng = prompts.rng
    lengths = [rng.randint(4000, 8000) for _ in range(3000)]
    popular = _Zipf(len(lengths), 0.7, rng)
    for _ in range(prompts.count(20_000)):
        document = popular.draw()
        prompts.add([(document, lengths[document])], rng.randint(20, 80), rng.randint(50, 250))
    return prompts.workload("rag1", 256)


def rag5(seed: int = 0, scale: float = 1.0, *, canonical: bool = False) -> Workload:
    """Make questions on five retrieved passages after an instruction.

    ``canonical`` puts the passages in the order of their numbers, which makes more of the prompts
    begin alike; otherwise they come in the order of retrieval.
    """
    prompts = _Prompts(seed, scale)
    rng = prompts.rng
    lengths = [rng.randint(300, 600) for _ in range(2000)]
    popular = _Zipf(len(lengths), 1.0, rng)
    for _ in range(prompts.count(20_000)):
        passages: list[int] = []
        while len(passages) < 5:
            passage = popular.draw()
            if passage not in passages:
                passages.append(passage)
        ordered = sorted(passages) if canonical else passages
        texts: list[tuple[object, int]] = [("instruction", 448)]
        texts += [(passage, lengths[passage]) for passage in ordered]
        prompts.add(texts, rng.randint(20, 80), rng.randint(50, 150))
    return prompts.workload("rag5-canonical" if canonical else "rag5", 160)


def tenants(seed: int = 0, scale: float = 1.0) -> Workload:
    """Make webhooks of 100 tenants with 2,000 prompt templates of 500 to 3,500 tokens."""
    prompts = _Prompts(seed, scale, [f"tenant{number:03d}" for number in range(100)])
    rng = prompts.rng
    lengths = [rng.randint(500, 3500) for _ in range(2000)]
    popular = _Zipf(len(lengths), 1.0, rng)
    for _ in range(prompts.count(20_000)):
        template = popular.draw()
        texts: list[tuple[object, int]] = [(template, lengths[template])]
        prompts.add(texts, rng.randint(50, 320), rng.randint(10, 90), template % 100)
    return prompts.workload("tenants", 96)


def best_of_8(seed: int = 0, scale: float = 1.0) -> Workload:
    """Make eight answers to each of 2,500 prompts; the prompts fill their blocks."""
    prompts = _Prompts(seed, scale)
    rng = prompts.rng
    for prompt in range(prompts.count(2500)):
        length = TOKENS_PER_HASH * rng.randint(30, 80)
        for _ in range(8):
            prompts.add([(prompt, length)], 0, rng.randint(50, 350))
    return prompts.workload("best-of-8", 352)


def fair_tenants(seed: int = 0, scale: float = 1.0) -> Workload:
    """Make eight tenants with 100 templates each, one of them with four times the jobs."""
    prompts = _Prompts(seed, scale, [f"tenant{number}" for number in range(8)])
    rng = prompts.rng
    lengths = [rng.randint(1000, 3000) for _ in range(800)]
    for tenant in range(8):
        num_jobs = prompts.count(6000 if tenant == 0 else 1500)
        for _ in range(num_jobs):
            template = tenant * 100 + rng.randrange(100)
            texts: list[tuple[object, int]] = [(template, lengths[template])]
            prompts.add(texts, rng.randint(100, 500), rng.randint(10, 90), tenant)
    return prompts.workload("fair-tenants", 96)


def _rag5_canonical(seed: int = 0, scale: float = 1.0) -> Workload:
    return rag5(seed, scale, canonical=True)


#: The made-up workloads by name: (seed, scale) -> workload.
GENERATORS: dict[str, Callable[[int, float], Workload]] = {
    "eval57": eval57,
    "rag1": rag1,
    "rag5": rag5,
    "rag5-canonical": _rag5_canonical,
    "tenants": tenants,
    "best-of-8": best_of_8,
    "fair-tenants": fair_tenants,
}
