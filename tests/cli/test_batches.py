"""``tidemill batch``."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result as Outcome

from support.actors import Troupe
from support.batch_shop import jsonl, request_line, serving
from tidemill import ConfigError, InvalidRequest
from tidemill.protocol.errors import NoSuchObject

Tidemill = Callable[..., Outcome]


@pytest.fixture
def runner(redis_url: str, tmp_path: Path) -> Iterator[None]:
    """A batch runner on the store that the commands use."""
    troupe = Troupe(tmp_path)
    troupe.start("support.batch_runner:main", redis_url, str(tmp_path / "data" / "blobs"))
    yield
    troupe.close()


def write(path: Path, *lines: object) -> str:
    path.write_bytes(jsonl(lines))
    return str(path)


def test_a_batch_is_submitted_waited_for_and_fetched(
    tidemill: Tidemill, redis_client: object, redis_url: str, runner: None, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl", *(request_line(n) for n in range(5)), request_line(9, prompt=[])
    )
    with serving(redis_url):
        done = tidemill("batch", "submit", source, "--wait", "--metadata", "run=1")
    assert done.exit_code == 0, done.output
    batch_id = done.stdout.splitlines()[0]
    assert f"{batch_id} completed: 5 answered, 1 failed of 6" in done.stdout
    answers = tmp_path / "out.jsonl"
    assert tidemill("batch", "output", batch_id, "-o", str(answers)).exit_code == 0
    ids = {json.loads(line)["custom_id"] for line in answers.read_text().splitlines()}
    assert ids == {f"id-{n}" for n in range(5)}
    failed = tidemill("batch", "output", batch_id, "--errors").stdout
    assert json.loads(failed)["custom_id"] == "id-9"
    told = json.loads(tidemill("batch", "status", batch_id, "--json").stdout)
    assert (told["status"], told["metadata"]) == ("completed", {"run": "1"})
    assert batch_id in tidemill("batch", "list").stdout


def test_an_invalid_input_is_told_line_by_line(
    tidemill: Tidemill, redis_client: object, runner: None, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", request_line(1), request_line(1), b"nonsense")
    done = tidemill("batch", "submit", source, "--wait")
    assert done.exit_code == 1
    assert "line 2: duplicate_custom_id" in done.stdout
    assert "line 3: invalid_json_line" in done.stdout


def test_a_batch_that_nobody_works_on_is_cancelled_and_has_no_output_yet(
    tidemill: Tidemill, redis_client: object, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", request_line(1))
    batch_id = tidemill("batch", "submit", source, "--window", "2h").stdout.strip()
    assert "validating" in tidemill("batch", "status", batch_id).stdout
    assert isinstance(tidemill("batch", "output", batch_id).exception, ConfigError)
    assert tidemill("batch", "cancel", batch_id).stdout == "cancelling\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--window", "soon"], InvalidRequest),
        (["--endpoint", "/v1/other"], InvalidRequest),
        (["--metadata", "novalue"], ConfigError),
    ],
)
def test_what_cannot_be_a_batch_is_refused(
    tidemill: Tidemill,
    redis_client: object,
    tmp_path: Path,
    options: list[str],
    error: type[Exception],
) -> None:
    source = write(tmp_path / "in.jsonl", request_line(1))
    assert isinstance(tidemill("batch", "submit", source, *options).exception, error)


def test_a_file_without_an_endpoint_and_an_unknown_batch_are_told(
    tidemill: Tidemill, redis_client: object, tmp_path: Path
) -> None:
    refused = tidemill("batch", "submit", write(tmp_path / "in.jsonl", b"x")).exception
    assert isinstance(refused, ConfigError) and "--endpoint" in refused.fix
    absent = tidemill("batch", "submit", str(tmp_path / "absent")).exception
    assert isinstance(absent, ConfigError)
    assert isinstance(tidemill("batch", "wait", "batch_0").exception, NoSuchObject)
