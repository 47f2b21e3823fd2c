"""Plays one step's task lists on a placement: dispatches units, moves what crosses, sums gradients.

A single thread dispatches everything that one JAX client runs, in the schedule's global order, and waits for
nothing. With several clients in a process (CPU and GPU) each has a thread, since transfers between clients
wait for their producer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.compile import place_batch
from hetjax.flat import Data, Piece
from hetjax.placement import MemberRun, Place, Placement, UnitRun
from hetjax.schedule import Schedule, Task
from hetjax.transfer import Carrier, add, arrived

Key = tuple[int, int, int]  # stage, member, microbatch


@dataclasses.dataclass
class Saved:
    """What a member keeps of one microbatch between forward and backward."""

    inputs: list[list[Any]]
    data: list[list[Any]]
    kept: list[list[Any]]


@functools.lru_cache(maxsize=512)
def _zeros(shapes: tuple[tuple[int, ...], ...], sharding: Any) -> Callable[[], list[jax.Array]]:
    return jax.jit(lambda: [jnp.zeros(s, jnp.float32) for s in shapes], out_shardings=sharding)


class Mailbox:
    """Values between members: parts from several producing members are joined when the last is there."""

    def __init__(self) -> None:
        """Start empty."""
        self._condition = threading.Condition()
        self._parts: dict[Any, dict[int, Any]] = collections.defaultdict(dict)
        self._boxes: dict[Any, dict[int, list[Any]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Wake everyone who waits, with an error."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def part(self, key: Any, source: int, value: Any, needed: int) -> list[Any] | None:
        """Add one producer's part; returns all parts, by producer, once `needed` are there."""
        with self._condition:
            parts = self._parts[key]
            parts[source] = value
            return [v for _, v in sorted(self._parts.pop(key).items())] if len(parts) == needed else None

    def post(self, to: Any, value_id: int, value: Any) -> None:
        """Deliver."""
        with self._condition:
            self._boxes[to][value_id].append(value)
            self._condition.notify_all()

    def take(self, to: Any, value_id: int, count: int) -> list[Any]:
        """Fetch `count` deliveries, waiting for another dispatching thread where there is one."""
        with self._condition:
            while len(self._boxes[to][value_id]) < count:
                if self._error is not None:
                    raise RuntimeError("another dispatching thread of this step failed") from self._error
                self._condition.wait()
            found = self._boxes[to].pop(value_id)
        return [arrived(v) for v in found]  # unlocked: other threads deliver while this one waits


class Step:
    """One pass over a batch: forward, and backward when training."""

    def __init__(
        self,
        placement: Placement,
        schedule: Schedule,
        carrier: Carrier,
        batch: Sequence[np.ndarray],
        params: Mapping[int, Mapping[Piece, Any]],
        *,
        training: bool,
        key: tuple[int, int] | None = None,
        seed_scale: Any = None,
        on_dispatch: Callable[[Task, Any], None] | None = None,
    ) -> None:
        """Prepare a pass.

        Args:
            placement: Where everything is.
            schedule: Its order, in training.
            carrier: Moves values between submeshes.
            batch: Host leaves of the whole batch.
            params: For each place, the pieces that it computes with (arrays or futures).
            training: Whether gradients are wanted.
            key: Seed and step number, for models that take a key.
            seed_scale: Loss scale as an array by place index; 1 where None.
            on_dispatch: Called after each task with an array that is ready when the task is done.
        """
        self.placement, self.schedule, self.carrier, self.batch = placement, schedule, carrier, batch
        self.training, self.key, self.seed_scale, self.on_dispatch = training, key, seed_scale, on_dispatch
        self.runs = placement.training if training else placement.evaluation_runs()
        self.params = params
        self.sums: dict[tuple[int, Piece], jax.Array] = {}
        self.results: dict[str, list[tuple[Place, jax.Array]]] = collections.defaultdict(list)
        self._saved: dict[Key, Saved] = {}
        self._resolved: dict[UnitRun, list[Any]] = {}
        self._forward_mail, self._backward_mail = Mailbox(), Mailbox()
        rows = placement.plan.microbatch_rows
        self.num_microbatches = next(len(b) for b in batch if b.ndim) // rows if batch else 0
        self._lock = threading.Lock()

    # ---- order ----

    def _tasks(self) -> list[Task]:
        """Training in the schedule's order; evaluation, of any number of microbatches, one by one."""
        if self.training:
            return [t for t in self.schedule.order if t.op in ("F", "B")]
        return [Task("F", s, m, k) for m in range(self.num_microbatches) for s, k in sorted(self.runs)]

    def play(self) -> None:
        """Dispatch every task in order."""
        ops = {"F": self._forward, "B": self._backward}
        tasks = self._tasks()
        clients: dict[Any, list[Task]] = {}
        for task in tasks:
            clients.setdefault(self.runs[task.stage, task.member].place.submesh.client, []).append(task)

        def run(own: Sequence[Task]) -> None:
            for task in own:
                done = ops[task.op](task)
                if self.on_dispatch:
                    self.on_dispatch(task, done)
                del done  # it may be a cotangent, which is to live no longer than needed

        if len(clients) == 1:
            run(tasks)
            return
        errors: list[BaseException] = []

        def guarded(own: Sequence[Task]) -> None:
            try:
                run(own)
            except BaseException as error:
                errors.append(error)
                self._forward_mail.fail(error)
                self._backward_mail.fail(error)

        threads = [
            threading.Thread(target=guarded, args=(own,), name="hetjax-dispatch") for own in clients.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    # ---- forward ----

    def _microbatch_data(self, run: MemberRun, microbatch: int) -> dict[Data, jax.Array]:
        """A member's rows of the batch leaves that it reads, and the key, in one transfer."""
        wanted = dict.fromkeys(d for u in run.units for d in u.data if isinstance(d, Data))
        first = microbatch * self.placement.plan.microbatch_rows
        sources = [d for d in wanted if d.kind == "batch"]
        leaves = [self.batch[d.index] for d in sources]
        own = [leaf[first + run.rows[0] : first + run.rows[1]] if leaf.ndim else leaf for leaf in leaves]
        out = dict(zip(sources, place_batch(own, run.place.submesh), strict=True))
        for source in wanted:
            if source.kind == "rng":
                out[source] = microbatch_key(self.key, microbatch, run.place.submesh.replicated)
        return out

    def _params_of(self, run: MemberRun, unit_run: UnitRun) -> list[Any]:
        """The parameters of a unit; put together once a step."""
        if unit_run not in self._resolved:
            here = self.params[run.place.index]
            self._resolved[unit_run] = [arrived(here[p]) for p in unit_run.unit.params]
        return self._resolved[unit_run]

    def _forward(self, task: Task) -> Any:
        key = (task.stage, task.member, task.microbatch)
        run, values = self.runs[key[:2]], dict[int, Any]()
        cache = self._microbatch_data(run, task.microbatch)
        saved = Saved([], [], [])
        done: Any = None
        for unit_run in run.units:
            unit, functions = unit_run.unit, unit_run.functions
            for value in unit.inputs:
                if value not in values:
                    values[value] = self._forward_mail.take(key, value, 1)[0]
            inputs = [values[v] for v in unit.inputs]
            data = [cache[d] if isinstance(d, Data) else d for d in unit_run.data]
            given = (self._params_of(run, unit_run), inputs, data, run.offset)
            if self.training:
                outputs, results, kept = functions.forward(*given)
                saved.inputs.append(inputs)
                saved.data.append(data)
                saved.kept.append(kept)
            else:
                outputs, results = functions.evaluate(*given)
            values.update(zip(unit.outputs, outputs, strict=True))
            with self._lock:
                for name, result in zip(unit.results, results, strict=True):
                    self.results[name].append((run.place, result))
            done = outputs or results or done
        self._send_values(run, key, values)
        if self.training:
            self._saved[key] = saved
        return done

    def _members(self, stage: int, rows: tuple[int, int]) -> list[MemberRun]:
        """Members of a stage that handle any of some rows."""
        members = [r for (s, _), r in self.runs.items() if s == stage]
        return [r for r in members if max(r.rows[0], rows[0]) < min(r.rows[1], rows[1])]

    def _readers(self, run: MemberRun, value: int) -> list[int]:
        """Other stages that read a value."""
        stage_of = self.placement.stage_of_segment
        stages = {stage_of[c] for c in run.flat.values[value].consumers}
        return sorted(stages - {run.stage})

    def _send_values(self, run: MemberRun, key: Key, values: Mapping[int, Any]) -> None:
        first, last = self.placement.plan.stages[run.stage].segments
        own = [v for v in values if first <= run.flat.values[v].producer < last]
        for value in own:
            for stage in self._readers(run, value):
                for reader in self._members(stage, run.rows):
                    to = (stage, reader.member, key[2])
                    self._deliver(self._forward_mail, run, reader, to, value, values[value])

    def _deliver(
        self, mail: Mailbox, run: MemberRun, reader: MemberRun, to: Key, value: int, array: Any
    ) -> None:
        sources = self._members(run.stage, reader.rows)
        part = (array, run.layout(value))
        parts = mail.part((to, value, run.stage), run.member, part, len(sources))
        if parts is not None:
            mail.post(to, value, self.carrier.move(parts, reader.layout(value), reader.dtype(value)))

    # ---- backward ----

    def _backward(self, task: Task) -> Any:
        key = (task.stage, task.member, task.microbatch)
        run, saved = self.runs[key[:2]], self._saved.pop(key)
        cotangents: dict[int, Any] = {}
        done: Any = None
        for i in range(len(run.units) - 1, -1, -1):
            unit_run = run.units[i]
            unit, functions = unit_run.unit, unit_run.functions
            moving = [unit.outputs[o] for o in functions.function.moving_outputs]
            pulled_in = [self._cotangent(run, key, v, cotangents) for v in moving]
            seed = [self._seed(run.place)] if functions.function.makes_loss else []
            given = (saved.inputs.pop(), saved.data.pop(), run.offset, saved.kept.pop(), pulled_in, seed)
            given = (self._params_of(run, unit_run), *given)
            gradients, pulled, token = self._pull(unit_run, run.place, given)
            self.sums.update(
                ((run.place.index, p), g) for p, g in zip(unit_run.moving_params, gradients, strict=True)
            )
            for index, cotangent in zip(functions.function.moving_inputs, pulled, strict=True):
                value = unit.inputs[index]
                cotangents[value] = add(cotangents[value], cotangent) if value in cotangents else cotangent
            done = pulled or token or done
        for value, cotangent in cotangents.items():
            stage = self.placement.stage_of_segment[run.flat.values[value].producer]
            for maker in self._members(stage, run.rows):
                to = (stage, maker.member, key[2])
                self._deliver(self._backward_mail, run, maker, to, value, cotangent)
        return done

    def _pull(self, unit_run: UnitRun, place: Place, given: tuple) -> tuple[list, list, list]:
        """Run a backward, adding to the sums where there are any."""
        functions, pieces = unit_run.functions, unit_run.moving_params
        sums = [self.sums.get((place.index, p)) for p in pieces]
        if self.num_microbatches == 1 and all(s is None for s in sums):
            return functions.first_backward(*given)
        if any(s is None for s in sums):
            zeros = _zeros(tuple(functions.gradient_specs()), place.submesh.stacked)()
            sums = [z if s is None else s for s, z in zip(sums, zeros, strict=True)]
        return functions.backward(*given, sums)

    def _cotangent(self, run: MemberRun, key: Key, value: int, local: dict[int, Any]) -> Any:
        """The sum of what all readers of a value send back."""
        found = [local.pop(value)] if value in local else []
        remote = self._readers(run, value)
        if remote:
            found += self._backward_mail.take(key, value, len(remote))
        assert found, "a floating value that crosses a cut has no cotangent"
        return functools.reduce(add, found)

    def _seed(self, place: Place) -> Any:
        if self.seed_scale is not None:
            return arrived(self.seed_scale[place.index])
        return self.placement.one(place)


@functools.lru_cache(maxsize=64)
def _key_function(sharding: Any) -> Callable:
    fold = jax.random.fold_in
    return jax.jit(lambda base, step, m: fold(fold(base, step), m), out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _base_key(seed: int, sharding: Any) -> jax.Array:
    return jax.device_put(jax.random.key(seed), sharding)


def microbatch_key(key: tuple[int, int] | None, microbatch: int, sharding: Any) -> jax.Array:
    """The key of a microbatch: `fold_in(fold_in(key(seed), step), microbatch)`."""
    assert key is not None, "the model takes a key and none was given"
    return _key_function(sharding)(_base_key(key[0], sharding), np.uint32(key[1]), np.uint32(microbatch))


class Watcher:
    """Learns when tasks end, by waiting for their results on threads of its own while dispatch goes on."""

    def __init__(self, placement: Placement, schedule: Schedule) -> None:
        """Start the clock.

        Args:
            placement: Names the group of each member.
            schedule: Its dependencies tell when a task could start.
        """
        self._placement, self._schedule = placement, schedule
        self._start = time.perf_counter()
        self._ends: dict[Task, float] = {}
        self._queues: dict[int, queue.SimpleQueue] = {p.index: queue.SimpleQueue() for p in placement.places}
        self._threads = [
            threading.Thread(target=self._wait, args=(q,), daemon=True) for q in self._queues.values()
        ]
        for thread in self._threads:
            thread.start()

    def _wait(self, tasks: queue.SimpleQueue) -> None:
        while (item := tasks.get()) is not None:
            task, done = item
            jax.block_until_ready(done)
            self._ends[task] = time.perf_counter() - self._start

    def __call__(self, task: Task, done: Any) -> None:
        """Note a dispatched task and an array that is ready when it is done."""
        self._queues[self._placement.members[task.stage, task.member].index].put((task, done))

    def finish(self) -> list[tuple[str, Task, float, float]]:
        """Wait for everything. Returns (group, task, start, end) in seconds since the watcher was made."""
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        rows, free = [], collections.defaultdict(float)
        for task in sorted(self._ends, key=lambda t: self._ends[t]):
            place = self._placement.members[task.stage, task.member]
            ready = max((self._ends.get(d, 0.0) for d in self._schedule.dependencies(task)), default=0.0)
            rows.append((place.group, task, max(free[place.index], ready), self._ends[task]))
            free[place.index] = self._ends[task]
        return rows
