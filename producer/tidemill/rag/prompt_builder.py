"""From a template, retrieved chunks and questions to prompts; pure."""

import re
from collections.abc import Mapping, Sequence

from tidemill.protocol.errors import InvalidRequest
from tidemill.rag._checks import check_count, check_jobs, check_rows, check_text, written
from tidemill.rag.chunk_order import canonical_order

_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_CHUNKS = "chunks"


class PromptBuilder:
    """Fills a template's ``{{chunks}}`` and its other ``{{name}}`` places for many jobs.

    Whatever differs from job to job ends the shared prefix, so ``{{chunks}}`` must come before
    every other place.  ``keep_first`` is that of ``canonical_order``.  Raises ``InvalidRequest``.
    """

    def __init__(self, template: str, *, separator: str = "\n\n", keep_first: int = 0) -> None:
        check_text(template, "template")
        check_text(separator, "separator")
        check_count(keep_first, "keep_first", "chunks", least=0)
        _check_places(_PLACE.findall(template))
        self._template = template
        self._separator = separator
        self._keep_first = keep_first

    def build(
        self, jobs_chunks: Sequence[Sequence[str]], fields: Sequence[Mapping[str, object]]
    ) -> list[str]:
        """Return one prompt for each job, with its chunks in canonical order.

        ``fields[i]`` fills the other places of job ``i``.  The order is made for all these jobs
        together: build those that run at the same time in one call.  Raises ``InvalidRequest``.
        """
        check_jobs(jobs_chunks, text_only=True)
        check_rows(fields, "fields")
        if len(jobs_chunks) != len(fields):
            raise InvalidRequest(
                f"fields: there are {len(fields)} for {len(jobs_chunks)} jobs", field="fields"
            )
        ordered = canonical_order(jobs_chunks, keep_first=self._keep_first)
        return [
            self._fill({**given, _CHUNKS: self._separator.join(chunks)})
            for given, chunks in zip(fields, ordered, strict=True)
        ]

    def _fill(self, values: Mapping[str, object]) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in values:
                raise InvalidRequest(f"{name}: the template needs it, the job lacks it", field=name)
            return written(values[name], name)

        return _PLACE.sub(value, self._template)


def _check_places(names: Sequence[str]) -> None:
    if names.count(_CHUNKS) != 1:
        raise InvalidRequest(
            f"template: it has {names.count(_CHUNKS)} places {{{{chunks}}}}, not 1",
            field="template",
        )
    if names[0] != _CHUNKS:
        raise InvalidRequest(
            f"template: {{{{{names[0]}}}}} stands before {{{{chunks}}}}, so no two jobs would share"
            " their chunks",
            field="template",
            fix="Put {{chunks}} first, for example after the instructions.",
        )
