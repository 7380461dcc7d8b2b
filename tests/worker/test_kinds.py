"""Jobs of other kinds than the model serves, and engines of other kinds that fail."""

import redis

from support.worker_rig import Rig, make_request, result_of
from tidemill.protocol.requests import EmbedRequest, TranscribeRequest


def test_a_job_that_came_to_a_model_of_another_kind_fails_naming_both_and_harms_no_other(
    rig: Rig, redis_client: redis.Redis
) -> None:
    rig.runner.run_free()
    # Past the checks of producers and the scheduler, as an old or foreign one might send it.
    wrong = [
        rig.give(EmbedRequest(model="m", inputs=("tide",))),  # type: ignore[arg-type]  # on purpose
        rig.give(TranscribeRequest(model="m", audio=b"x")),  # type: ignore[arg-type]
    ]
    right = rig.give(make_request())
    for job_id, kind in zip(wrong, ("embed", "transcribe"), strict=True):
        rig.wait_for(job_id, "failed")
        error = result_of(redis_client, job_id).end.error or ""
        assert "'m' is a model for generate" in error and f"kind {kind}" in error
    rig.wait_for(right, "done")
