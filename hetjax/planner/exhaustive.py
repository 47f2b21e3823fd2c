"""Small problems to the end: every layout with every cut, left out only where a bound says that it is slower.

What `search.py` picks by formula misses plans whose worth the formula does not see: slots of one group apart,
shared stages inside a pipeline, a group too many. Where groups, devices and segments are few, all of them fit
on a list. Each entry gets a bound from below (work of each team, the way to it and back, the end of the step,
load of the links), and the entries are simulated in order of their bounds until the next one is above the
best step found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hetjax.devices import DTYPE_BYTES, Number
from hetjax.graph import in_flight_bounds
from hetjax.planner.coarse import NUM_WAYS
from hetjax.planner.layout import Layout, Slot, Team
from hetjax.planner.pricer import Load

if TYPE_CHECKING:
    from hetjax.planner.search import Search

MOST_DEVICES = 12
"""Of all groups: with more of them nothing is tried."""

MOST_SEGMENTS = 12
"""The same."""

MOST_LAYOUTS = 6000
"""Teams x numbers of microbatches x repeats: with more of them the list is not made."""

MOST_CUTS = 400_000
"""Layouts x cuts: the same."""

MOST_TASKS = 200_000
"""Tasks simulated, likely ones and others."""

CUT_TASKS = 40
"""Tasks that are simulated in the time in which a cut is priced."""

MOST_ESTIMATES = 10_000
"""Cuts that the formula is asked about."""

ENOUGH = 1.001
"""Only plans that are faster than the best by this factor are looked for."""


def improve(search: Search) -> bool:
    """Simulate what may be faster than the best that the search has found, if the problem is small.

    Args:
        search: Its candidates grow.

    Returns:
        Whether one of them is better.
    """
    num_devices = sum(search.cluster.group(name).num_devices for name in search.names)
    small = num_devices <= MOST_DEVICES and search.stages.n <= MOST_SEGMENTS
    if search.program.rows_mode == "whole" or not search.found or not small:
        return False
    layouts = list(itertools.islice(_layouts(search), MOST_LAYOUTS + 1))
    num_cuts = sum(math.comb(search.stages.n - 1, len(layout.teams) - 1) for layout in layouts)
    if len(layouts) > MOST_LAYOUTS or num_cuts > MOST_CUTS:
        return False
    bounds = _Bounds(search)
    queue: list[tuple[float, int, int]] = []
    before, limit = search.shortest_s, search.shortest_s / ENOUGH
    for number, layout in enumerate(layouts):
        lower = bounds.lower_s(layout)
        queue += [(float(lower[c]), number, int(c)) for c in np.flatnonzero(lower < limit)]
    queue.sort()
    entries = [
        (lower, layouts[number], tuple(map(int, _cuts(search.stages.n, len(layouts[number].teams))[c])))
        for lower, number, c in queue
    ]
    # First the likeliest by the formula, so that the bounds leave out more of what follows.
    ordered = _by_estimate(search, entries)
    for variants, cut_tasks in ((_likely, 0), (_all, CUT_TASKS)):
        left = MOST_TASKS
        for lower, layout, cut in ordered:
            if left <= 0 or search.out_of_time:
                break
            if lower < search.shortest_s / ENOUGH:
                left -= sum(_tried(search, some, cut) for some in variants(search, layout, cut))
                left -= cut_tasks * NUM_WAYS * sum(map(len, layout.teams))
    return search.shortest_s < before


Entry = tuple[float, Layout, tuple[int, ...]]
"""A bound from below, a layout and a cut."""


def _by_estimate(search: Search, entries: Sequence[Entry]) -> list[Entry]:
    """The first of the entries, in the order of the formula's times."""
    found = []
    for number, entry in enumerate(entries[:MOST_ESTIMATES]):
        cut = search.stages.cut_at(*entry[1:])
        if cut is not None:
            found.append((cut.estimate_s, number))
    return [entries[number] for _, number in sorted(found)]


def _tried(search: Search, variants: Iterator[Layout], cut: tuple[int, ...]) -> int:
    """Simulate variants until memory is too small, which further ahead take more of; the tasks it took."""
    total = 0
    for variant in variants:
        tasks = search.try_cut(variant, cut, search.shortest_s)
        if tasks is None:
            break
        total += tasks
    return total


def _likely(search: Search, layout: Layout, cut: tuple[int, ...]) -> Iterator[Iterator[Layout]]:
    """Not ahead at all, as far as fills the way to the end, as far as can be, and `gpipe`."""
    variants = list(_variants(search, layout))
    yield iter(variants[:1])
    yield iter(variants[2:3] or variants[1:2])
    yield iter(variants[-2:-1])
    yield iter(variants[-1:])


def _all(search: Search, layout: Layout, cut: tuple[int, ...]) -> Iterator[Iterator[Layout]]:
    """Every way with all that can be ahead."""
    for way in _ways(search, layout, cut):
        yield _variants(search, way)


def _ways(search: Search, layout: Layout, cut: tuple[int, ...]) -> Iterator[Layout]:
    """Each slot in its cheapest way; then others for one slot after another, as that lowers the bound."""
    yield layout
    base = search.stages.cut_at(layout, cut)
    lower = search.shortest_s if base is None else min(base.lower_s * 0.999, search.shortest_s)
    slots = [(j, k) for j, team in enumerate(layout.teams) for k in range(len(team))]
    while True:
        found: list[tuple[float, Layout]] = []
        for j, k in slots:
            for way in range(NUM_WAYS):
                other = layout.with_way(j, k, way)
                at = search.stages.cut_at(other, cut)
                if at is not None and at.lower_s < lower:
                    found.append((at.lower_s, other))
        if not found:
            return
        found.sort(key=lambda item: item[0])
        yield from (other for _, other in found)
        lower, layout = found[0][0] * 0.999, found[0][1]


def _layouts(search: Search) -> Iterator[Layout]:
    """All teams in all orders, with all numbers of microbatches and of repeats."""
    schedules = (None,) if search.schedule is None else (search.schedule,)
    for row in _rows(search):
        for M in search.counts:
            rows = search.program.global_batch // M
            if any(search.stages.shares(team, rows) is None for team in row):
                continue
            for v in range(1, search.stages.n // len(row) + 1 if len(row) > 1 else 2):
                for kind in schedules:
                    kind = kind or ("1f1b" if v == 1 else "interleaved")
                    if v == 1 or kind in ("interleaved", "gpipe"):
                        yield Layout(row * v, M, kind)


def _rows(search: Search) -> Iterator[tuple[Team, ...]]:
    """Slots of some of the groups in every order, in every way joined to teams."""
    groups = [search.cluster.group(name) for name in search.names]
    options = [[0, *(k for k in range(1, g.num_devices + 1) if g.num_devices % k == 0)] for g in groups]
    for counts in itertools.product(*options):
        if not 0 < sum(counts) <= search.stages.n:
            continue
        slots = {g.name: search.slots(g.name, k) for g, k in zip(groups, counts, strict=True) if k}
        for order in _orders({name: len(own) for name, own in slots.items()}):
            rest = {name: iter(own) for name, own in slots.items()}
            line = [next(rest[name]) for name in order]
            for joins in itertools.product(
                (False, True) if search.shared else (False,), repeat=len(line) - 1
            ):
                row = _joined(line, joins)
                # Within a stage that is alone the order does not matter.
                if row is not None and (len(row) > 1 or list(order) == sorted(order, key=search.names.index)):
                    yield row


def _joined(line: Sequence[Slot], joins: Sequence[bool]) -> tuple[Team, ...] | None:
    """Slots as teams; None where one would have two slots of a group."""
    row: list[Team] = [(line[0],)]
    for join, slot in zip(joins, line[1:], strict=True):
        if not join:
            row.append((slot,))
        elif slot.group in {other.group for other in row[-1]}:
            return None
        else:
            row[-1] = (*row[-1], slot)
    return tuple(row)


def _orders(counts: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """Distinct orders of names that come several times."""
    if not any(counts.values()):
        yield ()
    for name, count in counts.items():
        if count:
            for rest in _orders({**counts, name: count - 1}):
                yield (name, *rest)


def _variants(search: Search, layout: Layout) -> Iterator[Layout]:
    """Ways to order the tasks of a layout: how far ahead, as long as that changes a bound; `gpipe`."""
    M = layout.num_microbatches
    before = None
    for ahead in range(M + 2 * len(layout.teams) if len(layout.row) > 1 else 1):
        variant = dataclasses.replace(layout, ahead=ahead)
        bounds = in_flight_bounds(layout.schedule, variant.graph(search.program.global_batch // M), M)
        if bounds == before:
            break
        before = bounds
        yield variant
    if search.schedule is None and layout.repeats == 1 < len(layout.row):
        yield dataclasses.replace(layout, schedule="gpipe")


@functools.cache
def _cuts(num_segments: int, num_stages: int) -> np.ndarray:
    """Boundaries of every cut, a row each."""
    inner = itertools.combinations(range(1, num_segments), num_stages - 1)
    return np.array([(0, *c, num_segments) for c in inner], int)


class _Bounds:
    """Times below which no plan of a layout can be, for all cuts at once.

    Args:
        search: Prices come from it, memory apart.
    """

    def __init__(self, search: Search) -> None:
        self.search, self.pricer = search, search.pricer
        self.least = functools.cache(self._least)

    def _least(self, group: str, num_devices: int, rows: int) -> list[np.ndarray]:
        """Least of any way for every run of segments.

        Returns:
            Seconds of a microbatch, of the reduction and of the update; bytes.
        """
        tables = self.pricer.tables(group, num_devices, Load(rows, 1, 1, 0, 0, 1))
        policies = range(len(self.pricer.policies))
        columns = [
            (
                t.work_s + t.again_s[0],
                t.end_s() - t.update(self.pricer.param_bytes),
                t.update(self.pricer.param_bytes),
                t.fixed() + functools.reduce(np.minimum, [t.kept(p) for p in policies]),
            )
            for t in tables
        ]
        return [functools.reduce(np.minimum, column) for column in zip(*columns, strict=True)]

    def lower_s(self, layout: Layout) -> np.ndarray:
        """No plan of a layout takes less, by cut."""
        M, row = layout.num_microbatches, layout.row
        rows = self.pricer.program.global_batch // M
        cuts = _cuts(self.search.stages.n, len(layout.teams))
        way: Number | np.ndarray = 0.0
        result, update = np.zeros(len(cuts)), np.zeros(len(cuts))
        for i, team in enumerate(row):
            shares = self.search.stages.shares(team, rows) or ()
            first = np.full(len(cuts), np.inf)
            for slot, own in zip(team, shares, strict=True):
                work, end, after, held = self.least(slot.group, len(slot.devices), own)
                stages = [(cuts[:, j], cuts[:, j + 1]) for j in range(i, len(layout.teams), len(row))]
                busy = M * sum(work[a, b] for a, b in stages)
                ends = sum(end[a, b] for a, b in stages)
                result = np.maximum(result, np.maximum(busy + way, busy + ends))
                capacity = self.pricer.groups[slot.group].memory_bytes
                if capacity is not None:
                    result[sum(held[a, b] for a, b in stages) > capacity] = np.inf
                update = np.maximum(update, sum(after[a, b] for a, b in stages))
                first = np.minimum(first, work[stages[0]])
            way = way + first
            if i + 1 < len(row):
                way = way + 2 * self.message_s(team, row[i + 1], rows, cuts[:, i + 1])[1]
        for j in range(len(layout.teams) - 1):
            passing, _ = self.message_s(layout.teams[j], layout.teams[j + 1], rows, cuts[:, j + 1])
            result = np.maximum(result, M * passing)
        return result + update

    def message_s(self, one: Team, two: Team, rows: int, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a message at each cut: on the link, and in all; none between teams of several slots."""
        if len(one) > 1 or len(two) > 1:
            return np.zeros(len(cut)), np.zeros(len(cut))
        a, b = one[0], two[0]
        link = self.search.stages.link(a, b)
        size = DTYPE_BYTES[self.pricer.groups[a.group].dtype] / 4
        num_bytes = self.pricer.crossing * rows * size
        occupied = np.array([link.occupied_s(float(n)) for n in num_bytes])[cut]
        return occupied, occupied + link.latency_us * 1e-6
