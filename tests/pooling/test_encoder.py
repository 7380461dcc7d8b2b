"""Rows of the pooling encoders against transformers and explicit pooling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.tiny_encoders import (
    MAX_POSITIONS,
    make_tokenizer,
    save_bert,
    save_cross_encoder,
    save_decoder,
)
from tidemill.protocol.errors import ConfigError, DamagedModel, UnsafeModel, UnsupportedModel
from tidemill.service.job_inputs import EncoderInput
from tidemill_gpuworker.loading.model_task import Task, find_task
from tidemill_gpuworker.pooling.encoder import TextEncoder

CPU = torch.device("cpu")
TEXTS = ("tide", "mill water wheel", "grain stone tide mill water wheel grain", "water water")


def load(directory: Path, task: Task = "embed") -> TextEncoder:
    return TextEncoder(directory, task, device=CPU, dtype=torch.float32)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(make_tokenizer().encode(text).ids)


def hidden_of(model: Any, text: str) -> torch.Tensor:
    """The hidden states [tokens, size] of one text alone, without padding."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids_of(text)])).last_hidden_state[0]


@pytest.mark.parametrize(
    ("pooling", "pick"),
    [
        (None, lambda hidden: hidden.mean(dim=0)),
        ({"pooling_mode_mean_tokens": True}, lambda hidden: hidden.mean(dim=0)),
        ({"pooling_mode_cls_token": True}, lambda hidden: hidden[0]),
        ({"pooling_mode": "lasttoken"}, lambda hidden: hidden[-1]),
    ],
    ids=["none", "mean", "cls", "last"],
)
def test_rows_are_the_pooled_states_of_each_text_alone(
    tmp_path: Path, pooling: dict[str, Any] | None, pick: Any
) -> None:
    save_bert(tmp_path, pooling)
    model = transformers.BertModel.from_pretrained(tmp_path).eval()
    expected = torch.stack([pick(hidden_of(model, text)) for text in TEXTS])
    # All in one batch, so three of the four are padded.
    rows = load(tmp_path).rows([EncoderInput(ids_of(text)) for text in TEXTS])
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_the_last_token_of_a_decoder_is_pooled(tmp_path: Path) -> None:
    save_decoder(tmp_path)
    assert find_task(tmp_path) == "embed"
    model = transformers.Qwen3Model.from_pretrained(tmp_path).eval()
    expected = torch.stack([hidden_of(model, text)[-1] for text in TEXTS])
    rows = load(tmp_path).rows([EncoderInput(ids_of(text)) for text in TEXTS])
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_a_cross_encoder_reads_both_texts_with_their_types(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    pairs = [make_tokenizer().encode("tide mill", document) for document in TEXTS]
    with torch.inference_mode():
        expected = torch.stack(
            [
                model(
                    input_ids=torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])
                ).logits[0]
                for pair in pairs
            ]
        )
    inputs = [EncoderInput(tuple(pair.ids), tuple(pair.type_ids)) for pair in pairs]
    rows = load(tmp_path, "score").rows(inputs)
    assert expected.std() > 1e-3
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_the_model_reads_as_many_tokens_as_it_has_positions_or_was_trained_on(
    tmp_path: Path,
) -> None:
    save_bert(tmp_path)
    assert load(tmp_path).max_tokens == MAX_POSITIONS
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert load(tmp_path).max_tokens == 16


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {},
    ],
)
def test_a_pooling_that_is_not_run_is_refused_by_name(
    tmp_path: Path, pooling: dict[str, Any]
) -> None:
    save_bert(tmp_path, pooling)
    with pytest.raises(UnsupportedModel, match=r"pooling by (max|mean and cls|nothing)"):
        load(tmp_path)


def test_a_module_that_is_not_run_is_refused_by_name(tmp_path: Path) -> None:
    save_bert(tmp_path)
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match="Dense"):
        load(tmp_path)


def test_a_model_with_code_of_its_own_is_never_run(tmp_path: Path) -> None:
    save_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(UnsafeModel, match="auto_map"):
        load(tmp_path)


def test_weights_that_lack_a_layer_are_damaged(tmp_path: Path) -> None:
    save_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(DamagedModel, match=r"layer\.2"):
        load(tmp_path)


def test_a_classifier_of_several_classes_gives_no_score(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, num_labels=3)
    with pytest.raises(UnsupportedModel, match="3 classes"):
        load(tmp_path, "score")


def test_the_task_follows_from_the_checkpoint_and_can_be_chosen_where_there_is_a_choice(
    tmp_path: Path,
) -> None:
    bert, cross, decoder = tmp_path / "b", tmp_path / "c", tmp_path / "d"
    save_bert(bert), save_cross_encoder(cross), save_decoder(decoder)
    assert [find_task(path) for path in (bert, cross, decoder)] == ["embed", "score", "embed"]
    assert find_task(decoder, "generate") == "generate"
    with pytest.raises(ConfigError, match="generate does not fit BertModel"):
        find_task(bert, "generate")
