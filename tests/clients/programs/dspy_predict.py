"""DSPy: plain calls, predictions that a schema forms, streams; dspy_predict.py BASE_URL MODEL"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition

BASE_URL, MODEL = sys.argv[1:3]
MESSAGE = "Your invoice is due."


class Sort(dspy.Signature):
    """Sort a message into its box."""

    message: str = dspy.InputField()
    box: Literal["bills", "friends"] = dspy.OutputField()
    is_urgent: bool = dspy.OutputField()


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        plain_calls_work(provider)
    # DSPy asks for schemas only of models that are said to know them.
    dspy.lm15.register_provider(
        ProviderDefinition.chat(
            AccessPolicy(provider="tidemill", base_url=BASE_URL), compat=OpenAIChatCompat()
        ),
        supports=ModelSupport(response_schema=True, function_calling=True),
    )
    lm = dspy.LM(f"tidemill/{MODEL}", api_key="none", cache=False, temperature=0, max_tokens=1000)
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    check(dspy.Predict(Sort)(message=MESSAGE))
    many_at_once()
    asyncio.run(asynchronously())
    asyncio.run(a_stream_tells_the_same())
    ran = ["openai/", "hosted_vllm/", "predict with a schema", "parallel", "async", "stream"]
    print(json.dumps({"client": "dspy", "version": version("dspy"), "ran": ran}))


def plain_calls_work(provider: str) -> None:
    lm = dspy.LM(f"{provider}/{MODEL}", api_base=BASE_URL, api_key="none", cache=False)
    [text] = lm("What is the capital of France?", temperature=0, max_tokens=12)
    assert text.strip(), text
    assert lm.history[-1]["usage"]["completion_tokens"] > 0, lm.history[-1]


def check(told: dspy.Prediction) -> None:
    assert told.box in ("bills", "friends"), told
    assert isinstance(told.is_urgent, bool), told


def many_at_once() -> None:
    predict = dspy.Predict(Sort)
    examples = [dspy.Example(message=f"{MESSAGE} ({n})").with_inputs("message") for n in range(4)]
    for told in predict.batch(examples, num_threads=4, disable_progress_bar=True):
        check(told)


async def asynchronously() -> None:
    check(await dspy.Predict(Sort).acall(message=MESSAGE))


async def a_stream_tells_the_same() -> None:
    stream = dspy.streamify(dspy.Predict(Sort))
    *_, last = [piece async for piece in stream(message=MESSAGE)]
    check(last)


if __name__ == "__main__":
    main()
