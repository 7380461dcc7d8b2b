"""A model without a neural network: its KV cache holds token ids, its logits are a hash of them.

The next token depends on the whole history as it is found *through the block table*, so a wrong
block table, a block reused too early or a block shared by mistake changes what is generated.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import BlockCopies
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

VOCAB_SIZE = 50_000

_numbers = count()


def next_token(history: List[int], vocab_size: int = VOCAB_SIZE) -> int:
    """The token that the fake model generates after ``history``."""
    digest = sha256(repr(list(history)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % vocab_size


def generate(
    prompt: List[int],
    num_tokens: int,
    window: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    *,
    choice: int = 0,
) -> list[int]:
    """What a sequence must generate, computed without any engine."""
    history = list(prompt)
    for _ in range(num_tokens):
        seen = history if window is None else history[-window:]
        history.append(of_choice(next_token(seen, vocab_size), choice))
    return history[len(prompt) :]


def of_choice(token: int, choice: int) -> int:
    """What the fake sampler makes of a token for one of a job's outputs."""
    return (token + choice) % VOCAB_SIZE


class FakeRunner:
    """Stores token ids in a paged cache, all rows of a step before it reads any.

    ``fail_before`` and ``fail_after`` are numbers of steps that raise before or after they have
    written to the cache.  Swap slots are lists of their own, so copies can go wrong too.
    With few tokens in the vocabulary it repeats itself, so that guesses come true.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.window = window
        self.cache: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tier: dict[int, list[int | None]] = {}
        self.plans: list[StepPlan] = []
        self.fail_before: set[int] = set()
        self.fail_after: set[int] = set()

    def execute(self, plan: StepPlan) -> list[int]:
        """Return, in place of logits, the next tokens of each sampled sequence.

        One behind its known tokens, and one behind each token of its draft.
        """
        self.plans.append(plan)
        number = len(self.plans)
        if number in self.fail_before:
            raise RuntimeError(f"step {number} fails before it computes")
        self._copy(plan.copies)
        for item in plan.scheduled:
            self._store(item)
        if number in self.fail_after:
            raise RuntimeError(f"step {number} fails after it computed")
        return [
            next_token(self._load(item, end), self.vocab_size)
            for item in plan.sampling
            for end in range(item.known_end, item.end + 1)
        ]

    def _copy(self, copies: BlockCopies) -> None:
        for copy in copies.outs:
            self.tier[copy.target] = list(self.cache[copy.source])
        for target, content in [(c.target, list(self.cache[c.source])) for c in copies.forks]:
            self.cache[target] = content
        for copy in copies.ins:
            self.cache[copy.target] = list(self.tier[copy.source])

    def _store(self, item: ScheduledSequence) -> None:
        for position, token in enumerate(item.token_ids, item.start):
            block, offset = divmod(position, self.block_size)
            self.cache[item.seq.block_table[block]][offset] = token

    def _load(self, item: ScheduledSequence, end: int) -> list[int]:
        tokens = []
        first = 0 if self.window is None else max(0, end - self.window)
        for position in range(first, end):
            block, offset = divmod(position, self.block_size)
            assert item.seq.block_table[block] >= 0, f"the block of position {position} is gone"
            token = self.cache[item.seq.block_table[block]][offset]
            assert token is not None, f"position {position} was never written"
            tokens.append(token)
        return tokens


class FakeSampler:
    """Takes the token that the fake runner has already chosen, moved on by the choice.

    Its logprob, where one is wanted, follows from the token; the likeliest beside it are the next
    numbers, each less likely than the one before.
    """

    def sample(self, logits: list[int], rows: list[Sequence]) -> list[SampledToken]:
        """Return the rows."""
        assert len(logits) == len(rows)
        return [
            _sampled(of_choice(token, row.choice), row)
            for token, row in zip(logits, rows, strict=True)
        ]


def fake_logprob(token: int) -> float:
    """The logprob of a token, from -2 to 0."""
    return -(token % 97) / 48.5


def alternatives(token: int, num: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens where the fake model has chosen ``token``, and their logprobs."""
    return tuple((of_choice(token, place), -(1 + place) / 4) for place in range(num))


def search_beams(
    prompt: List[int], width: int, num_tokens: int, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    """The outputs of a beam search, the best first, computed without any engine."""
    found: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(num_tokens):
        longer = [
            ([*ids, token], logprob + more)
            for ids, logprob in found
            for token, more in alternatives(next_token([*prompt, *ids], vocab_size), 2 * width)
        ]
        found = sorted(longer, key=lambda pair: -pair[1])[:width]
    return [ids for ids, _ in found]


def _sampled(token: int, row: Sequence) -> SampledToken:
    num = row.params.logprobs
    if num is None:
        return SampledToken(token, None)
    top = alternatives(token, num)
    return SampledToken(token, TokenLogprobs(logprob=fake_logprob(token), rank=1, top=top))


@dataclass(frozen=True)
class FakeFinish:
    """Why a fake sequence ended."""

    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class FakeOutput:
    """One word per token."""

    text: str
    finish: FakeFinish | None = None


@dataclass
class FakeProcessor:
    """Ends a sequence after ``num_tokens`` tokens or at ``stop_token``."""

    num_tokens: int
    stop_token: int | None = None
    taken: list[int] = field(default_factory=list)

    def process(self, token_id: int) -> FakeOutput:
        """Take the next token."""
        self.taken.append(token_id)
        if token_id == self.stop_token:
            return FakeOutput(f"{token_id} ", FakeFinish("stop", token_id))
        full = len(self.taken) >= self.num_tokens
        return FakeOutput(f"{token_id} ", FakeFinish("length") if full else None)

    def replay(self, token_ids: list[int]) -> FakeOutput:
        """Take the tokens of an earlier attempt, whose text has been told."""
        finish = None
        for token_id in token_ids:
            finish = self.process(token_id).finish
        return FakeOutput("", finish)


def make_seq(
    prompt: List[int],
    max_tokens: int | None = 8,
    *,
    seq_id: str = "",
    priority: int = 0,
    output: List[int] = (),
    salt: str | None = None,
) -> Sequence:
    """A greedy sequence; it gets an id of its own unless one is given."""
    return Sequence(
        seq_id=seq_id or f"seq-{next(_numbers)}",
        prompt_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        extra_keys=None if salt is None else (("cache_salt", salt),),
        priority=priority,
        output_ids=list(output),
        num_resumed_tokens=len(output),
    )
