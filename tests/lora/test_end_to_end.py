"""Adapters through producer, broker, scheduler and worker."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from support.greedy import reference_outputs
from support.lora_files import merged, write_adapter
from support.small_stacks import small_stack
from support.tiny_models import make_tiny_model
from support.tiny_tokenizers import byte_level_tokenizer
from support.wait import wait_until
from tidemill import Job, JobSpec, Producer
from tidemill.cli.main import app
from tidemill.protocol.errors import UnknownAdapter, UnknownModel

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 55))
NUM_TOKENS = 8
MODULES = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True)
class Mill:
    """A running stack, and what its model is."""

    url: str
    model: transformers.PreTrainedModel
    lora_dir: Path

    def add(self, name: str, seed: int) -> Path:
        """Write an adapter, of which the worker sees nothing before it is whole."""
        made = write_adapter(self.lora_dir.parent / f"{name}.new", self.model, MODULES, seed=seed)
        return made.rename(self.lora_dir / name)

    def expected(self, directory: Path | None) -> list[int]:
        model = merged(self.model, directory, scale=2.0) if directory else self.model
        return reference_outputs(model, [PROMPT], NUM_TOKENS)[0]


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    base = tmp_path_factory.mktemp("lora")
    model = make_tiny_model("llama-tied")
    model.save_pretrained(base / "model")
    byte_level_tokenizer().raw.save(str(base / "model" / "tokenizer.json"))
    fixed = write_adapter(base / "fixed", model, MODULES, seed=1)
    (base / "adapters").mkdir()
    options: tuple[str, ...] = ("--enable-lora", "--lora-modules", f"fixed={fixed}")
    options += ("--lora-dir", str(base / "adapters"))
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    options += ("--speculative-config", speculation)
    with small_stack(base / "model", tmp_path_factory.mktemp("stack"), *options) as stack:
        yield Mill(stack.url, model, base / "adapters")


@pytest.fixture
def producer(mill: Mill) -> Iterator[Producer]:
    with Producer(mill.url, timeout=30) as client:
        yield client


def ask(producer: Producer, lora: str | None = None, model: str | None = None) -> list[int]:
    job = producer.submit(
        PROMPT, model=model, lora=lora, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    return list(job.result().token_ids)


def test_jobs_of_several_adapters_each_get_their_own_model(mill: Mill, producer: Producer) -> None:
    fixed = mill.lora_dir.parent / "fixed"
    added = mill.add("several", seed=2)
    wait_until(lambda: "several" in known(mill))

    names = ["fixed", None, "several"] * 2
    specs = [
        JobSpec(PROMPT, lora=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        for name in names
    ]
    jobs = [job for job in producer.submit_many(specs) if isinstance(job, Job)]
    told = [list(job.result().token_ids) for job in jobs]

    assert told == [mill.expected(fixed), mill.expected(None), mill.expected(added)] * 2


def test_an_adapter_may_be_named_as_the_model(mill: Mill, producer: Producer) -> None:
    expected = mill.expected(mill.lora_dir.parent / "fixed")

    assert ask(producer, model="fixed") == ask(producer, lora="fixed") == expected


def test_adapters_come_and_go_while_the_worker_runs(mill: Mill, producer: Producer) -> None:
    directory = mill.add("guest", seed=3)
    expected = mill.expected(directory)
    wait_until(lambda: "guest" in known(mill))
    with Producer(mill.url, timeout=30) as fresh:
        assert ask(fresh, lora="guest") == expected

    shutil.rmtree(directory)
    wait_until(lambda: "guest" not in known(mill))

    with Producer(mill.url, timeout=30) as fresh, pytest.raises(UnknownAdapter, match="'guest'"):
        ask(fresh, lora="guest")


def test_a_name_that_is_neither_model_nor_adapter_is_refused(producer: Producer) -> None:
    with pytest.raises(UnknownAdapter, match="'nobody'") as refusal:
        ask(producer, lora="nobody")
    assert "fixed" in refusal.value.fix
    with pytest.raises(UnknownModel, match="'nobody'"):
        ask(producer, model="nobody")


def test_the_command_line_lists_adapters(mill: Mill) -> None:
    shown = CliRunner().invoke(app, ["lora", "--json", "--redis-url", mill.url])

    assert shown.exit_code == 0, shown.output
    [fixed] = [each for each in json.loads(shown.stdout)["m"] if each["name"] == "fixed"]
    assert fixed["rank"] == 4
    assert "fixed" in CliRunner().invoke(app, ["lora", "--redis-url", mill.url]).stdout


def known(mill: Mill) -> list[str]:
    """Adapters on the model's card now; a client may remember it for some seconds."""
    with Producer(mill.url, timeout=30) as fresh:
        return [card.name for card in fresh.model().adapters]
