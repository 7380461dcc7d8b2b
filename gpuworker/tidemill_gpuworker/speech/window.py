"""One window while it is decoded: tokens, their likelihood, and whether that is good enough."""

import hashlib
import zlib
from dataclasses import dataclass, field

import torch

from tidemill_gpuworker.speech.job import SpeechJob
from tidemill_gpuworker.speech.rules import apply_rules
from tidemill_gpuworker.speech.vocabulary import Vocabulary

#: Temperatures that are tried one after the other, and the limits of the reference code.
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_COMPRESSION = 2.4
_LEAST_LOGPROB = -1.0
_NO_SPEECH = 0.6
_GREEDY_TEMPERATURE = 1e-5
#: What came out at a higher temperature misleads the next window.
_RESET_TEMPERATURE = 0.5


@dataclass(slots=True, eq=False)
class Window:
    """The tokens of one window: ``prompt`` is told, ``opening`` says what to do, then ``sampled``.

    ``num_forced`` of the sampled tokens were published by an earlier attempt.
    """

    job: SpeechJob
    vocabulary: Vocabulary
    prompt: tuple[int, ...]
    opening: tuple[int, ...]
    max_sampled: int
    sampled: list[int] = field(default_factory=list)
    num_forced: int = 0
    sum_logprob: float = 0.0
    no_speech: float = 0.0
    attempt: int = 0
    is_over: bool = False
    #: Tokens that the decoder has seen.
    num_decoded: int = 0

    @property
    def temperature(self) -> float:
        """The temperature of this attempt."""
        asked = self.job.request.temperature
        return asked if asked else _TEMPERATURES[self.attempt]

    @property
    def start_ids(self) -> list[int]:
        """What the decoder reads before it is asked for a token."""
        return [*self.prompt, *self.opening, *self.sampled]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens and the end."""
        return self.sum_logprob / (len(self.sampled) - self.num_forced + 1)

    @property
    def is_silent(self) -> bool:
        """Whether the model hears no speech, and no words that it believes in."""
        return self.no_speech > _NO_SPEECH and self.mean_logprob <= _LEAST_LOGPROB

    @property
    def is_unsure(self) -> bool:
        """Whether what came before is better not told to the next window."""
        return self.temperature > _RESET_TEMPERATURE

    def hear(self, logits: torch.Tensor) -> None:
        """Note how likely there is no speech, by the logits [vocabulary] after the start token."""
        if self.vocabulary.no_speech is not None:
            self.no_speech = float(logits.softmax(dim=-1)[self.vocabulary.no_speech])

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by logits [vocabulary]."""
        timestamps = self.vocabulary.no_timestamps not in self.opening
        logits = apply_rules(logits, self.sampled, self.vocabulary, timestamps=timestamps)
        logprobs = logits.log_softmax(dim=-1)
        token_id = self._choose(logprobs)
        self.sum_logprob += float(logprobs[token_id])
        if token_id == self.vocabulary.end:
            self.is_over = True
            return
        self.sampled.append(token_id)
        self.is_over = len(self.sampled) >= self.max_sampled

    def needs_another_try(self, text: str) -> bool:
        """Whether the text is a loop or a guess, and a higher temperature is left to try."""
        is_last = bool(self.job.request.temperature) or self.attempt + 1 >= len(_TEMPERATURES)
        if is_last or self.num_forced or self.is_silent:
            return False
        return compression(text) > _MAX_COMPRESSION or self.mean_logprob < _LEAST_LOGPROB

    def start_again(self) -> None:
        """Forget what was sampled, for the next temperature."""
        self.sampled.clear()
        self.attempt += 1
        self.sum_logprob, self.is_over, self.num_decoded = 0.0, False, 0

    def _choose(self, logprobs: torch.Tensor) -> int:
        # As SamplingParams has it; dividing by less would leave no number.
        if self.temperature < _GREEDY_TEMPERATURE:
            return int(logprobs.argmax())
        # The same token whatever shares the step, and whoever takes the job over.
        place = f"{self.job.seq_id} {self.job.seek} {self.attempt} {len(self.sampled)}"
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        weights = (logprobs / self.temperature).softmax(dim=-1)
        return int(weights.multinomial(1, generator=generator))


def compression(text: str) -> float:
    """Return by how much text can be compressed: loops compress well."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
