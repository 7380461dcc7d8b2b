"""Encoders, cross-encoders and Whisper whose files are wrong: refused by name, never served."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.tiny_encoders import save_bert, save_cross_encoder
from support.tiny_whisper import save_tiny_whisper
from tidemill.protocol.errors import DamagedModel, ModelError, UnsupportedModel
from tidemill_gpuworker.loading.foreign_model import reading
from tidemill_gpuworker.pooling.encoder import TextEncoder
from tidemill_gpuworker.speech.model import SpeechModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny_whisper(root / "whisper")
    return {
        "bert": save_bert(root / "bert"),
        "cross": save_cross_encoder(root / "cross"),
        "whisper": root / "whisper",
    }


def load(kind: str, directory: Path) -> None:
    if kind == "whisper":
        SpeechModel(directory, device=CPU, dtype=torch.float32)
    else:
        task: Any = "score" if kind == "cross" else "embed"
        TextEncoder(directory, task, device=CPU, dtype=torch.float32)


def config(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    return change


def file(name: str, content: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(content) and None


def spoil(name: str) -> Callable[[Path], None]:
    return weights(lambda tensors: tensors[name].fill_(math.nan))


_POOLER = "bert.pooler.dense.weight"


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        (
            "bert",
            config(num_hidden_layers=1),
            DamagedModel,
            r"no place .* encoder\.layer\.1",
        ),
        ("bert", config(num_hidden_layers=-1), DamagedModel, r"tensor encoder\.layer\.0"),
        ("cross", config(num_hidden_layers=1), DamagedModel, r"tensor bert\.encoder\.layer\.1"),
        ("whisper", config(decoder_layers=1), DamagedModel, r"tensor model\.decoder\.layers\.1"),
        ("whisper", config(encoder_layers=0), DamagedModel, r"tensor model\.encoder\.layers\.0"),
        ("cross", weights(lambda t: t.pop(_POOLER)), DamagedModel, f"{_POOLER} is missing"),
        (
            "bert",
            weights(lambda t: t.update(x=torch.ones(1))),
            DamagedModel,
            "no place .* x",
        ),
        ("bert", spoil("encoder.layer.1.output.dense.weight"), DamagedModel, "not finite"),
        ("cross", spoil("classifier.weight"), DamagedModel, "not finite"),
        ("whisper", spoil("model.encoder.layers.0.fc1.weight"), DamagedModel, "not finite"),
        ("bert", config(vocab_size=5), DamagedModel, r"word_embeddings\.weight is \[10, 64\]"),
        ("bert", config(hidden_size="x"), DamagedModel, r"config\.json.*hidden_size"),
        ("whisper", config(d_model="x"), DamagedModel, r"config\.json.*d_model"),
        ("bert", config(num_attention_heads=0), DamagedModel, "ZeroDivisionError"),
        ("bert", file("sentence_bert_config.json", "[]"), DamagedModel, "sentence_bert_config"),
        ("whisper", file("preprocessor_config.json", "[]"), DamagedModel, "preprocessor_config"),
        ("whisper", config(dtype="float99"), DamagedModel, r"config\.json.*float99"),
        ("whisper", config(vocab_size=5), DamagedModel, "AssertionError"),
        ("bert", config(model_type="foo"), UnsupportedModel, r"config\.json.*foo"),
    ],
)
def test_files_that_are_wrong_are_refused_with_what_is_wrong(
    saved: dict[str, Path],
    tmp_path: Path,
    kind: str,
    change: Callable[[Path], None],
    error: type[ModelError],
    message: str,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(saved[kind], directory)
    change(directory)

    with pytest.raises(error, match=message) as refusal:
        load(kind, directory)
    assert str(directory) in str(refusal.value)


def test_a_head_for_another_task_and_old_buffers_are_passed_over(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    settings = transformers.BertConfig(vocab_size=10, num_attention_heads=4, **sizes)
    transformers.BertForPreTraining(settings).save_pretrained(tmp_path)
    weights(lambda t: t.update({"bert.embeddings.position_ids": torch.arange(512)[None]}))(tmp_path)

    load("bert", tmp_path)


def test_what_a_library_raises_names_the_path_but_not_if_the_machine_is_at_fault() -> None:
    with pytest.raises(UnsupportedModel, match=r"/x: .*ImportError: hqq"), reading(Path("/x")):
        raise ImportError("hqq")
    for kind in (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        with pytest.raises(kind), reading(Path("/x")):
            raise kind("no fault of the files")
