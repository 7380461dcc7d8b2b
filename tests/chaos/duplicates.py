"""Delivers function calls twice, as a client does whose first reply was lost."""

import random
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.client import Pipeline


def install(share: float, rng: random.Random) -> None:
    """From now on send ``share`` of the function calls of this process twice.

    The second reply counts.  Pipelines are repeated only if they hold nothing but function calls:
    no other command is promised to be idempotent.
    """
    _wrap_sync(share, rng)
    _wrap_async(share, rng)


def _is_call(name: Any) -> bool:
    return name in ("FCALL", b"FCALL")


def _all_calls(commands: Sequence[Any]) -> bool:
    # redis-py keeps (arguments, options) pairs, its asynchronous twin the same.
    return bool(commands) and all(_is_call(args[0]) for args, _ in commands)


def _wrap_sync(share: float, rng: random.Random) -> None:
    send = redis.Redis._send_command_parse_response
    execute = Pipeline._execute_pipeline

    def send_twice(self: Any, conn: Any, name: Any, *args: Any, **options: Any) -> Any:
        if _is_call(name) and rng.random() < share:
            send(self, conn, name, *args, **options)
        return send(self, conn, name, *args, **options)

    def execute_twice(self: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        if _all_calls(commands) and rng.random() < share:
            execute(self, connection, commands, False)
        return execute(self, connection, commands, raise_on_error)

    redis.Redis._send_command_parse_response = send_twice  # type: ignore[method-assign]
    Pipeline._execute_pipeline = execute_twice  # type: ignore[method-assign]


def _wrap_async(share: float, rng: random.Random) -> None:
    send = redis.asyncio.Redis._send_command_parse_response
    execute = AsyncPipeline._execute_pipeline

    async def send_twice(self: Any, conn: Any, name: Any, *args: Any, **options: Any) -> Any:
        if _is_call(name) and rng.random() < share:
            await send(self, conn, name, *args, **options)
        return await send(self, conn, name, *args, **options)

    async def execute_twice(self: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        if _all_calls(commands) and rng.random() < share:
            await execute(self, connection, commands, False)
        return await execute(self, connection, commands, raise_on_error)

    redis.asyncio.Redis._send_command_parse_response = send_twice  # type: ignore[method-assign]
    AsyncPipeline._execute_pipeline = execute_twice  # type: ignore[method-assign]
