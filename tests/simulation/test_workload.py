import json
import math
from collections import Counter
from pathlib import Path

import pytest

from support.small_workloads import make_random_workload, make_workload
from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.traces import load_trace
from tidemill_scheduler.simulation.workload import Workload, unpack_key

# Two jobs share ids 0 and 1, the third shares 0 alone, the fourth nothing.
JOBS = [([0, 1, 2], 13, 2), ([0, 1, 3], 15, 3), ([0, 4], 9, 1), ([5], 7, 4)]


def naive_bound(workload: Workload) -> tuple[int, int]:
    """Total and saved prompt tokens with an endless cache, by comparing whole prefixes."""
    seen: set[bytes] = set()
    total = saved = 0
    for job in workload:
        prefixes = [job.key[:end] for end in range(8, len(job.key) + 1, 8)]
        known = sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
        total += job.input_tokens
        saved += min(job.input_tokens - 1, known * workload.tokens_per_hash)
    return total, saved


def test_keys_share_as_many_hashes_as_their_chains() -> None:
    keys = [unpack_key(job.key) for job in make_workload(JOBS)]

    assert [len(key) for key in keys] == [3, 3, 2, 1]
    assert keys[0][:2] == keys[1][:2] and keys[0][2] != keys[1][2]
    assert keys[0][0] == keys[2][0] and keys[0][1] != keys[2][1]
    assert len({digest for key in keys for digest in key}) == 6


def test_the_bound_of_four_jobs_is_what_a_hand_counts() -> None:
    # The second job finds 2 hashes of 4 tokens, the third 1.
    assert make_workload(JOBS).bound() == (44, 12)


def test_a_prompt_that_is_known_as_a_whole_still_computes_one_token() -> None:
    assert make_workload([([0, 1], 8, 1), ([0, 1], 8, 1)]).bound() == (16, 7)


@pytest.mark.parametrize("common_depth", [0, 1, 2, 9])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_bound_of_copies_is_what_a_walk_over_all_jobs_finds(
    copies: int, common_depth: int
) -> None:
    workload = make_random_workload(3).copies(copies, common_depth)

    assert workload.bound() == naive_bound(workload)


def test_the_bound_of_the_first_jobs_is_what_a_walk_over_them_finds() -> None:
    workload = make_random_workload(4).copies(2).first(123)

    assert workload.num_jobs == 123
    assert workload.bound() == naive_bound(workload)


def test_copies_share_the_common_roots_and_nothing_else() -> None:
    workload = make_workload(JOBS[:1]).copies(2, common_depth=1)
    one, other = (unpack_key(job.key) for job in workload)

    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_shuffling_keeps_all_jobs_and_a_seed_its_order() -> None:
    workload = make_random_workload(5).copies(2)
    shuffled = workload.shuffled(1)

    assert [job.key for job in shuffled] != [job.key for job in workload]
    assert Counter(shuffled) == Counter(workload)
    assert list(shuffled) == list(workload.shuffled(1))
    assert list(shuffled) != list(workload.shuffled(2))


def test_shuffling_in_windows_mixes_only_neighbouring_copies() -> None:
    workload = make_random_workload(5, 50).copies(4)
    mixed = list(workload.shuffled(1, window=100))
    roots = [{unpack_key(job.key)[0] for job in mixed[start : start + 100]} for start in (0, 100)]

    assert not roots[0] & roots[1]
    assert Counter(mixed) == Counter(workload)
    assert [job.key for job in mixed] != [job.key for job in workload.shuffled(2, window=100)]


def test_shuffling_keeps_the_times_of_arrival() -> None:
    workload = make_random_workload(6, interval=0.5)

    assert [j.arrival for j in workload.shuffled(1)] == [j.arrival for j in workload]


def test_load_compresses_the_arrivals_and_bulk_has_none() -> None:
    workload = make_workload(JOBS, interval=3.0)

    assert [job.arrival for job in workload.compressed(2)] == [0, 1.5, 3, 4.5]
    assert [job.arrival for job in workload.compressed(2).as_bulk()] == [0, 0, 0, 0]


def test_other_salts_make_other_prefixes_of_the_same_shape() -> None:
    workload = make_random_workload(7)
    other = workload.salted("bulk")

    assert not {job.key[:8] for job in workload} & {job.key[:8] for job in other}
    assert workload.bound() == other.bound()


def test_terms_of_a_workload_are_those_of_its_jobs() -> None:
    workload = make_workload(JOBS, interval=1.0).with_priority(-2).with_deadline(10)

    assert [job.priority for job in workload] == [-2] * 4
    assert [job.deadline for job in workload] == [10, 11, 12, 13]
    assert {job.deadline for job in make_workload(JOBS)} == {math.inf}


def test_nonsense_is_refused() -> None:
    workload = make_workload(JOBS)
    for load in (0, -1, math.inf, math.nan, 1e7):
        with pytest.raises(ConfigError, match=r"load: .* is not from 0\.001 to 1,000,000"):
            workload.compressed(load)
    with pytest.raises(ConfigError, match="copies"):
        workload.copies(0)
    with pytest.raises(ConfigError, match="shuffled already"):
        workload.shuffled(1).copies(2)


def test_a_mooncake_trace_gives_full_blocks_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [7, 8]}\n'
    )
    first, second = load_trace(path)

    assert first.key == second.key and len(first.key) == 16
    assert (first.arrival, second.arrival) == (0, 1.5)
    assert (first.input_tokens, first.output_tokens) == (1200, 5)
    # A job that produces nothing would never end.
    assert second.output_tokens == 1


def test_an_azure_trace_gives_prefixes_that_nobody_shares(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.0319600,3180,8\n"
    )
    workload = load_trace(path)
    jobs = list(workload)

    assert [len(job.key) for job in jobs] == [9 * 8, 6 * 8]
    assert jobs[1].arrival == pytest.approx(1.052)
    assert workload.bound().hit_tokens == 0
    assert load_trace(path, limit=1).num_jobs == 1


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"timestamp": 0}\n', "line 1"),
        ("a.jsonl", "[]\n", "line 1"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", "no column GeneratedTokens"),
        ("a.csv", f"{AZURE}2023-11-16 18:17:03,1\n", "line 2 .*GeneratedTokens None is not from 0"),
        ("a.csv", f"{AZURE}\n2023-11-16 18:17:03,0,1\n", "line 3 .*ContextTokens 0 is not from 1"),
        ("a.csv", f"{AZURE}2023-11-16 18:17:03,1e3,1\n", "ContextTokens '1e3' is not from 1"),
        ("a.csv", f"{AZURE}2023-11-16 18:17:03,5,{'9' * 5000}\n", "to 100,000,000"),
        ("a.csv", f"{AZURE}{'x' * 200_000},1,1\n", "line 2 .*field larger than"),
        ("a.csv", AZURE, "holds no jobs"),
        ("a.csv", "", "holds no jobs"),
        ("a.jsonl", "", "holds no jobs"),
        ("a.jsonl", " \n\n", "holds no jobs"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        ("a.txt", "", "suffix"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ConfigError, match=problem):
        load_trace(path)


def mooncake_line(**changes: object) -> str:
    entry = {"timestamp": 0, "input_length": 2048, "output_length": 5, "hash_ids": [1, 2, 3, 4]}
    return json.dumps(entry | changes) + "\n"


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("timestamp", math.nan, "0 to 10,000,000,000,000 ms"),
        ("timestamp", math.inf, "0 to 10,000,000,000,000 ms"),
        ("timestamp", -1, "0 to 10,000,000,000,000 ms"),
        ("timestamp", "5", "0 to 10,000,000,000,000 ms"),
        ("timestamp", True, "0 to 10,000,000,000,000 ms"),
        ("input_length", 0, "1 to 100,000,000"),
        ("input_length", 4_000_000_000, "1 to 100,000,000"),
        ("input_length", 2048.5, "1 to 100,000,000"),
        ("output_length", -1, "0 to 100,000,000"),
        ("output_length", None, "0 to 100,000,000"),
        ("hash_ids", "123456", "a list of integers"),
        ("hash_ids", ["1", "2"], "a list of integers"),
        ("hash_ids", None, "a list of integers"),
        ("hash_ids", [1.5], "a list of integers"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_line_field_and_limit(
    tmp_path: Path, field: str, value: object, limit: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line() + mooncake_line(**{field: value}))

    with pytest.raises(
        ConfigError, match=f"line 2 of .*trace.jsonl.*: {field} .*{limit}"
    ) as caught:
        load_trace(path)
    assert len(caught.value.one_line()) < 300


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    good = AZURE if suffix == ".csv" else mooncake_line()
    path.write_bytes(good.encode() + b"\xff\xfe\n")

    with pytest.raises(ConfigError, match=r"line 2 .*UTF-8"):
        load_trace(path)


def test_jobs_of_a_trace_come_in_order_of_their_times_from_the_first_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    times = (9000, 4000, 9000, 5000)
    lines = [mooncake_line(timestamp=at, input_length=600 + n) for n, at in enumerate(times)]
    path.write_text("".join(lines))

    jobs = [(job.arrival, job.input_tokens) for job in load_trace(path)]
    assert jobs == [(0, 601), (1, 603), (5, 600), (5, 602)]

    path = tmp_path / "trace.csv"
    path.write_text(
        f"{AZURE}2023-11-16 18:17:05,700,1\n2023-11-16 18:17:03,800,1\n"
        "2023-11-16 19:17:04+01:00,900,1\n"
    )
    jobs = [(job.arrival, job.input_tokens) for job in load_trace(path)]
    assert jobs == [(0, 800), (1, 900), (2, 700)]


def test_an_id_stands_for_a_prefix_only_behind_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    chains = ([1, 1, 1, 1], [2, 1, 1, 1], [1, 1, 3, 1])
    path.write_text("".join(mooncake_line(hash_ids=chain) for chain in chains))
    workload = load_trace(path)
    first, second, third = (unpack_key(job.key) for job in workload)

    assert len(set(first)) == 4
    assert not set(first) & set(second)
    assert third[:2] == first[:2] and not set(third[2:]) & set(first)
    assert workload.bound().hit_tokens == 2 * 512


def test_a_byte_order_mark_and_empty_lines_are_no_part_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\ufeff" + mooncake_line() + "\n" + mooncake_line())
    assert load_trace(path).num_jobs == 2
    path = tmp_path / "trace.csv"
    path.write_text(f"\ufeff{AZURE}\r\n2023-11-16 18:17:05,700,1\r\n\r\n")
    assert load_trace(path).num_jobs == 1


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read"):
        load_trace(tmp_path / "absent.jsonl")
