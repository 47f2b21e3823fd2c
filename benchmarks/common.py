"""What the benchmarks share: machine and sizes, plans made by hand, plain steps to compare with, timing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax

import hetjax
import models
from hetjax.placement import Place
from hetjax.plan import Member, Stage
from hetjax.program import Program

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20


def start_cpu(num_devices: int = 1) -> None:
    """Set JAX up before it starts: so many CPU devices, no accelerator, nothing compiled kept from before."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_compilation_cache", False)


def introduce(text: str) -> None:
    """Say what is about to be measured, and where."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax"))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    say(text)
    say(f"{_processor()}, {os.cpu_count()} cores{load}; Python {platform.python_version()}, {versions}")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def finish(figures: Mapping[str, Any]) -> None:
    """Print the last line: the figures as JSON, with five significant digits."""

    def short(value: Any) -> Any:
        return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value

    say(json.dumps({name: short(value) for name, value in figures.items()}, allow_nan=False))


def in_fresh_process(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a module in a process of its own, with no persistent compilation cache.

    Args:
        module: As after `python -m`.
        arguments: Of its command line.
        environment: Added to this process's.

    Returns:
        The JSON of its last line.

    Raises:
        RuntimeError: It failed; holds what it wrote to stderr.
    """
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | dict(environment or {})
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def gpt(vocab_size: int, seq_len: int, **fields: Any) -> models.Model:
    """A GPT of models/, by the fields of its config."""
    config = models.parse({"family": "gpt", **fields}, "a benchmark")
    return models.build(config, seq_len=seq_len, vocab_size=vocab_size)


def random_batch(model: models.Model, global_batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens, all counted in the loss."""
    rng = np.random.default_rng(seed)
    shape = (global_batch, model.seq_len)
    tokens, targets = (rng.integers(0, model.vocab_size, shape, np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "weights": np.ones(shape, np.float32)}


def trace(model: models.Model, global_batch: int) -> Program:
    """Trace a model on batches as `random_batch` makes them."""
    return hetjax.trace(model.loss_fn, model.init_fn, model.batch_spec(global_batch))


def cpu_groups(*num_devices: int) -> hetjax.Cluster:
    """Groups of CPU devices on this machine, joined as in meshes/cpu_2x.toml."""
    groups = {f"cpu{i}": {"kind": "cpu", "num_devices": n} for i, n in enumerate(num_devices)}
    link = {"bandwidth_gb_per_s": 5.0, "latency_us": 200.0}
    return hetjax.Cluster.from_dict({"name": "benchmark", "groups": groups, "default_link": link})


def plan_by_hand(
    program: Program,
    cluster: hetjax.Cluster,
    *,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    remat: str = "dots",
    fuse: int = 1,
) -> hetjax.Plan:
    """Place equal runs of segments on the groups in order, a stage each, data parallel inside a group.

    Args:
        program: What to place.
        cluster: One group or several.
        num_microbatches: Of the program's global batch.
        schedule: Order of the tasks.
        remat: Policy of every segment.
        fuse: Neighbouring segments compiled as one program.
    """
    rows = program.global_batch // num_microbatches
    edges = np.linspace(0, program.num_segments, len(cluster.groups) + 1).round().astype(int).tolist()
    stages = []
    for group, start, stop in zip(cluster.groups, edges, edges[1:], strict=False):
        devices = tuple(range(group.num_devices))
        axes = {"dp": group.num_devices}
        member = Member(group.name, devices, axes, (0, rows), (remat,) * (stop - start))
        stages.append(Stage((start, stop), (member,), fuse))
    return hetjax.Plan(
        cluster=cluster,
        fingerprint=program.fingerprint,
        num_segments=program.num_segments,
        global_batch=program.global_batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        stages=tuple(stages),
    )


class Result:
    """What a step of any form gives: its loss, and arrays to wait for."""

    def __init__(self, loss: Any, arrays: Any) -> None:
        """Hold them.

        Args:
            loss: A scalar array, or a trainer's metrics.
            arrays: The new parameters.
        """
        self._loss, self._arrays = loss, arrays

    def wait(self) -> None:
        """Return when the step is done."""
        jax.block_until_ready(self._arrays)

    @property
    def loss(self) -> float:
        """The loss before the step."""
        return self._loss["loss"] if isinstance(self._loss, Mapping) else float(self._loss)


Step = Callable[[], Result]
"""Takes one step of training; returns before it is done."""


def hetjax_step(trainer: hetjax.Trainer, batch: Mapping[str, np.ndarray], seed: int = 0) -> Step:
    """Train by a trainer, on one batch again and again."""
    state = trainer.init(seed)

    def step() -> Result:
        nonlocal state
        state, metrics = trainer.step(state, batch)
        return Result(metrics, state.masters)

    return step


def plain_step_function(
    loss_fn: Callable[[Any, Any], jax.Array], tx: optax.GradientTransformation
) -> Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]:
    """The hand-written step: one jit of value_and_grad and optax, the old state donated."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def plain_step(
    init_fn: Callable[[jax.Array], Any],
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    batch: Mapping[str, np.ndarray],
    seed: int = 0,
) -> Step:
    """Train by the hand-written step, on one batch again and again."""
    params = jax.jit(init_fn)(jax.random.key(seed))
    opt_state, function = tx.init(params), plain_step_function(loss_fn, tx)

    def step() -> Result:
        nonlocal params, opt_state
        params, opt_state, loss = function(params, opt_state, batch)
        return Result(loss, params)

    return step


def interleave(forms: Mapping[str, Step], *, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Time forms of one thing against each other: every round takes a few steps of each, in turn.

    Args:
        forms: Compiled and warm.
        num_rounds: Rounds; the first form of a round is another each time.
        num_steps: Steps of each form in a round; only the last is waited for.

    Returns:
        By form, the seconds per step of each round.
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    names = list(forms)
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            results = [forms[name]() for _ in range(num_steps)]
            results[-1].wait()
            times[name].append((time.perf_counter() - begin) / num_steps)
        say(f"  round {number + 1}: " + ", ".join(f"{n} {times[n][-1] * 1e3:.1f} ms" for n in names))
    return times


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios round by round, so that a drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


@contextlib.contextmanager
def wrapped(trainer: hetjax.Trainer, wrap: Callable[[Place, Any], Any]) -> Generator[None]:
    """Put something around the compiled forwards and backwards of a trainer.

    Args:
        trainer: Whose functions; others that share them are affected too.
        wrap: Given the place and a compiled function, returns what is called instead.
    """
    found = {
        id(unit.functions): (run.place, unit.functions)
        for run in trainer.placement.training.values()
        for unit in run.units
    }
    with contextlib.ExitStack() as stack:
        for place, functions in found.values():
            for name in ("forward", "first_backward", "backward"):
                new = wrap(place, getattr(functions, name))
                stack.enter_context(mock.patch.object(functions, name, new))
        yield
