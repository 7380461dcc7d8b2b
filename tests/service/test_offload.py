"""Long work is done beside the event loop, which goes on meanwhile, a few pieces at a time."""

import asyncio
import threading

import pytest

from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.service.offload import MAX_AT_ONCE, beside_loop

#: The longest text that a gateway takes.
LONGEST = 1 << 20


async def test_an_event_loop_turns_while_the_longest_text_is_tokenised_and_told_again() -> None:
    tokenizer = byte_level_tokenizer()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def encode() -> tuple[list[int], int]:
        begun_at = turns
        return tokenizer.encode("abc " * (LONGEST // 4)), turns - begun_at

    def decode(ids: list[int]) -> tuple[str, int]:
        begun_at = turns
        return tokenizer.decode(ids), turns - begun_at

    turning = asyncio.create_task(turn())
    ids, turns_of_encoding = await beside_loop(encode)
    text, turns_of_decoding = await beside_loop(lambda: decode(ids))
    turning.cancel()
    assert text == "abc " * (LONGEST // 4)
    # Of a call that keeps the interpreter to itself there is none, or one at its very beginning.
    assert turns_of_encoding > 100 and turns_of_decoding > 20


async def test_few_pieces_run_at_once_and_the_others_in_their_order() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        assert gate.wait(30)
        return number

    pieces = [asyncio.create_task(beside_loop(lambda n=n: work(n))) for n in range(6)]
    while len(begun) < MAX_AT_ONCE:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert sorted(begun) == list(range(MAX_AT_ONCE))
    gate.set()
    assert await asyncio.gather(*pieces) == list(range(6))
    assert sorted(begun) == list(range(6))


async def test_work_that_nobody_waits_for_any_more_keeps_its_place_until_it_is_done() -> None:
    gate = threading.Event()
    pieces = [asyncio.create_task(beside_loop(lambda: gate.wait(30))) for _ in range(MAX_AT_ONCE)]
    await asyncio.sleep(0)
    for piece in pieces:
        piece.cancel()
    await asyncio.gather(*pieces, return_exceptions=True)
    later = asyncio.create_task(beside_loop(lambda: 5))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not later.done()
    gate.set()
    assert await later == 5


async def test_failures_are_told_and_take_no_place() -> None:
    for _ in range(2 * MAX_AT_ONCE):
        with pytest.raises(ZeroDivisionError):
            await beside_loop(lambda: 1 // 0)
    assert await beside_loop(lambda: 1) == 1
