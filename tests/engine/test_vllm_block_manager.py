"""Our block manager beside vLLM's own KVCacheManager (`make vllm-check` makes its environment)."""

from collections import Counter
from collections.abc import Iterator

import pytest

from support.vllm_blocks import VENV_PYTHON, Comparison, VllmProcess
from tidemill_gpuworker.engine.sequence import PriorityClass

pytestmark = [
    pytest.mark.skipif(
        not VENV_PYTHON.exists(), reason="vLLM is not installed here: `make vllm-check` does it"
    ),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(300),
]

NUM_OPERATIONS = 4000


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmProcess]:
    with VllmProcess() as process:
        yield process


@pytest.mark.parametrize("priority", [PriorityClass.STANDARD, PriorityClass.BATCH])
@pytest.mark.parametrize(
    ("num_blocks", "block_size"), [(6, 1), (12, 4), (40, 4), (16, 16), (300, 16)]
)
def test_random_operations_have_the_answers_that_vllm_gives(
    vllm: VllmProcess, num_blocks: int, block_size: int, priority: PriorityClass
) -> None:
    agreed, met = Counter[str](), Counter[str]()
    for seed in range(5):
        comparison = Comparison(
            vllm,
            num_blocks=num_blocks,
            block_size=block_size,
            priority=priority,
            seed=seed,
        )
        comparison.play(NUM_OPERATIONS // 5)
        agreed, met = agreed + comparison.agreed, met + comparison.met
    print(f"\n{agreed.total()} operations agreed: {dict(agreed)}, {dict(met)}")
    assert agreed.total() >= NUM_OPERATIONS
    assert set(agreed) == {"add", "admit", "advance", "append", "preempt", "finish"}
    assert met["hits"] > 20
    assert met["evictions"] > 20


def test_without_prefix_caching_the_same_operations_have_room(vllm: VllmProcess) -> None:
    comparison = Comparison(vllm, num_blocks=12, block_size=4, caching=False, seed=0)
    comparison.play(NUM_OPERATIONS)
    print(f"\n{comparison.agreed.total()} operations agreed: {dict(comparison.agreed)}")
    assert not comparison.met["hits"]
    assert comparison.met["refused admissions"] and comparison.met["refused growth"]
