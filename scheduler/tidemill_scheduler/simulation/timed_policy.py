"""Measures what a policy costs in real time."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tidemill_scheduler.simulation.policy import CacheAware, Hinting, Policy

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TimedPolicy:
    """Passes every call on and adds up the seconds.

    It follows KV events and gives hints only if the policy does.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        #: Seconds spent in the policy.
        self.seconds = 0.0
        self.add_job = self._timed(policy.add_job)
        self.forget = self._timed(policy.forget)
        self.add_worker = self._timed(policy.add_worker)
        self.remove_worker = self._timed(policy.remove_worker)
        self.update_worker = self._timed(policy.update_worker)
        self.tick = self._timed(policy.tick)
        self.sent = self._timed(policy.sent)
        self.dropped = self._timed(policy.dropped)
        if isinstance(policy, CacheAware):
            self.apply_kv = self._timed(policy.apply_kv)
            self.reset_kv = self._timed(policy.reset_kv)
        if isinstance(policy, Hinting):
            self.take_hints = self._timed(policy.take_hints)

    @property
    def is_unfinished(self) -> bool:
        """What the policy says."""
        return self._policy.is_unfinished

    def _timed(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return call
