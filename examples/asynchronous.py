"""The same with ``async``: start ``tidemill up``, then run this file.

One event loop follows any number of jobs on a few connections.
"""

import asyncio
from collections.abc import AsyncIterator

from tidemill import AsyncProducer, TidemillError

CITIES = ["Venice", "Rotterdam", "Dhaka", "Jakarta"]


async def rows() -> AsyncIterator[dict[str, str]]:
    """Return rows as they come, as from a database or a service."""
    for city in CITIES:
        yield {"city": city}


async def stream_two(producer: AsyncProducer) -> None:
    """Show two answers side by side as they are written."""
    told: dict[str, list[str]] = {"A tide is": [], "A wave is": []}

    async def follow(prompt: str) -> None:
        job = await producer.submit(prompt, max_tokens=12, temperature=0)
        async for chunk in job.stream(timeout=60):
            told[prompt].append(chunk.text)

    await asyncio.gather(*map(follow, told))
    for prompt, texts in told.items():
        print(f"{prompt}{'|'.join(texts)}")


async def main() -> None:
    """Stream, map and converse."""
    async with AsyncProducer() as producer:
        await stream_two(producer)
        answers = producer.map(
            rows(),
            prompt=lambda row: f"{row['city']} fights the water with",
            with_items=True,
            ordered=False,
            timeout=120,
            max_tokens=12,
        )
        async for row, answer in answers:
            print(f"{row['city']}: {' '.join(answer.text.split())}")

        talk = [{"role": "user", "content": "Name a river."}]
        first = await producer.generate(talk, timeout=60, max_tokens=12)
        talk += [first.message, {"role": "user", "content": "Name another."}]
        second = await producer.generate(talk, timeout=60, max_tokens=12)
        print(f"-- {second.usage.cached_tokens} of {second.usage.prompt_tokens} tokens were cached")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except TidemillError as error:
        raise SystemExit(error.one_line()) from None
