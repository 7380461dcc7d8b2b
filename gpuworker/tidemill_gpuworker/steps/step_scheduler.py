"""Which sequences run how many tokens in the next step."""

from collections.abc import Iterable, ValuesView

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.kv_use import KvUse
from tidemill.protocol.step_cost import StepCost
from tidemill_gpuworker.engine.length_check import check_length
from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence, SequenceStatus
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.kv_waste import measure_kv_use
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.speculation.figures import SpeculationFigures
from tidemill_gpuworker.steps.batch_pause import BatchPause
from tidemill_gpuworker.steps.slot_preemption import SlotPreemption
from tidemill_gpuworker.steps.static_batch import StaticBatch
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_draft import StepDraft
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_gpuworker.steps.time_budget import TimeBudget
from tidemill_gpuworker.steps.waiting_queue import WaitingQueue, urgency


class StepScheduler:
    """Continuous batching over one KV cache.

    Every step serves decodes first.  What is left of its budget goes to prefills, the interactive
    ones before the standard and the batch ones, and within a class those in progress before those
    that wait.  So a prefill in progress stands still as long as more urgent ones use whole steps.
    A step that prefills for the interactive class leaves the decodes of the batch class out.
    When blocks run out, the least urgent running sequence is preempted, the newest of the batch
    class first: it gives up its blocks and computes its tokens again later, but for those that are
    found in the cache or its CPU tier then.  The most urgent one is never preempted, so every
    sequence ends.  Interactive sequences take the places of batch ones if all are taken.

    Sequences that share a prefix compute it once: whoever is first is its *leader*, and followers
    either are admitted in the same step, after the leader's tokens, or wait until its next block
    is the one they lack no more.

    A beam that has got its row of logits is *held*, with its blocks, until ``extend`` says how it
    goes on; it gives them up to others before anything comes to a standstill.

    With a ``drafter``, decodes get what room a step has left for guesses of their next tokens.

    One step at a time: each plan that is not empty goes back through ``update`` or ``fail`` before
    anything else is called.
    """

    def __init__(
        self, config: StepConfig, block_manager: BlockManager, drafter: Drafter | None = None
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        #: By which the duration of a step is predicted; the engine improves on it.
        self.step_cost = StepCost()
        self.num_preemptions = 0
        #: Known tokens of sequences at their first admission, and how many of them were cached.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.speculation = SpeculationFigures()
        self._drafter = drafter
        self._waiting = WaitingQueue()
        # In order of admission.
        self._running: dict[str, Sequence] = {}
        self._sequences: dict[str, Sequence] = {}
        # Held ones that lost their blocks: there is nothing to compute for them yet.
        self._parked: dict[str, Sequence] = {}
        self._num_added = 0
        self._pause = BatchPause(config.max_paused_steps)
        self._slots = SlotPreemption(config, block_manager)
        self._batch: StaticBatch | None = None
        if config.scheduling_mode == "static":
            self._batch = StaticBatch(config.max_num_seqs, config.max_model_len, block_manager)
        self._plan: StepPlan | None = None
        self._admitted: list[Sequence] = []

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks, most urgent first."""
        return tuple(self._waiting)

    @property
    def running(self) -> ValuesView[Sequence]:
        """Sequences that hold blocks, in order of admission."""
        return self._running.values()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._sequences)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be prefilled, without those that the prefix cache holds by then."""
        return self._count_prefill(self._waiting, self.running)

    @property
    def num_urgent_tokens(self) -> int:
        """Those of the interactive class among the tokens still to be prefilled."""
        waiting = self._waiting.of_class(PriorityClass.INTERACTIVE)
        return self._count_prefill(waiting, (seq for seq in self.running if seq.priority < 0))

    @property
    def kv_use(self) -> KvUse:
        """How well the KV cache is used, between steps."""
        return measure_kv_use(self.block_manager, self.running)

    def _count_prefill(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> int:
        # What one computes is not computed again by the one behind it.
        blocks, before, count = self.block_manager, None, 0
        for seq in running:
            if seq.num_uncomputed_tokens > 1:
                before, count = seq, count + seq.num_uncomputed_tokens
        for seq in waiting:
            count += seq.num_tokens - blocks.block_size * blocks.count_shared(seq, before)
            before = seq
        return count

    def add(self, seq: Sequence) -> None:
        """Put a new sequence in the queue; raises ``InvalidRequest`` if it can never run."""
        assert seq.seq_id not in self._sequences, f"{seq.seq_id} was added before"
        if seq.is_beam and self._batch is not None:
            raise InvalidRequest(
                "use_beam_search: this worker runs static batches, which beams cannot join",
                field="params.use_beam_search",
            )
        check_length(seq, self.config.max_model_len, self.block_manager)
        seq.arrival = self._num_added
        self._num_added += 1
        self._sequences[seq.seq_id] = seq
        self._waiting.push(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Take in a sequence, between steps, that begins with the computed tokens of another one.

        It shares the blocks of that one, or, if all places are taken, waits for one and finds then
        what is cached.
        """
        assert self._plan is None, "sequences are forked between steps only"
        assert child.seq_id not in self._sequences, f"{child.seq_id} was added before"
        child.arrival = self._num_added
        self._num_added += 1
        self._sequences[child.seq_id] = child
        child.num_cached_tokens = parent.num_cached_tokens
        is_full = len(self._running) >= self.config.max_num_seqs
        if is_full or parent.status is not SequenceStatus.RUNNING:
            self._waiting.push(child)
            return
        child.status = SequenceStatus.RUNNING
        self._running[child.seq_id] = child
        self.block_manager.fork(parent, child)

    def extend(self, seq: Sequence, token_id: int) -> None:
        """Let a held sequence go on with a token, between steps."""
        assert seq.is_held, f"{seq.seq_id} has not got its row of logits"
        seq.output_ids.append(token_id)
        seq.is_held = False
        if self._parked.pop(seq.seq_id, None) is not None:
            self._waiting.push(seq)

    def abort(self, seq_id: str) -> Sequence | None:
        """Drop a sequence and free its blocks; None if it is not here."""
        assert self._plan is None, "sequences are aborted between steps only"
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self.finish(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        """Take out a sequence that needs no more tokens, and free its blocks."""
        assert self._plan is None, "sequences finish between steps only"
        if seq.seq_id in self._parked:
            del self._parked[seq.seq_id]
        elif seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        else:
            del self._running[seq.seq_id]
        del self._sequences[seq.seq_id]
        seq.status = SequenceStatus.FINISHED
        self.block_manager.free(seq)

    def schedule(self) -> StepPlan:
        """Decide the next step and give its tokens their blocks; empty only without work."""
        assert self._plan is None, "the last step has neither ended nor failed"
        plan = self._plan_step()
        while not plan.scheduled and self._waiting:
            held = [seq for seq in self.running if seq.is_held]
            if not held:
                break
            # Those that wait may be the ones that these are held for.
            self._preempt_one(max(held, key=urgency))
            plan = self._plan_step()
        self._plan = plan if plan.scheduled else None
        return plan

    def _plan_step(self) -> StepPlan:
        displaced = self._displace()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self.running:
            if not seq.is_held:
                (prefills if seq.num_uncomputed_tokens > 1 else decodes).append(seq)
        paused = self._pause.choose(decodes, is_wanted=self._has_interactive_prefill(prefills))
        decodes = [seq for seq in decodes if seq not in paused] if paused else decodes
        draft = StepDraft(self.config.max_num_batched_tokens, self._time_budget(decodes))
        draft.displaced = displaced
        self._continue(decodes, draft)
        self._prefill(PriorityClass.INTERACTIVE, prefills, draft)
        # A leader of another class counts too: its tokens are what interactive followers wait for.
        if not self._admitted and not any(seq in draft for seq in prefills):
            # There is no room for the interactive ones, perhaps until batch sequences end.
            draft.let_in(len(paused))
            self._continue(paused, draft)
        self._prefill(PriorityClass.STANDARD, prefills, draft)
        self._prefill(PriorityClass.BATCH, prefills, draft)
        self._pause.count(is_pause=any(seq not in draft for seq in paused))
        self._speculate(draft)
        return draft.plan(self.block_manager.copies)

    def update(self, plan: StepPlan, sampled: list[tuple[int, ...]]) -> None:
        """End a step that ran; ``sampled`` holds the new tokens of each one in ``plan.sampling``.

        Beams have none, and are held from now on.
        All but the last of a sequence's tokens were drafted: the step has written their KV entries.
        """
        assert plan is self._plan, "this is not the current step"
        self.block_manager.commit_step()
        self._count_prefix_hits(plan)
        for item, token_ids in zip(plan.sampling, sampled, strict=True):
            item.seq.output_ids += token_ids
            item.seq.is_held = item.seq.is_beam
            if item.draft:
                self._settle(item, len(token_ids) - 1)
        self._end_step()

    def fail(self, plan: StepPlan) -> None:
        """End a step that raised: nothing of it counts, and its sequences can be scheduled again.

        Those it admitted wait again, because their prefixes may be blocks the step never filled.
        """
        assert plan is self._plan, "this is not the current step"
        self.block_manager.rollback_step()
        for item in plan.scheduled:
            item.seq.num_computed_tokens = item.start
            if self._batch is None:
                # As after a step that ran: blocks hold computed tokens, not those of a draft.
                self.block_manager.trim(item.seq)
        for seq in self._admitted:
            self._put_back(seq)
        self._end_step()

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree with each other."""
        self.block_manager.check_integrity(self.running)
        assert not any(seq.block_table for seq in self._waiting), "a waiting sequence holds blocks"
        num_placed = len(self._running) + len(self._waiting) + len(self._parked)
        assert num_placed == len(self._sequences)

    def _time_budget(self, decodes: list[Sequence]) -> TimeBudget | None:
        seconds = self.config.tpot_slo_seconds
        if not seconds or all(seq.priority > PriorityClass.STANDARD for seq in decodes):
            return None
        least_tokens = len(decodes) + self.block_manager.block_size
        return TimeBudget(self.step_cost, seconds, least_tokens)

    def _has_interactive_prefill(self, prefills: list[Sequence]) -> bool:
        interactive = PriorityClass.INTERACTIVE
        return any(seq.priority_class is interactive for seq in prefills) or bool(
            self._waiting.of_class(interactive)
        )

    def _prefill(
        self, priority_class: PriorityClass, prefills: list[Sequence], draft: StepDraft
    ) -> None:
        self._continue([s for s in prefills if s.priority_class is priority_class], draft)
        # Blocks are short after a preemption: whoever came in now would be preempted next.
        is_short = draft.preempted or (draft.displaced and priority_class is PriorityClass.BATCH)
        if self._waiting and not is_short:
            self._admit_waiting(self._candidates(priority_class), draft)

    def _continue(self, seqs: Iterable[Sequence], draft: StepDraft) -> None:
        for seq in seqs:
            # It may have been preempted in favour of an earlier one.
            if seq.status is SequenceStatus.RUNNING and seq not in draft:
                self._advance(seq, draft)

    def _advance(self, seq: Sequence, draft: StepDraft) -> None:
        num_tokens = self._chunk(seq.num_computed_tokens, seq.num_uncomputed_tokens, draft)
        if num_tokens and self._make_room(seq, num_tokens, draft):
            self._schedule(seq, num_tokens, draft)

    def _make_room(self, seq: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        while not self.block_manager.allocate(seq, num_tokens):
            victim = max(self.running, key=urgency)
            self._preempt(victim, draft)
            if victim is seq:
                return False
        return True

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        # Whoever comes in leaves enough for all that came before, and may follow the victim.
        assert not self._admitted, f"{victim.seq_id} is preempted in a step that admitted others"
        draft.withdraw(victim)
        self._preempt_one(victim)

    def _preempt_one(self, victim: Sequence) -> None:
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.block_manager.preempt(victim)
        self._put_back(victim)

    def _displace(self) -> list[Sequence]:
        waiting = self._waiting.of_class(PriorityClass.INTERACTIVE)
        if self._batch is not None:
            self._batch.form(self._waiting, is_idle=not self._running)
            return []
        if len(self._running) + len(waiting) <= self.config.max_num_seqs:
            return []
        victims = self._slots.choose(waiting, self.running)
        for victim in victims:
            self._preempt_one(victim)
        return victims

    def _candidates(self, priority_class: PriorityClass) -> list[Sequence]:
        waiting = self._waiting.of_class(priority_class)
        return waiting if self._batch is None else [seq for seq in waiting if seq in self._batch]

    def _put_back(self, seq: Sequence) -> None:
        del self._running[seq.seq_id]
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        if seq.is_held:
            self._parked[seq.seq_id] = seq
        else:
            self._waiting.push(seq)

    def _admit_waiting(self, seqs: list[Sequence], draft: StepDraft) -> None:
        blocks = self.block_manager
        partial = [seq for seq in self.running if seq.num_uncomputed_tokens]
        owed = sum(blocks.num_missing_blocks(seq) for seq in partial)
        for seq in seqs:
            if not draft.token_budget or len(self._running) >= self.config.max_num_seqs:
                break
            prefix = self._find_prefix(seq, partial, draft)
            if draft.preempted:
                break
            if prefix is None:
                continue
            if not self._admit(seq, prefix, owed, draft):
                break
            owed += blocks.num_missing_blocks(seq)
            if seq.num_uncomputed_tokens:
                partial.append(seq)

    def _find_prefix(
        self, seq: Sequence, partial: list[Sequence], draft: StepDraft
    ) -> list[int] | None:
        """Return the cached prefix of ``seq``; None if a leader is about to make it longer."""
        blocks = self.block_manager
        prefix = blocks.find_prefix(seq)
        while leader := next((each for each in partial if blocks.awaits(seq, prefix, each)), None):
            # A leader of a class below is as urgent as the followers that wait for it.
            if leader in draft or leader.status is not SequenceStatus.RUNNING:
                return None
            self._advance(leader, draft)
            if leader not in draft:
                return None
            prefix = blocks.find_prefix(seq)
        return prefix

    def _admit(self, seq: Sequence, prefix: list[int], owed: int, draft: StepDraft) -> bool:
        blocks = self.block_manager
        num_cached = len(prefix) * blocks.block_size
        num_tokens = self._chunk(num_cached, seq.num_tokens - num_cached, draft)
        # Alone in the cache, a sequence may fill it to the last block.
        reserved = owed + self._num_spare_blocks(seq) if self._running else 0
        if self._batch is not None:
            reserved = 0
        if not num_tokens or not blocks.can_admit(seq, prefix, reserved):
            return False
        self._waiting.remove(seq)
        self._running[seq.seq_id] = seq
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_cached
        blocks.adopt_prefix(seq, prefix)
        allocated = blocks.allocate(seq, num_tokens)
        assert allocated, "can_admit counted the blocks"
        if self._batch is not None:
            blocks.reserve(seq, self.config.max_model_len)
        self._admitted.append(seq)
        self._schedule(seq, num_tokens, draft)
        return True

    def _num_spare_blocks(self, seq: Sequence) -> int:
        blocks = self.block_manager
        if seq.priority_class is not PriorityClass.BATCH:
            return blocks.num_watermark_blocks
        num_for_batch = int(self.config.batch_kv_share * blocks.num_blocks)
        return max(blocks.num_watermark_blocks, blocks.num_blocks - num_for_batch)

    def _chunk(self, start: int, num_tokens: int, draft: StepDraft) -> int:
        if not self.config.enable_chunked_prefill:
            return num_tokens if num_tokens <= draft.token_budget else 0
        threshold = self.config.long_prefill_token_threshold or num_tokens
        return draft.room(start, min(num_tokens, threshold))

    def _schedule(self, seq: Sequence, num_tokens: int, draft: StepDraft) -> None:
        draft.schedule(seq, num_tokens)
        seq.num_computed_tokens += num_tokens

    def _speculate(self, draft: StepDraft) -> None:
        """Guess behind decodes, with what tokens and blocks nobody else wants in this step."""
        if self._drafter is None or not self._drafter.is_on(len(self._running)):
            return
        for seq in self.running:
            if not draft.token_budget:
                break
            if draft.is_single(seq) and not seq.num_uncomputed_tokens:
                drafted = self._drafter.draft(seq)
                room = draft.room_behind(seq, len(drafted))
                if room:
                    room = self.block_manager.allocate_draft(seq, room)
                if room:
                    draft.append(seq, drafted[:room])

    def _settle(self, item: ScheduledSequence, num_accepted: int) -> None:
        self.block_manager.settle_draft(item.seq, num_accepted)
        item.seq.num_computed_tokens += num_accepted
        if self._batch is None:
            self.block_manager.trim(item.seq)
        self.speculation.count(len(item.draft), num_accepted)

    def _count_prefix_hits(self, plan: StepPlan) -> None:
        starts = {item.seq.seq_id: item.start for item in plan.scheduled}
        for seq in self._admitted:
            if seq.num_cached_tokens is None:
                num_hit = starts[seq.seq_id]
                seq.num_cached_tokens = min(num_hit, seq.num_prompt_tokens)
                self.num_queried_tokens += seq.num_tokens
                self.num_hit_tokens += num_hit

    def _end_step(self) -> None:
        self._plan = None
        self._admitted = []
