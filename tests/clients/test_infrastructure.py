"""The table of clients, and what decides whether a client can be run."""

import re
from pathlib import Path

import pytest

from clients import install
from clients.matrix import BEGIN, DOCUMENT, END, Outcome, rows_in, rows_of, with_rows


def outcome(client: str, ran: str, version: str = "1", flaw: str | None = None) -> Outcome:
    return Outcome(client, version, (ran,), flaw, "as it is")


def test_a_client_has_one_row_whatever_the_number_of_its_tests() -> None:
    [one, other] = rows_of([outcome("b", "chat"), outcome("a", "chat"), outcome("b", "stream")])
    assert one.cells == ("b", "1", "chat, stream", "passes", "as it is")
    assert other.client == "a"


def test_a_client_that_failed_once_has_not_passed() -> None:
    told = [outcome("a", "chat"), outcome("a", "", "", "**fails**: it streams")]
    assert rows_of(told)[0].cells == ("a", "1", "chat", "**fails**: it streams", "as it is")


def test_rows_are_read_back_from_the_document_they_were_written_into() -> None:
    rows = {row.client: row for row in rows_of([outcome("b | c", ""), outcome("A", "chat")])}
    written = with_rows(f"before {BEGIN}\nold\n{END} after", rows)
    assert written.startswith("before ") and written.endswith(" after") and "old" not in written
    assert list(rows_in(written)) == ["A", "b / c"]
    assert rows_in(written)["A"] == rows["A"]
    assert with_rows(written, rows_in(written)) == written
    with pytest.raises(ValueError, match="must both be"):
        with_rows("no table", rows)


def test_a_group_whose_requirements_have_changed_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(install, "VENVS", tmp_path / "venvs")
    made: list[str] = []

    def make(group: str) -> None:
        made.append(group)
        (tmp_path / "venvs" / group).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(install, "_install_python", make)
    (tmp_path / "one.txt").write_text("client==1\n")
    assert install.missing("one") == "one is not installed; `make clients` installs it"
    assert install.missing("two") == "there is no two.txt"
    assert install.main(["one"]) == install.main(["one"]) == 0
    assert made == ["one"] and install.missing("one") is None
    (tmp_path / "one.txt").write_text("client==2\n")
    assert install.missing("one") is not None
    assert install.main(["two"]) == 2


def test_the_document_lists_no_client_that_is_not_run_any_more() -> None:
    modules = Path(__file__).parent.glob("test_*.py")
    marker = r'mark\.clients\(\s*"([^"]+)"'
    run = {name for path in modules for name in re.findall(marker, path.read_text())}
    listed = set(rows_in(DOCUMENT.read_text()))
    assert listed and listed <= run


def test_every_requirement_is_pinned_and_names_no_host() -> None:
    for path in install.REQUIREMENTS.glob("*.txt"):
        lines = path.read_text().splitlines()
        assert all("==" in line and "/" not in line for line in lines), path
