"""What follows from an attempt, and when an endpoint is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.calls.webhooks import CALLBACK, GIVE_UP_MS, Counts, Outcome
from tidemill_webhooks.breaker import FAILURES_TO_OPEN, MAX_COOLDOWN_MS, cooldown_ms
from tidemill_webhooks.schedule import MAX_TRIES, Reply, Verdict, judge, pause_ms

HOUR_MS = 3_600_000


def verdict(
    reply: Reply, *, tries: int = 1, failures: int = 0, endpoint: str = "we_1", chance: float = 0.5
) -> Verdict:
    return judge(reply, tries=tries, failures=failures, endpoint_id=endpoint, chance=chance)


def test_ten_tries_take_seventy_five_hours() -> None:
    assert MAX_TRIES == 10
    pauses = [pause_ms(tries, 0.5) for tries in range(1, MAX_TRIES)]
    assert pauses[:3] == [5_000, 300_000, 1_800_000] and pauses == sorted(pauses)
    assert 75 * HOUR_MS < sum(pauses) < 76 * HOUR_MS
    assert sum(pause_ms(tries, 1.0) for tries in range(1, MAX_TRIES)) < GIVE_UP_MS


@given(st.integers(1, 9), st.floats(0, 1))
def test_a_pause_is_within_ten_percent_of_its_length(tries: int, chance: float) -> None:
    middle = pause_ms(tries, 0.5)
    assert 0.9 * middle - 1 <= pause_ms(tries, chance) <= 1.1 * middle + 1


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_success_is_a_delivery(status: int) -> None:
    assert verdict(Reply(status)) == Verdict(Outcome.DELIVERED, Counts.ANSWER)


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 403, 404, 408, 429, 500, 503])
def test_any_other_answer_is_tried_again_redirects_among_them(status: int) -> None:
    found = verdict(Reply(status))
    assert (found.outcome, found.counts) == (Outcome.RETRY, Counts.FAILURE)
    assert found.pause_ms == pause_ms(1, 0.5)


def test_the_tenth_failure_is_the_last() -> None:
    assert verdict(Reply(500), tries=9).outcome is Outcome.RETRY
    assert verdict(Reply(500), tries=10).outcome is Outcome.FAILED
    assert verdict(Reply(200), tries=10).outcome is Outcome.DELIVERED


def test_a_name_that_leads_inside_is_tried_three_times() -> None:
    inside = Reply(error="not public", is_inside=True)
    assert verdict(inside, tries=2).outcome is Outcome.RETRY
    assert verdict(inside, tries=3).outcome is Outcome.FAILED


def test_gone_switches_an_endpoint_off_and_gives_a_callback_up() -> None:
    assert verdict(Reply(410)).off_reason == "it answered 410 Gone"
    assert verdict(Reply(410)).outcome is Outcome.FAILED
    assert verdict(Reply(410), endpoint=CALLBACK) == Verdict(Outcome.FAILED, Counts.ANSWER)


def test_retry_after_makes_a_pause_longer_and_never_shorter() -> None:
    assert verdict(Reply(503, 60)).pause_ms == 60_000
    assert verdict(Reply(503, 1)).pause_ms == 5_000
    assert verdict(Reply(503, 1e9)).pause_ms == 24 * HOUR_MS
    assert verdict(Reply(503, -5)).pause_ms == 5_000


def test_a_busy_receiver_is_left_alone_for_all_deliveries_as_long_as_it_asks() -> None:
    assert verdict(Reply(429, 60)).cooldown_ms == verdict(Reply(503, 60)).cooldown_ms == 60_000
    assert verdict(Reply(500, 60)).cooldown_ms == 0


def test_what_no_later_try_can_change_is_given_up_and_not_held_against_the_endpoint() -> None:
    reply = Reply(error="only https is allowed", is_final=True)
    assert verdict(reply) == Verdict(Outcome.FAILED, Counts.NOTHING)


def test_a_circuit_opens_after_failures_in_a_row_for_longer_each_time_up_to_a_bound() -> None:
    times = [cooldown_ms(failures) for failures in range(1, 40)]
    assert times[: FAILURES_TO_OPEN - 1] == [0] * (FAILURES_TO_OPEN - 1)
    assert times[FAILURES_TO_OPEN - 1 : FAILURES_TO_OPEN + 2] == [30_000, 60_000, 120_000]
    assert times == sorted(times) and times[-1] == MAX_COOLDOWN_MS
    assert verdict(Reply(500), failures=FAILURES_TO_OPEN - 1).cooldown_ms == 30_000
