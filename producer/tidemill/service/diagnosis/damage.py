"""What stands in a shard's keys that nothing of Tidemill can read."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.settings import bad_settings
from tidemill.protocol.stored import damaged_fields, damaged_names, shown, stored_number
from tidemill.service.diagnosis.finding import Finding, Level, ok
from tidemill.service.diagnosis.replies import read

_NUM_EXAMPLES = 5
#: Members of one index that are looked at in one go.
_MAX_MEMBERS = 5000


@dataclass(frozen=True, slots=True)
class Damage:
    """What cannot be read, in words, by where it is."""

    counters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def read_damage(client: redis.Redis, keys: ShardKeys) -> Damage:
    """Look for unreadable counters, names and settings."""
    indexes = (keys.workers, keys.models, keys.active_queues)
    counters, settings, epoch, ended, *names = read(
        client,
        [
            ("HGETALL", keys.counters),
            ("HGETALL", keys.settings),
            ("GET", keys.epoch),
            ("ZRANGE", keys.ended, 0, _MAX_MEMBERS - 1),
            *(("ZRANGE", index, 0, _MAX_MEMBERS - 1) for index in indexes),
        ],
    )
    bad_epoch = [f"{keys.epoch} = {shown(epoch)}"] if stored_number(epoch) is None else []
    return Damage(
        counters=(*damaged_fields(counters), *bad_epoch),
        names=tuple(
            f"{name} in {index}"
            for index, members in zip(indexes, names, strict=True)
            for name in damaged_names(members)
        ),
        ended=tuple(shown(member) for member in ended if kept_bytes(member) is None),
        settings=tuple(bad_settings(settings)),
    )


def kept_bytes(member: bytes) -> int | None:
    """Return the size in a member ``<bytes> <job> <tenant>`` of the ended jobs, None in others."""
    size, space, _ = member.partition(b" ")
    return stored_number(size) if size and space else None


def check_damage(keys: ShardKeys, damage: Damage) -> list[Finding]:
    """Judge what was found."""
    return [
        _judge(
            "damaged counters",
            damage.counters,
            Level.FAILURE,
            f"Take each off with HDEL {keys.counters} FIELD (of {keys.epoch}: DEL), then correct"
            " what the check `counters` says.",
        ),
        _judge(
            "damaged names",
            damage.names,
            Level.FAILURE,
            "They are no UTF-8 and nothing of Tidemill's: take each off its index with ZREM.",
        ),
        _judge(
            "damaged ended jobs",
            damage.ended,
            Level.FAILURE,
            f"They are not `<bytes> <job> <tenant>`: take each off with ZREM {keys.ended} MEMBER.",
        ),
        _judge(
            "settings",
            damage.settings,
            Level.WARNING,
            "They do not hold: no such name, or no whole number from 0. See `tidemill tenant list`;"
            f" set them again or take them off with HDEL {keys.settings} FIELD.",
        ),
    ]


def _judge(check: str, found: Sequence[str], level: Level, fix: str) -> Finding:
    if not found:
        return ok(check, "none" if level is Level.FAILURE else "all can be used")
    more = ", ..." if len(found) > _NUM_EXAMPLES else ""
    return Finding(check, level, f"{len(found)}: {', '.join(found[:_NUM_EXAMPLES])}{more}", fix)
