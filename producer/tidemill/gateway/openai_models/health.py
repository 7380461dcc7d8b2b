"""What probes are told."""

from tidemill.gateway.openai_models.base import ApiResponse


class Version(ApiResponse):
    """The version of the gateway."""

    version: str


class Load(ApiResponse):
    """The number of requests that are being answered."""

    server_load: int
