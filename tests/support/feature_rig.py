"""Engines with and without features on one tiny Llama, and what they tell of the same jobs."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from support.feature_cases import ADAPTERS, NUM_TOKENS, STRUCTURES, TOKENIZER, FeatureJob
from support.lora_files import merged, write_adapter
from support.pairwise import Row
from support.tiny_models import VOCAB_SIZE, make_tiny_model
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.prefix import lora_keys
from tidemill_gpuworker.engine.beam_choice import BeamChoice
from tidemill_gpuworker.engine.beam_group import BeamGroup, beam_params
from tidemill_gpuworker.engine.choice_group import ChoiceGroup, params_of
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import OutputProcessor
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.lora.adapter_files import read_adapter
from tidemill_gpuworker.lora.layers import AdaptableLayers, LoadedAdapter
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_gpuworker.structured_output.compiler import grammar_compiler

MAX_MODEL_LEN = 128
NUM_BLOCKS = 96
#: Room for the longest sequence, and hardly for another one.
TIGHT_TOKENS = 96
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SCALE = 2.0


@dataclass(slots=True)
class Told:
    """All that was told of one answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[str | None, object] | None = None


@dataclass(slots=True)
class Load:
    """A model as one runner has it, with its adapters."""

    runner: ModelRunner
    adapters: dict[str, LoadedAdapter]


@dataclass(slots=True)
class CountingRunner:
    """Counts prefills that a step cut."""

    inner: ModelRunner
    num_chunked: int = 0

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run a step."""
        self.num_chunked += sum(not item.samples for item in plan.scheduled)
        return self.inner.execute(plan)


class Models:
    """One tiny Llama: as transformers has it, with adapters merged, and loaded in all ways."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        model = make_tiny_model("llama-tied")
        model.save_pretrained(directory / "model")
        self.references: dict[str | None, transformers.PreTrainedModel] = {None: model}
        for seed, name in enumerate(ADAPTERS):
            modules = _MODULES if name == "all" else ("q_proj", "v_proj")
            path = write_adapter(directory / name, model, modules, seed=seed)
            self.references[name] = merged(model, path, _SCALE)
        self._loads: dict[tuple[int, str], Load] = {}

    @cached_property
    def compiler(self) -> Any:
        """Compiles the grammars; to be closed."""
        made = grammar_compiler(TOKENIZER, VOCAB_SIZE)
        assert made is not None
        return made

    def load(self, block_size: int, kv_dtype: str) -> Load:
        """Return the model with blocks of that kind."""
        found = self._loads.get((block_size, kv_dtype))
        if found is None:
            runner = ModelRunner(
                self._directory / "model",
                dtype="float32",
                kv_cache_dtype=kv_dtype,
                block_size=block_size,
                num_blocks=NUM_BLOCKS,
                swap_space_bytes=1 << 21,
                max_model_len=MAX_MODEL_LEN,
                adaptable=AdaptableLayers(),
            )
            adapters = {
                name: runner.load_adapter(name, read_adapter(self._directory / name))
                for name in ADAPTERS
            }
            found = self._loads[block_size, kv_dtype] = Load(runner, adapters)
        return found


class FeatureEngine:
    """An engine with the features of a row; ``PLAIN`` has those that change no token switched off.

    Its blocks are few enough for preemptions if the row says so.
    """

    def __init__(self, models: Models, row: Row) -> None:
        self._models = models
        self._load = models.load(row["block_size"], row["kv_dtype"])
        runner, block_size = self._load.runner, row["block_size"]
        self.blocks = BlockManager(
            NUM_BLOCKS if row["memory"] == "roomy" else TIGHT_TOKENS // block_size,
            block_size,
            watermark=0.0,
            enable_prefix_caching=row["prefix_cache"],
            num_swap_blocks=runner.num_swap_blocks if row["memory"] == "swap" else 0,
            swap_on_preemption=row["memory"] == "swap",
        )
        config = StepConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=24 if row["chunks"] else 512,
            enable_chunked_prefill=row["chunks"],
        )
        self.scheduler = StepScheduler(config, self.blocks, _drafter(row["num_drafted"]))
        self.runner = CountingRunner(runner)
        sampler = Sampler(TOKENIZER.eos_token_ids)
        self.inner = Engine(self.runner, sampler, self.scheduler, _processor)
        self._engine = GroupEngine(self.inner)
        self._told: dict[tuple[str, int], Told] = {}

    def run(self, jobs: dict[str, FeatureJob]) -> dict[tuple[str, int], Told]:
        """Run jobs that come one by one, and return what was told of each answer by job's id."""
        works = [self.work(name, job) for name, job in jobs.items()]
        self._told = {}
        while works or self.inner.has_work:
            if works:
                self._engine.add(works.pop(0))
            for output in self._engine.step():
                self._take(output)
            self.scheduler.check_integrity()
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        return self._told

    def work(self, name: str, job: FeatureJob) -> Sequence | ChoiceGroup | BeamGroup:
        """Return a job as the engine runs it."""
        params = job.params
        if params.use_beam_search:
            root = self.sequence(f"{name}#0", job)
            root.params, root.is_beam = beam_params(params), True
            choice = BeamChoice(
                params.num_outputs,
                prompt_len=len(job.prompt),
                max_tokens=NUM_TOKENS,
                eos_token_ids=TOKENIZER.eos_token_ids,
            )
            return BeamGroup(root, params, choice)
        if params.num_outputs == 1:
            return self.sequence(name, job)
        choices = range(params.num_outputs)
        return ChoiceGroup([self.sequence(f"{name}#{k}", job, k) for k in choices], params)

    def sequence(self, name: str, job: FeatureJob, choice: int = 0) -> Sequence:
        """Return one answer of a job as a sequence."""
        seq = Sequence(
            name,
            list(job.prompt),
            params_of(job.params, choice),
            seed=job.seed,
            choice=choice,
            priority=job.priority,
        )
        if job.adapter:
            seq.adapter = self._load.adapters[job.adapter]
            seq.extra_keys = lora_keys(seq.adapter.name, seq.adapter.digest)
        if job.structure:
            compilation = self._models.compiler.compile(STRUCTURES[job.structure])
            compilation.future.exception(timeout=60)
            seq.guide = compilation.guide()
        return seq

    def run_alone(self, job: FeatureJob, choice: int) -> Told:
        """Return what is told of one answer that nobody else is there with."""
        params = job.params.model_copy(update={"n": 1})
        seq = self.sequence("alone", FeatureJob(job.prompt, params, job.structure, job.adapter))
        seq.choice, self._told = choice, {}
        self.inner.add(seq)
        while self.inner.has_work:
            for output in self.inner.step():
                self._take(output)
        return self._told["alone", choice]

    def _take(self, output: Any) -> None:
        choice = getattr(output, "choice", getattr(output.seq, "choice", 0))
        told = self._told.setdefault((output.seq.seq_id, choice), Told())
        told.ids += output.new_ids
        told.text += output.text
        told.logprobs += output.logprobs or ()
        if output.finish is not None:
            told.end = (output.finish.reason, output.finish.stop_reason)
        for number, end in enumerate(getattr(output, "ends", ())):
            self._told[output.seq.seq_id, number].end = (end.finish_reason, end.stop_reason)


PLAIN: Row = {
    "prefix_cache": False,
    "chunks": False,
    "memory": "roomy",
    "num_drafted": 0,
    "block_size": 16,
}


def plain_engine(models: Models, kv_dtype: str) -> FeatureEngine:
    """An engine without anything that must change no token."""
    return FeatureEngine(models, PLAIN | {"kv_dtype": kv_dtype})


def _drafter(num_drafted: int) -> Drafter | None:
    if not num_drafted:
        return None
    config = SpeculativeConfig(
        num_speculative_tokens=num_drafted, prompt_lookup_max=4, prompt_lookup_min=1
    )
    return Drafter(config, MAX_MODEL_LEN)


def _processor(seq: Sequence) -> OutputProcessor:
    return OutputProcessor(
        TOKENIZER, seq.params, prompt_len=seq.num_prompt_tokens, max_model_len=MAX_MODEL_LEN
    )
