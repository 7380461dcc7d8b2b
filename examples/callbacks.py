"""Queue several questions at once and be called as they are answered: start ``tidemill up`` first.

No thread waits for a job: all callbacks of a producer run on one.
"""

from tidemill import Chunk, Job, Producer, Result, TidemillError, Watch

QUESTIONS = ["Why is the sea salt?", "Why do tides come twice a day?", "Why are waves white?"]


def main() -> None:
    """Collect the questions, queue them in one round trip, and follow them all."""
    with Producer() as producer:
        with producer.batch("sea", max_tokens=40, temperature=0) as batch:
            for question in QUESTIONS:
                batch.submit([{"role": "user", "content": question}])
        print(f"queued: {', '.join(batch.ids)}")
        watches = [
            follow(question, job)
            for question, job in zip(QUESTIONS, batch.jobs, strict=True)
            if isinstance(job, Job)
        ]
        for watch in watches:
            watch.wait()
        status = batch.status()
        print(f"-- {status.done} of {status.total} are done")


def follow(question: str, job: Job) -> Watch:
    """Count the chunks of an answer, and print it when it is whole."""
    chunks: list[Chunk] = []

    def on_done(result: Result) -> None:
        print(f"{question} {' '.join(result.text.split())} ({len(chunks)} chunks)")

    def on_error(error: TidemillError) -> None:
        print(f"{question} failed: {error.one_line()}")

    return job.watch(on_token=chunks.append, on_done=on_done, on_error=on_error)


if __name__ == "__main__":
    try:
        main()
    except TidemillError as error:
        raise SystemExit(error.one_line()) from None
