"""An engine without a model: its logits are noise that leans towards ending what was begun."""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import torch

from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.engine import Engine, Runner, StepOutput
from tidemill_gpuworker.engine.output_processor import OutputProcessor
from tidemill_gpuworker.engine.sequence import Sequence as TokenSequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler

MAX_MODEL_LEN = 2048
#: What ends strings, arrays, objects and texts, and how much likelier it is than the rest.
_CLOSERS = '"]}'
_LEAN = 3.0


class NoisyRunner:
    """Logits of a sequence's next token follow from its id and the token's position alone."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        closers = [tokenizer.encode(text, add_special_tokens=False)[0] for text in _CLOSERS]
        self._lean = torch.zeros(vocab_size)
        self._lean[[*closers, *tokenizer.eos_token_ids]] = _LEAN
        self._vocab_size = vocab_size
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Return float32 [rows, vocab]: of each sampled sequence, and of each drafted token."""
        self.num_steps += 1
        rows = [
            self._row(item.seq.seq_id, position)
            for item in plan.sampling
            for position in range(item.known_end, item.end + 1)
        ]
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _row(self, seq_id: str, position: int) -> torch.Tensor:
        seed = crc32(f"{seq_id}/{position}".encode())
        noise = torch.randn(self._vocab_size, generator=torch.Generator().manual_seed(seed))
        return noise + self._lean


def noisy_engine(
    tokenizer: Tokenizer,
    vocab_size: int,
    runner: Runner[torch.Tensor] | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """An engine with the real scheduler, sampler and output processor over noise."""

    def processor(seq: TokenSequence) -> OutputProcessor:
        return OutputProcessor(
            tokenizer,
            seq.params,
            prompt_len=seq.num_prompt_tokens,
            max_model_len=MAX_MODEL_LEN,
            num_published_chars=seq.num_published_chars,
        )

    config = StepConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=MAX_MODEL_LEN
    )
    scheduler = StepScheduler(config, BlockManager(64 * MAX_MODEL_LEN // 16, 16), drafter)
    sampler = Sampler(tokenizer.eos_token_ids)
    runner = runner or NoisyRunner(tokenizer, vocab_size)
    return Engine(runner, sampler, scheduler, processor)


def guided_seq(
    compiler: GrammarCompiler,
    structured: StructuredOutput | None,
    *,
    seq_id: str = "seq",
    seed: int = 0,
    output_ids: Sequence[int] = (),
    **params: object,
) -> TokenSequence:
    """A sequence, with its guide if it has a constraint; waits for the compilation."""
    seq = TokenSequence(
        seq_id=seq_id,
        prompt_ids=[1, 2, 3],
        params=SamplingParams.model_validate(params),
        seed=seed,
        output_ids=list(output_ids),
        num_resumed_tokens=len(output_ids),
    )
    if structured is not None:
        compilation = compiler.compile(structured)
        compilation.future.exception(timeout=60)
        seq.guide = compilation.guide(output_ids)
    return seq


def run_all(engine: Engine, seqs: Iterable[TokenSequence]) -> Mapping[str, list[StepOutput]]:
    """Run sequences together to their ends; returns what the steps told of each."""
    told: dict[str, list[StepOutput]] = {}
    for seq in seqs:
        told[seq.seq_id] = []
        engine.add(seq)
    while engine.has_work:
        for output in engine.step():
            told[output.seq.seq_id].append(output)
    engine.step_scheduler.check_integrity()
    return told


def text_of(outputs: Iterable[StepOutput]) -> str:
    """The text of one sequence's steps."""
    return "".join(output.text for output in outputs)


def ended_by_itself(outputs: Sequence[StepOutput]) -> bool:
    """Whether the sequence reached an EOS token."""
    finish = outputs[-1].finish
    return finish is not None and finish.reason == "stop" and finish.stop_reason is None
