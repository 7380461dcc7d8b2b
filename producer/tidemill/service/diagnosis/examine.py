"""The whole examination: read the facts, judge them."""

import redis

from tidemill.protocol.keys import ShardKeys
from tidemill.service.diagnosis.damage import check_damage
from tidemill.service.diagnosis.finding import Finding
from tidemill.service.diagnosis.keyspace import check_census
from tidemill.service.diagnosis.scan import DEFAULT_MAX_KEYS, take_census
from tidemill.service.diagnosis.server import check_server_facts, read_server
from tidemill.service.diagnosis.shard import check_shard_facts
from tidemill.service.diagnosis.shard_facts import read_shard


def examine(
    client: redis.Redis, keys: ShardKeys, *, max_keys: int = DEFAULT_MAX_KEYS
) -> list[Finding]:
    """Examine a server and one shard on it; changes nothing.

    Raises ``BrokerUnavailable``, or ``BrokerError`` where this user may not read at all.
    """
    server = check_server_facts(read_server(client))
    facts = read_shard(client, keys)
    return [
        *server,
        *check_shard_facts(facts),
        *check_damage(keys, facts.damage),
        *check_census(take_census(client, keys, max_keys)),
    ]
