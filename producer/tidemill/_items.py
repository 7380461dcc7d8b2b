"""From the items of a ``map`` to jobs: prompts, specs or rows, and the keys they are found by."""

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from tidemill._checks import shown
from tidemill._request import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    JobOptions,
    JobSpec,
    Prompt,
    one_key_for_many,
)
from tidemill.protocol.errors import InvalidRequest, JobCancelled, JobFailed

T = TypeVar("T")

#: The column of a row that holds its prompt, or what makes the prompt of an item.
PromptOf = str | Callable[[T], Prompt | JobSpec]

#: The column of a row that names it, or what makes the name of an item.
KeyOf = str | Callable[[T], object]

#: Columns in which rows have their prompt by custom, the first of them that is there.
_USUAL_COLUMNS = ("messages", "prompt", "prompt_ids")


@dataclass(frozen=True, slots=True)
class ItemReader:
    """How items become jobs with ``options``; jobs with a ``key`` are found again by another run.

    Without ``key`` an item's number is its name; without ``key_prefix`` too it has none.
    """

    options: JobOptions
    prompt: PromptOf[Any] | None = None
    key: KeyOf[Any] | None = None
    key_prefix: str | None = None

    def __post_init__(self) -> None:
        _check_source("prompt", self.prompt)
        _check_source("key", self.key)
        if self.key_prefix is not None and not (
            isinstance(self.key_prefix, str) and self.key_prefix
        ):
            raise InvalidRequest(
                f"key_prefix: {shown(self.key_prefix)!r} is not a text that names a run",
                field="key_prefix",
            )
        if self.options.get("idempotency_key") is not None:
            raise one_key_for_many()

    def spec(self, number: int, item: Any) -> JobSpec:
        """Return the job of the ``number``-th item; raises ``InvalidRequest``."""
        spec = JobSpec.of(self._prompt(item), self.options)
        if not self._gives_keys or spec.has_key:
            return spec
        return spec.with_options({"idempotency_key": self._key(number, item)})

    def retry(self, spec: JobSpec, outcome: object, *, is_new: bool) -> JobSpec | None:
        """Return what to run in place of an earlier run's job for ``spec``, if it did not end well.

        The key of ``spec`` would only find that job again.  The next run goes from key to key in
        the same way, so whatever this one computes is found.
        """
        if is_new or not self._gives_keys or not isinstance(outcome, JobFailed | JobCancelled):
            return None
        key = f"{spec.idempotency_key}~{outcome.job_id}"
        if len(key) > MAX_IDEMPOTENCY_KEY_CHARS:
            key = sha256(key.encode()).hexdigest()
        return spec.with_options({"idempotency_key": key})

    @property
    def _gives_keys(self) -> bool:
        return self.key is not None or self.key_prefix is not None

    def _prompt(self, item: Any) -> Prompt | JobSpec:
        if callable(self.prompt):
            return self.prompt(item)
        if self.prompt is not None:
            prompt: Prompt = _column("prompt", item, self.prompt)
            return prompt
        if not isinstance(item, Mapping):
            plain: Prompt | JobSpec = item
            return plain
        for name in _USUAL_COLUMNS:
            if item.get(name) is not None:
                usual: Prompt = item[name]
                return usual
        raise InvalidRequest(
            f"prompt: a row with {_named(item)} does not say which of them is its prompt",
            field="prompt",
            fix='Give map a column, prompt="question", or a function of the row.',
        )

    def _key(self, number: int, item: Any) -> str:
        if self.key is None:
            name: object = number
        else:
            name = self.key(item) if callable(self.key) else _column("key", item, self.key)
        if name is None or name == "":
            raise InvalidRequest("key: an item has none", field="key", fix="Name each item.")
        return f"{name}" if self.key_prefix is None else f"{self.key_prefix}:{name}"


def check_items(items: object) -> None:
    """Refuse what can be iterated over and is not many items; raises ``InvalidRequest``."""
    kind = type(items).__name__
    if isinstance(items, str | bytes | bytearray | Mapping):
        raise InvalidRequest(
            f"items: {kind} is one thing, not many",
            field="items",
            fix="Give a list of prompts or rows; of a dict of splits, one split.",
        )
    if kind == "DataFrame":
        raise InvalidRequest(
            "items: a DataFrame iterates over its columns",
            field="items",
            fix='Give its rows: df.to_dict("records"), or df.iter_rows(named=True) with Polars.',
        )
    if not isinstance(items, Iterable | AsyncIterable) and not hasattr(items, "__getitem__"):
        raise InvalidRequest(f"items: {kind} cannot be iterated over", field="items")


def _check_source(name: str, source: object) -> None:
    if source is None or callable(source) or (isinstance(source, str) and source):
        return
    raise InvalidRequest(
        f"{name}: {shown(source)!r} is neither a column nor a function of an item", field=name
    )


def _column(option: str, item: Any, name: str) -> Any:
    if not isinstance(item, Mapping):
        raise InvalidRequest(
            f"{option}: {type(item).__name__} has no columns, so none is {name!r}",
            field=option,
            fix="Give a function of an item.",
        )
    if name not in item:
        raise InvalidRequest(
            f"{option}: a row has no column {name!r}, only {_named(item)}", field=option
        )
    return item[name]


def _named(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "no columns"
