"""Does the server hold what the model of a shard holds?"""

from collections.abc import Collection
from typing import Any

import redis

from support.shard import KEYS, QUEUE
from support.shard_model import ModelJob, ShardModel
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import JobEnd, TokenChunk


class Comparison:
    """Reads everything that the functions write, and fails where it differs from the model."""

    def __init__(self, client: redis.Redis, model: ShardModel) -> None:
        self.client = client
        self.model = model

    def check_shard(self) -> None:
        """Indexes, counters and streams; names what is new on the streams."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.xrange(KEYS.ingress(QUEUE))
            pipe.xrange(KEYS.dead_letters)
            for name in (KEYS.running, KEYS.delayed, KEYS.due, KEYS.ended, KEYS.jobs("default")):
                pipe.zrange(name, 0, -1)
            pipe.hgetall(KEYS.counters)
            pipe.xrange(KEYS.back_door("default"))
            pipe.xrange(KEYS.outbox)
            pipe.hget(KEYS.measures, "e")
            pipe.zcard(KEYS.active_queues)
            for worker in ("wkr_a", "wkr_b"):
                pipe.xlen(KEYS.commands(worker))
            replies = pipe.execute()
        pointers, letters, *indexes, counts, told, outbox, num_ended, listed, a, b = replies
        self._bind_pointers(pointers)
        self._bind_letters(letters)
        self._check_indexes(*(set(map(bytes.decode, index)) for index in indexes))
        assert {name.decode(): int(count) for name, count in counts.items()} == (
            self.model.counters()
        )
        fields = (b"j", b"s", b"r", b"n")
        heard = [tuple(entry[name].decode() for name in fields) for _, entry in told]
        assert heard == [(*entry[:3], str(entry[3])) for entry in self.model.told]
        hooked = [tuple(entry[name].decode() for name in fields[:3]) for _, entry in outbox]
        assert hooked == self.model.hooked
        assert int(num_ended or 0) == self.model.num_ended
        assert listed or not pointers
        assert (a, b) == (self.model.commands["wkr_a"], self.model.commands["wkr_b"])

    def _bind_pointers(self, pointers: list[Any]) -> None:
        found = {entry.decode(): fields[b"j"].decode() for entry, fields in pointers}
        # A pointer that was made and taken within one step was never seen.
        new = [entry for entry in found if entry not in self.model.pointers]
        queued = [job_id for job_id in self.model.unbound if self._awaits_pointer(job_id)]
        assert sorted(found[entry] for entry in new) == sorted(queued)
        for entry in new:
            self.model.jobs[found[entry]].entry = entry
            self.model.pointers[entry] = found[entry]
        self.model.unbound.clear()
        assert found == self.model.pointers

    def _awaits_pointer(self, job_id: str) -> bool:
        return job_id in self.model.jobs and self.model.jobs[job_id].state == "queued"

    def _bind_letters(self, letters: list[Any]) -> None:
        found = {entry.decode(): fields[b"j"].decode() for entry, fields in letters}
        new = [entry for entry in found if entry not in self.model.letters]
        assert [found[entry] for entry in new] == self.model.new_letters
        self.model.letters.update((entry, found[entry]) for entry in new)
        self.model.new_letters.clear()
        assert found == self.model.letters

    def _check_indexes(
        self,
        running: set[str],
        delayed: set[str],
        due: set[str],
        ended: set[str],
        listed: set[str],
    ) -> None:
        jobs = self.model.jobs.values()
        assert running == {job.job_id for job in jobs if job.state == "run"}
        assert delayed == {job.job_id for job in jobs if job.state == "delayed"}
        assert due == {job.job_id for job in jobs if job.due is not None}
        assert ended == set(self.model.ended)
        assert listed == self.model.listed

    def check_jobs(self, job_ids: Collection[str]) -> None:
        """Fields, lifetimes and token log of each job that ever was."""
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(KEYS.job(job_id), "st", "f", "n", "w", "cr", "rt")
                pipe.pttl(KEYS.job(job_id))
                pipe.hexists(KEYS.job(job_id), "req")
                pipe.xrange(KEYS.token_log(job_id))
                pipe.pttl(KEYS.token_log(job_id))
            replies = iter(pipe.execute())
        for job_id in job_ids:
            seen = [next(replies) for _ in range(5)]
            job = self.model.jobs.get(job_id)
            if job is None:
                assert seen == [[None] * 6, -2, False, [], -2]
            else:
                self._check_job(job, *seen)

    def _check_job(
        self, job: ModelJob, stored: list[Any], ttl: int, request: bool, log: Any, log_ttl: int
    ) -> None:
        texts = [(value or b"0").decode() for value in stored]
        counts = (job.fence, job.tokens, job.worker or "0", job.crashes, job.retries)
        assert texts == [job.state, *map(str, counts)]
        assert [entry.decode() for entry, _ in log] == job.log
        assert request == (job.lives or job.state == "dead")
        assert (ttl > 0) == (not job.lives) and (log_ttl == -1) == (job.lives and bool(log))
        ids: list[int] = []
        ends = [decode(fields[b"e"], JobEnd).state for _, fields in log if b"e" in fields]
        for _, fields in log:
            if b"d" in fields:
                ids += decode(fields[b"d"], TokenChunk).ids
        assert ids == list(range(job.tokens))
        assert ends == ([] if job.lives else [job.state])

    def check_batch(self, batch: str) -> None:
        """Counts, members and lifetime of a batch."""
        name, members_name = KEYS.batch("default", batch), KEYS.batch_members("default", batch)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(name)
            pipe.ttl(name)
            pipe.smembers(members_name)
            stored, ttl, members = pipe.execute()
        if batch not in self.model.batches:
            assert not stored
            return
        closed = stored.pop(b"st", None)
        counts = {state.decode(): int(count) for state, count in stored.items()}
        assert counts == dict(self.model.batches[batch])
        assert (closed is not None) == (batch in self.model.closed)
        live = [job for job in self.model.jobs.values() if job.lives and job.terms.batch == batch]
        assert members == {job.job_id.encode() for job in live}
        assert (ttl == -1) == bool(live)
