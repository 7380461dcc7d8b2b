"""Print how much KV memory requests of mixed lengths hold in vain, paged and reserved.

    python benchmarks/kv_memory.py --requests 100 --mean 500 --longest 4096

Lengths are lognormal from a fixed seed, cut at the longest and scaled to the mean. Every request
gets its blocks from the worker's own block manager, step by step as it grows; static allocation
gives each the room of the longest, as it does not know which one will need it. The last rows are
of caches of 8 bits (--kv-cache-dtype).

A last block is half empty on average, so the share of slots that hold a token depends on how long
requests are: each block size has a mean length below which it cannot reach 96 %.
"""

import argparse
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from tidemill.protocol.kv_use import KvUse
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.kv_waste import measure_kv_use

BLOCK_SIZES = (16, 32, 64, 128)
#: Of Llama 3 8B: 32 layers, keys and values, 8 KV heads.
HEADS_PER_TOKEN = 32 * 2 * 8
BFLOAT16_BYTES = HEADS_PER_TOKEN * 128 * 2
#: With a float32 scale for each head.
QUANTISED_BYTES = HEADS_PER_TOKEN * (128 + 4)
#: The share of the slots that is to hold a token.
GOAL_PERCENT = 96


@dataclass(frozen=True)
class Allocation:
    """What one way of allocating holds for the same requests."""

    name: str
    num_slots: int
    num_tokens: int
    most_empty: int
    bytes_per_token: int = BFLOAT16_BYTES

    @property
    def num_bytes(self) -> int:
        """Memory that an 8B model takes for the slots."""
        return self.num_slots * self.bytes_per_token

    @property
    def utilisation(self) -> float:
        """Share of the slots that hold a token."""
        return self.num_tokens / self.num_slots


def parse_arguments(arguments: Many[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--mean", type=int, default=500, help="tokens (%(default)s)")
    parser.add_argument("--longest", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def draw_lengths(num_requests: int, mean: int, longest: int, seed: int) -> list[int]:
    """Return lengths with this mean, to half a token, none above the longest."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.0, num_requests)
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = np.clip(np.round(drawn * scale), 1, longest)
        low, high = (scale, high) if lengths.mean() < mean else (low, scale)
    return [int(length) for length in lengths]


def paged(lengths: list[int], block_size: int) -> KvUse:
    """Let the block manager serve requests that grow to these lengths; returns the use at last."""
    blocks = BlockManager(sum(-(-n // block_size) for n in lengths), block_size, watermark=0.0)
    seqs = [
        Sequence(str(number), [number + 1] * length, SamplingParams(), seed=0)
        for number, length in enumerate(lengths)
    ]
    for seq in seqs:
        while seq.num_uncomputed_tokens:
            # A prompt's chunk first, then as decodes do, token by token.
            num_tokens = max(1, seq.num_uncomputed_tokens - 64)
            assert blocks.allocate(seq, num_tokens), "the cache has blocks for all of them"
            seq.num_computed_tokens += num_tokens
            blocks.commit_step()
            assert measure_kv_use(blocks, seqs).most_empty_slots < block_size
    return measure_kv_use(blocks, seqs)


def least_mean(block_size: int) -> int:
    """Return the mean length from which on blocks of this size reach the goal.

    Where lengths are spread, a last block lacks (block_size - 1) / 2 tokens in the mean.
    """
    return -(-GOAL_PERCENT * (block_size - 1) // (2 * (100 - GOAL_PERCENT)))


def compare(lengths: list[int], longest: int) -> list[Allocation]:
    """Return static allocation and paged ones of several block sizes."""
    rows = [
        Allocation(
            f"static, {longest:,} each",
            longest * len(lengths),
            sum(lengths),
            longest - min(lengths),
        )
    ]
    for size in BLOCK_SIZES:
        use = paged(lengths, size)
        slots = use.used_blocks * size
        name = f"paged, blocks of {size}"
        rows.append(Allocation(name, slots, use.num_tokens, use.most_empty_slots))
    quantised = [
        replace(row, name=row.name.replace("paged", "8 bits"), bytes_per_token=QUANTISED_BYTES)
        for row in rows[1:]
    ]
    return [*rows, *quantised]


def make_table(rows: list[Allocation], lengths: list[int]) -> Table:
    """Return one row for each way of allocating; the first one is what the others are held to."""
    title = f"{len(lengths)} requests of {np.mean(lengths):,.0f} tokens in the mean"
    table = Table(title=title, title_justify="left")
    table.add_column("allocation", no_wrap=True)
    columns = (
        "slots",
        "utilisation",
        "most empty\nslots of one",
        "GiB (8B model)",
        "requests in\nthe memory",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.num_slots:,}",
            f"{row.utilisation:.1%}",
            f"{row.most_empty:,}",
            f"{row.num_bytes / 2**30:.1f}",
            f"{rows[0].num_bytes / row.num_bytes:.1f} x",
        )
    return table


def explain_goal(mean: float) -> str:
    """Return which block sizes can reach the goal at this mean length, and which cannot."""
    lines = [
        f"A last block is half empty in the mean: {GOAL_PERCENT} % of the slots hold a token from",
    ]
    for size in BLOCK_SIZES:
        least = least_mean(size)
        verdict = "reached" if mean >= least else "out of reach"
        lines.append(
            f"  a mean of {least:,} tokens in blocks of {size}: {verdict} with {mean:,.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    options = parse_arguments()
    lengths = draw_lengths(options.requests, options.mean, options.longest, options.seed)
    console = Console()
    console.print(make_table(compare(lengths, options.longest), lengths))
    console.print(explain_goal(float(np.mean(lengths))), highlight=False)


if __name__ == "__main__":
    main()
