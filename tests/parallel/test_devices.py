"""What ranks do about their devices, as far as that can be told without a GPU."""

import socket
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.golden_models import make_golden_model, save_golden_model
from tidemill.protocol.errors import ConfigError, EngineFailed
from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.parallel import follower, orders
from tidemill_gpuworker.parallel.channel import Channel
from tidemill_gpuworker.parallel.collectives import NO_COLLECTIVES, ProcessGroup, backend_of
from tidemill_gpuworker.parallel.follower import Follower
from tidemill_gpuworker.parallel.followers import LoadOrder, NoFollowers
from tidemill_gpuworker.parallel.leading_model import LeadingModel
from tidemill_gpuworker.parallel.setup import make_team
from tidemill_gpuworker.parallel.shard import Place, Shard, place_of
from tidemill_gpuworker.parallel.team import device_of

CPU = torch.device("cpu")


class Calls:
    """Takes the place of ``torch.distributed`` and notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.groups: list[list[int]] = []
        self.ends: list[str] = []
        monkeypatch.setattr(dist, "init_process_group", self.init)
        monkeypatch.setattr(dist, "new_group", lambda ranks, **_: self.groups.append(ranks))
        monkeypatch.setattr(dist, "destroy_process_group", lambda: self.ends.append("destroy"))
        monkeypatch.setattr(
            dist.distributed_c10d, "_abort_process_group", lambda: self.ends.append("abort")
        )

    def init(self, backend: str, **options: Any) -> None:
        self.options = {"backend": backend, **options}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def join(rank: int, device: torch.device) -> ProcessGroup:
    return ProcessGroup(
        rank=rank, tensor_size=2, num_stages=2, device=device, store="/s", timeout_seconds=9
    )


def test_gpus_compute_together_over_nccl_each_rank_on_its_own(calls: Calls) -> None:
    group = join(3, torch.device(device_of("cuda", 3)))
    options = calls.options
    assert (options["backend"], options["device_id"]) == ("nccl", torch.device("cuda", 3))
    assert (options["rank"], options["world_size"]) == (3, 4)
    assert options["timeout"].total_seconds() == 9
    assert calls.groups == [[0, 1], [2, 3]]
    assert group.place == Place(Shard(1, 2), Shard(1, 2))


def test_cpus_compute_together_over_gloo(calls: Calls) -> None:
    join(1, torch.device(device_of("cpu", 1)))
    assert (calls.options["backend"], calls.options["device_id"]) == ("gloo", None)
    assert backend_of(CPU) == "gloo"


def test_the_wait_for_a_rank_that_is_gone_is_ended_once_and_on_gpus_alone(calls: Calls) -> None:
    gpus, cpus = join(0, torch.device("cuda", 0)), join(0, CPU)
    cpus.abort()
    assert calls.ends == []
    gpus.abort()
    gpus.close()
    assert calls.ends == ["abort"]
    cpus.close()
    cpus.close()
    assert calls.ends == ["abort", "destroy"]


def test_a_rank_takes_its_device_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"take {device}"))

    def make_group(**options: Any) -> SimpleNamespace:
        done.append(f"meet on {options['device']}")
        return SimpleNamespace(place=place_of(1, 2, 1))

    monkeypatch.setattr(follower, "ProcessGroup", make_group)
    monkeypatch.setattr(follower, "select_backend", lambda device: done.append(f"run on {device}"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Follower(Channel(theirs, "the leader"), joining(rank=1, tensor_size=2, device="cuda:1"))
        assert Channel(ours, "rank 1").receive() == (orders.DONE, {})
    assert done == ["take cuda:1", "meet on cuda:1", "run on cuda:1"]


def joining(**changes: Any) -> dict[str, Any]:
    fields = {"rank": 0, "tensor_size": 1, "num_stages": 1, "device": "cpu", "store": "/unused"}
    return {**fields, "timeout_seconds": 9, "num_threads": None, **changes}


@pytest.mark.parametrize("lacks", ["room", "memory"])
def test_a_rank_whose_device_has_no_room_says_so(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_golden_model(make_golden_model("llama untied"), tmp_path)
    order = LoadOrder(tmp_path, "native", None, False, "float32", 16, 64, 64)
    num_blocks = 1 << 40
    if lacks == "memory":

        def run_out(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        num_blocks = 8
        monkeypatch.setattr(follower, "make_kv_cache", run_out)
    cache = {"num_blocks": num_blocks, "num_slots": 0, "dtype": "float32"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader = Channel(ours, "the rank")
        rank = Follower(Channel(theirs, "the leader"), joining(store=str(tmp_path / "store")))
        try:
            leader.send(orders.LOAD, {**asdict(order), "model_dir": str(tmp_path)})
            leader.send(orders.CACHE, cache)
            with pytest.raises((ConfigError, EngineFailed)):
                rank.run()
        finally:
            rank._group.close()
        answers = [leader.receive() for _ in range(3)]
    assert [name for name, _ in answers] == [orders.DONE, orders.DONE, orders.FAILED]
    named = {"room": "does not fit", "memory": "cpu has no memory left"}
    assert named[lacks] in answers[-1][1]["error"]


class LosesARank(NoFollowers):
    """Ranks of which one goes while a step is computed."""

    place = place_of(0, 2, 1)

    def __init__(self) -> None:
        self.is_lost = False

    def check(self) -> None:
        """Raise once it is gone."""
        if self.is_lost:
            raise EngineFailed("rank 1 ended", fix="Start it again.")


class Part:
    """Half a model, which computes what was left in memory once the other half is gone."""

    head_is_split = True

    def __init__(self, ranks: LosesARank) -> None:
        self._ranks = ranks

    def __call__(self, inputs: StepInputs, cache: Any, backend: Any) -> torch.Tensor:
        """Not called."""
        raise AssertionError("the test computes logits alone")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Lose the rank."""
        self._ranks.is_lost = True
        return hidden


def test_what_was_computed_while_a_rank_went_is_never_told() -> None:
    ranks = LosesARank()
    assert ranks.collectives is NO_COLLECTIVES
    model = LeadingModel(Part(ranks), 5, ranks)
    assert model.logits(torch.zeros(0, 4)).shape == (0, 5)
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        model.logits(torch.zeros(2, 5))


def test_gpus_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config: Any = SimpleNamespace(
        num_ranks=2,
        lora=None,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        max_step_seconds=60.0,
        num_threads=None,
    )
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="without NCCL"):
        make_team(config, "cuda")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    team = make_team(config, "cuda")
    assert team is not None and team.size == 2
