"""Run a dataset through a model: start ``tidemill up``, then run this file, and run it again.

The second run computes nothing: the rows' jobs are found by ``key_prefix`` and their ids.  Stop the
first one with Ctrl-C: the next goes on where it was.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tidemill import Producer, TidemillError

RIVERS = ["Amazon", "Congo", "Danube", "Ganges", "Mekong", "Mississippi", "Nile", "Volga"]


def rows(path: Path | None) -> Iterable[dict[str, Any]]:
    """Return the rows of a JSONL file, one at a time, or some of our own.

    A dataset of Hugging Face does as well, streamed or not; so does any other iterable.
    """
    if path is None:
        return [{"id": name.lower(), "river": name} for name in RIVERS]
    return _lines(path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def ask(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row's prompt: what all rows share goes first, so that it is computed once."""
    return [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": f"Where does the {row['river']} flow?"},
    ]


def main() -> None:
    """Answer each row once, and tell how many answers were there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="JSONL with the fields id and river")
    parser.add_argument("--run", default="rivers-1", help="name of the run: another computes anew")
    arguments = parser.parse_args()
    failed = 0
    with Producer() as producer:
        answers = producer.map(
            rows(arguments.path),
            prompt=ask,
            key="id",
            key_prefix=arguments.run,
            with_items=True,
            return_exceptions=True,
            progress=True,
            priority=1,
            max_tokens=24,
            temperature=0,
        )
        for row, answer in answers:
            if isinstance(answer, TidemillError):
                failed += 1
                print(f"{row['id']}: failed: {answer.one_line()}")
            else:
                print(f"{row['id']}: {' '.join(answer.text.split())} ({answer.job_id})")
    if failed:
        print(f"-- {failed} failed; run it again, and they alone are tried again")


if __name__ == "__main__":
    try:
        main()
    except TidemillError as error:
        raise SystemExit(error.one_line()) from None
