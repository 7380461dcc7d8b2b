"""Inspect: an evaluation of chats and of tool calls, by chats, streams, responses, and as vLLM."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from command_lines import run, script
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, tool

CAPITALS = {"France": "Paris", "Japan": "Tokyo"}


@task
def capitals() -> Task:
    """What a small model knows."""
    samples = [
        Sample(input=f"What is the capital of {country}?", target=city, id=country)
        for country, city in CAPITALS.items()
    ]
    return Task(dataset=samples, solver=generate(), scorer=includes())


@task
def addition() -> Task:
    """A tool that must be called, whose result the model is told."""
    samples = [Sample(input=f"Add 1 and {number}.", target="called") for number in (1, 2)]
    solver = [use_tools(add(), tool_choice="any"), generate(tool_calls="single")]
    return Task(dataset=samples, solver=solver, scorer=was_called())


@tool
def add() -> Tool:
    """Adds."""

    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


@scorer(metrics=[accuracy()])
def was_called() -> Scorer:
    """Whether a tool was called with numbers and answered their sum."""

    async def score(state: TaskState, target: Target) -> Score:
        [call] = [
            call
            for message in state.messages
            for call in getattr(message, "tool_calls", None) or []
        ]
        [answer] = [message for message in state.messages if message.role == "tool"]
        is_right = answer.text == str(call.arguments["x"] + call.arguments["y"])
        return Score(value=1 if is_right else 0, answer=answer.text)

    return score


def main(base_url: str, model: str) -> None:
    def evaluate(name: str, service: str, *options: str) -> EvalLog:
        logs = Path.cwd() / "-".join(("logs", name, service.replace("/", "-"), *options[1:2]))
        run(
            *(script("inspect"), "eval", f"{__file__}@{name}", "--model", f"{service}/{model}"),
            *("--temperature", "0", "--max-tokens", "64", "--display", "plain"),
            *("--log-dir", str(logs), "--log-format", "json", *options),
            LOCAL_BASE_URL=base_url,
            LOCAL_API_KEY="none",
            VLLM_BASE_URL=base_url,
        )
        [path] = logs.glob("*.json")
        return read_eval_log(str(path))

    logs = [
        evaluate("capitals", "openai-api/local"),
        evaluate("capitals", "openai-api/local", "-M", "stream=true"),
        evaluate("capitals", "openai-api/local", "-M", "responses_api=true"),
        evaluate("capitals", "vllm"),
    ]
    for log in logs:
        check(log)
        assert texts(log) == texts(logs[0]), (texts(log), texts(logs[0]))
    calls = evaluate("addition", "openai-api/local")
    check(calls)
    assert accuracy_of(calls) == 1, calls.samples
    ran = ["chat", "streams", "responses", "tools", "as vLLM"]
    print(json.dumps({"client": "inspect-ai", "version": version("inspect-ai"), "ran": ran}))


def check(log: EvalLog) -> None:
    assert log.status == "success" and log.results is not None, log.error
    assert log.results.completed_samples == log.results.total_samples == 2
    assert accuracy_of(log) > 0, log.samples
    [usage] = log.stats.model_usage.values()
    assert usage.input_tokens > 0 and usage.output_tokens > 0, usage


def accuracy_of(log: EvalLog) -> float:
    assert log.results is not None
    return float(log.results.scores[0].metrics["accuracy"].value)


def texts(log: EvalLog) -> list[str]:
    return [sample.output.completion for sample in log.samples or []]


if __name__ == "__main__":
    main(*sys.argv[1:3])
