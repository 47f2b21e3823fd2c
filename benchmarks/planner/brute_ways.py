"""How one slot may run its stages, for `brute_force.py`: ways, and the cheapest remat policies that fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hetjax.memory import Memory, member_memory

if TYPE_CHECKING:
    from benchmarks.planner.brute_force import Space

POLICIES = ("none", "dots", "full")


class Way:
    """A slot's seconds with some axes, as matrices over (start, stop) of the run of segments."""

    def __init__(self, space: Space, group_name: str, axes: Mapping[str, int], rows: int) -> None:
        self.space, self.group, self.axes, self.rows = space, space.cluster.group(group_name), axes, rows
        self.used = math.prod(axes.values())
        self.shards = axes.get("dp", 1) * axes.get("fsdp", 1)
        costs, segments = space.costs, space.segments
        forward = [costs.forward_s(s, self.group, rows, axes) for s in segments]
        backward = [costs.backward_s(s, self.group, rows, axes, "none") for s in segments]
        self.repeat = [[costs.recompute_s(s, self.group, rows, axes, p) for s in segments] for p in POLICIES]
        self.F, self.B = space.runs(forward), space.runs(backward)
        self.G, self.R, self.U = (
            space.of_params(lambda p, f=f: f(p, self.group, axes))
            for f in (costs.gather_s, costs.reduce_s, costs.update_s)
        )
        self.frontier = functools.cache(self._frontier)
        self.fixed_bytes = functools.cache(self._fixed_bytes)

    def _memory(self, a: int, b: int, policy: str) -> Memory:
        return member_memory(
            self.space.segments[a:b],
            self.group,
            rows=self.rows,
            axes=self.axes,
            remat=(policy,) * (b - a),
            in_flight=1,
        )

    def _fixed_bytes(self, a: int, b: int) -> tuple[float, float]:
        """What stays, and the workspace."""
        memory = self._memory(a, b, "none")
        return float(memory.static_bytes), float(memory.workspace_bytes)

    def _frontier(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray, list[tuple[str, ...]]]:
        """Kept bytes of a part, seconds repeated, and policies: those that no others beat in both.

        Seconds rise, bytes fall.
        """
        points: list[tuple[float, float, tuple[str, ...]]] = [(0.0, 0.0, ())]
        for i in range(a, b):
            own = [
                (self.repeat[k][i], float(self._memory(i, i + 1, p).kept_bytes_per_part), p)
                for k, p in enumerate(POLICIES)
            ]
            grown = sorted((s + t, m + k, (*names, p)) for s, m, names in points for t, k, p in own)
            points, least = [], math.inf
            for point in grown:
                if point[1] < least:
                    points.append(point)
                    least = point[1]
        return (
            np.array([m for _, m, _ in points]),
            np.array([s for s, _, _ in points]),
            [p[2] for p in points],
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """How one slot of a team runs its stages: a way and policies for each."""

    ways: tuple[Way, ...]
    remat: tuple[tuple[str, ...], ...]
    repeat_s: tuple[float, ...]
    period_s: float
    end_s: float


def cheapest(
    fronts: Sequence[tuple[np.ndarray, np.ndarray, list[tuple[str, ...]]]],
    in_flight: Sequence[int],
    lane_bound: int,
    room: float,
) -> tuple[int, ...] | None:
    """Of each stage of a slot a point of its frontier: least seconds in all, with what is kept within room.

    At most `in_flight` parts of each stage and `lane_bound` of all are kept at once.
    """
    if len(fronts) == 1:
        fits = np.flatnonzero(fronts[0][0] * in_flight[0] <= room)
        return (int(fits[0]),) if len(fits) else None
    grid = np.indices([len(f[0]) for f in fronts]).reshape(len(fronts), -1).T
    kept = np.stack([f[0][grid[:, i]] for i, f in enumerate(fronts)], axis=1)
    order = np.argsort(-kept, axis=1, kind="stable")
    counts = np.array(in_flight)[order]
    before = np.cumsum(counts, axis=1) - counts
    taken = np.clip(lane_bound - before, 0, counts)
    used = (np.take_along_axis(kept, order, axis=1) * taken).sum(axis=1)
    seconds = sum(f[1][grid[:, i]] for i, f in enumerate(fronts))
    seconds = np.where(used <= room, seconds, math.inf)
    at = int(np.argmin(seconds))
    return tuple(map(int, grid[at])) if np.isfinite(seconds[at]) else None
