"""Bugs of the scheduler's decisions that the test suite must find."""

from mutation import Mutation

_POLICY = "scheduler/tidemill_scheduler/policy"
_PROPERTIES = "tests/scheduler/test_policy_properties.py"
_BATCH_BOUND = (
    f"{_PROPERTIES}"
    "::test_no_job_of_the_batch_lane_waits_beyond_its_bound_whatever_an_adversary_adds"
)
_HINTS = "tests/scheduler/test_group_hints.py"
_FAIR = "tests/scheduler/test_fair_share_debts.py"
_SPLITS = "tests/scheduler/test_group_splits.py"
_SHARES = "tests/scheduler/test_lane_shares.py"
_CACHES = "tests/scheduler/test_kv_residency.py"

POLICY_MUTATIONS = (
    Mutation(
        "nobody's turn is used up",
        f"{_POLICY}/fair_share.py",
        "        visit.left -= tokens\n",
        "",
        ("tests/scheduler/test_fair_share.py::test_weights_share_in_proportion", _BATCH_BOUND),
    ),
    Mutation(
        "an epoch is joined without limit",
        f"{_POLICY}/prefix_order.py",
        "        self._joinable_work -= work\n",
        "",
        (
            "tests/scheduler/test_scan_order.py"
            "::test_joiners_take_a_quarter_of_the_epochs_work_at_most",
            _BATCH_BOUND,
        ),
    ),
    Mutation(
        "a thief splits a group whose worker goes on with it",
        f"{_POLICY}/placement.py",
        "        return job is not None and not owner.fits(job, self.uncached(job, owner))\n",
        "        return True\n",
        (
            f"{_SPLITS}"
            "::test_a_worker_goes_on_with_its_group_until_it_has_clearly_more_than_an_idle_one",
        ),
    ),
    Mutation(
        "a worker without room for its group keeps it",
        f"{_POLICY}/placement.py",
        "        return job is not None and not owner.fits(job, self.uncached(job, owner))\n",
        "        return False\n",
        (
            f"{_SPLITS}"
            "::test_an_idle_worker_takes_over_from_one_that_has_no_credit_for_more_of_its_group",
        ),
    ),
    Mutation(
        "a silent worker keeps its group",
        f"{_POLICY}/placement.py",
        "        if owner is None or not self._is_open(owner) or self._gives_way(owner, thief):\n",
        "        if owner is None or self._gives_way(owner, thief):\n",
        (
            f"{_SPLITS}"
            "::test_a_worker_that_has_not_been_heard_of_for_longer_gives_its_group_away[3.0-6.0]",
        ),
    ),
    Mutation(
        "a first step of few tokens makes a worker look slow",
        f"{_POLICY}/fleet.py",
        "            _EARLIER_SHARE * self.predicted + _DEFAULT_COST.predict(step),\n",
        "            _EARLIER_SHARE * self.predicted\n"
        "            + _DEFAULT_COST.per_token * (step.prefill_tokens + step.decode_tokens),\n",
        (
            "tests/scheduler/test_fleet_speed.py"
            "::test_a_worker_whose_cache_has_most_of_its_prompts_looks_as_fast_as_one_that_computes"
            "_them",
        ),
    ),
    Mutation(
        "events of a cache are taken in although some before them are missing",
        f"{_POLICY}/residency.py",
        "        if events.seq > cache.seq + 1:\n            return False\n"
        "        if events.seq == cache.seq + 1:\n",
        "        if events.seq > cache.seq:\n",
        (f"{_CACHES}::test_a_gap_in_the_events_changes_nothing_until_a_snapshot_comes",),
    ),
    Mutation(
        "a job that ended is on its way for ever",
        f"{_POLICY}/worker_cache.py",
        "        del self.in_flight[position]\n        return True\n",
        "        return False\n",
        (f"{_CACHES}::test_a_job_on_its_way_casts_a_shadow_until_it_arrives",),
    ),
    Mutation(
        "what a dead worker held is remembered",
        f"{_POLICY}/residency.py",
        "        self._resident.discard(cache.resident, cache.bit)\n"
        "        for key in cache.in_flight:",
        "        for key in cache.in_flight:",
        (f"{_CACHES}::test_a_worker_that_comes_back_holds_nothing_of_before",),
    ),
    Mutation(
        "the oldest interactive job has no turn",
        f"{_POLICY}/tenant_queue.py",
        "        if turn == PICKS_PER_TURN - 1:\n",
        "        if turn == PICKS_PER_TURN:\n",
        (
            "tests/scheduler/test_virtual_queue.py"
            "::test_every_turn_the_oldest_job_goes_whatever_else_comes",
            f"{_PROPERTIES}"
            "::test_no_interactive_job_waits_beyond_its_bound_whatever_comes_after_it",
        ),
    ),
    Mutation(
        "all classes weigh the same",
        f"{_POLICY}/lanes.py",
        "self._shares.activate(rank, settings.class_weights[rank])",
        "self._shares.activate(rank, 1.0)",
        (f"{_SHARES}::test_interactive_jobs_that_never_end_leave_the_other_classes_their_shares",),
    ),
    Mutation(
        "interactive jobs use credit beyond their share",
        f"{_POLICY}/lanes.py",
        "return self._shares.debt(0) <= burst",
        "return True",
        (f"{_SHARES}::test_interactive_jobs_that_never_end_leave_the_other_classes_their_shares",),
    ),
    Mutation(
        "jobs that were given back wait until no others do",
        f"{_POLICY}/lanes.py",
        "        if self._num_requeued:\n            job = self._requeued.peek(worker_id)\n",
        "        if self._num_requeued and not self._busy:\n"
        "            job = self._requeued.peek(worker_id)\n",
        (
            "tests/scheduler/test_scheduler.py::test_requeued_jobs_go_first_then_lower_priorities",
            f"{_PROPERTIES}::test_what_a_dead_worker_held_goes_out_first_in_prefix_order_and_is"
            "_computed_anew",
        ),
    ),
    Mutation(
        "a tenant pays for what its jobs did not cost",
        f"{_POLICY}/model_desk.py",
        "self.lanes.adjust(running.job, cost - running.charged)",
        "self.lanes.adjust(running.job, running.charged - cost)",
        (
            f"{_SHARES}"
            "::test_a_tenant_whose_prompts_were_cached_after_all_gets_more_jobs_than_another",
        ),
    ),
    Mutation(
        "a tenant pays for what it used while it was alone",
        f"{_POLICY}/placement.py",
        "Running(job, price if is_charged else None)",
        "Running(job, price)",
        (f"{_SHARES}::test_corrections_of_jobs_that_were_not_charged_change_no_account",),
    ),
    Mutation(
        "jobs that come later are bound ahead of their tenant's order",
        f"{_POLICY}/tenant_line.py",
        "if is_interactive and tenant not in self._orders:",
        "if is_interactive:",
        (
            f"{_SHARES}::test_jobs_in_prefix_order_are_not_passed_by_ones_of_their_tenant_that"
            "_come_later",
        ),
    ),
    Mutation(
        "a worker that found nothing is not asked again when a job comes",
        f"{_POLICY}/model_desk.py",
        "        self._placement.wake_idle()\n",
        "",
        (f"{_SHARES}::test_a_worker_that_found_nothing_is_asked_again_as_soon_as_a_job_comes",),
    ),
    Mutation(
        "jobs of a new priority wait for a worker that drains",
        f"{_POLICY}/lanes.py",
        "                lane.release(worker.info.worker_id, 0.0)\n",
        "                continue\n",
        (f"{_SHARES}::test_a_job_of_a_new_priority_does_not_wait_for_a_worker_that_drains",),
    ),
    Mutation(
        "keys share one hash less than the shorter one has",
        f"{_POLICY}/routing_hashes.py",
        "    low, high = 0, min(len(left), len(right)) // ROUTING_HASH_BYTES\n",
        "    low, high = 0, min(len(left), len(right)) // ROUTING_HASH_BYTES - 1\n",
        (
            "tests/scheduler/test_prefix_list.py"
            "::test_shared_depth_counts_the_labels_that_two_paths_share",
        ),
    ),
    Mutation(
        "hints of groups that last are not repeated",
        f"{_POLICY}/hints.py",
        "        if hinted.tokens >= worker.capacity:\n",
        "        if False:\n",
        (
            "tests/scheduler/test_group_hints.py"
            "::test_a_hint_is_repeated_while_its_group_lasts_once_the_cache_has_turned_over",
        ),
    ),
    Mutation(
        "a prefix is given up that its tenant walks at another priority",
        f"{_POLICY}/hints.py",
        "if not any(other.anchor == walk.anchor for other in hinted.walks.values()):",
        "if True:",
        (f"{_HINTS}::test_a_prefix_stays_hinted_while_its_tenant_walks_it_at_another_priority",),
    ),
    Mutation(
        "hints for a worker that is gone are sent",
        f"{_POLICY}/hints.py",
        "        self._pending.pop(worker_id, None)\n",
        "",
        (f"{_HINTS}::test_a_worker_that_is_gone_is_told_nothing",),
    ),
    Mutation(
        "a job is as old as the pointer that was replaced",
        f"{_POLICY}/ageing.py",
        "if self._waiting.get(jobs[0].job_id) is jobs[0]:",
        "if self._waiting.get(jobs[0].job_id):",
        (
            "tests/scheduler/test_ageing.py"
            "::test_a_job_whose_pointer_was_replaced_is_not_as_old_as_the_first_one",
        ),
    ),
    Mutation(
        "jobs that left after they were swept are remembered for ever",
        f"{_POLICY}/ageing.py",
        "                self._swept, self._unswept = self._unswept, self._swept\n",
        "",
        (
            "tests/scheduler/test_ageing.py"
            "::test_few_jobs_that_have_left_are_remembered_in_whatever_order_they_leave",
        ),
    ),
    Mutation(
        "a debt is worked off by the time before it",
        f"{_POLICY}/fair_share.py",
        "        share.idle_since = self._rounds\n        self._remember(share)\n\n    def debt",
        "        self._remember(share)\n\n    def debt",
        (f"{_FAIR}::test_a_debt_that_an_idle_key_gets_is_not_worked_off_by_the_time_before",),
    ),
    Mutation(
        "who passes its turns counts as behind",
        f"{_POLICY}/fair_share.py",
        "            share.turned_at = self._rounds\n\n    def _begin",
        "\n    def _begin",
        (f"{_FAIR}::test_a_key_that_passes_turns_to_pay_its_debt_is_not_behind",),
    ),
    Mutation(
        "what visits left over adds up",
        f"{_POLICY}/fair_share.py",
        "share.carry = max(share.carry, min(share.carry + visit.left, share.portion))",
        "share.carry += visit.left",
        (f"{_FAIR}::test_what_visits_left_over_is_kept_up_to_one_portion",),
    ),
    Mutation(
        "a visit that came to nothing costs a place",
        f"{_POLICY}/fair_share.py",
        "min(share.place, visit.place_before)",
        "visit.place_before",
        (
            f"{_FAIR}"
            "::test_a_key_is_where_it_was_if_all_its_visits_came_to_nothing_in_whatever_order",
        ),
    ),
    Mutation(
        "a worker that comes as a drained one goes gets no interactive jobs",
        f"{_POLICY}/interactive_lane.py",
        "        self._barred.discard(worker_id)\n",
        "",
        (
            "tests/scheduler/test_interactive_lane.py"
            "::test_a_worker_that_comes_as_one_that_drained_goes_is_taken_in",
        ),
    ),
    Mutation(
        "a job that is taken over is planned to be computed whole",
        f"{_POLICY}/interactive_lane.py",
        "self._queues.bind(bound, worker_id, self._binding.expected_depth(bound, worker_id))",
        "self._queues.bind(bound, worker_id, 0)",
        (
            "tests/scheduler/test_interactive_lane.py"
            "::test_a_job_that_is_taken_over_is_planned_with_what_the_thief_holds",
        ),
    ),
)
