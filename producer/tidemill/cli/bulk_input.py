"""Lines of a bulk input file and the jobs they describe."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from tidemill._request import JobSpec
from tidemill.openai.response_format import structured_fields
from tidemill.protocol.errors import ConfigError, InvalidRequest
from tidemill.protocol.sampling import SamplingParams

MAX_LINE_BYTES = 1 << 20

_FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")
#: Fields of a line that go before the run's defaults.
_OWN = frozenset(SamplingParams.model_fields) | {"prefix_id", "structured", "json_schema"}
#: Names that OpenAI's clients use for ours.
_ALIASES = {"max_completion_tokens": "max_tokens"}


LineKey = tuple[int, str]


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line: its number from 1, its id, and the job or what is wrong with it."""

    number: int
    custom_id: str
    spec: JobSpec | None
    error: str | None = None

    @property
    def key(self) -> LineKey:
        """What tells this line from all others: ids may repeat."""
        return self.number, self.custom_id


@dataclass(frozen=True, slots=True)
class LineReader:
    """Turns lines into jobs.

    A line is a request of OpenAI's batch format ({custom_id, body}), or an object with ``prompt``
    or ``messages``, sampling fields, ``prefix_id`` and what the answer must look like
    (``structured``, ``json_schema`` or ``response_format``), or, with a ``template``, any object
    whose fields fill the template's ``{{name}}`` places.  ``defaults`` are options of every job; a
    line's own fields go before them.
    """

    template: str | None
    id_field: str | None
    model: str | None
    defaults: Mapping[str, Any]
    as_chat: bool = False
    #: Enters every job's idempotency key: names the run, and what must not change within it.
    run_id: str = ""

    def read(self, path: Path) -> Iterator[InputLine]:
        """Yield the non-empty lines of a file, never more than one in memory."""
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield self._parse(number, line)

    def _parse(self, number: int, line: bytes) -> InputLine:
        custom_id = f"line-{number}"
        try:
            row = _load(line)
            custom_id = str(row.get(self.id_field or "custom_id", row.get("id", custom_id)))
            return InputLine(number, custom_id, self._spec(row, number))
        except InvalidRequest as error:
            return InputLine(number, custom_id, None, error.one_line())

    def _spec(self, row: Mapping[str, Any], number: int) -> JobSpec:
        body = row.get("body", row)
        if not isinstance(body, dict):
            raise InvalidRequest("body: it is not an object", field="body")
        if "body" in row and body.get("tools"):
            raise InvalidRequest(
                "tools: the jobs of a file cannot call tools",
                field="tools",
                fix="Leave them out, or turn requests into jobs with tidemill.openai.chat.",
            )
        given = _our_names(body)
        own = {name: v for name, v in given.items() if name in _OWN and v is not None}
        if (structured := structured_fields(given)) is not None:
            own["structured"] = structured
        options = {**self.defaults, **own, "model": self.model or given.get("model")}
        prompt = self._prompt(given)
        text = json.dumps(
            [self.run_id, number, prompt, options], sort_keys=True, ensure_ascii=False
        )
        key = f"bulk-{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
        return JobSpec(prompt, idempotency_key=key, stream=False, **options)

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        if self.template is not None:
            text = _fill(self.template, row)
            return [{"role": "user", "content": text}] if self.as_chat else text
        for field in ("messages", "prompt", "prompt_ids"):
            if row.get(field) is not None:
                return row[field]
        raise InvalidRequest(
            "prompt: the line has neither prompt nor messages",
            field="prompt",
            fix="Add one, or fill a template from other fields with --template.",
        )


def _our_names(body: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {_ALIASES.get(str(k), str(k)): v for k, v in body.items()}
    if isinstance(given.get("logprobs"), bool):
        # In a chat request it is a switch, and the number stands elsewhere.
        given["logprobs"] = (given.get("top_logprobs") or 0) if given["logprobs"] else None
    return given


def count_lines(path: Path) -> int:
    """Return the number of non-empty lines; raises ``ConfigError`` if there is no such file."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in _lines(file) if line.strip())
    except OSError as error:
        raise ConfigError(
            f"the input {str(path)!r} cannot be read: {error.strerror}", fix="Check the path."
        ) from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, each cut off just above the limit: a huge one never fills the memory."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)


def _load(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequest(
            f"line: it is longer than the limit of {MAX_LINE_BYTES} bytes", field="line"
        )
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line: it is not JSON: {error}", field="line") from error
    if not isinstance(row, dict):
        raise InvalidRequest("line: it is not a JSON object", field="line")
    return row


def _fill(template: str, row: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in row:
            raise InvalidRequest(f"{name}: the template needs it, the line lacks it", field=name)
        return str(row[name])

    return _FIELD.sub(value, template)
