"""When Python looks for garbage: seldom, because each look at everything holds up all streams."""

import gc

#: Objects that are made, less those that went by themselves, before the youngest are looked at.
#: Python's own 700 lets two thousand streams that begin be looked at nine times from end to end.
_YOUNG = 5_000
#: Looks at one age before the next is looked at too; as in Python 3.11.
_LOOKS = 10


def collect_seldom() -> None:
    """Leave alone what has been made until now, and look at the rest less often.

    A look at all objects of two thousand streams takes a quarter of a second, in which nothing
    else happens.  Garbage waits longer for it: some tens of MiB more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _LOOKS, _LOOKS)
