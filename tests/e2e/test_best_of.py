"""Best of n with the real model: the prompt is computed once."""

import pytest

from tidemill import Producer

pytestmark = [pytest.mark.model, pytest.mark.timeout(280)]

BLOCK_SIZE = 16
PROMPT = (
    "The moon pulls the water of the sea towards itself, and so does the sun, which is heavier"
    " and farther away. The earth turns below the two bulges of water that this makes, one on the"
    " side of the moon and one on the other, and where a coast meets a bulge the water is high."
    " When sun and moon stand in one line their pulls add up, and the tide is a spring tide; when"
    " they stand at a right angle it is a neap tide. In one sentence, the tides are caused by"
)


@pytest.mark.parametrize("n", [2, 8])
def test_the_prompt_of_n_candidates_is_computed_once(producer: Producer, n: int) -> None:
    best = producer.submit_best_of(PROMPT, n=n, seed=3, max_tokens=6, cache_salt=f"of {n}")
    results = best.results(timeout=240)
    num_prompt = results[0].usage.prompt_tokens
    assert num_prompt > 4 * BLOCK_SIZE
    computed = [result.usage.prompt_tokens - result.usage.cached_tokens for result in results]
    assert max(computed) == num_prompt, "nobody had computed it before"
    assert sum(computed) <= num_prompt + n * BLOCK_SIZE
    assert len({result.token_ids for result in results}) > 1, "other seeds, other answers"
    longest = best.best(lambda result: len(result.text))
    assert longest.job_id in {job.id for job in best.jobs}


def test_a_repeated_call_gives_the_same_answers(producer: Producer) -> None:
    first, again = (
        producer.submit_best_of(PROMPT, n=3, max_tokens=6, idempotency_key="tides")
        for _ in range(2)
    )
    assert [job.id for job in first.jobs] == [job.id for job in again.jobs]
    assert first.results(timeout=240) == again.results(timeout=240)
