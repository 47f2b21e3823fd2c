"""Host time to dispatch a task, without waiting for it: on one device and on a submesh of four CPU devices.

A tiny GPT in two stages on two groups, so that computing takes next to nothing and every kind of work is
there: forward, backward, transfers, update. Figures in microseconds, medians:

- `single_device_us`, `four_devices_us`: one F or B task, from the end of the task dispatched before;
- `..._jax_us`: of that, inside the compiled functions' own calls, which a hand-written loop would pay too;
- `..._step_us`: the whole of `Trainer.step` until it returns, divided by its F and B tasks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Generator
from typing import Annotated, Any
from unittest import mock

import jax
import numpy as np
import optax
import typer

import hetjax
from benchmarks import common
from hetjax import runtime
from hetjax.schedule import Task


def main(
    num_microbatches: Annotated[int, typer.Option(min=1)] = 8,
    num_layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 4,
    fuse: Annotated[int, typer.Option(min=1, help="Segments compiled as one; default: a whole stage.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 50,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps: only whether it works.")] = False,
) -> None:
    """Measure how long the host needs to dispatch a task."""
    if quick:
        num_microbatches, num_layers, steps = 2, 1, 3
    common.start_cpu(8)
    common.introduce(
        f"Dispatch of F and B tasks: GPT of {num_layers} tiny blocks in two stages, "
        f"{num_microbatches} microbatches, 1F1B, fuse {fuse}, {steps} steps"
    )
    figures: dict[str, float] = {}
    for name, num_devices in (("single_device", 1), ("four_devices", 4)):
        trainer, batch = build(num_devices, num_microbatches, num_layers, fuse)
        found = measure(trainer, batch, steps)
        figures |= {f"{name}{what}_us": value for what, value in found.items()}
        said = ", ".join(f"{what.strip('_') or 'task'} {value:.0f} us" for what, value in found.items())
        common.say(f"  groups of {num_devices}: {said}")
    common.finish(figures)


def build(
    num_devices: int, num_microbatches: int, num_layers: int, fuse: int
) -> tuple[hetjax.Trainer, dict[str, np.ndarray]]:
    """Place a tiny GPT in two stages on groups of so many devices, and make a batch for it."""
    model = common.gpt(32, 8, num_layers=num_layers, embed_dim=8, num_heads=1)
    batch = common.random_batch(model, 4 * num_microbatches)
    program = common.trace(model, 4 * num_microbatches)
    cluster = common.cpu_groups(num_devices, num_devices)
    plan = common.plan_by_hand(program, cluster, num_microbatches=num_microbatches, fuse=fuse)
    return hetjax.Trainer(program, plan, optax.adamw(1e-3)), batch


def measure(trainer: hetjax.Trainer, batch: dict[str, np.ndarray], num_steps: int) -> dict[str, float]:
    """Dispatch steps one by one, each on idle devices.

    Returns:
        Microseconds: "" a task, "_jax" its share inside compiled functions, "_step" a step's time per task.
    """
    state = trainer.init(0)
    for _ in range(3):  # compiles; the second and third meet the layouts that the first left
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state.masters)
    whole = []
    num_tasks = sum(task.op in "FB" for task in trainer.schedule.order)
    for _ in range(num_steps):
        begin = time.perf_counter()
        state, _ = trainer.step(state, batch)
        whole.append(time.perf_counter() - begin)
        jax.block_until_ready(state.masters)
    tasks, inside = [], []
    with watched(trainer) as clock:
        for _ in range(num_steps):
            clock.restart()
            state, _ = trainer.step(state, batch, timeline=True)
            jax.block_until_ready(state.masters)
            tasks += clock.tasks[1:]  # the first one follows no task
            inside += clock.inside[1:]
    return {
        "": statistics.median(tasks) * 1e6,
        "_jax": statistics.median(inside) * 1e6,
        "_step": statistics.median(whole) / num_tasks * 1e6,
    }


class Clock:
    """Takes the place of the trainer's watcher: notes when the dispatch of each task ends, waits for none."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.tasks: list[float] = []
        self.inside: list[float] = []
        self._in_jax, self._last = 0.0, time.perf_counter()

    def __call__(self, task: Task, done: Any) -> None:
        """Note a dispatched task."""
        now = time.perf_counter()
        self.tasks.append(now - self._last)
        self.inside.append(self._in_jax)
        self._in_jax, self._last = 0.0, time.perf_counter()

    def timed(self, function: Any) -> Any:
        """The function, with the time inside it counted."""

        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            self._in_jax += time.perf_counter() - begin
            return result

        return call

    def finish(self) -> list[Any]:
        """The timeline, which nobody reads here."""
        return []


@contextlib.contextmanager
def watched(trainer: hetjax.Trainer) -> Generator[Clock]:
    """Let a clock watch the steps of a trainer that are taken with `timeline=True`."""
    clock = Clock()
    with common.wrapped(trainer, lambda _, function: clock.timed(function)):
        with mock.patch.object(runtime, "Watcher", lambda placement, schedule: clock):
            yield clock


if __name__ == "__main__":
    typer.run(main)
