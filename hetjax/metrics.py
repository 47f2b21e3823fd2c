"""What a run leaves to read: metrics.jsonl, TensorBoard, and the figures derived from them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from hetjax.errors import UserError

FILE_NAME = "metrics.jsonl"


class Smoother:
    """An exponential moving average that is unbiased from its first value on."""

    def __init__(self, decay: float = 0.9) -> None:
        """Start empty.

        Args:
            decay: Weight of the past, in [0, 1).
        """
        assert 0 <= decay < 1, "the decay of a moving average lies in [0, 1)"
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Take in one value and return the average so far; a value that is not finite is left out."""
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1 - self._decay) * value
            self._weight = self._decay * self._weight + (1 - self._decay)
        return self.value

    @property
    def value(self) -> float:
        """The average so far; nan before the first value."""
        return self._sum / self._weight if self._weight else math.nan


class StepClock:
    """Times steps by when their metrics arrive, leaving out what is not training.

    The first interval after `restart` with `warm=False` holds compilation and is kept apart. Steps are
    dispatched ahead, so the first interval after a restart holds several steps and those at the end hold
    none: `mean_s` is right once nothing is outstanding, `recent_s` leaves both out.
    """

    def __init__(self, window: int = 50) -> None:
        """Start without any step.

        Args:
            window: Number of latest steps that `recent_s` averages over.
        """
        self._recent: deque[float] = deque(maxlen=window)
        self._sum_s = 0.0
        self._num_steps = 0
        self._last: float | None = None
        self._warm = False
        self._fills = True
        self.first_step_s: float | None = None

    def restart(self, now_s: float, *, warm: bool = True) -> None:
        """Begin an interval at `now_s`: training starts or goes on after validation or a checkpoint."""
        self._last = now_s
        self._warm = warm
        self._fills = True

    def tick(self, now_s: float, *, counted: bool = True, steady: bool = True) -> float:
        """End a step at `now_s` and return the seconds since the last one.

        Args:
            now_s: When its metrics arrived.
            counted: False for a step that averages leave out.
            steady: False where no step was dispatched since the last one ended.
        """
        assert self._last is not None, "StepClock.restart begins the first interval"
        elapsed, self._last = now_s - self._last, now_s
        if counted and self._warm:
            self._sum_s += elapsed
            self._num_steps += 1
            if steady and not self._fills:
                self._recent.append(elapsed)
            self._fills = False
        else:  # it was alone on the devices
            if counted:
                self.first_step_s, self._warm = elapsed, True
            self._fills = True
        return elapsed

    @property
    def recent_s(self) -> float | None:
        """Mean seconds a step over the window; None while no step was timed alone."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def mean_s(self) -> float | None:
        """Mean seconds a step of all; None before the second step."""
        # not a median: metrics of several steps may arrive together, so that single intervals mean little
        return self._sum_s / self._num_steps if self._num_steps else None


def bits_per_byte(loss_nats: float, num_tokens: int | float, num_bytes: int | float) -> float:
    """Turn a loss per token into bits per byte of text, which compares between tokenizers.

    Args:
        loss_nats: Mean cross-entropy a token, in nats.
        num_tokens: Tokens that the mean is over.
        num_bytes: UTF-8 bytes that those tokens stand for.

    Returns:
        Bits a byte.
    """
    return loss_nats / math.log(2) * num_tokens / num_bytes


class MetricsWriter:
    """Appends one line a step to metrics.jsonl and the same scalars to TensorBoard."""

    def __init__(self, out_dir: Path, *, resumed_step: int | None = None, tensorboard: bool = True) -> None:
        """Open the files of a run.

        Args:
            out_dir: Directory of the run; has to exist.
            resumed_step: Last step that is kept from before; None begins a new run.
            tensorboard: Whether to write event files under `out_dir`/tensorboard.
        """
        self.path = out_dir / FILE_NAME
        if resumed_step is not None:
            keep_up_to(self.path, resumed_step)
        try:
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path} can't be written to ({error.strerror}). Remove it.") from None
        self._last_step = resumed_step or 0
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # slow to import, and not needed without it

            purge = None if resumed_step is None else resumed_step + 1
            self._board = SummaryWriter(str(out_dir / "tensorboard"), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the record of one step. JSON has no nan: a value that is not finite becomes null."""
        assert step > self._last_step, (
            f"step {step} after {self._last_step} would stand twice in metrics.jsonl"
        )
        self._last_step = step
        record: dict[str, Any] = {"step": step}
        for name, value in values.items():
            finite = value is not None and math.isfinite(value)
            record[name] = value if finite else None
            if finite and self._board is not None:
                self._board.add_scalar(
                    name.replace("_", "/", 1) if name.startswith("validation_") else name, value, step
                )
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Put everything written so far on disk, so that a checkpoint never is ahead of its metrics."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close the files."""
        if not self._file.closed:
            self.flush()
            self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsWriter:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl, in order. A last line that was cut short is left out.

    Raises:
        UserError: A line before the last is not JSON.
    """
    return [record for record, _ in _records(path)]


def keep_up_to(path: Path, step: int) -> None:
    """Cut metrics.jsonl back to the records up to `step`, atomically, so that no step stands twice."""
    if not path.is_file():
        return
    kept = [line for record, line in _records(path) if record["step"] <= step]
    draft = path.with_suffix(".jsonl.draft")
    draft.write_text("".join(kept), encoding="utf-8")
    os.replace(draft, path)


def _records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        record: Any = None
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int) and line.endswith("\n"):
            yield record, line
        elif number < len(lines):
            raise UserError(
                f"{path}, line {number} is not a record of a step: {line.strip()[:60]!r}. "
                "Remove that line, or the file, and resume again."
            )
