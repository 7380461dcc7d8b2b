"""When an endpoint that keeps failing is left alone: pure.

After some failures in a row its circuit is open: nothing is sent to it for a while, and then one
delivery goes first.  An answer closes it; another failure opens it for longer.
"""

#: Failures in a row after which nothing is sent for a while.
FAILURES_TO_OPEN = 5
FIRST_COOLDOWN_MS = 30_000
MAX_COOLDOWN_MS = 15 * 60_000


def cooldown_ms(failures: int) -> int:
    """Return for how long an endpoint is left alone after so many failures in a row."""
    beyond = failures - FAILURES_TO_OPEN
    if beyond < 0:
        return 0
    return min(MAX_COOLDOWN_MS, FIRST_COOLDOWN_MS << min(beyond, 16))
