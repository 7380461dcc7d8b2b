"""What happens in one simulated run, event by event."""

import math
import random
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import cast

from tidemill.protocol.errors import ConfigError, SimulationFailed
from tidemill.protocol.messages import KvEvents, WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.hints import Hint
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import MAX_PER_TICK
from tidemill_scheduler.simulation.cluster import Cluster, Faults
from tidemill_scheduler.simulation.events import Events
from tidemill_scheduler.simulation.ledger import Ledger
from tidemill_scheduler.simulation.member import Attempt, Member
from tidemill_scheduler.simulation.policy import CacheAware, Hinting, Policy
from tidemill_scheduler.simulation.sequence import Sequence
from tidemill_scheduler.simulation.worker import SimWorker
from tidemill_scheduler.simulation.workload import SimJob, Workload

#: So many heartbeats in a row without anything running mean that nothing ever will.
_MAX_IDLE_HEARTBEATS = 1000


class Run:
    """The state of one simulation while it goes on."""

    def __init__(
        self,
        cluster: Cluster,
        workloads: Items[Workload],
        policy: Policy,
        *,
        faults: Faults,
        seed: int,
    ) -> None:
        self.cluster, self.faults = cluster, faults
        self.ledger = Ledger()
        self.members: list[Member] = []
        self._policy = policy
        self._cache_aware = policy if isinstance(policy, CacheAware) else None
        self._hinting = policy if self.cluster.hints and isinstance(policy, Hinting) else None
        self._tokens_per_hash = workloads[0].tokens_per_hash
        self._rng = random.Random(seed)
        self._events = Events()
        self._jobs: dict[str, Attempt] = {}
        self._by_id: dict[str, Member] = {}
        self._online = [iter(w) for w in workloads if not w.is_bulk]
        self._bulk = [iter(w) for w in workloads if w.is_bulk]
        self._num_waiting = 0
        self._is_dirty = True
        self._is_tick_due = False
        self._to_start: list[Member] = []
        self._num_idle_heartbeats = 0
        # A pool that one job and its output overfill would never admit it.
        self._block_size = workloads[0].tokens_per_hash // ROUTING_STRIDE
        self._capacity = max(1, self.cluster.kv_tokens // self._block_size)

    @property
    def now(self) -> float:
        """Seconds of the simulation."""
        return self._events.now

    def work(self) -> None:
        """Simulate until all jobs have ended; raises ``SimulationFailed``."""
        for _ in range(self.cluster.num_workers):
            self._join(None)
        self._schedule_faults()
        for source in self._online:
            self._expect_arrival(source)
        if self.cluster.heartbeat_seconds:
            self._events.after(self.cluster.heartbeat_seconds, self._heartbeat, None)
        self._refill()
        self._settle()
        while self._events and (self.ledger.num_open or self._bulk or self._online):
            self._events.advance()
            self._settle()
        self.ledger.num_events = self._events.num_handled
        if self.ledger.num_open:
            raise SimulationFailed(
                f"{self.ledger.num_open} jobs lie at {self.now:.3f} s although nothing runs",
                fix="Let the policy return them from tick, or set is_unfinished.",
            )

    def _settle(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            self._decide_or_wait()
        starters, self._to_start = self._to_start, []
        for member in starters:
            if not member.worker.is_busy and member.is_computing:
                self._begin(member)

    def _decide_or_wait(self) -> None:
        period = self.cluster.tick_seconds
        if not period:
            self._decide()
        elif not self._is_tick_due:
            self._is_tick_due = True
            self._events.at((math.floor(self._events.now / period) + 1) * period, self._tick, None)

    def _tick(self, _: None) -> None:
        self._is_tick_due = False
        self._decide()

    def _decide(self) -> None:
        is_open = True
        while is_open:
            dispatches = self._policy.tick(self._events.now)
            self.ledger.num_ticks += 1
            was_empty = self._num_waiting == len(dispatches)
            if dispatches:
                self._send(dispatches)
                self._send_hints()
            is_refilled = self._refill()
            more = self._policy.is_unfinished or len(dispatches) >= MAX_PER_TICK
            is_open = more or (was_empty and is_refilled)

    def _expect_arrival(self, source: Iterator[SimJob]) -> None:
        job = next(source, None)
        if job is None:
            self._online.remove(source)
        else:
            self._events.at(job.arrival, self._arrive, (job, source))

    def _arrive(self, arrival: tuple[SimJob, Iterator[SimJob]]) -> None:
        job, source = arrival
        self._submit(job)
        self._expect_arrival(source)

    def _refill(self) -> bool:
        """Let bulk jobs wait up to the bound; whether any came."""
        before = self.ledger.num_jobs
        while self._bulk and self._num_waiting < self.cluster.max_waiting:
            job = next(self._bulk[0], None)
            if job is None:
                del self._bulk[0]
            else:
                self._submit(job)
        return self.ledger.num_jobs > before

    def _submit(self, job: SimJob) -> None:
        number = self.ledger.num_jobs
        self.ledger.num_jobs += 1
        num_blocks = -(-(job.input_tokens + job.output_tokens) // self._block_size)
        if num_blocks > self._capacity:
            raise ConfigError(
                f"kv_tokens: {self.cluster.kv_tokens} cannot hold job {number} with "
                f"{job.input_tokens} + {job.output_tokens} tokens",
                fix="Give the workers more KV cache.",
            )
        waiting = WaitingJob(
            job_id=f"job_{number:09d}",
            queue=sys.intern(f"p{int(job.priority >= 0) + int(job.priority > 0)}:{job.tenant}"),
            entry_id=f"{number + 1}-0",
            model=self.cluster.model,
            key=job.key,
            cost=job.input_tokens,
            priority=job.priority,
            since=max(job.arrival, self._events.now),
            max_tokens=job.max_tokens,
            deadline=job.deadline,
        )
        self._jobs[waiting.job_id] = Attempt(waiting, job.output_tokens)
        self._wait(waiting)

    def _wait(self, job: WaitingJob) -> None:
        self._num_waiting += 1
        self._is_dirty = True
        self.ledger.gap.waits(job.tenant)
        self._policy.add_job(job)

    def _send(self, dispatches: Items[Dispatch]) -> None:
        sent = [pair for dispatch in dispatches if (pair := self._dispatch(dispatch))]
        if self.cluster.rtt_seconds:
            self._events.after(self.cluster.rtt_seconds, self._deliver, sent)
        else:
            self._deliver(sent)

    def _dispatch(self, dispatch: Dispatch) -> tuple[Member, Sequence]:
        job, ledger = dispatch.job, self.ledger
        attempt, member = self._jobs.get(job.job_id), self._by_id.get(dispatch.worker_id)
        if attempt is None or attempt.member is not None or member is None:
            raise SimulationFailed(
                f"{job.job_id} was dispatched to {dispatch.worker_id} although it does not wait or "
                "there is no such worker",
                fix="Let the policy return each waiting job once, for a worker it was told of.",
            )
        ledger.num_dispatches += 1
        self._num_waiting -= 1
        ledger.gap.leaves(job.tenant)
        seq = attempt.start(member, self._events.now, ledger.num_dispatches)
        self._policy.sent(dispatch, seq.command)
        return member, seq

    def _deliver(self, sent: list[tuple[Member, Sequence]]) -> None:
        for member, seq in sent:
            if not member.is_computing:
                continue
            member.worker.receive(seq)
            if seq.is_cancelled:
                self._report(member)
            elif not member.worker.is_busy:
                self._to_start.append(member)
            else:
                self._interrupt(member)

    def _send_hints(self) -> None:
        if self._hinting is None:
            return
        hints = self._hinting.take_hints()
        if hints:
            self._events.after(self.cluster.rtt_seconds, self._deliver_hints, hints)

    def _deliver_hints(self, hints: Items[Hint]) -> None:
        for hint in hints:
            member = self._by_id.get(hint.worker_id)
            if member is not None:
                references = {int.from_bytes(d, "big"): n for d, n in hint.refs.items()}
                member.worker.cache.hint(references)

    def _cancel(self, ordinal: int) -> None:
        attempt = self._jobs.pop(f"job_{ordinal:09d}", None)
        if attempt is None:
            return
        self.ledger.num_cancelled += 1
        self._is_dirty = True
        if attempt.member is None:
            self._num_waiting -= 1
            self.ledger.gap.leaves(attempt.job.tenant)
            self._policy.forget(attempt.job.job_id)
            return
        member, seq = attempt.member, attempt.sequence
        assert seq is not None
        member.attempts.pop(attempt.job.job_id)
        seq.is_cancelled = True
        self.ledger.abandoned.append(seq)
        if seq.is_delivered and member.is_computing:
            member.worker.cancel(seq)
            self._interrupt(member)

    def _join(self, _: None) -> None:
        worker = SimWorker(len(self.members), self.cluster, self._tokens_per_hash)
        lag = self._rng.uniform(0, self.cluster.kv_lag_seconds)
        member = Member(worker, joined_at=self._events.now, kv_lag=lag)
        self.members.append(member)
        self._by_id[worker.id] = member
        self._policy.add_worker(worker.info, self._events.now)
        self._report(member)

    def _begin(self, member: Member) -> None:
        end = member.worker.begin(self._events.now)
        admitted = member.worker.admitted
        if admitted:
            self.ledger.admitted(admitted)
            admitted.clear()
        if end is not None:
            member.step_number += 1
            self._events.at(end, self._end_step, (member, member.step_number))

    def _interrupt(self, member: Member) -> None:
        if not member.worker.is_busy:
            return
        end = member.worker.interrupt(self._events.now)
        if end is not None:
            member.step_number += 1
            self._events.at(end, self._end_step, (member, member.step_number))

    def _end_step(self, step: tuple[Member, int]) -> None:
        member, number = step
        if number != member.step_number or not member.is_computing:
            return
        for seq in member.worker.complete(self._events.now):
            self._finish(member, seq)
        self._to_start.append(member)
        self._report(member)

    def _finish(self, member: Member, seq: Sequence) -> None:
        attempt = self._jobs.get(seq.job_id)
        if attempt is None or attempt.sequence is not seq:
            # Its worker was given up and the job went to another, or it was cancelled.
            self.ledger.num_fenced += not seq.is_cancelled
            return
        del self._jobs[seq.job_id]
        del member.attempts[seq.job_id]
        self.ledger.finished(attempt, self._events.now)

    def _report(self, member: Member) -> None:
        if not member.is_heard:
            return
        if self._cache_aware is not None:
            events = member.worker.kv_events()
            if events is not None:
                self._tell_kv(member, events)
        status = member.worker.status()
        self._policy.update_worker(member.worker.id, cast(WorkerStatus, status), self._events.now)
        self._is_dirty = True

    def _tell_kv(self, member: Member, events: KvEvents) -> None:
        if member.kv_lag:
            self._events.after(member.kv_lag, self._apply_kv, (member, events))
        else:
            self._apply_kv((member, events))

    def _apply_kv(self, told: tuple[Member, KvEvents]) -> None:
        member, events = told
        if self._cache_aware is None or not member.is_heard or events.seq <= member.kv_seq:
            return
        if not self._cache_aware.apply_kv(member.worker.id, events):
            snapshot = member.worker.kv_snapshot()
            self._cache_aware.reset_kv(member.worker.id, snapshot)
            member.kv_seq = snapshot.seq
        self._is_dirty = True

    def _heartbeat(self, _: None) -> None:
        is_idle = True
        for member in self.members:
            if member.is_heard:
                self._report(member)
                is_idle = is_idle and not member.worker.is_busy
        self._num_idle_heartbeats = self._num_idle_heartbeats + 1 if is_idle else 0
        is_alone = not self._events and self._num_idle_heartbeats > _MAX_IDLE_HEARTBEATS
        if not is_alone:
            self._events.after(self.cluster.heartbeat_seconds, self._heartbeat, None)

    def _schedule_faults(self) -> None:
        for when, number in self.faults.deaths:
            self._events.at(when, self._die, number)
        for when, number in self.faults.silences:
            self._events.at(when, self._fall_silent, number)
        for when in self.faults.joins:
            self._events.at(when, self._join, None)
        for when, ordinal in self.faults.cancels:
            self._events.at(when, self._cancel, ordinal)

    def _die(self, number: int) -> None:
        self.members[number].is_computing = False
        self._fall_silent(number)

    def _fall_silent(self, number: int) -> None:
        member = self.members[number]
        if member.is_heard:
            member.is_heard = False
            self._events.after(self.faults.detect_seconds, self._give_up, member)

    def _give_up(self, member: Member) -> None:
        """Take a lost worker's jobs back, in key order, with the next attempt's number."""
        member.left_at = self._events.now
        self._policy.remove_worker(member.worker.id)
        del self._by_id[member.worker.id]
        self._is_dirty = True
        attempts = sorted(member.attempts.values(), key=lambda a: (a.job.key, a.job.job_id))
        member.attempts.clear()
        for attempt in attempts:
            self.ledger.num_requeued += 1
            self.ledger.abandoned.append(attempt.give_back())
            self._wait(attempt.job)
