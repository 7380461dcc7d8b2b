"""Settings of the scheduler daemon: its command line over the environment."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, get_args

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import ServiceConfig, WebhookConfig, load_webhook_config
from tidemill_scheduler.policy.ageing import DEFAULT_AGE_SECONDS
from tidemill_scheduler.policy.settings import Order

#: Shorter ones would lapse during an ordinary pause of a process.
MIN_LEASE_SECONDS = 0.5
MIN_AGE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Built once in ``__main__``.

    A worker loses its jobs after ``lease_seconds`` without a heartbeat; the leading scheduler is
    replaced after ``leader_lease_seconds`` without one.  ``metrics_port`` None serves no metrics.
    """

    redis_url: str
    shard: str = "00"
    lease_seconds: float = 10.0
    leader_lease_seconds: float = 3.0
    metrics_port: int | None = None
    #: A job that waited so long in its priority class counts as one of the next higher.
    age_seconds: float = DEFAULT_AGE_SECONDS
    #: A worker that says nothing for this share of its lease gets no new jobs.
    silent_share: float = 0.75
    #: "prefix" orders by shared prefixes, "fifo" by arrival alone, to be compared with.
    policy: Order = "prefix"
    #: How long a text job may wait for a worker that serves its model to appear.
    unknown_model_seconds: float = 30.0
    #: Where files and the output of batches are kept; "" for nowhere.
    blob_url: str = ""
    #: Webhooks may go over http, to any port and any address: for development alone.
    allow_private_webhooks: bool = False
    webhooks: WebhookConfig = field(default_factory=lambda: WebhookConfig(None, "", False))

    def __post_init__(self) -> None:
        for name, least in (
            ("lease_seconds", MIN_LEASE_SECONDS),
            ("leader_lease_seconds", MIN_LEASE_SECONDS),
            ("age_seconds", MIN_AGE_SECONDS),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(
                    f"{name} is {value:g}, but must be at least {least:g}",
                    fix=f"Correct --{name.replace('_', '-')}.",
                )

    @property
    def lease_ms(self) -> int:
        """A job's lease in ms."""
        return round(self.lease_seconds * 1000)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError`` in place of an exit with several lines."""
        raise ConfigError(message, fix=f"{self.prog} --help lists the options.")


def parse_arguments(arguments: Sequence[str] | None, service: ServiceConfig) -> SchedulerConfig:
    """Read the command line; raises ``ConfigError`` where it is wrong or names no server."""
    parser = _Parser(
        "tidemill scheduler",
        description="Decide which waiting job of a shard runs next, and where.  The first one"
        " started leads; others stand by and take over within seconds, so run two.",
    )
    parser.add_argument("--redis-url", default=service.redis_url, help="the broker's address")
    parser.add_argument("--shard", default=service.shard, help="two hexadecimal digits")
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=service.lease_seconds,
        help="silence after which a worker loses its jobs; at least twice, better three times"
        " the workers' TIDEMILL_BEAT_SECONDS, or jobs expire while they run (%(default)g)",
    )
    parser.add_argument(
        "--leader-lease-seconds",
        type=float,
        default=3.0,
        help="silence after which a standby takes over from the leader (%(default)g)",
    )
    parser.add_argument(
        "--age-seconds",
        type=float,
        default=DEFAULT_AGE_SECONDS,
        help="wait after which a job counts as one of the next higher priority class (%(default)g)",
    )
    parser.add_argument(
        "--policy",
        choices=get_args(Order),
        default="prefix",
        help="the order of waiting jobs: by shared prefixes, or by arrival alone (%(default)s)",
    )
    parser.add_argument(
        "--allow-private-webhooks",
        action="store_true",
        help="deliver webhooks over http, to any port and any address: for development alone",
    )
    parser.add_argument("--metrics-port", type=int, help="0 takes a free one; none by default")
    options = parser.parse_args(arguments)
    if not options.redis_url:
        raise ConfigError(
            "the scheduler was given no broker",
            fix="Pass --redis-url or set TIDEMILL_REDIS_URL; `tidemill up` does both.",
        )
    return SchedulerConfig(
        **vars(options), webhooks=load_webhook_config(), blob_url=service.blob_url
    )
