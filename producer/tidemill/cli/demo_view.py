"""What the demo shows: the answers as they grow, then a table of figures."""

import statistics
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidemill.cli.demo_run import Answer, DemoRun

_REFRESH_PER_SECOND = 12


class DemoView:
    """A live picture on a terminal; elsewhere each answer is printed when the run is over."""

    def __init__(self, console: Console, run: DemoRun) -> None:
        self._console = console
        self._run = run
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if kind is None:
            for answer in self._run.answers:
                self._console.print(_full(answer))

    def _picture(self) -> RenderableType:
        # One line an answer, so that the picture fits a small terminal.
        width = max(20, self._console.width - 2)
        lines = [_tail(answer, width) for answer in self._run.answers]
        return Group(*lines, Text(_note(self._run), style="bold yellow"))


def summary(run: DemoRun) -> Table:
    """Return the table of figures: one row an answer, and the sums."""
    table = Table(
        title="Tokens in, cached, out; time to the first token",
        title_justify="left",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("prompt", no_wrap=True, max_width=26)
    for name in ("in", "cached", "out", "first token", "tokens/s", "end"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in run.answers:
        table.add_row(answer.question, *_figures(answer))
    table.add_section()
    table.add_row("[bold]all, at once[/]", *_sums(run))
    table.caption = _verdict(run)
    table.caption_justify = "left"
    return table


def _figures(answer: Answer) -> tuple[str, ...]:
    result = answer.result
    if result is None or answer.first_token is None or answer.finished is None:
        return ("-",) * 6
    streaming = max(answer.finished - answer.submitted, 1e-9)
    return (
        str(result.usage.prompt_tokens),
        str(result.usage.cached_tokens),
        str(len(answer.ids)),
        f"{answer.first_token - answer.submitted:.2f} s",
        f"{len(answer.ids) / streaming:.1f}",
        str(result.finish_reason),
    )


def _sums(run: DemoRun) -> tuple[str, ...]:
    usages = [a.result.usage for a in run.answers if a.result is not None]
    waits = [a.first_token - a.submitted for a in run.answers if a.first_token is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return (
        f"{prompt}",
        f"{cached / max(1, prompt):.0%} hit",
        f"{run.num_tokens}",
        f"p50 {statistics.median(waits):.2f} s" if waits else "-",
        f"{run.num_tokens / max(run.seconds, 1e-9):.1f}",
        "",
    )


def _verdict(run: DemoRun) -> str:
    killer = run.killer
    if run.problems or killer is None:
        return f"{len(run.answers)} streams, {len(run.problems)} with a gap or a repeated token"
    return (
        f"Worker {killer.killed_pid} was killed after {killer.tokens_then} tokens;"
        f" {len(run.answers)} streams went on without a gap or a repeated token."
    )


def _note(run: DemoRun) -> str:
    if run.killer is None or run.killer.killed_pid is None:
        return ""
    return f"worker {run.killer.killed_pid} was killed: its jobs move on when their leases end"


def _tail(answer: Answer, width: int) -> Text:
    mark = "…" if answer.finished is None else "✓"
    head = f"{mark} {answer.question} "
    room = max(0, width - len(head))
    body = " ".join(answer.text.split())
    return Text.assemble((head, "bold"), (body[-room:] if room else "", ""), no_wrap=True)


def _full(answer: Answer) -> Text:
    return Text.assemble((f"{answer.question}\n", "bold cyan"), f"{answer.text.strip()}\n")
