"""Asks an engine for one token of the smallest prompt there is."""

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine import Engine
from tidemill_gpuworker.sequence import Sequence

_PROBE_ID = "probe"
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def probe(engine: Engine) -> Exception | None:
    """Run one step of an engine without sequences; returns what it fails with, if it does.

    Tells an engine that is broken, say after an error of its GPU, from one that a job broke.
    """
    try:
        engine.add(Sequence(_PROBE_ID, prompt_ids=[0], params=_PARAMS, seed=0))
        engine.step()
    except Exception as error:
        # The outermost frame of a step, as in the job runner: any exception is the answer.
        return error
    finally:
        engine.abort(_PROBE_ID)
    return None
