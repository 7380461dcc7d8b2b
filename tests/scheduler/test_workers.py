"""The credit of one worker."""

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.workers import Worker


def make_worker(**values: object) -> Worker:
    defaults = {
        "worker_id": "a",
        "model": "m",
        "num_blocks": 100,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "wire_version": 1,
    }
    return Worker(WorkerInfo.model_validate(defaults | values), 0.0)


def test_a_job_reserved_again_is_charged_once() -> None:
    worker = make_worker()
    for command in ("1-0", "2-0", "3-0"):
        worker.reserve("j", 500)
        worker.sent("j", command)
    assert worker.outstanding_tokens == 500

    worker.update(WorkerStatus(last_command="3-0", num_running=1, free_blocks=90), 1.0)

    assert worker.outstanding_tokens == 0
