"""Settings of deliveries: a command line over the environment."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tidemill.protocol.errors import ConfigError
from tidemill.service.broker_url import is_cluster
from tidemill.service.config import ServiceConfig, WebhookConfig, load_config, load_webhook_config
from tidemill_webhooks.settings import DeliverySettings
from tidemill_webhooks.signing import check_secret


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Built once in ``__main__``; ``shards`` are those whose deliveries are made here."""

    redis_url: str
    rq_url: str
    shards: tuple[str, ...]
    delivery: DeliverySettings
    metrics_port: int | None = None


def delivery_settings(config: WebhookConfig, *, allow_private: bool = False) -> DeliverySettings:
    """Return how to deliver; raises ``ConfigError`` for a secret that is none."""
    if config.secret:
        check_secret(config.secret)
    return DeliverySettings(
        allow_private=allow_private or config.allow_private, operator_secret=config.secret
    )


def queue_url(config: WebhookConfig, redis_url: str) -> str | None:
    """Return where RQ keeps its queue; None where it has no server that it can use."""
    if config.rq_url:
        return config.rq_url
    return None if is_cluster(redis_url) else redis_url


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError`` in place of an exit with several lines."""
        raise ConfigError(message, fix=f"{self.prog} --help lists the options.")


def worker_config(
    arguments: Sequence[str] = (), service: ServiceConfig | None = None
) -> WorkerConfig:
    """Read the command line; raises ``ConfigError``."""
    service = service or load_config()
    parser = _Parser("tidemill webhooks worker", description="Delivers webhooks from RQ's queue.")
    parser.add_argument("--redis-url", default=service.redis_url, help="the broker's address")
    parser.add_argument("--metrics-port", type=int, help="0 takes a free one; none by default")
    parser.add_argument(
        "--allow-private-webhooks",
        action="store_true",
        help="deliver over http, to any port and any address: for development alone",
    )
    options = parser.parse_args(arguments)
    if not options.redis_url:
        raise ConfigError(
            "the worker was given no broker", fix="Pass --redis-url or set TIDEMILL_REDIS_URL."
        )
    webhooks = load_webhook_config()
    rq_url = queue_url(webhooks, options.redis_url)
    if rq_url is None:
        raise ConfigError(
            "RQ cannot work on a cluster",
            fix="Set TIDEMILL_RQ_URL to a server of its own; without one the scheduler delivers.",
        )
    return WorkerConfig(
        redis_url=options.redis_url,
        rq_url=rq_url,
        shards=service.shards,
        delivery=delivery_settings(webhooks, allow_private=options.allow_private_webhooks),
        metrics_port=options.metrics_port,
    )
