"""What the block table costs: the native attention kernel over scattered blocks and over one."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from tidemill_kernels import AttentionBackend, AttentionMetadata, select_backend

#: So much of K and V is read before a call finds its own again, as from layer to layer of a model.
COLD_BYTES = 128 << 20
#: CPU time of one sample.
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model."""

    title: str
    num_heads: int
    kv_heads: int
    head_dim: int


SMOLLM2 = Heads("SmolLM2 135M", 9, 3, 64)
LLAMA3 = Heads("Llama 3 8B", 32, 8, 128)


@dataclass(frozen=True)
class Case:
    """``num_seqs`` sequences of ``context`` tokens, the last ``num_queries`` of them new."""

    heads: Heads
    num_seqs: int
    num_queries: int
    context: int

    @property
    def title(self) -> str:
        """What kind of step it is."""
        if self.num_queries == 1:
            return f"{self.heads.title}, {self.num_seqs} decodes"
        return f"{self.heads.title}, prefill of {self.num_queries}"

    @property
    def heads_apart(self) -> "Case":
        """The same work with each KV head as a sequence of its own.

        A sequence's blocks in order are then the very bytes of one block: a call over them differs
        by the lookups in the table alone.
        """
        heads = self.heads
        alone = Heads(heads.title, heads.num_heads // heads.kv_heads, 1, heads.head_dim)
        return replace(self, heads=alone, num_seqs=self.num_seqs * heads.kv_heads)


CASES = (
    *(Case(heads, 8, 1, context) for heads in (SMOLLM2, LLAMA3) for context in (128, 1024, 4096)),
    *(Case(heads, 1, 256, context) for heads in (SMOLLM2, LLAMA3) for context in (256, 1024, 4096)),
)
#: The ways of laying out the same keys and values; the first is what the others are held to.
LAYOUTS = ("one block", "in order", "scattered", "torch SDPA")


@dataclass(frozen=True)
class BlockCosts:
    """Of one case: CPU seconds of a call over one block a sequence, ratios of others to it.

    ``lookups`` are ratios of a call through the table to one without, over the same bytes.
    """

    title: str
    context: int
    seconds: float
    ratios: dict[str, list[float]]
    lookups: list[float]

    def ratio(self, layout: str) -> float:
        """The median of a layout's ratios."""
        return statistics.median(self.ratios[layout])

    @property
    def scatter(self) -> float:
        """Scattered blocks beside blocks in order, which the table does the same for."""
        pairs = zip(self.ratios["scattered"], self.ratios["in order"], strict=True)
        return statistics.median(scattered / in_order for scattered, in_order in pairs)


class Layouts:
    """Calls of attention over the same numbers, laid out in each way."""

    def __init__(self, case: Case, dtype: torch.dtype, block_size: int) -> None:
        self._case = case
        self._dtype = dtype
        self._block_size = block_size
        self._backend: AttentionBackend = select_backend(torch.device("cpu"), prefer="native")
        heads, rows = case.heads, case.num_seqs * case.num_queries
        generator = torch.Generator().manual_seed(0)
        shape = (case.num_seqs, heads.kv_heads, case.context, heads.head_dim)
        self._keys, self._values = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )
        query = torch.randn((rows, heads.num_heads, heads.head_dim), generator=generator)
        self._query = query.to(dtype)
        num_bytes = 2 * self._keys.numel() * self._keys.element_size()
        self._num_copies = max(1, min(64, COLD_BYTES // num_bytes))

    def calls(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return a call for each layout; each gives [rows, heads, head_dim]."""
        num_blocks = self._case.num_seqs * self._case.context // self._block_size
        order = torch.arange(num_blocks)
        scattered = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        return {
            "one block": self._paged(self._case.context, torch.arange(self._case.num_seqs)),
            "in order": self._paged(self._block_size, order),
            "scattered": self._paged(self._block_size, scattered),
            "torch SDPA": self._sdpa(),
        }

    def _paged(self, block_size: int, places: torch.Tensor) -> Callable[[], torch.Tensor]:
        caches = self._copies(
            *(self._in_blocks(each, block_size, places) for each in (self._keys, self._values))
        )
        metadata = self._metadata(places.view(self._case.num_seqs, -1))
        out, scale = torch.empty_like(self._query), self._case.heads.head_dim**-0.5

        def call() -> torch.Tensor:
            keys, values = next(caches)
            self._backend.paged_attention(out, self._query, keys, values, metadata, scale)
            return out

        return call

    def _in_blocks(self, dense: torch.Tensor, size: int, places: torch.Tensor) -> torch.Tensor:
        """Cut [seqs, kv_heads, context, dim] into blocks and put each in its place."""
        seqs, kv_heads, context, dim = dense.shape
        blocks = dense.view(seqs, kv_heads, context // size, size, dim).transpose(1, 2)
        cache = torch.empty(len(places), kv_heads, size, dim, dtype=dense.dtype)
        cache[places] = blocks.reshape(-1, kv_heads, size, dim)
        return cache

    def _metadata(self, tables: torch.Tensor) -> AttentionMetadata:
        case = self._case
        return AttentionMetadata(
            block_tables=tables.to(torch.int32).contiguous(),
            seq_lens=torch.full((case.num_seqs,), case.context, dtype=torch.int32),
            cu_seqlens_q=torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.num_queries,
            max_seqlen_q=case.num_queries,
            max_seq_len=case.context,
            num_decodes=case.num_seqs if case.num_queries == 1 else 0,
        )

    def _sdpa(self) -> Callable[[], torch.Tensor]:
        case = self._case
        caches = self._copies(self._keys, self._values)
        query = self._query.view(case.num_seqs, case.num_queries, *self._query.shape[1:])
        query = query.transpose(1, 2).contiguous()
        visible = torch.ones(case.num_queries, case.context, dtype=torch.bool)
        mask = None if case.num_queries == 1 else visible.tril(case.context - case.num_queries)

        def call() -> torch.Tensor:
            keys, values = next(caches)
            out = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
            return out.transpose(1, 2).reshape(self._query.shape)

        return call

    def _copies(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        copies = [(keys.clone(), values.clone()) for _ in range(self._num_copies)]
        while True:
            yield from copies


def measure_blocks(case: Case, dtype: torch.dtype, block_size: int, repeat: int) -> BlockCosts:
    """Time each layout in each repeat, one right behind the other."""
    samples = _sample(Layouts(case, dtype, block_size).calls(), repeat)
    apart = Layouts(case.heads_apart, dtype, block_size).calls()
    lookups = _sample({layout: apart[layout] for layout in ("one block", "in order")}, repeat)
    plain = samples[LAYOUTS[0]]
    ratios = {layout: _ratios(samples[layout], plain) for layout in LAYOUTS[1:]}
    return BlockCosts(
        case.title,
        case.context,
        statistics.median(plain),
        ratios,
        _ratios(lookups["in order"], lookups["one block"]),
    )


def _sample(calls: dict[str, Callable[[], torch.Tensor]], repeat: int) -> dict[str, list[float]]:
    check_equal(calls)
    num_calls = max(1, int(_SAMPLE_SECONDS / _cpu_seconds(calls["one block"], 3)))
    samples: dict[str, list[float]] = {layout: [] for layout in calls}
    for number in range(repeat):
        turn = number % len(calls)
        for layout in (*[*calls][turn:], *[*calls][:turn]):
            samples[layout].append(_cpu_seconds(calls[layout], num_calls))
    return samples


def _ratios(some: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


def check_equal(calls: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Assert that all layouts stand for the same numbers: ours to the last bit."""
    plain = calls["one block"]().clone()
    for layout, call in calls.items():
        if layout == "torch SDPA":
            torch.testing.assert_close(call(), plain, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(call(), plain), f"{layout}: other numbers than in one block"


def _cpu_seconds(call: Callable[[], torch.Tensor], number: int) -> float:
    started = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - started) / number
