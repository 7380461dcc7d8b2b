"""The same questions by ``generate`` of transformers, greedily, in float32, one at a time."""

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from gsm8k_compare import Output
from gsm8k_questions import STOP, cut_at_stop, shared_length
from rich.progress import Progress


class Reference:
    """The model in transformers, with the KV entries of what all prompts begin with."""

    def __init__(self, model_dir: Path, prompts: Sequence[str], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model = model.eval()
        self.prompts: list[list[int]] = [self._tokenizer(text)["input_ids"] for text in prompts]
        self._prefix = self._compute(self.prompts[0][: shared_length(self.prompts)])

    @torch.inference_mode()
    def _compute(self, ids: list[int]) -> transformers.DynamicCache:
        cache = transformers.DynamicCache(config=self._model.config)
        self._model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def generate(self, number: int, max_tokens: int, *, reuses_prefix: bool = True) -> list[int]:
        """Return the output for one prompt, with the token that ended it."""
        ids = torch.tensor([self.prompts[number]])
        reused = {"cache": copy.deepcopy(self._prefix)} if reuses_prefix else {}
        found = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            stop_strings=[STOP],
            tokenizer=self._tokenizer,
            **reused,
        )
        return list(map(int, found[0, ids.shape[1] :]))

    def output(self, ids: Sequence[int]) -> Output:
        """Return ids with the text before the stop."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return Output(tuple(ids), cut_at_stop(text))

    @torch.inference_mode()
    def gap(self, number: int, said: Sequence[int], token: int) -> float | None:
        """Return by how much the two largest logits behind ``said`` differ.

        None if ``token`` is neither of them.
        """
        ids = torch.tensor([[*self.prompts[number], *said]])
        row = self._model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        top = row.topk(2)
        return float(top.values[0] - top.values[1]) if token in top.indices.tolist() else None


class Record:
    """Outputs found so far, one a line of a file, so that a run can be gone on with."""

    def __init__(self, path: Path | None, model_dir: Path, max_tokens: int) -> None:
        self._path = path
        self._setting = [str(model_dir), transformers.__version__, torch.__version__, max_tokens]
        rows = path.read_text().splitlines() if path is not None and path.exists() else []
        self._found = {row["key"]: row["ids"] for row in map(json.loads, rows)}

    def find(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the output for these tokens."""
        return self._found.get(self._key(prompt))

    def add(self, prompt: Sequence[int], ids: list[int]) -> None:
        """Keep an output."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": self._key(prompt), "ids": ids}) + "\n")

    def _key(self, prompt: Sequence[int]) -> str:
        return hashlib.sha256(json.dumps([self._setting, list(prompt)]).encode()).hexdigest()


def generate_all(
    reference: Reference, record: Record, max_tokens: int, progress: Progress
) -> tuple[list[Output], float]:
    """Return all outputs, and the seconds that those took that were not in the record."""
    task = progress.add_task("transformers", total=len(reference.prompts))
    outputs, seconds = [], 0.0
    for number, prompt in enumerate(reference.prompts):
        ids = record.find(prompt)
        if ids is None:
            started = time.monotonic()
            ids = reference.generate(number, max_tokens)
            seconds += time.monotonic() - started
            record.add(prompt, ids)
        outputs.append(reference.output(ids))
        progress.advance(task)
    return outputs, seconds
