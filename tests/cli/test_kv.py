"""``tidemill kv``."""

import json
from collections.abc import Callable

import pytest
from click.testing import Result as Outcome

from support.fake_mill import FakeMill

Tidemill = Callable[..., Outcome]

USE = {
    "num_blocks": 1200,
    "block_size": 16,
    "used_blocks": 100,
    "cached_blocks": 700,
    "empty_slots": 40,
    "most_empty_slots": 13,
    "swap_blocks": 4096,
    "used_swap_blocks": 1024,
    "swapped_out": 1500,
    "swapped_in": 60,
    "forked": 3,
    "evicted": 77,
}


@pytest.mark.leaks_keys
def test_each_worker_tells_what_it_holds_and_what_of_it_in_vain(
    tidemill: Tidemill, mill: FakeMill
) -> None:
    mill.report(kv=USE)

    shown = tidemill("kv")

    assert shown.exit_code == 0, shown.exception
    assert shown.stdout.splitlines()[:6] == [
        mill.worker_id,
        "  waste  utilisation 97.5%, at most 13 of 16 slots empty per job",
        "  blocks 1,200: 100 used, 700 cached, 400 free",
        "  tokens 1,560 in used blocks",
        "  swap   1,024 of 4,096 blocks; 1,500 went out, 60 came in",
        "  moves  3 forked, 77 evicted",
    ]


@pytest.mark.leaks_keys
def test_a_large_cache_can_be_read_on_80_columns(
    tidemill: Tidemill, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = {name: value * 10**4 for name, value in USE.items()}
    mill.report(kv=large | {"block_size": 128, "most_empty_slots": 127})

    lines = tidemill("kv").stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert "  blocks 12,000,000: 1,000,000 used, 7,000,000 cached, 4,000,000 free" in lines
    assert lines[4].endswith("40,960,000 blocks; 15,000,000 went out, 600,000 came in")


@pytest.mark.leaks_keys
def test_figures_come_as_json_too(tidemill: Tidemill, mill: FakeMill) -> None:
    mill.report(kv=USE)
    told = json.loads(tidemill("kv", "--json").stdout)
    derived = {"free_blocks": 400, "num_tokens": 1560, "utilisation": 0.975}
    assert told == {mill.worker_id: USE | derived}


@pytest.mark.leaks_keys
def test_a_worker_that_tells_nothing_of_a_cache_has_dashes(
    tidemill: Tidemill, mill: FakeMill
) -> None:
    mill.report()
    assert json.loads(tidemill("kv", "--json").stdout) == {mill.worker_id: None}
    assert "  waste  -" in tidemill("kv").stdout


def test_without_workers_it_says_so(tidemill: Tidemill) -> None:
    assert tidemill("kv").stdout == "No worker is here.\n"
