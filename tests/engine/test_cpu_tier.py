"""The CPU tier alone: what it keeps, what it forgets, and what a step may rely on."""

from tidemill_gpuworker.memory.cpu_tier import CpuTier

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(*hashes: bytes, num_slots: int = 3) -> CpuTier:
    """A tier that holds these contents, each stored by a step of its own."""
    tier = CpuTier(num_slots)
    for block_hash in hashes:
        tier.store(block_hash)
        tier.commit_step()
    return tier


def test_a_stored_content_is_found_in_the_slot_it_was_given() -> None:
    tier = CpuTier(2)
    slot = tier.store(A)
    assert slot is not None
    assert (tier.find(A), tier.find(B), tier.num_used) == (slot, None, 1)
    tier.check_integrity()


def test_what_is_here_already_is_not_copied_again() -> None:
    tier = filled(A)
    assert tier.store(A) is None
    assert tier.num_used == 1


def test_what_was_used_longest_ago_makes_room() -> None:
    tier = filled(A, B, C)
    tier.use(A)
    tier.commit_step()
    tier.store(D)
    assert [tier.find(each) is not None for each in (A, B, C, D)] == [True, False, True, True]
    tier.check_integrity()


def test_storing_again_counts_as_use() -> None:
    tier = filled(A, B, C)
    tier.store(A)
    tier.commit_step()
    tier.store(D)
    assert tier.find(A) is not None
    assert tier.find(B) is None


def test_nothing_that_the_step_itself_reads_or_writes_makes_room() -> None:
    tier = filled(A, num_slots=2)
    tier.use(A)
    assert tier.store(B) is not None
    assert tier.store(C) is None
    tier.commit_step()
    assert tier.store(C) is not None


def test_a_failed_step_leaves_nothing_it_was_to_bring_and_all_it_only_read() -> None:
    tier = filled(A)
    tier.use(A)
    tier.store(B)
    tier.rollback_step()
    assert tier.find(A) is not None
    assert tier.find(B) is None
    tier.check_integrity()
    assert [tier.store(each) is not None for each in (B, C)] == [True, True]


def test_a_tier_without_slots_keeps_nothing() -> None:
    tier = CpuTier(0)
    assert tier.store(A) is None
    assert tier.find(A) is None
    tier.check_integrity()
