"""Speculation under a grammar: each place of a draft has the mask of what comes before it."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.guided_engine import MAX_MODEL_LEN, guided_seq, noisy_engine, run_all
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.structured import StructuredOutput
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler, grammar_compiler

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size + 5
NUM_DRAFTED = 6
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "forced": {"regex": "(ab-){25}"},
    "free within": {"regex": "(a[xy]b ){12}[0-9]{3}"},
    "schema": {
        "json_schema": {
            "type": "array",
            "items": {"type": "object", "properties": {"id": {"enum": [1, 2]}}, "required": ["id"]},
            "minItems": 5,
            "maxItems": 9,
        }
    },
    "choice": {"choice": ["aaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaab"]},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert made is not None
    yield made
    made.close()


def speculating_engine() -> Engine:
    config = SpeculativeConfig(
        num_speculative_tokens=NUM_DRAFTED, prompt_lookup_max=4, prompt_lookup_min=1
    )
    drafter = Drafter(config, MAX_MODEL_LEN)
    return noisy_engine(TOKENIZER, VOCAB_SIZE, drafter=drafter)


def make_seqs(compiler: GrammarCompiler, constraint: dict[str, Any]) -> list[Sequence]:
    asked = StructuredOutput.model_validate(constraint)
    asks: list[dict[str, Any]] = [
        *({}, {"temperature": 0.0}, {"frequency_penalty": 0.4}, {"min_tokens": 100})
    ]
    guided = [
        guided_seq(compiler, asked, seq_id=f"seq-{seed}", seed=seed, max_tokens=120, **params)
        for seed, params in enumerate(asks)
    ]
    return [*guided, guided_seq(compiler, None, seq_id="free", seed=9, max_tokens=60)]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_speculation_changes_no_guided_token(compiler: GrammarCompiler, name: str) -> None:
    plain_seqs = make_seqs(compiler, CONSTRAINTS[name])
    guessed_seqs = make_seqs(compiler, CONSTRAINTS[name])
    run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), plain_seqs)
    engine = speculating_engine()

    run_all(engine, guessed_seqs)

    assert [seq.output_ids for seq in guessed_seqs] == [seq.output_ids for seq in plain_seqs]
    assert engine.figures.speculation.num_accepted_tokens > 20


def test_a_draft_ends_where_the_grammar_refuses_it(compiler: GrammarCompiler) -> None:
    asked = StructuredOutput.model_validate({"regex": "(ab-){3}c"})
    seq = guided_seq(compiler, asked, max_tokens=50)
    said = TOKENIZER.encode("ab-ab-ab-", add_special_tokens=False)
    seq.output_ids += said[: len(said) * 2 // 3]
    assert seq.guide is not None
    for token_id in seq.output_ids:
        seq.guide.accept(token_id)
    config = SpeculativeConfig(num_speculative_tokens=9, prompt_lookup_max=2, prompt_lookup_min=1)

    drafted = Drafter(config, MAX_MODEL_LEN).draft(seq)

    assert TOKENIZER.decode(drafted) == "ab-"
    # The guide is where it was.
    assert seq.guide.count_allowed(said[len(said) * 2 // 3 :]) == len(said) // 3
