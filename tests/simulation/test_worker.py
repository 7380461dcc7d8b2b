"""A worker by itself: the owner of the clock is the test."""

import pytest

from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.cluster import Cluster
from tidemill_scheduler.simulation.sequence import Sequence
from tidemill_scheduler.simulation.worker import SimWorker
from tidemill_scheduler.simulation.workload import pack_key

#: One second for a step, one for each token, nothing for attention: sums for a hand.
SECONDS = StepCost(base=1.0, per_token=1.0, per_pair=0.0, per_context=0.0)

INTERACTIVE, STANDARD, BATCH = -1, 0, 1


def make_worker(**settings: object) -> SimWorker:
    values = {"kv_tokens": 1000, "step_tokens": 8, "watermark": 0.0, "cost": SECONDS, **settings}
    return SimWorker(0, Cluster(1, **values), tokens_per_hash=4)  # type: ignore[arg-type]


def make_sequence(
    number: int, chain: list[int], input_tokens: int, output_tokens: int, priority: int = STANDARD
) -> Sequence:
    queue = f"p{1 + (priority > 0) - (priority < 0)}:default"
    job = WaitingJob(f"job{number}", queue, f"{number}-0", "sim", pack_key(chain), input_tokens)
    object.__setattr__(job, "priority", priority)
    return Sequence(job, output_tokens, number, f"1-{number}")


def run_to_end(worker: SimWorker, now: float = 0.0) -> list[tuple[str, float, float]]:
    """(job, first token, end) in the order of their ends."""
    ended = []
    while (end := worker.begin(now)) is not None:
        now = end
        ended += [(seq.job_id, seq.first_token_at, now) for seq in worker.complete(now)]
    return ended


def test_a_prompt_is_computed_in_chunks_and_then_decoded_token_by_token() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [], 20, 3))

    # Chunks of 8, 8 and 4 tokens take 9 + 9 + 5 s, the two tokens after the first 2 s each.
    assert run_to_end(worker) == [("job1", 23.0, 27.0)]
    assert (worker.num_steps, worker.busy_seconds, worker.output_tokens) == (5, 27.0, 3)
    assert worker.cache.num_pinned == 0


def test_a_follower_in_the_same_step_finds_what_its_leader_computes() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [1], 5, 1))
    worker.receive(make_sequence(2, [1], 7, 1))

    # 5 tokens and the 3 that the second does not share.
    assert run_to_end(worker) == [("job1", 9.0, 9.0), ("job2", 9.0, 9.0)]
    assert (worker.hit_tokens, worker.computed_tokens) == (4, 8)


def test_without_publishing_at_schedule_a_follower_of_the_same_step_finds_nothing() -> None:
    worker = make_worker(publish_at_schedule=False, step_tokens=20)
    for number, length in ((1, 5), (2, 7)):
        worker.receive(make_sequence(number, [1], length, 2))
    run_to_end(worker)
    worker.receive(make_sequence(3, [1], 6, 1))
    run_to_end(worker)

    assert (worker.hit_tokens, worker.computed_tokens) == (4, 5 + 7 + 2)
    assert worker.cache.num_pinned == 0


def test_a_follower_waits_until_the_chunks_of_its_leader_reach_it() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [1, 2, 3], 12, 1))
    worker.receive(make_sequence(2, [1, 2, 3], 13, 1))

    run_to_end(worker)

    assert (worker.hit_tokens, worker.computed_tokens) == (12, 13)


def test_decodes_are_served_before_prefills_within_the_budget_of_a_step() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [], 8, 9))
    assert worker.begin(0.0) == 9.0
    worker.complete(9.0)
    worker.receive(make_sequence(2, [], 8, 1))

    # One token is decoded, so 7 of the 8 are computed, then the last.
    assert worker.begin(9.0) == 18.0
    worker.complete(18.0)
    assert worker.begin(18.0) == 21.0
    assert [seq.job_id for seq in worker.complete(21.0)] == ["job2"]


def test_interactive_prompts_go_before_batch_prompts_that_came_first() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [], 20, 1, BATCH))
    assert worker.begin(0.0) == 9.0
    worker.complete(9.0)
    worker.receive(make_sequence(2, [], 6, 1, INTERACTIVE))

    ended = run_to_end(worker, 9.0)

    # The step at 9 s computes 6 interactive and 2 batch tokens, the next two 8 and 2.
    assert ended == [("job2", 18.0, 18.0), ("job1", 30.0, 30.0)]


def test_batch_decodes_are_left_out_while_an_interactive_prompt_is_computed() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [], 4, 3, BATCH))
    worker.receive(make_sequence(2, [], 4, 2, STANDARD))
    assert worker.begin(0.0) == 9.0
    worker.complete(9.0)
    worker.receive(make_sequence(3, [], 14, 1, INTERACTIVE))

    # 1 + 7 tokens take 9 s.  The other 7 are computed in the next step without a decode, as the
    # standard job has ended; then the batch job gets its last two tokens in 2 s each.
    assert run_to_end(worker, 9.0) == [
        ("job2", 9.0, 18.0),
        ("job3", 26.0, 26.0),
        ("job1", 9.0, 30.0),
    ]
    assert (worker.output_tokens, worker.num_steps) == (6, 5)


def test_batch_decodes_are_left_out_of_so_many_steps_in_a_row_at_most() -> None:
    worker = make_worker(max_paused_steps=2)
    worker.receive(make_sequence(1, [], 8, 3, BATCH))
    assert worker.begin(0.0) == 9.0
    worker.complete(9.0)
    worker.receive(make_sequence(2, [], 39, 1, INTERACTIVE))

    # Chunks of 8, 8, 7 and a decode, 8, 8; then the last token.
    assert run_to_end(worker, 9.0) == [("job2", 54.0, 54.0), ("job1", 9.0, 56.0)]


def test_batch_decodes_go_on_while_an_interactive_prompt_has_no_room() -> None:
    worker = make_worker(max_seqs=1)
    worker.receive(make_sequence(1, [], 8, 4, BATCH))
    worker.receive(make_sequence(2, [], 8, 1, INTERACTIVE))
    worker.receive(make_sequence(3, [], 8, 1, INTERACTIVE))

    ended = run_to_end(worker)

    assert [job for job, _, _ in ended] == ["job2", "job3", "job1"]
    worker.receive(make_sequence(4, [], 8, 3, BATCH))
    assert worker.begin(0.0) == 9.0
    worker.complete(9.0)
    worker.receive(make_sequence(5, [], 8, 1, INTERACTIVE))
    assert run_to_end(worker, 9.0) == [("job4", 9.0, 13.0), ("job5", 22.0, 22.0)]


def test_the_batch_class_is_admitted_up_to_the_ceiling_and_others_to_the_watermark() -> None:
    # 100 blocks of one token; two stay free.
    worker = make_worker(kv_tokens=100, watermark=0.02, batch_ceiling=0.5, step_tokens=1000)
    worker.receive(make_sequence(1, [], 40, 5, BATCH))
    worker.receive(make_sequence(2, [], 10, 5, BATCH))
    worker.receive(make_sequence(3, [], 43, 5, STANDARD))
    worker.receive(make_sequence(4, [], 1, 5, STANDARD))
    worker.begin(0.0)

    assert [seq.job_id for seq in worker.admitted] == ["job3", "job4"]
    assert worker.cache.num_pinned == 54


def test_a_worker_without_anything_to_run_admits_what_it_can_hold_at_all() -> None:
    worker = make_worker(kv_tokens=100, watermark=0.5, batch_ceiling=0.6, step_tokens=1000)
    worker.receive(make_sequence(1, [], 90, 10, BATCH))

    assert len(run_to_end(worker)) == 1


def test_no_more_sequences_run_than_allowed() -> None:
    worker = make_worker(max_seqs=2, step_tokens=1000)
    for number in range(5):
        worker.receive(make_sequence(number, [], 4, 4))
    worker.begin(0.0)

    assert len(worker.admitted) == 2


def test_a_promised_time_per_token_bounds_the_steps_in_which_others_decode() -> None:
    # A step with one decoded token takes 2 s, so 3 prompt tokens fit into 5 s.
    worker = make_worker(step_tokens=100, tpot_slo_seconds=5.0)
    worker.receive(make_sequence(1, [], 10, 20))
    now = worker.begin(0.0)
    assert now == 11.0
    worker.complete(now)
    worker.receive(make_sequence(2, [], 9, 1, BATCH))
    ends = []
    for _ in range(3):
        end = worker.begin(now)
        assert end is not None
        ends.append(end - now)
        now = end
        worker.complete(now)

    assert ends == [5.0, 5.0, 5.0]


def test_a_prefill_goes_on_by_a_block_even_if_no_promise_can_be_kept() -> None:
    worker = make_worker(step_tokens=100, tpot_slo_seconds=0.5)
    worker.receive(make_sequence(1, [], 10, 20))
    worker.begin(0.0)
    worker.complete(11.0)
    worker.receive(make_sequence(2, [], 9, 1, BATCH))

    assert worker.begin(11.0) == 14.0


def test_nothing_is_promised_to_the_batch_class() -> None:
    worker = make_worker(step_tokens=100, tpot_slo_seconds=5.0)
    worker.receive(make_sequence(1, [], 10, 20, BATCH))
    worker.begin(0.0)
    worker.complete(11.0)
    worker.receive(make_sequence(2, [], 30, 1, BATCH))

    assert worker.begin(11.0) == 11.0 + 1 + 1 + 30


def test_a_delivery_ends_many_steps_after_the_one_under_way() -> None:
    worker = make_worker()
    worker.receive(make_sequence(1, [], 8, 50))
    worker.begin(0.0)
    worker.complete(9.0)
    assert worker.begin(9.0) == 9.0 + 49 * 2

    worker.receive(make_sequence(2, [], 3, 1))
    # Steps of 2 s began at 9, 11, 13, ...
    assert worker.interrupt(14.5) == 15.0
    worker.complete(15.0)
    assert worker.begin(15.0) == 15.0 + 1 + 1 + 3


def test_the_status_tells_what_waits_without_what_the_cache_has() -> None:
    worker = make_worker(step_tokens=10)
    worker.receive(make_sequence(1, [1, 2], 8, 1))
    worker.begin(0.0)
    worker.complete(9.0)
    worker.receive(make_sequence(2, [1, 2, 3], 13, 3))
    worker.receive(make_sequence(3, [], 25, 2))
    waiting = worker.status()
    assert (waiting.num_waiting, waiting.num_running, waiting.waiting_tokens) == (2, 0, 5 + 25)
    assert [(f.job_id, f.cached_tokens, f.output_tokens) for f in waiting.finished] == [
        ("job1", 0, 1)
    ]
    worker.begin(9.0)
    worker.complete(20.0)
    status = worker.status()

    # 5 tokens of the one and 5 of the other are computed.
    assert (status.num_waiting, status.num_running, status.waiting_tokens) == (0, 2, 20)
    assert status.free_blocks == 1000 - (13 + 3) - (25 + 2)
    assert (status.last_command, status.finished) == ("1-3", ())
    assert status.prompt_tokens == 8 + 13 + 25 and status.cached_tokens == 8


def test_a_cancelled_sequence_gives_its_blocks_back_wherever_it_is() -> None:
    worker = make_worker(kv_tokens=100)
    sequences = [make_sequence(number, [], 8, 20) for number in range(4)]
    decoding, partial, queued, kept = sequences
    worker.receive(decoding)
    worker.begin(0.0)
    worker.complete(9.0)
    for seq in (partial, queued, kept):
        worker.receive(seq)
    end = worker.begin(9.0)
    assert end is not None
    for seq in (decoding, partial, queued):
        worker.cancel(seq)
    worker.complete(end)
    status = worker.status()

    assert (status.num_running, status.num_waiting, status.free_blocks) == (0, 1, 100)
    assert [job for job, _, _ in run_to_end(worker, end)] == ["job3"]


def test_kv_events_tell_what_was_computed_and_their_sum_is_the_snapshot() -> None:
    worker = make_worker(kv_tokens=12, step_tokens=100)
    held: set[int] = set()
    for number, chain in enumerate([[1, 2], [3], [1, 4]]):
        worker.receive(make_sequence(number, chain, 4 * len(chain) + 1, 1))
        run_to_end(worker)
        events = worker.kv_events()
        assert events is not None and events.seq == number + 1
        held |= {*_digests(events.stored)}
        held -= {*_digests(events.evicted)}
    snapshot = worker.kv_snapshot()

    assert worker.kv_events() is None
    assert snapshot.seq == 3
    assert {*_digests(snapshot.digests)} == held
    assert {1, 4} <= held and 2 not in held


def _digests(text: bytes) -> list[int]:
    return [int.from_bytes(text[start : start + 8], "big") for start in range(0, len(text), 8)]


@pytest.mark.parametrize("macro_steps", [True, False])
def test_an_idle_worker_begins_nothing(macro_steps: bool) -> None:
    assert make_worker(macro_steps=macro_steps).begin(1.0) is None


def test_waiting_tokens_that_the_sequence_before_computes_are_counted_once() -> None:
    worker = make_worker(max_seqs=1)
    worker.receive(make_sequence(1, [1, 2, 3], 14, 1, INTERACTIVE))
    worker.receive(make_sequence(2, [1, 2, 4], 15, 1, INTERACTIVE))
    worker.receive(make_sequence(3, [1, 2, 4], 13, 1))

    status = worker.status()
    assert status.urgent_tokens == 14 + 15 - 8
    assert status.waiting_tokens == 14 + (15 - 8) + 13

    # 8 of the first one's tokens are in the step; the last 6 it will compute too.
    end = worker.begin(0.0)
    assert end is not None
    worker.complete(end)
    assert worker.status().urgent_tokens == (14 - 8) + (15 - 8)
