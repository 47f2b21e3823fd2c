"""What a run shows a person: its progress while it runs and its summary at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from hetjax.metrics import Smoother


@dataclasses.dataclass(frozen=True)
class Summary:
    """What came of a run.

    Attributes:
        first_step: Step that this process began at, 0 for a new run.
        last_step: Step that it ended at.
        num_steps: Steps of the whole job.
        wall_s: Seconds from the first step to the end.
        first_step_s: Seconds of the first step, compilation included; None without one.
        step_time_s: Mean seconds a step without compilation, validation and checkpoints; None below two.
        predicted_step_time_s: What the plan said; None where it says nothing.
        tokens_per_s: Over the steps that `step_time_s` covers.
        loss: Smoothed training loss at the end.
        validation_loss: The last validation's; None without one.
        validation_bits_per_byte: The same in bits a byte; None where bytes are not known.
        busy_share: By group, mean over the steps that were timed task by task.
        utilisation: Model FLOPs over the devices' peak; None where a peak is not known.
        stopped_by: Name of the signal that ended the run early.
        checkpoint: Path of the last checkpoint; None without one.
    """

    first_step: int
    last_step: int
    num_steps: int
    wall_s: float
    first_step_s: float | None
    step_time_s: float | None
    predicted_step_time_s: float | None
    tokens_per_s: float | None
    loss: float
    validation_loss: float | None
    validation_bits_per_byte: float | None
    busy_share: Mapping[str, float]
    utilisation: float | None
    stopped_by: str | None
    checkpoint: str | None


class Display:
    """Shows steps as they are done: a bar on a terminal, otherwise a plain line now and then."""

    def __init__(self, console: Console, *, num_steps: int, log_every: int, unit: str = "tokens") -> None:
        """Prepare without showing anything yet.

        Args:
            console: Where to.
            num_steps: Steps of the whole job.
            log_every: Steps between plain lines.
            unit: What throughput counts.
        """
        self._console = console
        self._num_steps = num_steps
        self._log_every = log_every
        self._unit = unit
        self._loss = Smoother()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Display:
        """Show the bar."""
        if self._console.is_terminal:
            columns = ("[bold]{task.fields[count]}", None, "{task.fields[loss]}", "{task.fields[rate]}")
            left = "[dim]{task.fields[left]}"
            bars = [BarColumn(bar_width=None) if c is None else TextColumn(c) for c in (*columns, left)]
            self._bar = Progress(*bars, console=self._console, expand=True)
            fields = {"count": "compiling", "loss": "", "rate": "", "left": ""}
            self._task = self._bar.add_task("", total=self._num_steps, **fields)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar down, leaving its last state."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def loss(self) -> float:
        """The smoothed loss."""
        return self._loss.value

    def step(self, step: int, values: Mapping[str, float], rate: float | None, step_s: float | None) -> None:
        """Show a step that is done.

        Args:
            step: Its number.
            values: Its metrics; "loss" is among them.
            rate: Throughput in units a second.
            step_s: Seconds a step lately, for the time left.
        """
        loss = self._loss.add(values["loss"])
        throughput = "" if rate is None else f"{rate:,.0f} {self._unit}/s"
        left = "" if step_s is None else f"{duration((self._num_steps - step) * step_s)} left"
        if self._bar is not None:
            fields = {"count": f"step {step}/{self._num_steps}", "loss": f"loss {loss:.4f}"}
            self._bar.update(self._task, completed=step, **fields, rate=throughput, left=left)
        elif step % self._log_every == 0 or step in (1, self._num_steps):
            parts = [f"step {step}/{self._num_steps}", f"loss {loss:.4f}", throughput, left]
            self.say("  ".join(p for p in parts if p))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, `2:03` or `0:07`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def show_text(console: Console, text: str) -> None:
    """Print a text as it is, such as a plan's table."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_summary(console: Console, summary: Summary, unit: str = "tokens") -> None:
    """Print the summary: a table on a terminal, otherwise plain lines."""
    rows = summary_rows(summary, unit)
    if not console.is_terminal:
        width = max(len(name) for name, _ in rows)
        show_text(console, "\n".join(f"{name:<{width}}  {value}" for name, value in rows))
        return
    table = Table(show_header=False, title="Summary", title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def summary_rows(summary: Summary, unit: str = "tokens") -> list[tuple[str, str]]:
    """Give the lines of the summary, without those of which nothing is known."""
    s = summary
    steps = f"{s.last_step} of {s.num_steps}" + (f", resumed at {s.first_step}" if s.first_step else "")
    rows: list[tuple[str, str | None]] = [
        ("steps", steps),
        ("wall time", duration(s.wall_s)),
        ("first step, with compilation", _seconds(s.first_step_s)),
        (f"{unit}/s", None if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}"),
        ("step time", _step_time(s)),
        *((f"busy, {group}", f"{share:.0%}") for group, share in s.busy_share.items()),
        ("model FLOPs utilisation", None if s.utilisation is None else f"{s.utilisation:.1%}"),
        ("loss (smoothed)", f"{s.loss:.4f}"),
        ("validation loss", None if s.validation_loss is None else f"{s.validation_loss:.4f}"),
        (
            "validation bits per byte",
            None if s.validation_bits_per_byte is None else f"{s.validation_bits_per_byte:.4f}",
        ),
        ("stopped by", s.stopped_by),
        ("checkpoint", s.checkpoint),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _step_time(s: Summary) -> str | None:
    measured, predicted = _seconds(s.step_time_s), _seconds(s.predicted_step_time_s)
    if s.step_time_s is None or measured is None:
        return None if predicted is None else f"predicted {predicted}"
    if s.predicted_step_time_s is None:
        return f"{measured} measured"
    ratio = s.step_time_s / s.predicted_step_time_s
    return f"{measured} measured, {predicted} predicted (measured / predicted {ratio:.2f})"


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
