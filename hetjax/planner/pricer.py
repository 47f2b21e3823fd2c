"""What a run of segments costs on a slot: seconds a microbatch with the remat that its memory asks for.

All runs are priced at once, as matrices over their start and stop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax.cluster import Cluster, Group
from hetjax.cost import Costs, ProgramLike, alike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.memory import ADAM_BYTES_PER_PARAM, kept_per_row
from hetjax.planner.layout import Run, Slot, Way

INF = float("inf")

EVERY = (slice(None), slice(None))
"""All runs of segments: prices and bytes as matrices over start and stop. (start, stop) asks for one run."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What besides the segments decides a member's price and memory.

    Attributes:
        rows: Of each microbatch that the member handles.
        num_microbatches: Of one step.
        in_flight: Microbatches (parts of one, where they are split) between forward and backward at once.
        ahead: How many inputs may wait besides the one on its way.
        cotangents: How many cotangents may wait.
        share: How many stages share the devices' memory.
        passing: Whether the schedule lets parameters come and go.
        splits: Parts in which the rows of a microbatch run one after another.
        team_devices: Of all slots that share the stage; 0 where its state stays with each of them.
        input_size: Bytes of the inputs' elements, over those of float32: what their producer computes in.
    """

    rows: int
    num_microbatches: int
    in_flight: int
    ahead: int
    cotangents: int
    share: int
    passing: bool = False
    splits: int = 1
    team_devices: int = 0
    input_size: Number = 1.0


FEW_DEVICES = 8
"""Slots of up to so many devices may leave all but one idle."""


class Line(NamedTuple):
    """Seconds as base + slope x bytes."""

    base: float
    slope: float

    @classmethod
    def through(cls, x: Number, y: Number, x2: Number, y2: Number) -> Line:
        """Through two points."""
        slope = (y2 - y) / (x2 - x)
        return cls(float(y - slope * x), float(slope))

    def __call__(self, num_bytes: Any) -> Any:
        """Seconds of so many bytes, or of a matrix of them."""
        return self.base + self.slope * num_bytes


class Table:
    """One member on one way: seconds and bytes of every run of segments, as matrices over (start, stop)."""

    def __init__(self, pricer: Pricer, group: Group, way: Way, load: Load) -> None:
        axes = dict(way.axes)
        fsdp, tp = axes.get("fsdp", 1), axes.get("tp", 1)
        rows = -(-load.rows // load.splits)
        self.pricer, self.way, self.load = pricer, way, load
        (self.work, *self.repeat), (self.work_s, *self.again_s) = pricer.seconds(
            group.name, way.axes, rows, load.splits
        )
        hosted = way.residency == "offloaded" and not load.passing
        self.end, self.update = pricer.end_of_step(group.name, way.axes, hosted)
        size = DTYPE_BYTES[group.dtype] / 4
        self.local_rows = -(-rows // (axes.get("dp", 1) * fsdp))
        self.size = size
        self.per_row = self.local_rows * size / tp
        self.shards = fsdp * tp
        copied = size if size < 1 or fsdp > 1 else 0.0
        # Bytes per byte of float32 parameters: what stays, and what is there while a stage runs.
        if way.residency == "resident":
            self.static, self.passing = 1 / self.shards + (copied + 1) / tp, 0.0
            self.state = 1 / self.shards
        elif way.residency == "sharded":
            share = fsdp * tp / load.team_devices
            self.static, self.passing = share / self.shards + (size + 1) / tp, 0.0
            self.state = share / self.shards
        elif hosted:
            self.static, self.passing, self.state = (size + 1) / tp, 0.0, 0.0
        else:
            on_device = 0.0 if way.residency == "offloaded" else 1.0
            self.static = 2 * on_device / self.shards
            self.passing = 2 * (size + 1) / tp
            self.state = on_device / self.shards
        memory = group.memory_bytes
        self.capacity = INF if memory is None else float(memory)

    def fixed(self, at: Any = EVERY) -> Any:
        """Bytes of what stays, and of boundary values that wait."""
        p, load, rows = self.pricer, self.load, self.local_rows
        waiting = p.crossing_in[at] * (rows * (load.ahead + 1) * load.input_size)
        waiting = waiting + p.crossing_out[at] * (rows * load.cotangents * self.size)
        return p.param_bytes[at] * self.static + p.state_bytes[at] * self.state + waiting

    def workspace(self, at: Any = EVERY) -> Any:
        """Bytes while a task runs."""
        p, params = self.pricer, self.pricer.param_bytes[at]
        other = np.maximum(p.temporaries[at] * self.per_row, params / self.shards)
        if self.passing:
            other = other + params * self.passing + p.full_bytes[at] * (2 * self.per_row)
        return other

    def room(self, at: Any = EVERY) -> Any:
        """Bytes that a stage's kept activations may take."""
        return (self.capacity - self.workspace(at)) / self.load.share - self.fixed(at)

    def kept(self, policy: int, at: Any = EVERY) -> Any:
        """Bytes of the activations that are kept at once under a policy."""
        return self.pricer.kept_bytes[policy][at] * (self.per_row * self.load.in_flight)

    def end_s(self, at: Any = EVERY) -> Any:
        """Seconds at the end of the step: what is gathered, reduced and updated."""
        return self.end(self.pricer.param_bytes[at])

    def repeat_s(self) -> np.ndarray:
        """Recompute that brings the kept activations to what fits: part of the segments one policy on."""
        room = self.room()
        if self.load.passing:
            return np.where(room >= 0, self.again_s[-1], INF)
        before_bytes, before_s = self.kept(0), self.again_s[0]
        open_runs = (before_bytes > room) & _upper(len(before_bytes))
        result = np.where(open_runs, INF, before_s)
        for i in range(1, len(self.again_s)):
            if not open_runs.any():
                break
            num_bytes, seconds = self.kept(i), self.again_s[i]
            fits = open_runs & (num_bytes <= room)
            freed = np.maximum(before_bytes - num_bytes, 1e-9)
            part = np.clip((before_bytes - room) / freed, 0.0, 1.0)
            result = np.where(fits, before_s + (seconds - before_s) * part, result)
            open_runs &= ~fits
            before_bytes, before_s = num_bytes, seconds
        return result

    @functools.cached_property
    def price(self) -> np.ndarray:
        """Seconds a microbatch, with the end of the step shared out; infinite where memory is too small."""
        return self.work_s + self.repeat_s() + self.end_s() / self.load.num_microbatches

    def by_policy(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes kept of one part and seconds repeated, by segment of a run and policy."""
        kept = np.array([np.diff(self.pricer.kept[p][a : b + 1]) for p in self.pricer.policies])
        return kept.T * self.per_row, np.array([np.diff(r[a : b + 1]) for r in self.repeat]).T

    def over_bytes(self) -> np.ndarray:
        """Bytes too many with the most frugal policy; negative where it fits."""
        if self.load.passing:
            return -self.room() * self.load.share
        least = functools.reduce(np.minimum, [self.kept(i) for i in range(len(self.pricer.policies))])
        return (least - self.room()) * self.load.share


class Pricer:
    """Prices runs of segments on slots, with everything that repeats kept.

    Args:
        program: What is placed.
        cluster: Where.
        costs: Seconds of segments.
        policies: Remat policies that may be chosen, the cheapest in time first.
        pins: Groups that may run a segment, by its index; all where it is not named.
        offload: Whether a slot may keep its state in host memory.
    """

    def __init__(
        self,
        program: ProgramLike,
        cluster: Cluster,
        costs: Costs,
        policies: tuple[str, ...],
        pins: Mapping[int, Sequence[str]] | None = None,
        *,
        offload: bool = False,
    ) -> None:
        self.pins, self.offload = dict(pins or {}), offload
        self.program, self.cluster, self.costs, self.policies = program, cluster, costs, policies
        self.segments = program.segments()
        n = self.num_segments = len(self.segments)
        self.indices = range(n)
        self.alike = [alike(s) for s in self.segments]
        kinds = dict(zip(self.alike, self.segments, strict=True))
        self.classes = [(s, self.alike.count(key)) for key, s in kinds.items()]
        self.groups = {g.name: g for g in cluster.groups}
        self.params = _prefix([s.param_bytes for s in self.segments])
        self.num_params = _prefix([s.num_params for s in self.segments])
        self.kept = {p: _prefix([kept_per_row(s, p) for s in self.segments]) for p in policies}
        # The same of every run of segments.
        self.param_bytes = between(self.params)
        self.state_bytes = between(self.num_params) * ADAM_BYTES_PER_PARAM
        self.kept_bytes = [between(self.kept[p]) for p in policies]
        self.full_bytes = between(_prefix([kept_per_row(s, "full") for s in self.segments]))
        # Bytes per row of the largest segment's temporaries in each run.
        single = [kept_per_row(s, "none") + 2 * s.boundary_bytes_per_row for s in self.segments]
        self.temporaries = np.zeros((n + 1, n + 1))
        for start in range(n):
            self.temporaries[start, start + 1 :] = np.maximum.accumulate(single[start:])
        self.skips = any(edge.consumer - edge.producer > 1 for edge in program.edges())
        self.crossing = np.zeros(n + 1)
        for edge in program.edges():
            self.crossing[edge.producer + 1 : edge.consumer + 1] += edge.bytes_per_row
        self.seconds = functools.lru_cache(maxsize=2_000)(self._seconds)
        self.never = functools.cache(self._never)
        self.end_of_step = functools.lru_cache(maxsize=20_000)(self._end_of_step)
        shape = self.param_bytes.shape
        self.crossing_in = np.broadcast_to(self.crossing[:, None], shape)
        self.crossing_out = np.broadcast_to(self.crossing[None, :], shape)
        # A matrix of a model of many segments takes 100 kB and more.
        self.tables = functools.lru_cache(maxsize=6_000)(self._tables)
        self.model_s = functools.lru_cache(maxsize=20_000)(self._model_s)

    def _never(self, group_name: str) -> np.ndarray:
        """What is not a run of the group: stop <= start, or a segment that is pinned to another one."""
        pinned = between(_prefix([group_name not in self.pins.get(i, (group_name,)) for i in self.indices]))
        return ~_upper(self.num_segments + 1) | (pinned > 0)

    def used_devices(self, slot: Slot, rows: int) -> int:
        """How many of a slot's devices share the rows evenly: the most that divide them."""
        if self.program.rows_mode == "whole":
            return 1
        n = len(slot.devices)
        return next(d for d in range(min(n, rows), 0, -1) if rows % d == 0)

    def ways(self, slot: Slot, load: Load) -> tuple[Way, ...]:
        """Ways to run on a slot, the preferred first: `dp`; `fsdp` and `tp` where memory needs them."""
        if load.passing:
            residencies: tuple[str, ...] = ("gathered", "offloaded")
        else:
            # All stages of a device would have their parameters there at once.
            residencies = ("resident", "offloaded") if self.offload and load.share == 1 else ("resident",)
        rows = load.rows // load.splits if load.rows % load.splits == 0 else load.rows
        n = self.used_devices(slot, rows)
        options: list[tuple[tuple[str, int], ...]] = []
        if load.passing:
            options.append((("fsdp", n),))
        else:
            options += [(("dp", n),)] + ([(("fsdp", n),)] if n > 1 else [])
            group = self.groups[slot.group]
            host = min(len(slot.devices), group.devices_per_host or len(slot.devices))
            tp = 2
            while tp <= min(host, 8):
                width = self.used_devices(Slot(slot.group, slot.devices[: len(slot.devices) // tp]), rows)
                options.append((("fsdp", width), ("tp", tp)))
                tp *= 2
            if 1 < n <= FEW_DEVICES:  # where the gradients' sum takes longer than the other devices save
                options.append((("dp", 1),))
        found = tuple(Way(axes, r) for r in residencies for axes in options)
        return (*found, Way((("fsdp", n),), "sharded")) if load.team_devices else found

    def _seconds(
        self, group_name: str, axes: tuple[tuple[str, int], ...], rows: int, splits: int = 1
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Forward and backward, and what each policy repeats: seconds up to each segment, and of each run."""
        group, sizes, costs = self.groups[group_name], dict(axes), self.costs
        known: dict[object, list[Number]] = {}
        for s, key in zip(self.segments, self.alike, strict=True):
            if key not in known:
                work = costs.forward_s(s, group, rows, sizes) + costs.backward_s(
                    s, group, rows, sizes, "none"
                )
                known[key] = [
                    work,
                    *(costs.recompute_s(s, group, rows, sizes, p) for p in self.policies),
                ]
        columns = splits * np.array([known[key] for key in self.alike], float).T
        prefixes = [_prefix(c) for c in columns]
        return prefixes, [between(p) for p in prefixes]

    def _end_of_step(
        self, group_name: str, axes: tuple[tuple[str, int], ...], hosted: bool
    ) -> tuple[Line, Line]:
        """Gather, reduction and update together, and the update: seconds by bytes of parameters.

        Args:
            group_name: Where.
            axes: Of the submesh.
            hosted: Whether the state comes from host memory and goes back (see `workload.member_seconds`).
        """
        group, sizes, costs = self.groups[group_name], dict(axes), self.costs
        total = float(self.params[-1]) or 1.0
        shards = sizes.get("fsdp", 1) * sizes.get("tp", 1)
        size = DTYPE_BYTES[group.dtype] / 4

        def through(seconds: Callable[..., Number], copied: float) -> Line:
            at = [seconds(x, group, sizes) for x in (total / 2, total)]
            if hosted:
                on_host = [costs.offload_s(x / shards * copied, group) for x in (total / 2, total)]
                join = max if seconds == costs.update_s else operator.add
                at = list(map(join, at, on_host))
            return Line.through(total / 2, at[0], total, at[1])

        gather, reduce = through(costs.gather_s, size), through(costs.reduce_s, 1.0)
        update = through(costs.update_s, 3.0)
        both = Line(gather.base + reduce.base + update.base, gather.slope + reduce.slope + update.slope)
        return both, update

    def _tables(self, slot_group: str, num_devices: int, load: Load) -> list[Table]:
        slot = Slot(slot_group, tuple(range(num_devices)))
        group = self.groups[slot_group]
        return [Table(self, group, way, load) for way in self.ways(slot, load)]

    def _model_s(self, group_name: str, num_devices: int, rows: int) -> float:
        """Forward and backward of the whole model on a slot of so many devices, memory apart."""
        n = self.used_devices(Slot(group_name, tuple(range(num_devices))), rows)
        group, axes, policy = self.groups[group_name], {"dp": n}, self.policies[0]
        return sum(
            count
            * (
                self.costs.forward_s(s, group, rows, axes)
                + self.costs.backward_s(s, group, rows, axes, "none")
                + self.costs.recompute_s(s, group, rows, axes, policy)
            )
            for s, count in self.classes
        )


class Member:
    """One slot of one stage: the best way for each run of segments."""

    def __init__(self, pricer: Pricer, slot: Slot, load: Load) -> None:
        self.slot, self.load, self.pricer = slot, load, pricer
        self.tables = pricer.tables(slot.group, len(slot.devices), load)
        self.never = pricer.never(slot.group)

    @functools.cached_property
    def price(self) -> np.ndarray:
        """Seconds a microbatch of the best way; infinite where none fits."""
        best = functools.reduce(np.minimum, [table.price for table in self.tables])
        return np.where(self.never, INF, best)

    def run(self, table: Table, policies: tuple[str, ...]) -> Run:
        """One of the ways in full."""
        used = math.prod(size for _, size in table.way.axes)
        return Run(self.slot, used, table.way, self.load.rows, self.load.splits, policies)

    @functools.cached_property
    def over_bytes(self) -> np.ndarray:
        """Bytes too many in the most frugal way; negative where it fits."""
        least = functools.reduce(np.minimum, [table.over_bytes() for table in self.tables])
        return np.where(self.never, INF, least)


def _prefix(values: Sequence[Number] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])


def between(prefix: np.ndarray) -> np.ndarray:
    """Sum of every run [start, stop), as a matrix."""
    return prefix[None, :] - prefix[:, None]


@functools.cache
def _upper(size: int) -> np.ndarray:
    return np.triu(np.ones((size, size), dtype=bool), 1)
