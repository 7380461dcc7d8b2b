"""Feeds a follower from the log and the channel of its job, on an event loop."""

from tidemill._async_link import AsyncLink
from tidemill._async_rescue import AsyncRescue
from tidemill._async_subscription import Subscription
from tidemill._await_result import ResultFollower
from tidemill._follow import TokenFollower
from tidemill._listener import pass_on, wait_seconds
from tidemill._reads import naming
from tidemill.protocol.errors import JobNotFound, ResultExpired


class AsyncDriver:
    """Does the I/O of one follower; to be closed by the task that uses it."""

    def __init__(
        self,
        link: AsyncLink,
        follower: TokenFollower | ResultFollower,
        rescue: AsyncRescue | None = None,
    ) -> None:
        self._link = link
        self._follower = follower
        self._rescue = rescue
        self._subscription: Subscription | None = None
        self._num_quiet = 0

    async def advance(self, deadline: float | None) -> None:
        """Read if that is due, else wait for a message; ``JobNotFinished`` after ``deadline``."""
        follower = self._follower
        if follower.must_read:
            await self._read(deadline)
            return
        if self._subscription is None:
            self._subscription = self._link.listener.listen(follower.channel)
        seconds = wait_seconds(follower.job_id, deadline, self._num_quiet)
        notice = await self._subscription.get(seconds)
        self._num_quiet = 0 if notice is not None else self._num_quiet + 1
        pass_on(notice, follower)

    def take_arrived(self) -> None:
        """Take the messages that are here already, until one asks for a look at the log."""
        while self._subscription is not None and not self._follower.must_read:
            notice = self._subscription.get_nowait()
            if notice is None:
                return
            pass_on(notice, self._follower)

    async def _read(self, deadline: float | None) -> None:
        follower = self._follower
        try:
            with naming(follower.job_id):
                follower.take_reply(await self._link.read(follower.next_read()))
        except ResultExpired:
            raise
        except JobNotFound:
            if self._rescue is None:
                raise
            await self._rescue.bring_back(deadline)
            follower.start_over()

    def close(self) -> None:
        """Stop listening; to advance again starts it again."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._link.listener.discard(subscription)
