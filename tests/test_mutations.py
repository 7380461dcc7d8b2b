"""The bugs of `make mutation-check` must still be bugs of the present code."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

from mutation import Mutation, Outdated  # noqa: E402
from mutations import MUTATIONS  # noqa: E402

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=list(BY_NAME))
def test_a_bug_can_be_planted_and_its_tests_exist(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text("utf-8")
    assert mutation.mutated(text) != text
    assert mutation.tests
    for test in mutation.tests:
        path, _, name = test.partition("[")[0].partition("::")
        tests = (ROOT / path).read_text("utf-8")
        assert re.search(rf"^(async )?def {name}\(", tests, re.MULTILINE), test


def test_every_bug_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(MUTATIONS) >= 10


def test_a_bug_in_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(Outdated, match=r"a bug: there is no file\.py"):
        Mutation("a bug", "file.py", "old", "new", ("test",)).apply(tmp_path)


def test_a_bug_whose_text_has_changed_is_named() -> None:
    mutation = Mutation("a bug", "file.py", "old", "new", ("test",))
    assert mutation.mutated("an old text") == "an new text"
    for text in ("nothing", "old and old"):
        with pytest.raises(Outdated, match=r"a bug: its text is \d times in file\.py"):
            mutation.mutated(text)
