"""lm-eval: tasks scored over HTTP, beside lm-eval's own way of asking transformers."""

import json
import math
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from command_lines import run, script

BASE_URL, MODEL, MODEL_DIR = sys.argv[1:4]
TASKS = Path(__file__).parents[1] / "tasks"
#: Tokens the model may read at once; the longer of the texts to be scored takes several windows.
WINDOW = 128
SCORED, GENERATED = ("choices", "prose"), ("questions",)
ALL = (*SCORED, *GENERATED)
#: Nats by which sums over a text may differ, in float32.
TOLERANCE = 2e-3
#: An API is also told the token before a window, and makes one token behind it.
API_LENGTH = WINDOW + 2


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Others of this machine work too while transformers does, the server among them.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    os.environ["HF_HOME"] = str(Path.cwd() / "home")
    # Tasks name their data relative to where lm-eval runs.
    shutil.copytree(TASKS, "tasks")
    with ThreadPoolExecutor() as pool:
        local = pool.submit(
            over_http,
            *("local-completions", ALL),
            tokenizer=MODEL_DIR,
            tokenizer_backend="huggingface",
            max_length=API_LENGTH,
        )
        # It asks for the server's tokenizer by itself.
        remote = pool.submit(over_http, "local-completions", ("choices",), max_length=API_LENGTH)
        chats = pool.submit(over_http, "local-chat-completions", GENERATED, "--apply_chat_template")
        truth = by_transformers(ALL)
        true_chats = by_transformers(GENERATED, apply_chat_template=True)
    check_scores(local.result(), truth, SCORED)
    # One of the answers is what the model would write.
    assert {score(each)[1] for each in answers(truth, "choices")} == {True, False}, truth
    check_scores(remote.result(), truth, ("choices",))
    check_texts(local.result(), truth)
    check_texts(chats.result(), true_chats)
    ran = ["loglikelihood", "rolling loglikelihood", "generate_until", "remote tokenizer", "chat"]
    print(json.dumps({"client": "lm-eval", "version": version("lm-eval"), "ran": ran}))


def over_http(model: str, tasks: tuple[str, ...], *options: str, **args: Any) -> dict[str, Any]:
    """Run the command line; returns the results and, of each task, the samples."""
    path = "chat/completions" if "chat" in model else "completions"
    args |= {"model": MODEL, "base_url": f"{BASE_URL}/{path}", "num_concurrent": 8}
    out = Path(f"{model}-of-{len(tasks)}")
    run(
        *(script("lm_eval"), "--model", model, "--include_path", "tasks"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in args.items())),
        *("--tasks", ",".join(tasks), "--batch_size", "1" if "chat" in model else "4"),
        *("--log_samples", "--output_path", str(out), *options),
    )
    [results] = out.rglob("results_*.json")
    samples = {}
    for task in tasks:
        [path_of_samples] = out.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in path_of_samples.read_text().splitlines()]
    return {"results": json.loads(results.read_text())["results"], "samples": samples}


def by_transformers(tasks: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Evaluate in this process, on the same weights."""
    # Only now: it reads the environment as it is imported.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    told = simple_evaluate(
        model="hf",
        model_args={"pretrained": MODEL_DIR, "dtype": "float32", "max_length": WINDOW},
        tasks=list(tasks),
        task_manager=TaskManager(include_path="tasks"),
        device="cpu",
        batch_size=4,
        **options,
    )
    assert told is not None
    return told


def check_scores(told: dict[str, Any], truth: dict[str, Any], tasks: tuple[str, ...]) -> None:
    for task in tasks:
        ours, theirs = answers(told, task), answers(truth, task)
        assert len(ours) == len(theirs) > 1, (ours, theirs)
        for one, other in zip(map(score, ours), map(score, theirs), strict=True):
            assert abs(one[0] - other[0]) < TOLERANCE and one[1:] == other[1:], (one, other)
        for name, value in truth["results"][task].items():
            if isinstance(value, float):
                assert math.isclose(told["results"][task][name], value, rel_tol=1e-4), (task, name)


def check_texts(told: dict[str, Any], truth: dict[str, Any]) -> None:
    ours, theirs = answers(told, "questions"), answers(truth, "questions")
    assert ours == theirs and all(text.strip() for text in ours), (ours, theirs)


def answers(told: dict[str, Any], task: str) -> list[Any]:
    """Return what the model told of each document and choice, in order."""
    samples = sorted(told["samples"][task], key=lambda sample: sample["doc_id"])
    return [each for sample in samples for [each] in sample["resps"]]


def score(answer: Any) -> list[float | bool]:
    """Return a logprob and, of a choice, whether it is of the likeliest tokens.

    The file of samples has all of them as texts.
    """
    if isinstance(answer, str | float):
        return [float(answer)]
    logprob, *greedy = answer
    return [float(logprob), *(str(each) == "True" for each in greedy)]


if __name__ == "__main__":
    main()
