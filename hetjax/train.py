"""The training loop: steps, metrics, validation, checkpoints, and every way in which a run can end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hetjax import checkpoint
from hetjax.checkpoint import Checkpointer, CheckpointError
from hetjax.config import TrainConfig
from hetjax.metrics import MetricsWriter, StepClock, bits_per_byte
from hetjax.report import Display, Summary

CHECKPOINTS = "checkpoints"
# Steps whose metrics may be outstanding: the host dispatches that far ahead of the devices.
NUM_AHEAD = 2
# Compilation is over, and even a short run gets busy shares.
_FIRST_TIMED_STEP = 3
# A loss scale halves at every overflow: by then it has shrunk by 2**40, and overflow is not the cause.
_MAX_SKIPPED_STEPS = 40
_RATES_AT_ONCE = 1000
_NON_FINITE_HELP = (
    "Lower optimizer.learning_rate, raise optimizer.warmup_steps or set optimizer.clip_norm; go on with "
    "--resume or begin anew."
)


class NonFiniteError(RuntimeError):
    """The loss or the gradients are not finite: training on would only lose what was learned."""


@runtime_checkable
class Trainer(Protocol):
    """What the loop needs of `hetjax.Trainer`; the state is opaque, with its number of steps as `.step`."""

    def init(self, seed: int = 0) -> Any:
        """Make the first state."""
        ...

    def step(self, state: Any, batch: Any, *, timeline: bool = False) -> tuple[Any, Any]:
        """Dispatch a step."""
        ...

    def evaluate(self, state: Any, batch: Any) -> Any:
        """Dispatch a forward pass."""
        ...

    def export(self, state: Any) -> dict[str, Any]:
        """Give the state in its canonical layout."""
        ...

    def import_(self, saved: dict[str, Any], /) -> Any:
        """Place a state given in its canonical layout."""
        ...

    def canonical_spec(self) -> Mapping[str, Any]:
        """Give names, shapes and dtypes of the canonical layout."""
        ...


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of global batches that can say where it stands, in JSON."""

    def __next__(self) -> Any:
        """Give the next batch."""
        ...

    def state_dict(self) -> Any:
        """Say where it stands."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go to where it stood."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a run needs.

    Attributes:
        trainer: Plays the plan.
        batches: Training batches.
        validation: Gives the validation batches anew.
        settings: Section [train].
        num_tokens_per_step: Tokens (or examples) of a global batch, for the throughput.
        validation_bytes: Bytes of text that all validation batches stand for; None where that has no meaning.
        learning_rate: By number of steps done, for the log.
        loss_scaled: Whether overflowing gradients are met by skipping the step.
        predicted_step_time_s: The plan's.
        utilisation: Model FLOPs utilisation of a step time in seconds; None where a peak is unknown.
    """

    trainer: Trainer
    batches: Batches
    validation: Callable[[], Iterable[Any]]
    settings: TrainConfig
    num_tokens_per_step: int
    validation_bytes: int | None = None
    learning_rate: Callable[[Any], Any] | None = None
    loss_scaled: bool = False
    predicted_step_time_s: float | None = None
    utilisation: Callable[[float], float] | None = None


class StopSignals:
    """Turns the first SIGTERM or SIGINT into a wish to stop; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        """Do nothing yet; signals are caught within the `with` block, in the main thread."""
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Begin to catch."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


def restore(trainer: Trainer, batches: Batches, out_dir: Path) -> Any:
    """Place the state of the latest checkpoint and move the data to where it stood.

    Args:
        trainer: Of this plan, which may be another than the one that the checkpoint was written under.
        batches: Training batches.
        out_dir: Directory of the run.

    Returns:
        The state.

    Raises:
        UserError: There is no checkpoint, it is damaged, or it does not fit the model.
    """
    directory = out_dir / CHECKPOINTS
    exported, data_state = checkpoint.load(directory)
    checkpoint.check_layout(exported, trainer.canonical_spec(), directory / str(exported["step"]))
    batches.load_state_dict(data_state)
    return trainer.import_(exported)


class Loop:
    """One run from its first or resumed step to its end."""

    def __init__(self, job: Job, out_dir: Path, display: Display, stop: StopSignals) -> None:
        """Prepare; files are opened by `run`.

        Args:
            job: What to run.
            out_dir: Directory of the run; has to exist.
            display: Where progress is shown.
            stop: When to end early.
        """
        self._job = job
        self._out_dir = out_dir
        self._display = display
        self._stop = stop
        self._clock = StepClock()
        self._pending: deque[tuple[int, Any, bool]] = deque()
        self._held: tuple[int, dict[str, float | None]] | None = None
        self._busy: list[Mapping[str, float]] = []
        self._validation: tuple[float, float | None] | None = None
        self._saved_step: int | None = None
        self._num_skipped = 0

    def run(self, state: Any) -> Summary:
        """Train until the last step or until told to stop.

        Args:
            state: Initial or restored; donated.

        Returns:
            The summary.

        Raises:
            NonFiniteError: Loss or gradients are not finite; the last good checkpoint is kept.
            CheckpointError: The last checkpoint could not be written.
        """
        first = int(state.step)
        self._begun_s = time.perf_counter()
        self._rates: tuple[int, np.ndarray] | None = None
        settings = self._job.settings
        resumed = first if first else None
        with (
            Checkpointer(self._out_dir / CHECKPOINTS, max_to_keep=settings.max_checkpoints) as self._saver,
            MetricsWriter(
                self._out_dir, resumed_step=resumed, tensorboard=settings.tensorboard
            ) as self._writer,
        ):
            last = self._steps(state)
        return self._summary(first, last, time.perf_counter() - self._begun_s)

    def _steps(self, state: Any) -> int:
        job, settings = self._job, self._job.settings
        first = step = int(state.step)
        self._clock.restart(time.perf_counter(), warm=False)
        while step < settings.num_steps and self._stop.received is None:
            batch = next(job.batches)
            step += 1
            timed = _due(step, settings.timeline_every) or (
                step == first + _FIRST_TIMED_STEP and settings.timeline_every is not None
            )
            if timed:  # alone on the devices
                self._drain()
            state, metrics = job.trainer.step(state, batch, timeline=timed)
            self._pending.append((step, metrics, timed))
            alone = timed or step == first + 1  # the first step compiles
            while len(self._pending) > (0 if alone else NUM_AHEAD):
                self._record()
            last = step == settings.num_steps
            validate = last or _due(step, settings.eval_every)
            save = last or _due(step, settings.checkpoint_every) or self._stop.received is not None
            if validate or save:
                self._drain()
                if validate:
                    self._validate(state)
                self._write_held()
                if save:
                    self._save(state, step, final=last)
                self._clock.restart(time.perf_counter())
        self._drain()
        self._write_held()
        if step != self._saved_step and step > first:
            self._save(state, step, final=True)
        return step

    def _drain(self) -> None:
        while self._pending:
            self._record(steady=False)

    def _record(self, steady: bool = True) -> None:
        """Wait for the oldest outstanding step's metrics, check them and show them."""
        step, metrics, timed = self._pending.popleft()
        values = dict(metrics.fetch())
        self._clock.tick(time.perf_counter(), counted=not timed, steady=steady)
        if timed:
            self._busy.append(dict(metrics.busy))
        self._write_held()
        step_s = self._clock.recent_s
        rate = self._job.num_tokens_per_step / step_s if step_s else None
        record: dict[str, float | None] = dict(values)
        if self._job.learning_rate is not None:
            record["learning_rate"] = self._rate(self._job.learning_rate, step)
        record |= {"tokens_per_s": rate, "elapsed_s": time.perf_counter() - self._begun_s}
        self._held = (step, record)
        self._display.step(step, values, rate, step_s)
        self._check_finite(step, values)

    def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
        names = ["loss", "grad_norm"]
        bad = [n for n in names if not math.isfinite(values.get(n, 0.0))]
        self._num_skipped = self._num_skipped + 1 if "grad_norm" in bad else 0
        if not bad or (
            self._job.loss_scaled and bad == ["grad_norm"] and self._num_skipped < _MAX_SKIPPED_STEPS
        ):
            return
        self._write_held()
        self._writer.flush()
        what = "loss" if bad[0] == "loss" else "norm of the gradients"
        raise NonFiniteError(
            f"The {what} is {values[bad[0]]} at step {step}. {self._kept()} {_NON_FINITE_HELP}"
        )

    def _write_held(self) -> None:
        if self._held is not None:
            self._writer.write(*self._held)
            self._held = None

    def _validate(self, state: Any) -> None:
        """Evaluate the validation batches and add the figures to the record of the step just done."""
        total = weight = 0.0
        for batch in self._job.validation():
            if self._stop.received is not None:
                return
            metrics = self._job.trainer.evaluate(state, batch)
            count = float(metrics.weight("loss"))
            total, weight = total + float(metrics.fetch()["loss"]) * count, weight + count
        if not weight:
            return
        loss, num_bytes = total / weight, self._job.validation_bytes
        per_byte = bits_per_byte(loss, weight, num_bytes) if num_bytes else None
        self._validation = (loss, per_byte)
        assert self._held is not None, "validation follows a step"
        step, record = self._held
        self._held = (step, record | {"validation_loss": loss, "validation_bits_per_byte": per_byte})
        text = f"step {step}: validation loss {loss:.4f}"
        self._display.say(text + (f", {per_byte:.4f} bits per byte" if per_byte is not None else ""))

    def _save(self, state: Any, step: int, *, final: bool) -> None:
        """Write a checkpoint; a failed one ends the run only where there is no later chance."""
        self._writer.flush()
        exported = self._job.trainer.export(state)
        if not checkpoint.all_finite(exported):
            what = f"A parameter is not finite after step {step}, though the loss was."
            raise NonFiniteError(f"{what} {self._kept()} {_NON_FINITE_HELP}")
        data_state = self._job.batches.state_dict()
        try:
            self._saver.wait()
        except CheckpointError as error:  # of the checkpoint before; this one has its own chance
            self._display.say(f"{error} Training goes on.")
        try:
            self._saver.save(step, exported, data_state)
            if final:
                self._saver.wait()
            self._saved_step = step
        except CheckpointError as error:
            if final:
                raise
            self._display.say(f"{error} Training goes on.")

    def _kept(self) -> str:
        """Say which checkpoint there is to go back to."""
        with contextlib.suppress(CheckpointError):
            self._saver.wait()
        steps = self._saver.steps()
        return f"The checkpoint of step {steps[-1]} is kept." if steps else "No checkpoint had been written."

    def _rate(self, schedule: Callable[[Any], Any], step: int) -> float:
        """Evaluate the schedule, for many steps at once: one call instead of one a step."""
        import jax

        block, place = divmod(step - 1, _RATES_AT_ONCE)
        if self._rates is None or self._rates[0] != block:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                steps = np.arange(block * _RATES_AT_ONCE, (block + 1) * _RATES_AT_ONCE, dtype=np.int32)
                self._rates = block, np.asarray(jax.jit(jax.vmap(schedule))(steps))
        return float(self._rates[1][place])

    def _summary(self, first: int, last: int, wall_s: float) -> Summary:
        step_s = self._clock.mean_s
        busy: dict[str, float] = {}
        for group in self._busy[0] if self._busy else ():
            busy[group] = float(np.mean([shares[group] for shares in self._busy]))
        loss, per_byte = self._validation or (None, None)
        steps = checkpoint.finished_steps(self._out_dir / CHECKPOINTS)
        return Summary(
            first_step=first,
            last_step=last,
            num_steps=self._job.settings.num_steps,
            wall_s=wall_s,
            first_step_s=self._clock.first_step_s,
            step_time_s=step_s,
            predicted_step_time_s=self._job.predicted_step_time_s,
            tokens_per_s=self._job.num_tokens_per_step / step_s if step_s else None,
            loss=self._display.loss,
            validation_loss=loss,
            validation_bits_per_byte=per_byte,
            busy_share=busy,
            utilisation=self._job.utilisation(step_s) if self._job.utilisation and step_s else None,
            stopped_by=self._stop.received.name if self._stop.received else None,
            checkpoint=str(self._out_dir / CHECKPOINTS / str(steps[-1])) if steps else None,
        )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
