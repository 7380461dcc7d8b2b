"""The decoder for speech against transformers, and its rules against those of the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from support.tiny_whisper import IDS, save_tiny_whisper
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.speech.alignment import cost_matrix, split_words, token_times, warp
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.rules import apply_rules
from tidemill_gpuworker.speech.vocabulary import Vocabulary, read_vocabulary

START = IDS["<|startoftranscript|>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(directory: Path) -> SpeechModel:
    return SpeechModel(directory, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> Vocabulary:
    return read_vocabulary(directory, Tokenizer.from_directory(directory))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.WhisperForConditionalGeneration.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()


def make_windows(model: SpeechModel, count: int) -> list[torch.Tensor]:
    noise = np.random.default_rng(1).standard_normal((count, 480_000)).astype(np.float32)
    return [model.features(samples)[:, :3000] for samples in noise]


def test_windows_at_different_positions_share_a_step_and_give_the_logits_of_each_alone(
    model: SpeechModel, reference: Any
) -> None:
    windows = make_windows(model, 3)
    rows = [[START, 41, 7], [START, 42, 9, 3, 17], [START, 5]]
    model.encode(windows, 0)
    for slot, row in enumerate(rows):
        model.decode(torch.tensor([row[:-1]]), [0], slot)
    last = torch.tensor([[row[-1]] for row in rows])
    hidden = model.decode(last, [len(row) - 1 for row in rows], 0).hidden
    logits = model.logits(hidden[:, 0])
    for row, window, found in zip(rows, windows, logits, strict=True):
        with torch.inference_mode():
            output = reference(input_features=window[None], decoder_input_ids=torch.tensor([row]))
        torch.testing.assert_close(found, output.logits[0, -1], atol=1e-4, rtol=0)


def test_a_window_that_moves_to_another_slot_goes_on_there(
    model: SpeechModel, reference: Any
) -> None:
    windows = make_windows(model, 2)
    model.encode(windows, 0)
    model.decode(torch.tensor([[START, 8]]), [0], 1)
    model.move(1, 0)
    logits = model.logits(model.decode(torch.tensor([[9]]), [2], 0).hidden[0, 0])
    with torch.inference_mode():
        ids = torch.tensor([[START, 8, 9]])
        output = reference(input_features=windows[1][None], decoder_input_ids=ids)
    torch.testing.assert_close(logits, output.logits[0, -1], atol=1e-4, rtol=0)


def test_the_attention_of_chosen_heads_is_that_of_the_model(
    model: SpeechModel, reference: Any
) -> None:
    [window] = make_windows(model, 1)
    ids = torch.tensor([[START, 1, 2, 3]])
    model.encode([window], 0)
    found = model.decode(ids, [0], 0, [(0, 1), (1, 2), (1, 3)]).attention
    with torch.inference_mode():
        output = reference(
            input_features=window[None], decoder_input_ids=ids, output_attentions=True
        )
    cross = output.cross_attentions
    expected = torch.stack([cross[0][:, 1], cross[1][:, 2], cross[1][:, 3]], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_logits_that_are_no_numbers_are_never_told(model: SpeechModel) -> None:
    with pytest.raises(ArithmeticError, match="finite"):
        model.logits(torch.full((1, 64), torch.nan))


@pytest.mark.parametrize("length", [0, 1, 2, 5, 12])
def test_the_rules_for_timestamps_are_those_of_the_reference(
    vocabulary: Vocabulary, length: int
) -> None:
    config = transformers.GenerationConfig(
        no_timestamps_token_id=vocabulary.no_timestamps,
        eos_token_id=vocabulary.end,
        bos_token_id=vocabulary.end,
        max_initial_timestamp_index=50,
    )
    opening = [START, IDS["<|en|>"], IDS["<|transcribe|>"]]
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=len(opening))
    generator = torch.Generator().manual_seed(length)
    plain = Vocabulary(
        **{
            name: getattr(vocabulary, name)
            for name in Vocabulary.__slots__
            if not name.startswith("suppressed")
        },
        suppressed=(),
        suppressed_first=(),
    )
    begin = vocabulary.first_timestamp
    for _ in range(50):
        logits = 3 * torch.randn(len(IDS), generator=generator)
        # Timestamps of a fair weight: each branch of the rules must be met.
        logits[begin:] -= 5 * torch.rand(1, generator=generator)
        sampled: list[int] = []
        for place in range(length):
            is_time = torch.rand(1, generator=generator) < 0.4 or not place
            low, high = (begin, len(IDS)) if is_time else (0, 40)
            sampled.append(int(torch.randint(low, high, (1,), generator=generator)))
        expected = theirs(torch.tensor([opening + sampled]), logits[None].clone())[0]
        found = apply_rules(logits, sampled, plain, timestamps=True)
        assert torch.equal(found, expected)


def test_tokens_that_a_model_must_not_say_are_suppressed(vocabulary: Vocabulary) -> None:
    logits = torch.zeros(len(IDS))
    first = apply_rules(logits, [], vocabulary, timestamps=False)
    later = apply_rules(logits, [7], vocabulary, timestamps=False)
    assert first.isinf().nonzero().flatten().tolist() == [3, 4, IDS["<|endoftext|>"]]
    assert later.isinf().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 7), (9, 30), (20, 6)])
def test_the_cheapest_path_is_that_of_the_reference(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(shape[1]).standard_normal(shape)
    rows, columns = warp(costs)
    theirs_rows, theirs_columns = _dynamic_time_warping(costs)
    assert costs[rows, columns].sum() == pytest.approx(
        costs[theirs_rows, theirs_columns].sum(), abs=1e-4
    )
    assert np.all(np.diff(rows) >= 0) and np.all(np.diff(columns) >= 0)
    assert len(token_times((rows, columns))) == shape[0]


def test_attention_is_smoothed_as_in_the_reference() -> None:
    attention = torch.rand(3, 5, 40, generator=torch.Generator().manual_seed(2)).double()
    std, mean = torch.std_mean(attention, dim=-2, keepdim=True, unbiased=False)
    expected = -_median_filter((attention - mean) / std, 7).mean(dim=0)
    np.testing.assert_allclose(cost_matrix(attention, 40), expected.numpy(), atol=1e-9)


def test_a_word_takes_the_punctuation_that_follows_it() -> None:
    class Spelling:
        def decode(self, ids: list[int]) -> str:
            return "".join([" ask", " not", ",", " wh", "at", "."][index] for index in ids)

    words = split_words(range(6), Spelling(), "en")  # type: ignore[arg-type]  # it only decodes
    assert [(word.text, word.num_tokens) for word in words] == [
        (" ask", 1),
        (" not,", 2),
        (" what.", 3),
    ]
