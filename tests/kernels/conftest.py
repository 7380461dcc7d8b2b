"""Keep apart the kernel tests that cannot share a process.

Triton reads TRITON_INTERPRET when a kernel is decorated, so one process can either interpret
kernels (`TRITON_INTERPRET=1 pytest tests/kernels -m interpret`) or compile them (everything else).
"""

import os

import pytest

_OTHER_PROCESS = "compile_only" if os.environ.get("TRITON_INTERPRET") == "1" else "interpret"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    misplaced = [item for item in items if item.get_closest_marker(_OTHER_PROCESS)]
    if misplaced:
        config.hook.pytest_deselected(items=misplaced)
        items[:] = [item for item in items if item not in misplaced]
