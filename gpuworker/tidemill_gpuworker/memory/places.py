"""Where the content of a logical block is: in a block of the device, in host memory, or nowhere.

A *place* is one integer, as block tables hold many of them: a physical block from 0 up,
``NO_BLOCK``, or a slot of the CPU tier.
"""

from collections.abc import Callable

#: No query will read this logical block any more: it is wholly outside the model's window.
NO_BLOCK = -1


def place_of_slot(slot: int) -> int:
    """Return the place that stands for a slot of the CPU tier."""
    return NO_BLOCK - 1 - slot


def slot_of(place: int) -> int | None:
    """Return the slot of the CPU tier that ``place`` stands for; None if it is none."""
    return NO_BLOCK - 1 - place if place < NO_BLOCK else None


def longest_chain(limit: int, find: Callable[[int], int | None]) -> list[int]:
    """Return the places of the first blocks, up to ``limit`` or the first one not found."""
    places: list[int] = []
    for index in range(limit):
        place = find(index)
        if place is None:
            break
        places.append(place)
    return places


def longest_windowed_chain(
    limit: int, first_needed: Callable[[int], int], find: Callable[[int], int | None]
) -> list[int]:
    """Return the longest prefix whose *needed* blocks are found; the others are ``NO_BLOCK``.

    ``first_needed(n)`` is the first block that whatever comes after ``n`` blocks still reads.
    """
    end = limit
    places: list[int] = []
    index = limit - 1
    while index >= first_needed(end) and index >= 0:
        place = find(index)
        if place is None:
            end, places = index, []
        else:
            places.append(place)
        index -= 1
    return [NO_BLOCK] * (end - len(places)) + places[::-1]
