"""Bugs that the test suite must find: each is one exact change of one file."""

from decoding_mutations import DECODING_MUTATIONS
from mutation import Mutation
from policy_mutations import POLICY_MUTATIONS
from sampling_mutations import SAMPLING_MUTATIONS

_LUA = "producer/tidemill/protocol/library"
_FUNCTIONS = "tests/protocol/test_functions.py"
_MODEL = (
    "tests/protocol/test_functions_model.py"
    "::test_the_functions_keep_every_promise_under_retries_crashes_and_stale_callers"
)
_PRODUCERS = "tests/crash/test_producer_crashes.py"
_SCHEDULERS = "tests/crash/test_scheduler_crashes.py"
_WORKERS = "tests/crash/test_worker_crashes.py"
_BROKERS = "tests/crash/test_broker_crashes.py"
_HOOKS = "tests/crash/test_webhook_crashes.py"
_DELIVERIES = "tests/webhooks/test_delivery.py"
_STANDBY = (
    f"{_SCHEDULERS}::test_scheduler_dies_with_jobs_in_its_hands_and_its_standby_gives_them_out"
)


MUTATIONS = (
    Mutation(
        "append does not look at fence and worker",
        f"{_LUA}/3_attempt.lua",
        "if v[1] ~= fence or v[3] ~= 'run' or v[4] ~= worker then return -1 end",
        "if v[3] ~= 'run' then return -1 end",
        (f"{_FUNCTIONS}::test_a_stale_claimant_can_neither_append_nor_finish", _MODEL),
    ),
    Mutation(
        "finish does not look at fence and worker",
        f"{_LUA}/2_ending.lua",
        "if v.f ~= A[2] or v.w ~= A[3] or v.st ~= 'run' then return {-1, v.st} end",
        "if v.st ~= 'run' then return {-1, v.st} end",
        (f"{_FUNCTIONS}::test_a_stale_claimant_can_neither_append_nor_finish", _MODEL),
    ),
    Mutation(
        "nack does not look at fence and worker",
        f"{_LUA}/2_ending.lua",
        "if v.f ~= A[2] or v.w ~= A[3] or v.st ~= 'run' then return {0, 0} end",
        "if v.st ~= 'run' then return {0, 0} end",
        (
            "tests/protocol/test_retries.py"
            "::test_another_worker_with_the_right_fence_can_do_nothing",
            _MODEL,
        ),
    ),
    Mutation(
        "a queue is retired with pointers in it",
        f"{_LUA}/4_fleet.lua",
        "if redis.call('EXISTS', K[1]) == 1 and redis.call('XLEN', K[1]) > 0 then return 0 end",
        "if redis.call('EXISTS', K[1]) == 0 then return 0 end",
        (
            f"{_FUNCTIONS}::test_a_queue_with_entries_is_not_retired_and_an_empty_one_leaves"
            "_nothing",
            f"{_STANDBY}[scheduler.after_read]",
        ),
    ),
    Mutation(
        "submit does not see that the job exists",
        f"{_LUA}/1_submit.lua",
        "if redis.call('EXISTS', K[1]) == 1 then return {0, A[1], level, run_id, -1} end",
        "",
        (f"{_FUNCTIONS}::test_submitting_the_same_id_again_creates_one_job", _MODEL),
    ),
    Mutation(
        "submit does not look at the idempotency key",
        f"{_LUA}/1_submit.lua",
        "local known = redis.call('GET', K[4])",
        "local known = false",
        (
            f"{_FUNCTIONS}::test_an_idempotency_key_returns_the_first_job",
            f"{_PRODUCERS}::test_producer_dies_around_submit_and_finds_its_jobs_again"
            "[producer.after_submit]",
        ),
    ),
    Mutation(
        "pointers are acknowledged when they are read",
        f"{_LUA}/4_fleet.lua",
        "'COUNT', max,\n    'STREAMS'",
        "'COUNT', max, 'NOACK',\n    'STREAMS'",
        (
            f"{_STANDBY}[scheduler.after_read]",
            f"{_SCHEDULERS}::test_scheduler_dies_while_it_serves_the_front_door"
            "[scheduler.front_after_read]",
        ),
    ),
    Mutation(
        "a worker forgets a job before its end is confirmed",
        "gpuworker/tidemill_gpuworker/shell/publisher.py",
        '        _pass_crash_points("before", writes)\n',
        '        _pass_crash_points("before", writes)\n'
        "        for write in writes:\n"
        "            if write.end is not None:\n"
        "                self.forget(write.item.job)\n"
        "                self._jobs.discard(write.item.job)\n",
        (
            "tests/worker/test_publisher.py::test_an_end_repairs_the_log_too",
            "tests/crash/test_lost_messages.py::test_a_message_lost_by_a_worker_changes_nothing"
            "[finish-request]",
        ),
    ),
    Mutation(
        "the reaper does not look at the lease again",
        f"{_LUA}/2_ending.lua",
        "if not expiry or tonumber(expiry) > now() then return 0 end",
        "if not expiry then return 0 end",
        (f"{_FUNCTIONS}::test_a_job_whose_lease_still_runs_is_not_reaped", _MODEL),
    ),
    Mutation(
        "a reader that resumes inside a chunk loses a token",
        "producer/tidemill/_follow.py",
        "ids=chunk.ids[self.position - chunk.start :],",
        "ids=chunk.ids[self.position - chunk.start + 1 :],",
        (
            "tests/sdk/test_follow.py::test_a_log_rewritten_with_other_boundaries_is_cut_where_the"
            "_reader_was",
        ),
    ),
    Mutation(
        "a reader trusts pub/sub and does not look for what it missed",
        "producer/tidemill/_follow.py",
        "        if chunk.start != self.position:\n            self.must_read = True\n"
        "            return\n",
        "",
        ("tests/sdk/test_follow.py::test_lost_repeated_and_reordered_messages_change_nothing",),
    ),
    Mutation(
        "a worker rewinds one token too far",
        "gpuworker/tidemill_gpuworker/shell/token_buffer.py",
        "        while self.num_written < position:\n            start = self.num_written\n",
        "        position = max(self.num_written, position - 1)\n"
        "        while self.num_written < position:\n"
        "            start = self.num_written\n",
        (
            "tests/worker/test_token_buffer.py::test_a_write_whose_reply_was_lost_is_skipped",
            "tests/worker/test_token_buffer.py::test_log_and_result_agree_after_any_losses",
        ),
    ),
    Mutation(
        "a resumed attempt forgets the last token before it",
        "gpuworker/tidemill_gpuworker/shell/job_work.py",
        "        output_ids=list(generated.ids),\n",
        "        output_ids=list(generated.ids[:-1]),\n",
        (
            f"{_WORKERS}::test_worker_dies_in_mid_generation_and_another_goes_on"
            "[worker.after_append:4]",
        ),
    ),
    Mutation(
        "a delayed job runs before its time",
        f"{_LUA}/3_attempt.lua",
        "if not ready or tonumber(ready) > now() then return 0 end",
        "if not ready then return 0 end",
        (
            "tests/protocol/test_time_limits.py"
            "::test_a_delayed_job_runs_when_its_time_has_come_and_not_before",
            _MODEL,
        ),
    ),
    Mutation(
        "a job is promoted that is not delayed any more",
        f"{_LUA}/3_attempt.lua",
        "if redis.call('HGET', K[1], 'st') ~= 'delayed' then return 0 end",
        "",
        (
            "tests/protocol/test_time_limits.py"
            "::test_a_time_to_run_that_does_not_hold_any_more_is_forgotten",
        ),
    ),
    Mutation(
        "a job expires although no limit of it has passed",
        f"{_LUA}/2_ending.lua",
        "  if reason == '' then\n    local later = next_due(v)",
        "  if reason == '' then reason = 'deadline' end\n"
        "  if reason == '' then\n    local later = next_due(v)",
        (
            "tests/protocol/test_time_limits.py"
            "::test_a_look_at_a_job_that_lives_notes_when_to_look_again",
            _MODEL,
        ),
    ),
    Mutation(
        "cancel leaves the token log open",
        f"{_LUA}/2_ending.lua",
        "  cut_off(K, A[1], v, A[3], A[4], A[5], A[6], {A[7], A[8]})\n  return {1, A[3]}",
        "  leave(K, A[1], v)\n  redis.call('HSET', K[1], 'st', A[3])\n  return {1, A[3]}",
        (
            f"{_WORKERS}::test_worker_paused_while_its_jobs_are_cancelled_writes_nothing_any_more",
            _MODEL,
        ),
    ),
    Mutation(
        "a job that ends stays in the count of running ones",
        f"{_LUA}/2_ending.lua",
        "    redis.call('ZREM', K[3], id)\n    count(K[6], 'r:' .. v.tn, -1)\n",
        "    redis.call('ZREM', K[3], id)\n",
        (
            f"{_FUNCTIONS}::test_finish_seals_the_log_and_keeps_the_last_tokens",
            _MODEL,
            f"{_PRODUCERS}::test_producer_is_killed_in_mid_stream_and_follows_again",
        ),
    ),
    Mutation(
        "dispatch does not look at the epoch",
        f"{_LUA}/3_attempt.lua",
        "if redis.call('GET', K[7]) ~= A[5] then return redis.error_reply('EPOCH') end",
        "",
        (f"{_FUNCTIONS}::test_a_deposed_scheduler_dispatches_nothing", _MODEL),
    ),
    Mutation(
        "a crash that no worker can have had counts",
        f"{_LUA}/2_ending.lua",
        "elseif v.at == v.cl then crashes",
        "else crashes",
        (f"{_FUNCTIONS}::test_an_attempt_that_no_worker_read_is_no_crash",),
    ),
    Mutation(
        "an attempt that lost its lease tells how a delivery went",
        f"{_LUA}/6_webhook.lua",
        "if v[1] ~= 'pending' or v[2] ~= A[2] then return '' end",
        "",
        (f"{_DELIVERIES}::test_an_attempt_that_lost_its_lease_cannot_say_how_it_went",),
    ),
    Mutation(
        "a delivery is taken while another has it",
        f"{_LUA}/6_webhook.lua",
        "if number(v[2]) > t then return {0, 'taken'} end",
        "",
        (f"{_DELIVERIES}::test_an_attempt_that_lost_its_lease_cannot_say_how_it_went",),
    ),
    Mutation(
        "an answer to an attempt that was in the air ends a pause that was asked for since",
        f"{_LUA}/6_webhook.lua",
        "if number(v[1]) <= t or number(v[2]) < began then redis.call('DEL', key) end",
        "redis.call('DEL', key)",
        (
            f"{_DELIVERIES}"
            "::test_what_was_in_the_air_already_does_not_end_a_pause_that_was_asked_for[204]",
        ),
    ),
    Mutation(
        "an entry of the outbox goes before its deliveries are made",
        "scheduler/tidemill_webhooks/outbox.py",
        """        crash_point("webhooks.after_read")
""",
        """        await self._client.xtrim(self._keys.outbox, maxlen=0)
        crash_point("webhooks.after_read")
""",
        (f"{_HOOKS}::test_leader_dies_between_an_end_and_its_delivery[webhooks.after_read]",),
    ),
    Mutation(
        "a delivery leaves the index when its attempt begins",
        f"{_LUA}/6_webhook.lua",
        "  redis.call('ZADD', K[2], lease, A[1])\n",
        "  redis.call('ZREM', K[2], A[1])\n",
        (f"{_HOOKS}::test_leader_dies_between_an_end_and_its_delivery[webhooks.after_take]",),
    ),
    Mutation(
        "a webhook goes to a name of which the first address alone is checked",
        "scheduler/tidemill_webhooks/address_guard.py",
        "if not allow_private and not all(map(is_public, addresses)):",
        "if not allow_private and not is_public(addresses[0]):",
        (
            "tests/webhooks/test_address_guard.py"
            "::test_one_closed_address_among_many_closes_the_name",
        ),
    ),
    Mutation(
        "jobs that a broker has lost are given up",
        "producer/tidemill/_receipt.py",
        "if receipt.fate.has_ended or not _is_another(accepted, server):",
        "if receipt.job_id:",
        (f"{_BROKERS}::test_broker_that_lost_accepted_jobs_gets_them_again_from_their_owner[0]",),
    ),
    Mutation(
        "a leader of an earlier epoch reads pointers",
        f"{_LUA}/4_fleet.lua",
        "if redis.call('GET', K[1]) ~= A[1] then return redis.error_reply('EPOCH') end",
        "",
        ("tests/scheduler/test_ingress.py::test_a_leader_of_an_earlier_epoch_reads_nothing",),
    ),
    Mutation(
        "a beat renews leases that are not the worker's any more",
        f"{_LUA}/4_fleet.lua",
        "    if v[1] == A[b + 1] and v[2] == 'run' and v[3] == A[1] then",
        "    if v[2] == 'run' then",
        (_MODEL,),
    ),
    Mutation(
        "a new leader reaps before workers had a lease to beat",
        "scheduler/tidemill_scheduler/fleet/grace.py",
        "        return self._lease_seconds - self._seen_seconds\n",
        "        return 0.0\n",
        (
            "tests/scheduler/test_grace.py::test_a_new_process_waits_a_whole_lease",
            "tests/scheduler/test_failover.py"
            "::test_a_new_leader_gives_workers_a_whole_lease_to_beat",
        ),
    ),
    Mutation(
        "batch decodes pause as long as interactive prompts come",
        "gpuworker/tidemill_gpuworker/steps/batch_pause.py",
        "        if not is_wanted or self._num_steps >= self._most_steps:",
        "        if not is_wanted:",
        ("tests/engine/test_batch_pause.py::test_after_so_many_steps_comes_one_with_all_decodes",),
    ),
    *POLICY_MUTATIONS,
    *SAMPLING_MUTATIONS,
    *DECODING_MUTATIONS,
)
