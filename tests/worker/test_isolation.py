"""A job that breaks steps is found, and nobody else is blamed."""

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from tidemill_gpuworker.shell.isolation import Isolation


@dataclass
class Work:
    """One job: how many steps it takes, and what a failure costs it.

    With ``tells_at_end`` nothing is kept of it before its end, as of a beam search, a prompt in
    chunks or a transcription: whenever it enters the engine it begins anew.  It breaks the step
    for which it has ``breaks_at`` tokens, and any step after ``breaks_after`` good ones in a row.
    """

    length: int
    tells_at_end: bool = False
    breaks_at: int | None = None
    breaks_after: int | None = None
    num_done: int = 0
    num_steps: int = 0
    num_failures: int = 0

    @property
    def may_break(self) -> bool:
        limits = (self.breaks_at, self.breaks_after)
        return any(limit is not None and limit < self.length for limit in limits)

    @property
    def must_break(self) -> bool:
        # With what it keeps it may get past ``breaks_after`` while others fail beside it.
        return self.may_break and (self.tells_at_end or self.breaks_after is None)

    @property
    def breaks(self) -> bool:
        return self.num_done == self.breaks_at or self.num_steps == self.breaks_after

    def enter(self) -> None:
        self.num_steps = 0
        if self.tells_at_end:
            self.num_done = 0

    def advance(self) -> bool:
        """Take a step; returns whether what it brought is kept."""
        self.num_done += 1
        self.num_steps += 1
        return self.num_done == self.length or not self.tells_at_end


class Simulation:
    """An engine of such jobs, of which ``max_batch`` fit into a step that works."""

    def __init__(self, jobs: dict[str, Work], max_batch: int = 99) -> None:
        self.isolation = Isolation()
        self.jobs = jobs
        self.remaining = set(jobs)
        self.engine: list[str] = []
        self.culprits: list[str] = []
        self.max_batch = max_batch
        for name in jobs:
            self._enter(name)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.remaining:
                assert not self.isolation.is_active
                return
            while trial := self.isolation.next_trial(len(self.engine)):
                self._enter(trial)
            self._step()
        raise AssertionError(f"{self.remaining} never end")

    def come_in(self, name: str, work: Work) -> None:
        """Let a job come in later."""
        self.jobs[name] = work
        self.remaining.add(name)
        if self.isolation.is_active:
            self.isolation.hold(name)
        else:
            self._enter(name)

    def _enter(self, name: str) -> None:
        self.jobs[name].enter()
        self.engine.append(name)

    def _step(self) -> None:
        assert self.engine, "the engine idles although jobs wait"
        is_broken = any(self.jobs[name].breaks for name in self.engine)
        if is_broken or len(self.engine) > self.max_batch:
            self._fail()
            return
        progressed = list(self.engine)
        kept = [name for name in progressed if self.jobs[name].advance()]
        self.isolation.step_worked(progressed, kept)
        for name in progressed:
            if self.jobs[name].num_done == self.jobs[name].length:
                self._drop(name)

    def _fail(self) -> None:
        in_engine = list(self.engine)
        for name in in_engine:
            self.jobs[name].num_failures += 1
        verdict = self.isolation.step_failed(in_engine)
        if verdict.culprit:
            self.culprits.append(verdict.culprit)
            self._drop(verdict.culprit)
        self.engine.clear()
        for name in in_engine:
            if name not in verdict.removed:
                self._enter(name)

    def _drop(self, name: str) -> None:
        self.isolation.discard(name)
        self.remaining.remove(name)
        self.engine.remove(name)


def test_a_single_failure_is_an_accident() -> None:
    isolation = Isolation()
    assert isolation.step_failed(["a", "b"]).removed == ()
    isolation.step_worked({"a", "b"}, {"a", "b"})
    assert isolation.step_failed(["a", "b"]).removed == ()
    assert not isolation.is_active


def test_a_step_that_worked_excuses_nobody_who_got_nothing_from_it() -> None:
    isolation = Isolation()
    assert isolation.step_failed(["a", "b"]).removed == ()
    isolation.step_worked({"a", "b"}, {"a"})
    assert isolation.step_failed(["a", "b"]).removed == ("a", "b")


def test_jobs_that_fail_only_together_are_all_finished() -> None:
    simulation = Simulation({name: Work(5) for name in "abcd"}, max_batch=2)
    simulation.run()
    assert simulation.culprits == []


def test_a_job_that_fails_late_is_found_among_cleared_ones() -> None:
    simulation = Simulation({"a": Work(9), "b": Work(9, breaks_at=5), "c": Work(9)})
    simulation.run()
    assert simulation.culprits == ["b"]


def test_a_job_that_begins_anew_after_each_failure_is_found_beside_ones_that_go_on() -> None:
    poison = Work(30, tells_at_end=True, breaks_at=4)
    beam, stream = Work(30, tells_at_end=True), Work(100)
    simulation = Simulation({"poison": poison, "beam": beam, "stream": stream})
    simulation.run()
    assert simulation.culprits == ["poison"]
    assert max(poison.num_failures, beam.num_failures, stream.num_failures) <= 6


def test_a_job_that_gains_a_token_between_two_failures_is_found_all_the_same() -> None:
    poison = Work(200, breaks_after=1)
    simulation = Simulation({"poison": poison, "stream": Work(200)})
    simulation.run()
    assert simulation.culprits == ["poison"]
    assert poison.num_failures <= 10


def test_a_newcomer_is_cleared_by_its_first_step_though_it_tells_at_its_end() -> None:
    simulation = Simulation({"a": Work(9), "b": Work(9)})
    simulation.isolation.step_failed(["a", "b"])
    removed = simulation.isolation.step_failed(["a", "b"]).removed
    assert removed == ("a", "b")
    simulation.engine.clear()
    for number in range(4):
        simulation.come_in(f"late {number}", Work(50, tells_at_end=True))
    simulation.run(max_steps=70)
    assert simulation.culprits == []


def test_a_lost_trial_does_not_block_the_others() -> None:
    isolation = Isolation()
    isolation.step_failed(["a", "b"])
    assert isolation.step_failed(["a", "b"]).removed == ("a", "b")
    assert isolation.next_trial(0) == "a"
    isolation.discard("a")
    assert isolation.next_trial(0) == "b"
    isolation.discard("b")
    assert not isolation.is_active


def _works(**faults: st.SearchStrategy[int] | st.SearchStrategy[None]) -> st.SearchStrategy[Work]:
    return st.builds(Work, st.integers(1, 6), st.booleans(), **faults)


_INNOCENT = _works()
_GUILTY = _works(breaks_at=st.integers(0, 5)) | _works(breaks_after=st.integers(0, 3))


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), _INNOCENT | _GUILTY, min_size=1),
    st.integers(1, 8),
)
@example({"a": Work(6, True, breaks_at=5), "b": Work(6, True, breaks_at=4), "c": Work(6)}, 8)
def test_exactly_the_guilty_jobs_fail(jobs: dict[str, Work], max_batch: int) -> None:
    simulation = Simulation(jobs, max_batch)
    simulation.run()
    assert set(simulation.culprits) >= {name for name, work in jobs.items() if work.must_break}
    assert set(simulation.culprits) <= {name for name, work in jobs.items() if work.may_break}


def test_a_suspect_must_do_more_after_each_failure_before_it_is_cleared() -> None:
    isolation = Isolation()
    isolation.step_failed(["a", "b"])
    isolation.step_failed(["a", "b"])
    assert isolation.next_trial(0) == "a"
    isolation.step_worked({"b"}, {"b"})
    assert isolation.next_trial(1) is None
    isolation.step_worked({"a"}, {"a"})
    assert isolation.next_trial(1) is None
    isolation.step_worked({"a"}, {"a"})
    assert isolation.next_trial(1) == "b"
