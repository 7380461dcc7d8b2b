"""From a claimed job of kind *generate* to what the engine runs."""

from collections.abc import Sequence as Several

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.beam_choice import BeamChoice
from tidemill_gpuworker.engine.beam_group import BeamGroup, beam_params
from tidemill_gpuworker.engine.choice_group import ChoiceGroup, params_of
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.shell.claims import Claim

_NOTHING = Generated([], 0)


def work_of(claim: Claim, generated: Several[Generated]) -> Sequence | ChoiceGroup | BeamGroup:
    """Return a sequence, or a group of them for a job of several outputs.

    ``generated`` is what earlier attempts told of each choice.  A job whose choices show at the
    end only begins anew.
    """
    params = claim.request.params
    if params.use_beam_search:
        return _beams(claim, params, generated)
    if params.num_outputs == 1:
        return _sequence(claim, claim.job.job_id, 0, generated[0])
    resumed = [] if params.is_told_at_end else generated
    sequences = [
        _sequence(
            claim,
            f"{claim.job.job_id}#{choice}",
            choice,
            resumed[choice] if choice < len(resumed) else _NOTHING,
        )
        for choice in range(params.num_outputs)
    ]
    return ChoiceGroup(sequences, params, generated)


def sequences_of(work: Sequence | ChoiceGroup | BeamGroup) -> Several[Sequence]:
    """Return the sequences of a job."""
    return (work,) if isinstance(work, Sequence) else work.sequences


def _beams(claim: Claim, params: SamplingParams, told: Several[Generated]) -> BeamGroup:
    root = _sequence(claim, f"{claim.job.job_id}#0", 0, _NOTHING)
    root.params, root.is_beam = beam_params(params), True
    most = claim.max_output_tokens
    choice = BeamChoice(
        params.num_outputs,
        prompt_len=len(claim.prompt_ids),
        max_tokens=most if params.max_tokens is None else min(most, params.max_tokens),
        eos_token_ids=() if params.ignore_eos else claim.eos_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    return BeamGroup(root, params, choice, told)


def _sequence(claim: Claim, seq_id: str, choice: int, generated: Generated) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        prompt_ids=list(claim.prompt_ids),
        params=params_of(claim.request.params, choice),
        seed=claim.seed,
        extra_keys=claim.extra_keys,
        bad_word_ids=claim.bad_word_ids,
        adapter=claim.adapter,
        priority=claim.request.priority,
        choice=choice,
        output_ids=list(generated.ids),
        num_resumed_tokens=len(generated.ids),
        num_published_chars=generated.num_chars,
    )
