"""Small changes to a plan: the steps of the search from the best that it has found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetjax.devices import Number
from hetjax.planner.coarse import NUM_WAYS
from hetjax.planner.explain import Candidate
from hetjax.planner.layout import Layout

if TYPE_CHECKING:
    from hetjax.planner.search import Search

FEW_STAGES = 12
"""Plans of up to so many stages are tried with each slot in another way."""


def neighbours(
    search: Search, layout: Layout, bounds: tuple[int, ...], best: Candidate
) -> Iterator[tuple[Layout, tuple[int, ...]]]:
    """Layouts and boundaries one small change away."""
    for other in similar(search, layout):
        cut = search.stages.cut(other)
        if cut is not None and cut.lower_s < best.simulation.step_time_s:
            yield other, cut.bounds
        if other.teams == layout.teams:
            yield other, bounds
    moves = []
    for j in range(1, len(bounds) - 1):
        for step in (1, -1):
            moved = (*bounds[:j], bounds[j] + step, *bounds[j + 1 :])
            if all(a < b for a, b in itertools.pairwise(moved)):
                moves.append(moved)
    # Off the busiest stages first.
    search.random.shuffle(moves)
    seconds = [
        max(m.seconds[0] + m.seconds[1] for m in stage.members if m.seconds) for stage in best.plan.stages
    ]
    moves.sort(key=lambda moved: -relief(bounds, moved, seconds))
    for moved in moves:
        yield layout, moved
    for other in other_ways(search, layout):
        yield other, bounds


def other_ways(search: Search, layout: Layout) -> Iterator[Layout]:
    """Slots in other ways: all of a group, and of few stages each by itself.

    What is cheapest for a slot need not be for the step: the end of the first stage is waited for.
    """
    slots = [(j, k, slot.group) for j, team in enumerate(layout.teams) for k, slot in enumerate(team)]
    sets = [[(j, k) for j, k, name in slots if name == group] for group in layout.groups]
    if len(layout.teams) <= FEW_STAGES:
        sets += [[(j, k)] for j, k, _ in slots]
    for own in {tuple(own): None for own in sets}:
        for way in range(NUM_WAYS):
            other = layout
            for j, k in own:
                other = other.with_way(j, k, way)
            yield other


def relief(bounds: Sequence[int], moved: Sequence[int], seconds: Sequence[Number]) -> Number:
    """How much busier the stage is that loses a segment than the one that gains it."""
    j = next(j for j, (a, b) in enumerate(zip(bounds, moved, strict=True)) if a != b)
    loser, gainer = (j, j - 1) if moved[j] > bounds[j] else (j - 1, j)
    return seconds[loser] - seconds[gainer]


def similar(search: Search, layout: Layout) -> Iterator[Layout]:
    """Other microbatch counts, schedules, orders and slot sizes."""
    at = search.counts.index(layout.num_microbatches)
    for M in search.counts[max(at - 1, 0) : at + 2]:
        yield dataclasses.replace(layout, num_microbatches=M)
    row, v = layout.row, layout.repeats
    if layout.schedule in ("1f1b", "interleaved") and len(row) > 1:
        for ahead in {layout.ahead // 2, layout.ahead - 1, layout.ahead + 1, layout.ahead + 3}:
            if ahead >= 0 and ahead != layout.ahead:
                yield dataclasses.replace(layout, ahead=ahead)
        for backward in search.backwards:
            yield dataclasses.replace(layout, backward=backward)
    if search.schedule is None and len(row) > 1:
        yield Layout(row, layout.num_microbatches, "gpipe")
        yield dataclasses.replace(layout, teams=row, schedule="1f1b", ways=())
        for other in (v - 1, v + 1):
            if 2 <= other <= 6 and other * len(row) <= search.program.num_segments:
                yield dataclasses.replace(layout, teams=row * other, schedule="interleaved", ways=())
    for i in range(len(row) - 1):
        if row[i][0].group != row[i + 1][0].group:
            swapped = (*row[:i], row[i + 1], row[i], *row[i + 2 :])
            yield dataclasses.replace(layout, teams=swapped * v, ways=())
    if search.program.rows_mode == "whole":
        return
    if search.features == "all" and layout.schedule == "1f1b" and len(row) > 1:
        rows = search.program.global_batch // layout.num_microbatches
        for i in range(len(row)):
            now = layout.splits or (1,) * len(row)
            for part in {now[i] * 2, now[i] // 2} - {0}:
                if rows % part == 0:
                    yield dataclasses.replace(layout, splits=(*now[:i], part, *now[i + 1 :]))
    if any(s > 1 for s in layout.splits):
        return
    layout = dataclasses.replace(layout, splits=(), ways=())
    yield from resized(search, layout)
    if search.shared:
        yield from merged(search, layout)


def resized(search: Search, layout: Layout) -> Iterator[Layout]:
    """One group cut into another number of slots."""
    row, v = layout.row, layout.repeats
    if any(len(team) > 1 for team in row):
        return
    for name in layout.groups:
        places = [i for i, team in enumerate(row) if team[0].group == name]
        if places != list(range(places[0], places[-1] + 1)):
            continue
        n = search.cluster.group(name).num_devices
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        at = divisors.index(len(places)) if len(places) in divisors else 0
        for count in divisors[max(at - 1, 0) : at + 2]:
            slots = tuple((slot,) for slot in search.slots(name, count))
            teams = (*row[: places[0]], *slots, *row[places[-1] + 1 :])
            if count != len(places) and len(teams) * v <= search.program.num_segments:
                yield dataclasses.replace(layout, teams=teams * v)


def merged(search: Search, layout: Layout) -> Iterator[Layout]:
    """Two neighbouring stages as one that shares its rows, and the other way round."""
    row, v = layout.row, layout.repeats
    for i in range(len(row) - 1):
        if row[i][0].group != row[i + 1][0].group:
            teams = (*row[:i], (*row[i], *row[i + 1]), *row[i + 2 :])
            yield dataclasses.replace(layout, teams=teams * v)
    for i, team in enumerate(row):
        for j in range(1, len(team)):
            teams = (*row[:i], team[:j], team[j:], *row[i + 1 :])
            if len(teams) * v <= search.program.num_segments:
                yield dataclasses.replace(layout, teams=teams * v)
