"""What kind of jobs a checkpoint is for, going by the name of its class."""

import json
import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.loading.model_task import find_task

CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
MASKED = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
DOCS = Path(__file__).parents[2] / "docs" / "engine.md"


def task_of(architecture: str, model_dir: Path, wanted: str = "auto") -> str:
    (model_dir / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return find_task(model_dir, wanted)


def test_every_family_of_the_docs_generates(tmp_path: Path) -> None:
    table = DOCS.read_text().split("### Native families")[1].split("\n\n")[1]
    named = set(re.findall(r"`(\w+For\w+)`", table))
    assert named == set(FAMILIES)
    assert {task_of(name, tmp_path) for name in named} == {"generate"}


def test_every_causal_language_model_of_transformers_generates(tmp_path: Path) -> None:
    assert {"GPT2LMHeadModel", "XLNetLMHeadModel", "OpenAIGPTLMHeadModel"} < CAUSAL
    others = {name for name in CAUSAL - MASKED if task_of(name, tmp_path) != "generate"}
    assert not others


@pytest.mark.parametrize("name", sorted(CAUSAL & MASKED))
def test_a_model_that_is_causal_or_not_can_be_asked_to_generate(name: str, tmp_path: Path) -> None:
    assert task_of(name, tmp_path) == "embed"
    assert task_of(name, tmp_path, "generate") == "generate"


def test_a_model_without_a_head_does_not_generate(tmp_path: Path) -> None:
    for name in ("BertModel", "GPT2Model", "RobertaForMaskedLM"):
        assert task_of(name, tmp_path) == "embed"
        with pytest.raises(ConfigError, match=f"generate does not fit {name}"):
            task_of(name, tmp_path, "generate")
