"""Thousands of requests through one engine, with cancels, failed steps and preemptions."""

import pytest
import torch

from support.engine_soak import MAX_GROWTH_BYTES, SETTINGS, Setting, Soak, main
from support.soak_parts import real_parts


def check_that_all_happened(soak: Soak, *, at_least: int) -> None:
    figures = soak.figures()
    names = ["cancelled", "preemptions", "single", "several", "beams", "blocks forked"]
    names += ["blocks swapped in", "blocks swapped out"]
    if soak.fake is not None:
        names.append("failed steps")
    if soak.setting.speculates:
        names.append("guesses accepted")
    too_rare = {name: figures.get(name, 0) for name in names if figures.get(name, 0) < at_least}
    assert not too_rare


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_block_and_no_token_is_lost_whatever_happens(setting: Setting) -> None:
    soak = Soak(setting, num_requests=300)

    soak.run()

    check_that_all_happened(soak, at_least=5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_block_and_no_memory_is_lost_in_ten_thousand_requests(setting: Setting) -> None:
    soak = Soak(setting, num_requests=10_000)

    soak.run()

    check_that_all_happened(soak, at_least=100)
    assert soak.growth_bytes < MAX_GROWTH_BYTES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_block_and_no_memory_is_lost_with_real_tensors(setting: Setting) -> None:
    before = torch.get_num_threads()
    try:
        soak = Soak(setting, num_requests=2_000, parts=real_parts())
        soak.run()
    finally:
        torch.set_num_threads(before)

    check_that_all_happened(soak, at_least=5)
    assert soak.growth_bytes < MAX_GROWTH_BYTES


def test_the_command_tells_the_resident_set_of_each_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--requests", "40"]) == 0

    told = capsys.readouterr().out
    for setting in SETTINGS:
        assert f"{setting}: every step free + used = 60 blocks" in told
    assert told.count("(middle)") == told.count("(end)") == len(SETTINGS)
    assert told.endswith("memory is flat\n")
