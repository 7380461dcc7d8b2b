"""What the clients of several tenants use together: connections by shard, and tokenizers."""

from tidemill._async_link import AsyncLinks
from tidemill._endpoint import Endpoint
from tidemill.service.config import load_config
from tidemill.service.tokenizer_cache import TokenizerStore


class AsyncShared:
    """Owned by whoever makes the clients: they leave its connections open when they close."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._links: dict[str, AsyncLinks] = {}
        self.tokenizers = TokenizerStore(load_config().cache_dir)

    def links(self, endpoint: Endpoint) -> AsyncLinks:
        """Return the connections for a client of this endpoint."""
        shard = endpoint.keys.shard
        if shard not in self._links:
            self._links[shard] = AsyncLinks(endpoint, self._timeout)
        return self._links[shard]

    async def close(self) -> None:
        """Close all connections."""
        while self._links:
            await self._links.popitem()[1].close()
