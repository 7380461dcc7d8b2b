"""The account of a step in the making."""

from support.fake_engine import make_seq
from tidemill_gpuworker.steps.step_draft import StepDraft


def test_scheduled_tokens_leave_the_budget_and_withdrawn_ones_return() -> None:
    draft = StepDraft(10)
    kept, victim = make_seq([1, 2, 3]), make_seq([1, 2, 3, 4])
    draft.schedule(kept, 3)
    draft.schedule(victim, 4)
    assert draft.token_budget == 3

    draft.withdraw(victim)

    assert draft.token_budget == 7
    assert [item.seq for item in draft.plan().scheduled] == [kept]
    assert draft.plan().preempted == (victim,)


def test_a_victim_that_was_not_scheduled_returns_nothing() -> None:
    draft = StepDraft(10)

    draft.withdraw(make_seq([1]))

    assert draft.token_budget == 10


def test_single_tokens_come_first_and_the_rest_keeps_its_order() -> None:
    draft = StepDraft(20)
    seqs = [make_seq([0] * length) for length in (3, 1, 2, 1)]
    for seq in seqs:
        draft.schedule(seq, seq.num_tokens)

    plan = draft.plan()

    assert [item.seq for item in plan.scheduled] == [seqs[1], seqs[3], seqs[0], seqs[2]]
    assert (plan.num_decodes, plan.num_tokens) == (2, 7)
