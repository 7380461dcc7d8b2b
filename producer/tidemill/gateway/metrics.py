"""What Prometheus is told of a gateway, and the middleware that counts."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.gateway.errors import CLIENT_GONE_STATUS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """The collectors of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tidemill_gateway_requests",
            "Requests answered, by route and status; 499 where the client left first.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tidemill_gateway_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "tidemill_gateway_open_requests",
            "Requests that are being answered.",
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "tidemill_gateway_time_to_first_token_seconds",
            "Time from a request's headers to the first token of its stream.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "tidemill_gateway_tokens",
            "Tokens in answers told, by kind: prompt, cached (of the prompt's), completion.",
            ("kind",),
            registry=self.registry,
        )
        self.cancelled_jobs = Counter(
            "tidemill_gateway_cancelled_jobs",
            "Jobs cancelled because their client had left.",
            registry=self.registry,
        )
        self.num_open = 0

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        self.open_requests.set(self.num_open)
        return generate_latest(self.registry)


class Counting:
    """ASGI middleware: counts requests, by the route that took them, and times them."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at, status = time.monotonic(), CLIENT_GONE_STATUS
        scope.setdefault("state", {})["began_at"] = began_at

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.num_open += 1
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._metrics.num_open -= 1
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if route != "unmatched" else "any"
            self._metrics.requests.labels(route, method, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - began_at)
