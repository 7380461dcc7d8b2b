"""A job that breaks steps is found, and nobody else is blamed."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tidemill_gpuworker.shell.isolation import Isolation


class Simulation:
    """An engine of job names: a step gives each job a token, or fails if ``breaks`` says so."""

    def __init__(self, jobs: dict[str, int], breaks: Callable[[dict[str, int]], bool]) -> None:
        self.isolation = Isolation()
        self.remaining = dict(jobs)
        self.engine = dict.fromkeys(jobs)
        self.culprits: list[str] = []
        self.breaks = breaks

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.remaining:
                return
            while trial := self.isolation.next_trial(len(self.engine)):
                self.engine[trial] = None
            self._step()
        raise AssertionError(f"{self.remaining} never end")

    def _step(self) -> None:
        assert self.engine, "the engine idles although jobs wait"
        if self.breaks({name: self.remaining[name] for name in self.engine}):
            self._failed()
            return
        progressed = list(self.engine)
        for name in progressed:
            self.remaining[name] -= 1
            if not self.remaining[name]:
                del self.remaining[name], self.engine[name]
        self.isolation.step_worked(progressed)

    def _failed(self) -> None:
        verdict = self.isolation.step_failed(list(self.engine))
        for name in verdict.removed:
            del self.engine[name]
        if verdict.culprit:
            self.culprits.append(verdict.culprit)
            self.isolation.discard(verdict.culprit)
            del self.remaining[verdict.culprit]


def test_a_single_failure_is_an_accident() -> None:
    isolation = Isolation()
    assert isolation.step_failed(["a", "b"]).removed == ()
    isolation.step_worked({"a"})
    assert isolation.step_failed(["a", "b"]).removed == ()
    assert not isolation.is_active


def test_jobs_that_fail_only_together_are_all_finished() -> None:
    simulation = Simulation(dict.fromkeys("abcd", 5), lambda engine: len(engine) > 2)
    simulation.run()
    assert simulation.culprits == []


def test_a_job_that_fails_late_is_found_among_cleared_ones() -> None:
    simulation = Simulation({"a": 9, "b": 9, "c": 9}, lambda engine: engine.get("b") == 4)
    simulation.run()
    assert simulation.culprits == ["b"]


def test_a_lost_trial_does_not_block_the_others() -> None:
    isolation = Isolation()
    isolation.step_failed(["a", "b"])
    assert isolation.step_failed(["a", "b"]).removed == ("a", "b")
    assert isolation.next_trial(0) == "a"
    isolation.discard("a")
    assert isolation.next_trial(0) == "b"
    isolation.discard("b")
    assert not isolation.is_active


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 6), min_size=1),
    st.sets(st.sampled_from("abcdefgh")),
    st.integers(1, 6),
    st.integers(1, 8),
)
def test_exactly_the_guilty_jobs_fail(
    jobs: dict[str, int], guilty: set[str], at_remaining: int, max_batch: int
) -> None:
    def breaks(engine: dict[str, int]) -> bool:
        bad = any(engine.get(name) == at_remaining for name in guilty)
        return bad or len(engine) > max_batch

    simulation = Simulation(jobs, breaks)
    simulation.run()
    expected = {name for name in guilty if jobs.get(name, 0) >= at_remaining}
    assert set(simulation.culprits) == expected
