"""What an API key may submit in a minute: charged as it is accepted, told in headers."""

from collections.abc import Mapping, Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.gateway.identity import Identity
from tidemill.gateway.state import GatewayState
from tidemill.protocol.calls import NewJob
from tidemill.protocol.calls.access import Charged, KeyLimits
from tidemill.protocol.errors import RateLimited, TidemillError
from tidemill.protocol.messages import Usage

_STATE = "key_limits"
_KINDS = ("limit", "remaining", "reset")
#: What scripts of browsers may read too.
HEADERS = tuple(f"x-ratelimit-{kind}-{unit}" for unit in ("requests", "tokens") for kind in _KINDS)


class KeyAccount:
    """What one request takes from its key.

    A job's tokens are those of its prompt and the most that it may write; what it did not write
    comes back where the gateway hears of its end.  A prompt that was not computed for certain comes
    back as well, one of which nothing is known does not.
    """

    def __init__(self, state: GatewayState, identity: Identity, request: Request) -> None:
        self._state, self._identity, self._request = state, identity, request
        self._taken: dict[str, int] = {}
        #: Of jobs whose prompt nobody has counted: what was taken for it.
        self._uncounted: dict[str, int] = {}

    async def take_request(self) -> None:
        """Take one request; raises ``RateLimited``, also while tokens are owed."""
        await self._take(requests=1)

    async def take_jobs(self, jobs: Sequence[NewJob]) -> None:
        """Take the tokens of jobs that are about to be submitted; raises ``RateLimited``."""
        if self._identity.limits.tokens is None:
            return
        taken = {job.job_id: job.num_tokens for job in jobs}
        await self._take(tokens=sum(taken.values()))
        self._taken |= taken
        self._uncounted |= {
            job.job_id: max(0, job.num_tokens - job.max_output) for job in jobs if not job.cost
        }

    def settle(self, job_id: str, usage: Usage) -> None:
        """Give back what a job that has ended did not use."""
        prompt = usage.prompt_tokens or self._uncounted.get(job_id, 0)
        self._give_back(self._taken.pop(job_id, 0) - prompt - usage.completion_tokens)

    def settle_nothing(self) -> None:
        """Give everything back: the jobs were refused."""
        self._give_back(sum(self._taken.values()))
        self._taken.clear()

    async def _take(self, *, requests: int = 0, tokens: int = 0) -> None:
        identity = self._identity
        charged = await self._state.charge(identity, requests=requests, tokens=tokens)
        if charged is None:
            return
        self._request.scope["state"][_STATE] = headers_of(identity.limits, charged)
        if charged.is_refused:
            raise _used_up(identity.limits, charged)

    def _give_back(self, tokens: int) -> None:
        if tokens > 0:
            self._state.spawn(self._return(tokens), "giving tokens back to an API key")

    async def _return(self, tokens: int) -> None:
        await self._state.charge(self._identity, tokens=-tokens)


class KeyLimitHeaders:
    """ASGI middleware: tells in OpenAI's headers what the caller's key has left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and _STATE in state:
                MutableHeaders(scope=message).update(state[_STATE])
            await send(message)

        await self._app(scope, receive, send_with_limits)


def headers_of(limits: KeyLimits, charged: Charged) -> Mapping[str, str]:
    """Return the headers that tell what is left of a key's minute."""
    lefts = {
        "requests": (limits.requests, charged.requests_left),
        "tokens": (limits.tokens, charged.tokens_left),
    }
    headers = {}
    for unit, (limit, left) in lefts.items():
        if limit is None or left is None:
            continue
        full_again = 60 * (limit - left) / limit if limit else 60.0
        headers[f"x-ratelimit-limit-{unit}"] = str(limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(max(0, left))
        headers[f"x-ratelimit-reset-{unit}"] = span(full_again)
    return headers


def span(seconds: float) -> str:
    """Return a length of time as OpenAI writes it: ``20ms``, ``1.5s``, ``6m0s``."""
    ms = max(0, round(seconds * 1000))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    told = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{told}s" if minutes else f"{told}s"


def _used_up(limits: KeyLimits, charged: Charged) -> TidemillError:
    limit = limits.tokens if charged.lacking == "tokens" else limits.requests
    return RateLimited(
        f"the API key allows {limit} {charged.lacking} a minute",
        retry_after_seconds=charged.wait_ms / 1000,
        fix="Send fewer, or ask for a key that allows more.",
        unit=charged.lacking,
    )
