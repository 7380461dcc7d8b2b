"""Asks an engine for the smallest job there is."""

from collections.abc import Callable

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.job_engine import JobEngine, Work
from tidemill_gpuworker.engine.sequence import Sequence

_PROBE_ID = "probe"
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def smallest_sequence(seq_id: str) -> Sequence:
    """Return the smallest job of kind *generate*."""
    return Sequence(seq_id, prompt_ids=[0], params=_PARAMS, seed=0)


def probe(
    engine: JobEngine, smallest: Callable[[str], Work] = smallest_sequence
) -> Exception | None:
    """Run one step of an engine without jobs; returns what it fails with, if it does.

    Tells an engine that is broken, say after an error of its GPU, from one that a job broke.
    """
    try:
        engine.add(smallest(_PROBE_ID))
        engine.step()
    except Exception as error:
        # The outermost frame of a step, as in the job runner: any exception is the answer.
        return error
    finally:
        engine.abort(_PROBE_ID)
    return None
