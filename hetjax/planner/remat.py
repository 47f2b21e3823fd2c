"""Which segments of a device are recomputed: the least time for what has to fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

EXACT_ITEMS = 12
"""Segments of one stage up to which all choices that no other beats are compared."""


def choose(
    kept: Sequence[np.ndarray],
    seconds: Sequence[np.ndarray],
    in_flight: Sequence[int],
    lane_bound: int,
    room: float,
) -> list[np.ndarray] | None:
    """A policy for each segment, with which the activations of all stages of a device fit.

    Args:
        kept: For each stage bytes of one part, by segment and policy.
        seconds: For each stage what the policies repeat, likewise.
        in_flight: Parts that each stage keeps at once, at most.
        lane_bound: Parts of all stages at once, at most.
        room: Bytes for them.

    Returns:
        For each stage the index of each segment's policy; None where none fits. For one stage of few segments
        the least time there is; else what fits by the best exchange of time for memory, segment by segment.
    """
    chosen = [np.zeros(len(own), int) for own in kept]
    if over(kept, chosen, in_flight, lane_bound, room) <= 0:
        return chosen
    if over(kept, [own.argmin(axis=1) for own in kept], in_flight, lane_bound, room) > 0:
        return None
    if len(kept) == 1 and len(kept[0]) <= EXACT_ITEMS:
        return [_exact(kept[0], seconds[0], room / in_flight[0])]
    steps = sorted(_steps(kept, seconds, in_flight))
    for _, j, i, policy in steps:
        if kept[j][i, policy] < kept[j][i, chosen[j][i]]:
            chosen[j][i] = policy
            if over(kept, chosen, in_flight, lane_bound, room) <= 0:
                break
    _give_back(kept, seconds, in_flight, lane_bound, room, chosen)
    return chosen


def over(
    kept: Sequence[np.ndarray],
    chosen: Sequence[np.ndarray],
    in_flight: Sequence[int],
    lane_bound: int,
    room: float,
) -> float:
    """Bytes over the room; of the lane's parts those of the largest stages count first."""
    sums = [float(own[np.arange(len(own)), at].sum()) for own, at in zip(kept, chosen, strict=True)]
    left, total = lane_bound, 0.0
    for num_bytes, count in sorted(zip(sums, in_flight, strict=True), reverse=True):
        total += num_bytes * min(left, count)
        left -= min(left, count)
    return total - room


def _steps(kept: Sequence[np.ndarray], seconds: Sequence[np.ndarray], in_flight: Sequence[int]):
    """(seconds a byte, stage, segment, policy) of every policy that frees memory."""
    for j, (own, time) in enumerate(zip(kept, seconds, strict=True)):
        for i, policy in np.ndindex(own.shape):
            freed = (own[i, 0] - own[i, policy]) * in_flight[j]
            if freed > 0:
                yield float((time[i, policy] - time[i, 0]) / freed), j, i, policy


def _give_back(
    kept: Sequence[np.ndarray],
    seconds: Sequence[np.ndarray],
    in_flight: Sequence[int],
    lane_bound: int,
    room: float,
    chosen: Sequence[np.ndarray],
) -> None:
    """Back to cheaper policies where these fit too, the most expensive first."""
    paid = sorted(
        (
            (float(time[i, at[i]]), j, i)
            for j, (time, at) in enumerate(zip(seconds, chosen, strict=True))
            for i in range(len(at))
        ),
        reverse=True,
    )
    for _, j, i in paid:
        now = chosen[j][i]
        for policy in np.argsort(seconds[j][i], kind="stable"):
            if seconds[j][i, policy] >= seconds[j][i, now]:
                break
            chosen[j][i] = policy
            if over(kept, chosen, in_flight, lane_bound, room) <= 0:
                break
            chosen[j][i] = now


def _exact(kept: np.ndarray, seconds: np.ndarray, room: float) -> np.ndarray:
    """The least seconds of all policies that fit, by extending what no other choice beats."""
    points: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for own, time in zip(kept, seconds, strict=True):
        grown = sorted(
            (s + float(time[p]), m + float(own[p]), (*names, p))
            for s, m, names in points
            for p in range(len(own))
        )
        points, least = [], math.inf
        for point in grown:
            if point[1] < least:
                points.append(point)
                least = point[1]
    return np.array(next(names for _, num_bytes, names in points if num_bytes <= room * (1 + 1e-12)))
