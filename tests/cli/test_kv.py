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
    [row] = [line for line in shown.stdout.splitlines() if mill.worker_id in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        mill.worker_id,
        *("1,200", "100", "700", "400", "1,560", "13 of 16", "97.5%"),
        *("1,024 of 4,096", "1,500", "60", "3", "77"),
    ]


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
    assert " - " in tidemill("kv").stdout


def test_without_workers_it_says_so(tidemill: Tidemill) -> None:
    assert tidemill("kv").stdout == "No worker is here.\n"
