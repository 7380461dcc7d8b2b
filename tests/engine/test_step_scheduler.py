"""Which sequences run how many tokens: the step policy, one rule at a time."""

from support.fake_engine import make_seq
from tidemill_gpuworker.engine.sequence import Sequence, SequenceStatus
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def make_scheduler(
    num_blocks: int = 64,
    *,
    budget: int = 32,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    threshold: int = 0,
    chunked: bool = True,
    watermark: float = 0.0,
    prefix_caching: bool = True,
) -> StepScheduler:
    config = StepConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_chunked_prefill=chunked,
    )
    blocks = BlockManager(num_blocks, 4, watermark=watermark, enable_prefix_caching=prefix_caching)
    return StepScheduler(config, blocks)


def own_prompt(number: int, length: int) -> list[int]:
    """A prompt that shares no block with the prompts of other numbers."""
    return [1000 * number + position for position in range(length)]


def add(
    scheduler: StepScheduler, *lengths: int, priority: int = 0, max_tokens: int | None = 8
) -> list[Sequence]:
    seqs = [
        make_seq(own_prompt(number, length), max_tokens, priority=priority)
        for number, length in enumerate(lengths, 1 + scheduler._num_added)
    ]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def advance(scheduler: StepScheduler) -> StepPlan:
    """Run one step in which every sequence samples token 7."""
    plan = scheduler.schedule()
    scheduler.update(plan, [(7,)] * len(plan.sampling))
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Return sequence id, start and number of tokens of everything scheduled."""
    return [(item.seq.seq_id, item.start, item.num_tokens) for item in plan.scheduled]


def test_without_work_the_plan_is_empty() -> None:
    scheduler = make_scheduler()

    assert scheduler.schedule() == StepPlan()
    assert not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 70)

    assert shape(advance(scheduler)) == [(seq.seq_id, 0, 32)]
    assert shape(advance(scheduler)) == [(seq.seq_id, 32, 32)]
    assert seq.output_ids == []
    assert shape(advance(scheduler)) == [(seq.seq_id, 64, 6)]
    assert seq.output_ids == [7]
    assert shape(advance(scheduler)) == [(seq.seq_id, 70, 1)]


def test_decodes_come_first_and_the_prefill_in_progress_gets_the_rest() -> None:
    scheduler = make_scheduler()
    short, long = add(scheduler, 5, 60)
    assert shape(advance(scheduler)) == [(short.seq_id, 0, 5), (long.seq_id, 0, 27)]

    plan = advance(scheduler)

    assert shape(plan) == [(short.seq_id, 5, 1), (long.seq_id, 27, 31)]
    assert plan.num_decodes == 1


def test_a_prefill_admitted_before_a_decode_is_still_served_after_it() -> None:
    scheduler = make_scheduler(threshold=8)
    long, short = add(scheduler, 60, 5)
    advance(scheduler)

    assert shape(advance(scheduler)) == [(short.seq_id, 5, 1), (long.seq_id, 8, 8)]


def test_a_plan_puts_single_tokens_first_even_if_they_end_a_prefill() -> None:
    scheduler = make_scheduler()
    leader = make_seq(list(range(8)))
    follower = make_seq([*range(8), 8])
    scheduler.add(leader)
    scheduler.add(follower)

    plan = advance(scheduler)

    assert shape(plan) == [(follower.seq_id, 8, 1), (leader.seq_id, 0, 8)]
    assert plan.num_decodes == 1


def test_what_is_left_of_the_budget_goes_to_waiting_sequences() -> None:
    scheduler = make_scheduler()
    first, second, third, fourth = add(scheduler, 10, 10, 20, 3)

    plan = advance(scheduler)

    assert shape(plan) == [(first.seq_id, 0, 10), (second.seq_id, 0, 10), (third.seq_id, 0, 12)]
    assert plan.num_tokens == 32
    assert scheduler.waiting == (fourth,)


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    first, second, third = add(scheduler, 2, 2, 2)

    advance(scheduler)

    assert list(scheduler.running) == [first, second]
    scheduler.finish(first)
    advance(scheduler)
    assert list(scheduler.running) == [second, third]


def test_the_long_prefill_threshold_cuts_chunks_and_lets_others_in() -> None:
    scheduler = make_scheduler(threshold=6)
    long, short = add(scheduler, 14, 5)

    assert shape(advance(scheduler)) == [(long.seq_id, 0, 6), (short.seq_id, 0, 5)]
    assert shape(advance(scheduler)) == [(short.seq_id, 5, 1), (long.seq_id, 6, 6)]
    assert shape(advance(scheduler)) == [(short.seq_id, 6, 1), (long.seq_id, 12, 2)]


def test_a_follower_waits_for_a_leader_whose_prefix_is_on_its_way() -> None:
    scheduler = make_scheduler(threshold=8)
    prompt = list(range(16))
    leader, follower = make_seq(prompt), make_seq([*prompt, 99])
    [stranger] = add(scheduler, 3)
    scheduler.add(leader)
    scheduler.add(follower)

    assert shape(advance(scheduler)) == [(stranger.seq_id, 0, 3), (leader.seq_id, 0, 8)]
    assert shape(advance(scheduler)) == [
        (stranger.seq_id, 3, 1),
        (follower.seq_id, 16, 1),
        (leader.seq_id, 8, 8),
    ]
    assert follower.num_cached_tokens == 16


def test_a_follower_in_the_same_step_computes_only_its_own_tail() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    leader, follower = make_seq(prompt), make_seq([*prompt, 98, 99])
    scheduler.add(leader)
    scheduler.add(follower)

    plan = advance(scheduler)

    assert shape(plan) == [(leader.seq_id, 0, 12), (follower.seq_id, 12, 2)]
    assert follower.block_table[:3] == leader.block_table
    assert (leader.num_cached_tokens, follower.num_cached_tokens) == (0, 12)
    assert (scheduler.num_queried_tokens, scheduler.num_hit_tokens) == (26, 12)


def test_a_follower_never_shares_tokens_of_a_later_step() -> None:
    scheduler = make_scheduler(budget=16, threshold=10)
    prompt = list(range(20))
    leader = make_seq(prompt)
    follower = make_seq([*prompt[:8], *own_prompt(1, 3)])
    scheduler.add(leader)
    scheduler.add(follower)

    plan = scheduler.schedule()

    # The leader's chunk ends inside its third block, which must not be found.
    assert shape(plan) == [(leader.seq_id, 0, 10), (follower.seq_id, 8, 3)]
    late = make_seq([*prompt, 99])
    assert len(scheduler.block_manager.find_prefix(late)) == 2


def test_more_urgent_sequences_are_admitted_first_then_older_ones() -> None:
    scheduler = make_scheduler()
    batch = add(scheduler, 2, priority=5)
    standard = add(scheduler, 2, 2)
    interactive = add(scheduler, 2, priority=-1)

    plan = advance(scheduler)

    expected = [*interactive, *standard, *batch]
    assert [item.seq for item in plan.scheduled] == expected


def test_the_newest_sequence_gives_way_when_blocks_run_out() -> None:
    scheduler = make_scheduler(6, max_model_len=24)
    first, second, third = add(scheduler, 8, 8, 8)
    advance(scheduler)

    plan = advance(scheduler)

    assert shape(plan) == [(first.seq_id, 8, 1), (second.seq_id, 8, 1)]
    assert plan.preempted == (third,)
    assert third.status is SequenceStatus.WAITING
    assert (third.num_preemptions, third.num_computed_tokens, third.block_table) == (1, 0, [])
    assert third.output_ids == [7]


def test_the_least_urgent_sequence_gives_way_even_if_it_was_already_scheduled() -> None:
    scheduler = make_scheduler(6, max_model_len=24)
    [batch] = add(scheduler, 5, priority=1)
    advance(scheduler)
    first, second = add(scheduler, 8, 7)
    assert len(advance(scheduler).scheduled) == 3

    plan = advance(scheduler)

    assert plan.preempted == (batch,)
    assert shape(plan) == [(first.seq_id, 8, 1), (second.seq_id, 7, 1)]
    assert batch.output_ids == [7, 7]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(6, max_model_len=24)
    add(scheduler, 8, 8, 8)
    advance(scheduler)
    add(scheduler, 1)

    plan = advance(scheduler)

    assert len(plan.preempted) == 1
    assert plan.num_tokens == 2
    assert len(scheduler.waiting) == 2


def test_a_preempted_sequence_is_the_first_of_its_priority_to_return() -> None:
    scheduler = make_scheduler(7, max_model_len=24)
    first, _, third = add(scheduler, 8, 8, 8)
    advance(scheduler)
    [later] = add(scheduler, 1)
    [urgent] = add(scheduler, 1, priority=-1)
    advance(scheduler)
    assert scheduler.waiting == (urgent, third, later)

    scheduler.finish(first)
    plan = advance(scheduler)

    assert [item.seq for item in plan.scheduled[1:]] == [urgent, third]


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(7, max_model_len=24)
    first, second, third = add(scheduler, 8, 8, 8)
    for _ in range(2):
        advance(scheduler)
    assert third.num_preemptions == 1
    scheduler.finish(first)

    plan = advance(scheduler)

    # Its tail was evicted for the block that the others needed; its head is still there.
    assert shape(plan) == [(second.seq_id, 9, 1), (third.seq_id, 4, 5)]
    assert third.num_cached_tokens == 0, "usage counts the first admission only"


def test_a_sequence_that_is_itself_the_least_urgent_gives_way() -> None:
    scheduler = make_scheduler(4, max_model_len=16)
    first, second = add(scheduler, 8, 7)
    advance(scheduler)
    scheduler.schedule()
    assert list(scheduler.running) == [first]
    assert scheduler.waiting == (second,)


def test_a_waiting_sequence_never_preempts_a_running_one() -> None:
    scheduler = make_scheduler(4, max_model_len=16)
    [running] = add(scheduler, 12)
    advance(scheduler)
    [urgent] = add(scheduler, 8, priority=-5)

    plan = advance(scheduler)

    assert [item.seq for item in plan.scheduled] == [running]
    assert scheduler.waiting == (urgent,)


def test_a_sequence_that_does_not_fit_yet_holds_back_later_ones() -> None:
    scheduler = make_scheduler(4, max_model_len=16)
    [running] = add(scheduler, 8)
    advance(scheduler)
    big, small = add(scheduler, 12, 1)

    advance(scheduler)

    assert scheduler.waiting == (big, small)
    scheduler.finish(running)
    advance(scheduler)
    assert list(scheduler.running) == [big, small]


def test_the_whole_prompt_must_fit_before_its_first_chunk_runs() -> None:
    scheduler = make_scheduler(10, budget=8, max_model_len=40)
    [running] = add(scheduler, 6)
    advance(scheduler)
    [long] = add(scheduler, 33)

    advance(scheduler)
    assert scheduler.waiting == (long,)

    scheduler.finish(running)
    advance(scheduler)
    assert list(scheduler.running) == [long]


def test_blocks_a_prefill_in_progress_still_needs_are_not_given_away() -> None:
    scheduler = make_scheduler(10, budget=8, max_model_len=40, threshold=4)
    long, short = add(scheduler, 32, 12)

    advance(scheduler)
    assert list(scheduler.running) == [long]

    advance(scheduler)
    assert list(scheduler.running) == [long]
    assert scheduler.waiting == (short,)


def test_the_watermark_keeps_blocks_free_for_running_sequences_to_grow() -> None:
    scheduler = make_scheduler(10, max_model_len=40, watermark=0.2)
    first, second, third = add(scheduler, 8, 20, 8)

    advance(scheduler)

    assert list(scheduler.running) == [first, second]
    assert scheduler.waiting == (third,)
    assert scheduler.block_manager.num_free_blocks == 3


def test_alone_a_sequence_may_use_the_last_block() -> None:
    scheduler = make_scheduler(10, budget=40, max_model_len=41, watermark=0.5)
    [seq] = add(scheduler, 40, max_tokens=1)

    advance(scheduler)

    assert scheduler.block_manager.num_free_blocks == 0
    assert seq.output_ids == [7]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler = make_scheduler(budget=32, max_model_len=32, chunked=False)
    first, second = add(scheduler, 20, 13)

    assert shape(advance(scheduler)) == [(first.seq_id, 0, 20)]
    assert shape(advance(scheduler)) == [(first.seq_id, 20, 1), (second.seq_id, 0, 13)]


def test_a_failed_step_leaves_running_sequences_where_they_were() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 40)
    advance(scheduler)

    plan = scheduler.schedule()
    scheduler.fail(plan)

    scheduler.check_integrity()
    assert seq.num_computed_tokens == 32
    assert seq.status is SequenceStatus.RUNNING
    assert len(seq.block_table) == 32 // 4
    assert shape(advance(scheduler)) == [(seq.seq_id, 32, 8)]


def test_a_failed_step_sends_leader_and_followers_back_to_the_queue() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    leader, follower = make_seq(prompt), make_seq([*prompt, 99])
    scheduler.add(leader)
    scheduler.add(follower)

    scheduler.fail(scheduler.schedule())

    scheduler.check_integrity()
    assert scheduler.waiting == (leader, follower)
    assert scheduler.block_manager.num_free_blocks == 64
    assert scheduler.block_manager.find_prefix(follower) == []
    assert follower.num_cached_tokens is None
    assert scheduler.num_queried_tokens == 0
    assert scheduler.num_preemptions == 0
    assert shape(advance(scheduler)) == [(follower.seq_id, 12, 1), (leader.seq_id, 0, 12)]


def test_an_aborted_leader_leaves_computed_blocks_to_its_followers() -> None:
    scheduler = make_scheduler(budget=8)
    prompt = list(range(12))
    leader, follower = make_seq(prompt), make_seq([*prompt, 99])
    scheduler.add(leader)
    advance(scheduler)

    assert scheduler.abort(leader.seq_id) is leader
    scheduler.add(follower)

    assert leader.status is SequenceStatus.FINISHED
    assert shape(advance(scheduler)) == [(follower.seq_id, 8, 5)]


def test_a_waiting_sequence_can_be_aborted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = add(scheduler, 4, 4)
    advance(scheduler)

    assert scheduler.abort(second.seq_id) is second
    assert scheduler.abort(first.seq_id) is first
    assert scheduler.abort("nobody") is None
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_waiting_tokens_are_those_no_prefix_covers_and_what_neighbours_share_is_one() -> None:
    scheduler = make_scheduler(budget=16, max_num_seqs=1)
    prompt = list(range(12))
    scheduler.add(make_seq([*prompt, *own_prompt(1, 20)]))
    scheduler.add(make_seq([*prompt, 99]))
    assert scheduler.num_waiting_tokens == 32 + 1

    advance(scheduler)
    assert scheduler.num_waiting_tokens == 16 + 1

    advance(scheduler)
    assert scheduler.num_waiting_tokens == 1


def test_waiting_tokens_that_the_prefill_under_way_will_compute_are_counted_with_it() -> None:
    scheduler = make_scheduler(budget=16)
    prompt = own_prompt(1, 40)
    for last in range(3):
        scheduler.add(make_seq([*prompt, last]))

    advance(scheduler)

    assert len(scheduler.waiting) == 2
    assert scheduler.num_waiting_tokens == (41 - 16) + 1 + 1


def test_without_a_prefix_cache_waiting_sequences_share_no_tokens() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for last in range(3):
        scheduler.add(make_seq([*own_prompt(1, 12), last]))

    assert scheduler.num_waiting_tokens == 3 * 13


def test_cached_output_of_an_earlier_attempt_is_no_cached_prompt() -> None:
    scheduler = make_scheduler()
    prompt = list(range(6))
    first = make_seq(prompt, 12)
    scheduler.add(first)
    for _ in range(8):
        advance(scheduler)
    scheduler.abort(first.seq_id)
    resumed = make_seq(prompt, 12, output=first.output_ids)
    scheduler.add(resumed)

    assert shape(advance(scheduler)) == [(resumed.seq_id, 12, 2)]
    assert resumed.num_cached_tokens == 6
