"""What a worker does with a job that names an adapter."""

from pathlib import Path

import pytest
import redis

from support import shard
from support.lora_files import write_adapter
from support.shard import KEYS
from support.tiny_models import make_tiny_model
from support.worker_rig import make_card, make_request, make_tokenizer, submit
from tidemill.protocol.errors import UnknownAdapter
from tidemill.protocol.messages import AdapterCard, CommandKind
from tidemill.service.prompt import extra_keys, prepare
from tidemill_gpuworker.lora.adapter_files import AdapterFiles
from tidemill_gpuworker.lora.adapters import Adapters
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.lora.layers import LoadedAdapter
from tidemill_gpuworker.shell.claims import Claim, ClaimLoader, Refusal
from tidemill_gpuworker.shell.commands import Command
from tidemill_gpuworker.shell.work_clock import WorkClock

pytestmark = pytest.mark.leaks_keys

SALT = b"\x07" * 16


def load(name: str, files: AdapterFiles) -> LoadedAdapter:
    return LoadedAdapter(name, files.digest, {}, 0)


def claim_of(client: redis.Redis, adapters: Adapters | None, lora: str) -> object:
    tokenizer = make_tokenizer()
    loader = ClaimLoader(
        client, KEYS, "wkr_a", make_card(tokenizer), tokenizer, WorkClock(), adapters=adapters
    )
    job_id = submit(client, make_request((4, 5), lora=lora))
    shard.dispatch(client, job_id, shard.lead(client))
    [claim] = loader.load([Command("1-0", CommandKind.RUN, job_id, 1)])
    return claim


def test_a_claim_holds_the_adapter_and_keeps_its_prefixes_apart(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "x", make_tiny_model("llama-tied"), ("q_proj",))
    adapters = Adapters(LoraConfig(modules=(("poet", directory),)), load)
    digest = adapters.cards[0].digest

    claim = claim_of(redis_client, adapters, "poet")

    assert isinstance(claim, Claim)
    assert claim.adapter is adapters.get("poet")
    assert claim.extra_keys == (("lora:poet", digest), *extra_keys(SALT, "r1", None))


@pytest.mark.parametrize("is_on", [True, False])
def test_a_job_of_an_adapter_that_is_gone_is_refused_for_good(
    redis_client: redis.Redis, is_on: bool
) -> None:
    adapters = Adapters(LoraConfig(), load) if is_on else None

    refusal = claim_of(redis_client, adapters, "poet")

    assert isinstance(refusal, Refusal)
    assert "'poet'" in refusal.failure.reason
    assert not refusal.failure.may_pass


def test_the_producer_hashes_a_prompt_as_the_worker_does() -> None:
    card = make_card(make_tokenizer()).model_copy(
        update={"adapters": (AdapterCard(name="poet", digest="d1", rank=4),)}
    )
    prompt = tuple(range(2, 10)) * 12

    def key(lora: str | None) -> bytes:
        return prepare(make_request(prompt, lora=lora), None, card, SALT).routing_key

    assert key("poet")
    assert key("poet") != key(None)
    with pytest.raises(UnknownAdapter, match="'nobody'"):
        key("nobody")
