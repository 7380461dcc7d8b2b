"""What the leader was allowed, the process that works on its batches is allowed too."""

import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from support.shard import KEYS
from tidemill.service.config import load_config
from tidemill.service.runtime import ParentLink
from tidemill_scheduler.batches import keeper
from tidemill_scheduler.batches.duties import batch_duties
from tidemill_scheduler.batches.settings import parse_settings
from tidemill_scheduler.config import parse_arguments


@pytest.mark.parametrize("flags", [[], ["--allow-private-webhooks"]])
def test_the_batch_runner_takes_private_callbacks_if_its_leader_delivers_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.delenv("TIDEMILL_WEBHOOKS_ALLOW_PRIVATE", raising=False)
    started = Mock(spec=subprocess.Popen)
    monkeypatch.setattr(keeper.subprocess, "Popen", started)
    service = load_config({"TIDEMILL_BLOB_URL": f"file://{tmp_path}"})
    config = parse_arguments(["--redis-url", "redis://nowhere", *flags], service)
    [run, _] = batch_duties(Mock(), KEYS, config)
    link = ParentLink()
    run.__self__._start(link)  # type: ignore[attr-defined]  # a bound method
    link.close()
    command = started.call_args.args[0]
    told = command[command.index("tidemill_scheduler.batches") + 1 :]
    assert told == flags
    assert parse_settings(told).allow_private_webhooks is bool(flags)
