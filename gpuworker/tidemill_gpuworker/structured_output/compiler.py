"""Compiles grammars in threads of their own, each once."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

from llguidance import LLMatcher, LLTokenizer

from tidemill.protocol.codec import encode
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.grammar import grammar_of, limits, refusal
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.structured_output.grammar_guide import GrammarGuide
from tidemill_gpuworker.structured_output.trial import GrammarTrial, Vocabulary
from tidemill_gpuworker.structured_output.vocabulary import vocabulary_of

#: By the clock, the wait for a trial of another grammar included.
MAX_COMPILE_SECONDS = 60.0
MAX_CACHED_GRAMMARS = 256
_NUM_THREADS = 2


class Compilation:
    """A grammar that is compiled, or will be; shared by all sequences of one constraint.

    ``submit`` has the compilation run on some thread.  What one sequence makes the grammar's lexer
    work out stays, for all of them: together they may use up what it can hold.
    """

    def __init__(
        self,
        structured: StructuredOutput,
        submit: Callable[[Callable[[], LLMatcher]], Future[LLMatcher]],
        build: Callable[[StructuredOutput], LLMatcher],
        *,
        limit_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.structured = structured
        self._build = build
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._started: float | None = None
        self.future = submit(self._run)

    @property
    def is_settled(self) -> bool:
        """Whether ``guide`` gives a guide or an error now."""
        return self.future.done() or self._is_overdue

    def guide(self, token_ids: Sequence[int] = ()) -> GrammarGuide:
        """Return a new guide that has accepted ``token_ids``, the output of an earlier attempt.

        Raises ``InvalidRequest`` if the grammar cannot be enforced, took too long, or does not
        allow these tokens; ``GrammarTooComplex`` if it cannot take them any more.
        """
        if not self.future.done():
            raise self._error(f"it took more than {self._limit_seconds:g} s to compile")
        guide = GrammarGuide(self.future.result(), self._field)
        try:
            guide.replay(token_ids)
        except ValueError as error:
            raise self._error("the tokens of an earlier attempt do not follow it") from error
        return guide

    def _run(self) -> LLMatcher:
        self._started = self._clock()
        return self._build(self.structured)

    @property
    def _is_overdue(self) -> bool:
        return self._started is not None and self._clock() - self._started > self._limit_seconds

    @property
    def _field(self) -> str:
        return f"structured.{self.structured.constraint}"

    def _error(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._field}: {what}", field=self._field, fix="Make it simpler.")


class GrammarCompiler:
    """Compiles each constraint once and keeps the last ones; used by the step loop's thread alone.

    A thread cannot be stopped, so each grammar goes through a ``trial`` first, a process that can
    be; the limit on the time here only tells when to stop waiting.
    """

    def __init__(
        self,
        vocabulary: LLTokenizer,
        *,
        trial: GrammarTrial | None = None,
        limit_seconds: float = MAX_COMPILE_SECONDS,
        build: Callable[[StructuredOutput], LLMatcher] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary = vocabulary
        self._trial = trial
        self._limit_seconds = limit_seconds
        self._build = build or self._compiled
        self._clock = clock
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._cache: OrderedDict[bytes, Compilation] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> Compilation:
        """Return the grammar of this constraint, from the cache or in the making."""
        key = _key(structured)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._start(structured)
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return found

    def compile_again(self, spent: Compilation) -> Compilation:
        """Return the same grammar for one job alone; nobody is given ``spent`` from now on."""
        key = _key(spent.structured)
        if self._cache.get(key) is spent:
            del self._cache[key]
        return self._start(spent.structured)

    def _start(self, structured: StructuredOutput) -> Compilation:
        return Compilation(
            structured,
            self._pool.submit,
            self._build,
            limit_seconds=self._limit_seconds,
            clock=self._clock,
        )

    def close(self) -> None:
        """Start no more compilations; those that run end by their limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _compiled(self, structured: StructuredOutput) -> LLMatcher:
        grammar = grammar_of(structured)
        complaint = self._trial.complaint(grammar) if self._trial is not None else ""
        if complaint:
            raise refusal(structured, complaint)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        # The first mask is the dearest, and finds what is too complex from the start.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(structured, matcher.get_error())
        return matcher


def _key(structured: StructuredOutput) -> bytes:
    return sha256(encode(structured)).digest()


def grammar_compiler(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler | None:
    """Return a compiler for a model with ``vocab_size`` logits; None if it cannot have one."""
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    if vocabulary is None:
        return None
    described = Vocabulary(tokenizer.raw.to_str(), vocab_size, list(tokenizer.eos_token_ids))
    return GrammarCompiler(vocabulary, trial=GrammarTrial(described))
