"""Native and torch kernels on the CPU against the float64 reference."""

import dataclasses

import pytest
import torch

from support.attention_cases import TOLERANCES, Shape, make_problem, relative_error
from tidemill_kernels import AttentionBackend, AttentionMetadata, select_backend

CPU = torch.device("cpu")
MIXED = ([1, 1, 1, 7, 33, 16, 2], [37, 5, 1, 40, 33, 48, 700])
SHAPES = {
    "grouped 8:2": Shape(),
    "grouped 9:3": Shape(9, 3),
    "one KV head of 71": Shape(71, 1),
    "multi-head": Shape(3, 3),
    "odd group 10:2": Shape(10, 2),
    "head_dim 8": Shape(4, 2, 8),
    "head_dim 80": Shape(8, 2, 80),
    "head_dim 96": Shape(4, 1, 96),
    "head_dim 128": Shape(8, 1, 128),
    "head_dim 256": Shape(2, 1, 256),
    "blocks of 1": Shape(block_size=1),
    "blocks of 4": Shape(block_size=4),
    "blocks of 7": Shape(block_size=7),
    "blocks of 64": Shape(block_size=64),
    "blocks of 128": Shape(block_size=128),
}


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_backend(CPU, prefer=request.param)


def check(
    backend: AttentionBackend, shape: Shape, query_lens: list[int], seq_lens: list[int]
) -> None:
    problem = make_problem(shape, query_lens, seq_lens)
    out = problem.poisoned_out()
    backend.paged_attention(
        out, problem.query, problem.key_cache, problem.value_cache, problem.metadata, problem.scale
    )
    assert relative_error(out, problem.expected()) <= TOLERANCES[shape.dtype]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_mixed_step_equals_the_float64_reference(backend: AttentionBackend, shape: Shape) -> None:
    check(backend, shape, *MIXED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_off_by_its_rounding_alone(
    backend: AttentionBackend, dtype: torch.dtype
) -> None:
    check(backend, Shape(9, 3, dtype=dtype), *MIXED)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_bfloat16_results_are_rounded_to_the_nearest(
    backend: AttentionBackend, head_dim: int
) -> None:
    problem = make_problem(Shape(6, 2, head_dim, dtype=torch.bfloat16), *MIXED)
    out = problem.poisoned_out()
    backend.paged_attention(
        out, problem.query, problem.key_cache, problem.value_cache, problem.metadata, problem.scale
    )
    # Sums are float32, so only values next to a rounding boundary may fall on its other side.
    differs = out != problem.expected().bfloat16()
    assert float(differs.double().mean()) < 0.005


@pytest.mark.parametrize("seq_len", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1300])
def test_a_decode_of_any_length_equals_the_reference(
    backend: AttentionBackend, seq_len: int
) -> None:
    check(backend, Shape(4, 2), [1], [seq_len])


@pytest.mark.parametrize(
    ("query_len", "seq_len"),
    [(1, 1), (2, 2), (64, 64), (65, 65), (5, 64), (5, 65), (5, 69), (100, 228), (17, 640)],
)
def test_a_prefill_chunk_sees_its_context_and_no_future(
    backend: AttentionBackend, query_len: int, seq_len: int
) -> None:
    # A trailing single token after a chunk is a prefill of length one, not a decode.
    check(backend, Shape(6, 2), [3, query_len], [3, seq_len])


def test_strided_queries_and_outputs_are_honoured(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(), *MIXED)
    tokens, heads, dim = problem.query.shape
    wide = torch.full((tokens, heads + 4, dim), float("nan"))
    wide[:, :heads] = problem.query
    out = torch.full((tokens, 2, heads, dim), float("nan"))
    backend.paged_attention(
        out[:, 1],
        wide[:, :heads],
        problem.key_cache,
        problem.value_cache,
        problem.metadata,
        problem.scale,
    )
    assert relative_error(out[:, 1], problem.expected()) <= TOLERANCES[torch.float32]
    assert out[:, 0].isnan().all()


def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(4, 2), *MIXED)
    problem = dataclasses.replace(problem, query=problem.query * 60)
    out = problem.poisoned_out()
    backend.paged_attention(
        out, problem.query, problem.key_cache, problem.value_cache, problem.metadata, problem.scale
    )
    # Scores near 500 lose about seven bits to float32 before the softmax.
    assert relative_error(out, problem.expected()) <= 1e-4


def test_a_sequence_is_rounded_the_same_alone_and_in_company() -> None:
    native = select_backend(CPU, prefer="native")
    together = make_problem(Shape(), [1, 1, 90], [37, 1200, 100])
    out = together.poisoned_out()
    native.paged_attention(
        *(out, together.query, together.key_cache, together.value_cache),
        *(together.metadata, together.scale),
    )
    for seq, rows in enumerate([slice(0, 1), slice(1, 2), slice(2, 92)]):
        alone = torch.full_like(out[rows], float("nan"))
        metadata = _only(together.metadata, seq, rows)
        native.paged_attention(
            *(alone, together.query[rows], together.key_cache, together.value_cache),
            *(metadata, together.scale),
        )
        assert torch.equal(alone, out[rows])


def test_an_empty_step_is_a_no_op(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(), [1], [5])
    metadata = AttentionMetadata(
        block_tables=torch.empty(0, 1, dtype=torch.int32),
        seq_lens=torch.empty(0, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        max_seqlen_q=0,
        max_seq_len=0,
        num_decodes=0,
    )
    empty = problem.query[:0]
    backend.paged_attention(
        empty.clone(), empty, problem.key_cache, problem.value_cache, metadata, problem.scale
    )


def test_an_impossible_block_is_refused_before_anything_is_written() -> None:
    problem = make_problem(Shape(), [1, 1], [20, 20])
    problem.metadata.block_tables[1, 1] = problem.key_cache.shape[0]
    out = problem.poisoned_out()
    with pytest.raises(IndexError, match="sequence 1"):
        select_backend(CPU, prefer="native").paged_attention(
            *(out, problem.query, problem.key_cache, problem.value_cache),
            *(problem.metadata, problem.scale),
        )
    assert out.isnan().all()


def test_misfitting_shapes_are_refused_by_name(backend: AttentionBackend) -> None:
    problem = make_problem(Shape(), [1], [5])
    with pytest.raises(ValueError, match="query must be"):
        backend.paged_attention(
            *(problem.poisoned_out(), problem.query[..., :32]),
            *(problem.key_cache, problem.value_cache, problem.metadata, problem.scale),
        )


def _only(metadata: AttentionMetadata, seq: int, rows: slice) -> AttentionMetadata:
    length = rows.stop - rows.start
    return AttentionMetadata(
        block_tables=metadata.block_tables[seq : seq + 1],
        seq_lens=metadata.seq_lens[seq : seq + 1],
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        max_seqlen_q=length,
        max_seq_len=int(metadata.seq_lens[seq]),
        num_decodes=int(length == 1),
    )
