"""Where to cut: exact stage boundaries for a given row of slots.

A slot is a set of devices that takes one place in the pipeline. For every run of segments and every slot the
fastest way to run it that fits (dp or fsdp, which remat policy) is priced at once as a matrix over (start,
stop); a dynamic program then picks the boundaries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hetjax.cluster import Cluster
from hetjax.cost import Costs, ProgramLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.graph import StageGraph, in_flight_bounds
from hetjax.memory import ADAM_BYTES_PER_PARAM, kept_per_row

SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, np.inf)
"""Multiples of the shortest possible period that are tried, to trade the period for the pipeline's length."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Devices that take one place in the pipeline.

    Attributes:
        group: Their group.
        devices: Their indices; as many of them are used as the rows divide by.
    """

    group: str
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a slot runs a stage."""

    axes: tuple[tuple[str, int], ...]
    remat: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """Slots in pipeline order, with everything that the prices depend on.

    Attributes:
        slots: One for each stage; a slot may come several times (`interleaved`).
        num_microbatches: Of one step.
        schedule: Whose bounds the memory follows.
    """

    slots: tuple[Slot, ...]
    num_microbatches: int
    schedule: str

    def graph(self) -> StageGraph:
        """A chain of the slots' lanes."""
        numbers: dict[Slot, int] = {}
        lanes = tuple((numbers.setdefault(slot, len(numbers)),) for slot in self.slots)
        return StageGraph(lanes, tuple((s, s + 1) for s in range(len(lanes) - 1)))


@dataclasses.dataclass(frozen=True)
class Cut:
    """Boundaries for a layout.

    Attributes:
        bounds: Where each stage starts, and the number of segments.
        ways: How each stage runs.
        estimate_s: Step time by formula; the simulator knows better.
    """

    bounds: tuple[int, ...]
    ways: tuple[Way, ...]
    estimate_s: Number


def used_devices(slot: Slot, rows: int, rows_mode: str) -> int:
    """How many of a slot's devices share the rows evenly: the most that divide them."""
    if rows_mode == "whole":
        return 1
    return max(n for n in range(1, len(slot.devices) + 1) if rows % n == 0)


class Pricer:
    """Prices runs of segments on slots, with everything that repeats kept.

    Args:
        program: What is placed.
        cluster: Where.
        costs: Seconds of segments.
        policies: Remat policies that may be chosen, the cheapest in time first.
    """

    def __init__(
        self, program: ProgramLike, cluster: Cluster, costs: Costs, policies: tuple[str, ...]
    ) -> None:
        self.program, self.cluster, self.costs, self.policies = program, cluster, costs, policies
        self.segments = program.segments()
        n = self.num_segments = len(self.segments)
        self.params = _prefix([s.param_bytes for s in self.segments])
        self.num_params = _prefix([s.num_params for s in self.segments])
        kept = {p: [kept_per_row(s, p) for s in self.segments] for p in (*policies, "none")}
        self.kept = {p: _prefix(values) for p, values in kept.items()}
        single = [k + 2 * s.boundary_bytes_per_row for k, s in zip(kept["none"], self.segments, strict=True)]
        self.temporaries = np.zeros((n + 1, n + 1))
        for start in range(n):
            self.temporaries[start, start + 1 :] = np.maximum.accumulate(single[start:])
        # Boundary values have their producer's dtype, which can be that of any group.
        self.widest = max(DTYPE_BYTES[g.dtype] for g in cluster.groups) / 4
        self.skips = any(edge.consumer - edge.producer > 1 for edge in program.edges())
        self.crossing = np.zeros(n + 1)
        for edge in program.edges():
            self.crossing[edge.producer + 1 : edge.consumer + 1] += edge.bytes_per_row
        self.matrices = functools.lru_cache(maxsize=4096)(self._matrices)
        self.seconds = functools.lru_cache(maxsize=4096)(self._seconds)

    def ways(self, num_devices: int) -> tuple[Way, ...]:
        """Ways to run on so many devices, the preferred first: `dp`; `fsdp` where memory needs it; remat."""
        axes = [(("dp", num_devices),)] + ([(("fsdp", num_devices),)] if num_devices > 1 else [])
        return tuple(Way(a, p) for p in self.policies for a in axes)

    def _seconds(self, group_name: str, rows: int, way: Way) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Prefix sums of F and of B; seconds of the step's end, as base and slope over parameter bytes."""
        group, axes = self.cluster.group(group_name), dict(way.axes)
        forward = _prefix([self.costs.forward_s(s, group, rows, axes) for s in self.segments])
        backward = _prefix([self.costs.backward_s(s, group, rows, axes, way.remat) for s in self.segments])
        total = float(self.params[-1]) or 1.0
        ends = [
            self.costs.gather_s(p, group, axes)
            + self.costs.reduce_s(p, group, axes)
            + self.costs.update_s(p, group, axes)
            for p in (total / 2, total)
        ]
        slope = (ends[1] - ends[0]) / (total / 2)
        return forward, backward, ends[1] - slope * total, slope

    def bytes(
        self, group_name: str, rows: int, way: Way, in_flight: int, ahead: int, cotangents: int
    ) -> np.ndarray:
        """Bytes per device of every run of segments, as `memory.member_memory` counts them."""
        group, axes = self.cluster.group(group_name), dict(way.axes)
        fsdp, size = axes.get("fsdp", 1), DTYPE_BYTES[group.dtype] / 4
        local_rows = rows / (axes.get("dp", 1) * fsdp)
        params, num_params = _between(self.params), _between(self.num_params)
        static = params / fsdp + params + num_params * ADAM_BYTES_PER_PARAM / fsdp
        if size < 1 or fsdp > 1:
            static = static + params * size
        kept = _between(self.kept[way.remat]) * local_rows * size * in_flight
        waiting = self.crossing[:, None] * (ahead + 1) + self.crossing[None, :] * cotangents
        waiting = waiting * local_rows * self.widest
        workspace = np.maximum(self.temporaries * local_rows * size, params / fsdp)
        return static + kept + waiting + workspace

    def _matrices(
        self,
        slot: Slot,
        rows: int,
        num_microbatches: int,
        in_flight: int,
        ahead: int,
        cotangents: int,
        share: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For every run of segments: seconds a microbatch of the first way that fits, which way, bytes over.

        `share` stages share the devices, each with its part of the memory.
        """
        group = self.cluster.group(slot.group)
        capacity = np.inf if group.memory_bytes is None else group.memory_bytes / share
        n = self.num_segments
        best, which = np.full((n + 1, n + 1), np.inf), np.zeros((n + 1, n + 1), int)
        least_over = np.full((n + 1, n + 1), np.inf)
        for i, way in enumerate(self.ways(used_devices(slot, rows, self.program.rows_mode))):
            forward, backward, base, slope = self.seconds(slot.group, rows, way)
            period = _between(forward) + _between(backward)
            period = period + (base + slope * _between(self.params)) / num_microbatches
            over = self.bytes(slot.group, rows, way, in_flight, ahead, cotangents) - capacity
            first = np.isinf(best) & (over <= 0)
            which = np.where(first, i, which)
            best = np.where(first, period, best)
            least_over = np.minimum(least_over, over)
        backwards = np.tri(n + 1, dtype=bool)  # stop <= start: no segment
        best[backwards] = np.inf
        least_over[backwards] = np.inf
        return best, which, least_over

    def _of_layout(self, layout: Layout) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        bounds = in_flight_bounds(layout.schedule, layout.graph(), layout.num_microbatches).stage
        rows = self.program.global_batch // layout.num_microbatches
        result = []
        for j, slot in enumerate(layout.slots):
            # A producer may run ahead by what its bound is wider; with skips that may be the first stage.
            ahead = max(bounds[0 if self.skips else j - 1] - bounds[j], 0) if j else 0
            cotangents = bounds[j] if layout.schedule == "gpipe" else 2
            result.append(
                self.matrices(
                    slot,
                    rows,
                    layout.num_microbatches,
                    bounds[j],
                    ahead,
                    cotangents,
                    layout.slots.count(slot),
                )
            )
        return result

    def transfer_s(self, layout: Layout, j: int) -> np.ndarray:
        """Seconds of one message from stage j to the next, by where the cut is."""
        if j + 1 == len(layout.slots):
            return np.zeros(self.num_segments + 1)
        a, b = layout.slots[j], layout.slots[j + 1]
        if a == b:
            return np.zeros(self.num_segments + 1)
        link = self.cluster.link(a.group, b.group)
        rows = self.program.global_batch // layout.num_microbatches
        num_bytes = self.crossing * rows * DTYPE_BYTES[self.cluster.group(a.group).dtype] / 4
        return link.latency_us * 1e-6 + num_bytes / (link.bandwidth_gb_per_s * 1e9)

    def floor_s(self, layout: Layout) -> float:
        """No boundaries make this layout's step shorter, by the same formula.

        With weights w over the slots, the longest period is at least sum over segments of min over slots of
        (w x seconds) / sum of w.
        """
        rows = self.program.global_batch // layout.num_microbatches
        weights, weighted = 0.0, np.full(self.num_segments, np.inf)
        for slot in dict.fromkeys(layout.slots):
            way = self.ways(used_devices(slot, rows, self.program.rows_mode))[0]
            forward, backward, _, _ = self.seconds(slot.group, rows, way)
            weight = 1 / max(float(forward[-1] + backward[-1]), 1e-30)
            weights += weight
            weighted = np.minimum(weighted, weight * (np.diff(forward) + np.diff(backward)))
        return layout.num_microbatches * float(weighted.sum()) / weights

    def cut(self, layout: Layout) -> Cut | None:
        """The best boundaries for a layout, or None where nothing fits.

        Minimises (M - 1) * longest period + sum of stages and transfers, exactly up to the choice of `SLACK`;
        a period is a stage's F and B, or its message's time on the link where that is longer.
        """
        M = layout.num_microbatches
        matrices = self._of_layout(layout)
        periods, lengths = [], []
        for j, (seconds, _, _) in enumerate(matrices):
            transfer = self.transfer_s(layout, j)[None, :]
            periods.append(np.maximum(seconds, transfer))
            lengths.append(seconds + 2 * transfer)
        shortest = _bottleneck(periods)
        if not np.isfinite(shortest):
            return None
        best: tuple[float, tuple[int, ...]] | None = None
        for slack in SLACK:
            limit = shortest * slack * (1 + 1e-12)
            masked = [np.where(p <= limit, c, np.inf) for p, c in zip(periods, lengths, strict=True)]
            bounds = _shortest(masked)
            longest = max(p[a, b] for p, a, b in zip(periods, bounds, bounds[1:], strict=False))
            total = sum(c[a, b] for c, a, b in zip(lengths, bounds, bounds[1:], strict=False))
            if (
                layout.schedule == "interleaved"
            ):  # Megatron-LM's bubble: the number of lanes, less one, of chunks
                lanes = len(set(layout.slots))
                estimate = longest * (M * len(layout.slots) / lanes + lanes - 1)
            else:
                estimate = (M - 1) * longest + total
            if best is None or estimate < best[0] * (1 - 1e-9):
                best = float(estimate), bounds
        assert best is not None, "a finite period has boundaries"
        return Cut(best[1], self._ways_at(layout, matrices, best[1]), best[0])

    def cut_at(self, layout: Layout, bounds: tuple[int, ...]) -> Cut | None:
        """Given boundaries with the best way to run each stage, or None where one does not fit."""
        matrices = self._of_layout(layout)
        if any(not np.isfinite(m[0][a, b]) for m, a, b in zip(matrices, bounds, bounds[1:], strict=False)):
            return None
        return Cut(bounds, self._ways_at(layout, matrices, bounds), 0.0)

    def _ways_at(
        self,
        layout: Layout,
        matrices: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        bounds: tuple[int, ...],
    ) -> tuple[Way, ...]:
        rows = self.program.global_batch // layout.num_microbatches
        return tuple(
            self.ways(used_devices(slot, rows, self.program.rows_mode))[which[a, b]]
            for slot, (_, which, _), a, b in zip(layout.slots, matrices, bounds, bounds[1:], strict=False)
        )

    def least_overflow(self, layout: Layout) -> tuple[Number, int, dict[str, Number]]:
        """How far a layout is from fitting at best; every slot may come once.

        Returns:
            Bytes over (negative where it fits), the stage that is the furthest over, and for each group that
            is over the bytes that it needs per device.
        """
        over = [m[2] for m in self._of_layout(layout)]
        worst = _bottleneck(over)
        masked = [np.where(o <= worst, 0.0, np.inf) for o in over]
        bounds = _shortest(masked)
        values = [float(o[a, b]) for o, a, b in zip(over, bounds, bounds[1:], strict=False)]
        needs: dict[str, Number] = {}
        for slot, value in zip(layout.slots, values, strict=True):
            if value > 0:
                have = self.cluster.group(slot.group).memory_bytes or 0.0
                needs[slot.group] = max(needs.get(slot.group, 0.0), have + value)
        return worst, int(np.argmax(values)), needs


def _prefix(values: Sequence[Number]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])


def _between(prefix: np.ndarray) -> np.ndarray:
    """Sum of every run [start, stop), as a matrix."""
    return prefix[None, :] - prefix[:, None]


def _bottleneck(matrices: Sequence[np.ndarray]) -> float:
    """Least possible maximum over the stages."""
    reach = np.full(matrices[0].shape[0], np.inf)
    reach[0] = -np.inf
    for matrix in matrices:
        reach = np.maximum(reach[:, None], matrix).min(axis=0)
    return float(reach[-1])


def _shortest(matrices: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Boundaries with the least sum over the stages; finite somewhere."""
    size = matrices[0].shape[0]
    reach = np.full(size, np.inf)
    reach[0] = 0.0
    sources = []
    for matrix in matrices:
        totals = reach[:, None] + matrix
        sources.append(totals.argmin(axis=0))
        reach = totals.min(axis=0)
    bounds = [size - 1]
    for source in reversed(sources):
        bounds.append(int(source[bounds[-1]]))
    return tuple(reversed(bounds))
