"""Ask a running Tidemill: start one with ``tidemill up``, then run this file."""

from tidemill import Producer, TidemillError


def main() -> None:
    """Watch one answer as it is written, then collect a few at once."""
    with Producer() as producer:
        question = [{"role": "user", "content": "Why does the sea have tides?"}]
        job = producer.submit(question, max_tokens=60, temperature=0)
        for chunk in job.stream():
            print(chunk.text, end="", flush=True)
        usage = job.result().usage
        print(
            f"\n-- {usage.completion_tokens} tokens, {usage.cached_tokens} of the prompt cached\n"
        )

        rivers = ["Nile", "Danube", "Amazon"]
        prompts = [f"The {river} flows through" for river in rivers]
        for river, result in zip(rivers, producer.map(prompts, max_tokens=16), strict=True):
            print(f"{river}: {result.text.strip()}")


if __name__ == "__main__":
    try:
        main()
    except TidemillError as error:
        raise SystemExit(error.one_line()) from None
