"""A simulated worker: one continuous batch, chunked prefill, a paged KV cache, and no tokens."""

import math
from collections import deque
from collections.abc import Iterable
from typing import cast

from tidemill.protocol.messages import FinishedSequence, KvEvents, KvSnapshot, WorkerInfo
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.simulation.cluster import Cluster
from tidemill_scheduler.simulation.decoding import DecodeBatch
from tidemill_scheduler.simulation.kv_cache import KvCache
from tidemill_scheduler.simulation.sequence import Sequence
from tidemill_scheduler.simulation.status import SimFinished, SimKvEvents, SimStatus
from tidemill_scheduler.simulation.workload import pack_key

#: Classes of priority: interactive, standard, batch.
_CLASSES = (0, 1, 2)
_BATCH_CLASS = 2


class SimWorker:
    """Steps as a real worker does; whoever owns it tells it the time.

    The prompt's tokens and the output's are reserved when a sequence is admitted, so none is ever
    preempted.  In each class one prefill at a time is incomplete.  Steps that prefill for the
    interactive class leave the decodes of the batch class out.
    """

    __slots__ = (
        "_began_at",
        "_block_size",
        "_budget",
        "_ceiling",
        "_chunks",
        "_cluster",
        "_decoding",
        "_finished",
        "_is_blocked",
        "_kv_seq",
        "_last_command",
        "_num_running",
        "_partials",
        "_queued_tokens",
        "_queues",
        "_reserve",
        "_seconds",
        "_steps",
        "_time_left",
        "_to_cancel",
        "admitted",
        "busy_seconds",
        "cache",
        "computed_tokens",
        "hit_tokens",
        "id",
        "info",
        "is_busy",
        "num_steps",
        "number",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, number: int, cluster: Cluster, tokens_per_hash: int) -> None:
        self.number = number
        self._cluster = cluster
        self._block_size = tokens_per_hash // ROUTING_STRIDE
        self.info = WorkerInfo(
            worker_id=f"w{number:04d}",
            model=cluster.model,
            block_size=self._block_size,
            num_blocks=max(1, cluster.kv_tokens // self._block_size),
            max_num_seqs=cluster.max_seqs,
            max_num_batched_tokens=cluster.step_tokens,
            wire_version=1,
        )
        self.id = self.info.worker_id
        self.cache = KvCache(self.info.num_blocks)
        self._reserve = math.ceil(cluster.watermark * self.info.num_blocks)
        self._ceiling = int(cluster.batch_ceiling * self.info.num_blocks)
        self._decoding = DecodeBatch(cluster.cost)
        self._queues: tuple[deque[Sequence], ...] = (deque(), deque(), deque())
        self._partials: list[Sequence | None] = [None, None, None]
        self._num_running = 0
        self._queued_tokens = (-1, 0)
        self._last_command = "0-0"
        self._kv_seq = 0
        # The step under way.
        self._chunks: list[tuple[Sequence, int]] = []
        self._steps = 0
        self._began_at = 0.0
        self._seconds = 0.0
        self._budget = 0
        self._time_left = math.inf
        self._is_blocked = False
        self._finished: list[Sequence] = []
        self._to_cancel: list[Sequence] = []
        #: Sequences admitted since their owner looked last.
        self.admitted: list[Sequence] = []
        self.is_busy = False
        #: Sums over its life.
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.hit_tokens = 0
        self.computed_tokens = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def receive(self, seq: Sequence) -> None:
        """Take a sequence in, or note that it was cancelled on its way."""
        self._last_command = seq.command
        if not seq.is_cancelled:
            seq.is_delivered = True
            self._queues[seq.priority_class].append(seq)
            self._queued_tokens = (-1, 0)

    def begin(self, now: float) -> float | None:
        """Start the next step, or all up to the next change; returns when it ends, None if idle."""
        self._plan()
        if self._chunks:
            self._steps, self._seconds = 1, self._step_seconds()
        elif self._decoding.count:
            self._steps = self._decoding.steps_to_end() if self._cluster.macro_steps else 1
            self._seconds = self._decoding.seconds(self._steps)
        else:
            return None
        self.is_busy, self._began_at = True, now
        return now + self._seconds

    def interrupt(self, now: float) -> float | None:
        """End many steps taken at once after the one under way; returns when, None if unchanged."""
        if self._steps == 1:
            return None
        steps = self._decoding.steps_within(now - self._began_at)
        if steps >= self._steps:
            return None
        self._steps, self._seconds = steps, self._decoding.seconds(steps)
        return max(now, self._began_at + self._seconds)

    def complete(self, now: float) -> list[Sequence]:
        """End the step; returns the sequences that are finished."""
        decoding, steps = self._decoding, self._steps
        self.is_busy = False
        self.busy_seconds += self._seconds
        self.num_steps += steps
        self.output_tokens += decoding.count * steps
        decoding.advance(steps)
        finished: list[Sequence] = []
        for seq, _ in self._chunks:
            if not self._cluster.publish_at_schedule:
                self._publish(seq)
            if seq.num_done == seq.input_tokens:
                self._produce_first(seq, now, finished)
        finished += decoding.pop_ended()
        if finished:
            self._finished += finished
            for seq in finished:
                self._release(seq)
        if self._to_cancel:
            self._cancel_pending(finished)
        return finished

    def cancel(self, seq: Sequence) -> None:
        """Drop a sequence, at once if it waits, after the step under way if it runs."""
        if not seq.blocks:
            self._queues[seq.priority_class].remove(seq)
            self._queued_tokens = (-1, 0)
        elif self.is_busy:
            self._to_cancel.append(seq)
        else:
            self._abort(seq)

    def status(self) -> SimStatus:
        """Return what a real worker would report now; finished sequences are told once."""
        finished: tuple[FinishedSequence, ...] = ()
        if self._finished:
            told = [SimFinished(s.job_id, s.hit_tokens, s.output_tokens) for s in self._finished]
            finished = cast(tuple[FinishedSequence, ...], tuple(told))
            self._finished.clear()
        waiting_tokens = 0
        for partial in self._partials:
            if partial is not None:
                waiting_tokens += partial.num_left
        interactive, standard, batch = self._queues
        num_waiting = len(interactive) + len(standard) + len(batch)
        if num_waiting:
            waiting_tokens += self._count_queued_tokens()
        return SimStatus(
            self._last_command,
            self._num_running,
            num_waiting,
            waiting_tokens,
            self.cache.num_free,
            self._seconds / self._steps if self._steps else 0.0,
            self.prompt_tokens,
            self.hit_tokens,
            self.output_tokens,
            finished,
            self._cluster.cost,
            urgent_tokens=self._count_urgent_tokens() if interactive or self._partials[0] else 0,
        )

    def kv_events(self) -> KvEvents | None:
        """Return what changed in the cache since the last call, None if nothing did."""
        stored, evicted = self.cache.take_changes()
        if not stored and not evicted:
            return None
        self._kv_seq += 1
        events = SimKvEvents(self._kv_seq, pack_key(stored), pack_key(evicted))
        return cast(KvEvents, events)

    def kv_snapshot(self) -> KvSnapshot:
        """Return all that is in the cache."""
        return KvSnapshot(seq=self._kv_seq, digests=pack_key(self.cache.digests()))

    def _plan(self) -> None:
        self._chunks, self._is_blocked = [], False
        if self._decoding.is_paused:
            self._decoding.resume()
        is_urgent = bool(self._queues[0]) or self._partials[0] is not None
        if is_urgent:
            self._decoding.pause(self._cluster.max_paused_steps)
        self._open_step()
        if is_urgent:
            self._plan_class(0)
        if self._decoding.is_paused and not self._chunks:
            # Whom the batch class was to make way for has no room: perhaps until that ends.
            self._decoding.resume()
            self._open_step()
        for priority_class in _CLASSES[1:]:
            if self._queues[priority_class] or self._partials[priority_class] is not None:
                self._plan_class(priority_class)

    def _open_step(self) -> None:
        self._budget = self._cluster.step_tokens - self._decoding.count
        self._time_left = self._spare_seconds()

    def _plan_class(self, priority_class: int) -> None:
        partial, queue = self._partials[priority_class], self._queues[priority_class]
        if partial is not None:
            self._compute(partial)
        while queue and self._budget > 0 and not self._is_blocked:
            self._is_blocked = not self._admit(queue[0])
            if not self._is_blocked:
                self._compute(queue.popleft())

    def _spare_seconds(self) -> float:
        slo, decoding = self._cluster.tpot_slo_seconds, self._decoding
        if not slo or not decoding.num_prompt:
            return math.inf
        return max(0.0, slo - decoding.seconds(1))

    def _admit(self, seq: Sequence) -> bool:
        cache = self.cache
        if self._num_running >= self._cluster.max_seqs:
            return False
        depth = cache.find(seq.chain, seq.depth)
        num_blocks = -(-(seq.input_tokens + seq.output_tokens) // self._block_size)
        num_new = cache.count_new(seq.chain, depth, num_blocks)
        if not self._has_room(cache.num_pinned + num_new, seq.priority_class):
            return False
        cache.reserve(seq.chain, depth, num_new)
        seq.blocks, seq.depth, seq.published = num_blocks, depth, depth
        # The last token is computed even if all are there: its logits are needed.
        tokens = depth * self._block_size * ROUTING_STRIDE
        seq.hit_tokens = seq.num_done = min(seq.input_tokens - 1, tokens)
        self.prompt_tokens += seq.input_tokens
        self.hit_tokens += seq.hit_tokens
        self._num_running += 1
        self._queued_tokens = (-1, 0)
        self.admitted.append(seq)
        return True

    def _has_room(self, num_pinned: int, priority_class: int) -> bool:
        capacity = self.info.num_blocks
        if not self._num_running:
            return num_pinned <= capacity
        if priority_class == _BATCH_CLASS and num_pinned > self._ceiling:
            return False
        return num_pinned <= capacity - self._reserve

    def _compute(self, seq: Sequence) -> None:
        left = seq.num_left
        chunk = min(left, self._budget)
        if self._time_left != math.inf:
            chunk = min(chunk, self._affordable(seq))
        if chunk > 0:
            self._chunks.append((seq, chunk))
            seq.num_done += chunk
            self.computed_tokens += chunk
            self._budget -= chunk
            if self._cluster.publish_at_schedule:
                self._publish(seq)
        if chunk < left:
            self._partials[seq.priority_class] = seq
            self._budget = 0
        else:
            self._partials[seq.priority_class] = None

    def _affordable(self, seq: Sequence) -> int:
        """The most tokens of a prefill that fit in the time left, one block in a step at least."""
        cost, time_left = self._cluster.cost, self._time_left
        linear = cost.per_token + cost.per_pair * seq.num_done
        root = math.sqrt(linear * linear + 2 * cost.per_pair * time_left)
        # The other form of the solution, which is exact when attention costs nothing.
        tokens = int(2 * time_left / (linear + root)) if linear + root > 0 else self._budget
        if not self._chunks:
            tokens = max(tokens, self._block_size)
        tokens = min(tokens, self._budget, seq.num_left)
        spent = linear * tokens + cost.per_pair * tokens * tokens / 2
        self._time_left = max(0.0, time_left - spent)
        return tokens

    def _publish(self, seq: Sequence) -> None:
        end = min(len(seq.chain), seq.num_done // (self._block_size * ROUTING_STRIDE))
        if end > seq.published:
            self.cache.publish(seq.chain[seq.published : end])
            seq.published = end

    def _step_seconds(self) -> float:
        cost, tokens, pairs = self._cluster.cost, 0, 0
        for seq, chunk in self._chunks:
            tokens += chunk
            pairs += chunk * (seq.num_done - chunk) + chunk * (chunk - 1) // 2
        return self._decoding.seconds(1) + cost.per_token * tokens + cost.per_pair * pairs

    def _produce_first(self, seq: Sequence, now: float, finished: list[Sequence]) -> None:
        seq.first_token_at = now
        self.output_tokens += 1
        if seq.output_tokens == 1:
            finished.append(seq)
        else:
            self._decoding.add(seq)

    def _release(self, seq: Sequence) -> None:
        is_batch = seq.priority_class == _BATCH_CLASS
        self.cache.free(seq.held, seq.num_unpublished, is_batch=is_batch)
        self._num_running -= 1

    def _cancel_pending(self, finished: list[Sequence]) -> None:
        for seq in self._to_cancel:
            if seq not in finished:
                self._abort(seq)
        self._to_cancel.clear()

    def _abort(self, seq: Sequence) -> None:
        if self._partials[seq.priority_class] is seq:
            self._partials[seq.priority_class] = None
        else:
            self._decoding.cancel(seq)
        self._release(seq)

    def _count_urgent_tokens(self) -> int:
        partial = self._partials[0]
        queued = self._count_tokens(self._queues[:1])
        return queued + (partial.num_left if partial is not None else 0)

    def _count_queued_tokens(self) -> int:
        version, tokens = self._queued_tokens
        if version != self.cache.version:
            tokens = self._count_tokens(self._queues)
            self._queued_tokens = (self.cache.version, tokens)
        return tokens

    def _count_tokens(self, queues: Iterable[Iterable[Sequence]]) -> int:
        """What one computes is not computed again by the one behind it."""
        per_hash, find = self._block_size * ROUTING_STRIDE, self.cache.find
        tokens = 0
        for before, queue in zip(self._partials, queues, strict=False):
            for seq in queue:
                # Little changes from one step to the next.
                seq.depth = known = find(seq.chain, seq.depth)
                if before is not None:
                    known = _count_shared(seq, before, known)
                tokens += max(1, seq.input_tokens - per_hash * known)
                before = seq
        return tokens


def _count_shared(seq: Sequence, before: Sequence, known: int) -> int:
    """Hashes that are cached, or will be once ``before`` is computed; ``known`` of them are."""
    left, right = seq.chain, before.chain
    low, high = known, min(len(left), len(right))
    if low >= high or left[low] != right[low]:
        return known
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
