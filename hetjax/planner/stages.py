"""Where to cut: for a given layout, boundaries whose slowest stage is as fast as can be.

A longer run of segments is never cheaper, so for a given period each stage may take as many segments as fit
it, and the shortest period for which that reaches the end is found by bisection; exact up to `TOLERANCE`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetjax.cluster import Link
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.graph import Bounds, in_flight_bounds
from hetjax.plan import WEIGHT_SHARE
from hetjax.planner.lanes import best_lane, rough_lane
from hetjax.planner.layout import Cut, Layout, Run, Slot, Team
from hetjax.planner.pricer import INF, Load, Member, Pricer
from hetjax.planner.rows import share_rows

Price = np.ndarray
"""Of the segments from a start (row) to a stop (column); never less for more of them."""

MOST = 1e300
"""Above every price that is not infinite."""

SPLIT_IDLE = 0.4
"""Share of filling and draining that stays idle where backwards are split: about the forwards' part."""

TOLERANCE = 1e-4
"""Relative, of the longest period."""


class Passage(NamedTuple):
    """One way of a boundary's values between consecutive stages.

    Attributes:
        sender: Number of the slot in its team.
        receiver: The same.
        channel: What it shares with others.
        link: Over which.
        rows: Of a microbatch, times the size of an element over that of float32.
    """

    sender: int
    receiver: int
    channel: tuple[object, object]
    link: Link
    rows: float


def soonest_s(messages: Sequence[tuple[Passage, Number]]) -> Number:
    """Below which no microbatch is past a boundary, in either direction.

    A slot waits for all that comes to it; which slot of the next stage is on the longest way is not known.
    """
    arrivals: tuple[dict[int, Number], dict[int, Number]] = {}, {}
    for passage, seconds in messages:
        for there, slot in zip(arrivals, (passage.receiver, passage.sender), strict=True):
            there[slot] = max(there.get(slot, 0.0), seconds)
    return min((s for there in arrivals for s in there.values()), default=0.0)


class Stages:
    """Cuts layouts; what repeats is kept.

    Args:
        pricer: Of the program and cluster.
        sharded: Whether teams may divide their stage's state among their slots.
    """

    def __init__(self, pricer: Pricer, *, sharded: bool = False) -> None:
        self.pricer, self.sharded = pricer, sharded
        self.n = pricer.num_segments
        self.limits = functools.lru_cache(maxsize=1024)(self._limits)
        self.link = functools.lru_cache(maxsize=20_000)(self._link)
        self.passages = functools.lru_cache(maxsize=20_000)(self._passages)
        self.shares = functools.lru_cache(maxsize=4096)(self._shares)
        self.members = functools.lru_cache(maxsize=2_000)(Member)

    def _limits(self, layout: Layout) -> Bounds:
        """What the schedule promises of a layout."""
        M = layout.num_microbatches
        return in_flight_bounds(layout.schedule, layout.graph(self.pricer.program.global_batch // M), M)

    def _link(self, a: Slot, b: Slot) -> Link:
        return self.pricer.cluster.link_between(a.group, a.devices, b.group, b.devices)

    def _shares(self, team: Team, rows: int) -> tuple[int, ...] | None:
        if len(team) == 1:
            return (rows,)
        seconds = {
            i: functools.partial(self.pricer.model_s, slot.group, len(slot.devices))
            for i, slot in enumerate(team)
        }
        return share_rows([len(slot.devices) for slot in team], [seconds[i] for i in range(len(team))], rows)

    def stages(self, layout: Layout) -> list[tuple[Member, ...]] | None:
        """The members of each stage; None where a team cannot share the rows."""
        pricer, M = self.pricer, layout.num_microbatches
        rows = pricer.program.global_batch // M
        in_flight = self.limits(layout).stage
        result = []
        mirrored = layout.schedule in ("gpipe", "ministage")
        for j, team in enumerate(layout.teams):
            shares = self.shares(team, rows)
            if shares is None:
                return None
            # A producer may run ahead by what its bound is wider; with skips that may be the first stage.
            ahead = max(in_flight[0 if pricer.skips else j - 1] - in_flight[j], 0) if j else 0
            share = layout.teams.count(team)
            passing = layout.schedule == "ministage"
            cotangents = in_flight[j] if mirrored and not passing else 2
            # Where the state may be divided among the team: over how many devices.
            devices = sum(len(slot.devices) for slot in team) if self.sharded and len(team) > 1 else 0
            splits = layout.num_splits(j)
            before = layout.teams[j - 1] if j else ()
            size = max((DTYPE_BYTES[pricer.groups[slot.group].dtype] / 4 for slot in before), default=1.0)
            result.append(
                tuple(
                    self.members(
                        pricer,
                        slot,
                        Load(own, M, in_flight[j], ahead, cotangents, share, passing, splits, devices, size),
                    )
                    for slot, own in zip(team, shares, strict=True)
                )
            )
        return result

    def _passages(self, one: Team, two: Team, rows: int) -> list[Passage]:
        """Who sends to whom between consecutive stages; nothing between stages of the same team."""
        ranges = []
        for team in (one, two):
            stops = list(itertools.accumulate(self.shares(team, rows) or (), initial=0))
            ranges.append(list(itertools.pairwise(stops)))
        result = []
        for i, (a, (first, stop)) in enumerate(zip(one, ranges[0], strict=True)):
            for k, (b, (start, end)) in enumerate(zip(two, ranges[1], strict=True)):
                common = min(stop, end) - max(first, start)
                if common > 0 and one != two:
                    size = DTYPE_BYTES[self.pricer.groups[a.group].dtype] / 4
                    channel = (a.group, b.group) if a.group != b.group else (a, b)
                    result.append(Passage(i, k, channel, self.link(a, b), common * size))
        return result

    def messages(self, layout: Layout, j: int, cut: int) -> list[tuple[Passage, Number]]:
        """What stage j sends to the next for each microbatch, with the seconds of each message at a cut."""
        if j + 1 == len(layout.teams):
            return []
        rows = self.pricer.program.global_batch // layout.num_microbatches
        found = self.passages(layout.teams[j], layout.teams[j + 1], rows)
        return [(p, p.link.transfer_s(self.pricer.crossing[cut] * p.rows)) for p in found]

    def cut(self, layout: Layout) -> Cut | None:
        """Boundaries with the shortest longest period, or None where nothing fits.

        Where teams run several stages each, the sum of a team's stages counts.
        """
        members = self.stages(layout)
        if members is None or len(members) > self.n:
            return None
        price = [_worst(stage) for stage in members]
        if layout.repeats > 1:
            bounds = self.balanced(layout, price)
        else:
            _, bounds = self.shortest(price)
        return None if bounds is None else self.finish(layout, members, bounds, exactly=False)

    def balanced(self, layout: Layout, price: Sequence[Price]) -> tuple[int, ...] | None:
        """Boundaries with the shortest longest sum over a team's stages, and stages of a team alike."""
        period, bounds = self.shortest(price)
        if bounds is None:
            return None
        lanes = [layout.row.index(team) for team in layout.teams]
        best = self.longest_lane(lanes, price, bounds)
        low, high = best / 2, best
        while high > low * (1 + 10 * TOLERANCE):
            middle = (low + high) / 2
            found = self.deal(lanes, layout.repeats, price, middle)
            if found is None:
                low = middle
                continue
            reached = self.longest_lane(lanes, price, found)
            if reached < best:
                best, bounds = reached, found
            high = middle
        return bounds

    def longest_lane(self, lanes: Sequence[int], price: Sequence[Price], bounds: Sequence[int]) -> Number:
        """The longest sum over the stages of a lane."""
        sums: dict[int, Number] = {}
        for lane, p, a, b in zip(lanes, price, bounds, bounds[1:], strict=False):
            sums[lane] = sums.get(lane, 0.0) + p[a, b]
        return max(sums.values())

    def deal(
        self, lanes: Sequence[int], repeats: int, price: Sequence[Price], lane_s: Number
    ) -> tuple[int, ...] | None:
        """Boundaries for lanes that take so long: each stage as near to its lane's even part as can be."""
        n, J = self.n, len(price)
        bounds, spent, turn = [0], [0.0] * (max(lanes) + 1), [0] * (max(lanes) + 1)
        for j, (lane, p) in enumerate(zip(lanes, price, strict=True)):
            a, most = bounds[-1], n - (J - 1 - j)
            turn[lane] += 1
            target = lane_s * turn[lane] / repeats - spent[lane]
            last = turn[lane] == repeats
            b = self.farthest(p, a, most, target if last else max(target, 0.0))
            if not last and b < most and p[a, b + 1] < INF:
                under = target - (p[a, b] if b > a else 0.0)
                if p[a, b + 1] - target < under and spent[lane] + p[a, b + 1] <= lane_s:
                    b += 1
            b = max(b, a + 1)
            if b > most or p[a, b] == INF:
                return None
            spent[lane] += float(p[a, b])
            bounds.append(b)
        return tuple(bounds) if bounds[-1] == n else None

    def farthest(self, p: Price, a: int, most: int, limit: Number) -> int:
        """The longest run from `a` that stays within a price; `a` where none does."""
        return a + int(p[a, a + 1 : most + 1].searchsorted(min(limit, MOST), "right"))

    def cut_at(self, layout: Layout, bounds: Sequence[int]) -> Cut | None:
        """Given boundaries with the best way to run each stage, or None where one does not fit."""
        members = self.stages(layout)
        return None if members is None else self.finish(layout, members, tuple(bounds))

    def finish(
        self,
        layout: Layout,
        members: Sequence[tuple[Member, ...]],
        bounds: tuple[int, ...],
        *,
        exactly: bool = True,
    ) -> Cut | None:
        """Each slot's best way for all its stages, and the estimate of given boundaries; None: does not fit.

        Unless `exactly` is asked for, recompute is shared out without regard to whole segments, where memory
        suffices stage by stage, and no policies are chosen.
        """
        n, J = len(layout.row), len(members)
        periods, ends, reductions = [0.0] * J, [0.0] * J, [0.0] * J
        shortest, update_s = [INF] * J, 0.0
        runs: list[list[Run]] = [[] for _ in members]
        limits = self.limits(layout).lane
        given = {(j, k): way for j, k, way in layout.ways}
        for i, team in enumerate(layout.row):
            own = range(i, J, n)
            spans = [(bounds[j], bounds[j + 1]) for j in own]
            for k in range(len(team)):
                lane = [members[j][k] for j in own]
                best = None if exactly or given else rough_lane(lane, spans)
                best = best or best_lane(lane, spans, limits[i], [given.get((j, k)) for j in own])
                if best is None:
                    return None
                ways, seconds, end, update, policies = best
                update_s = max(update_s, sum(update))
                for x, j in enumerate(own):
                    periods[j] = max(periods[j], seconds[x])
                    shortest[j] = min(shortest[j], seconds[x])
                    ends[j] = max(ends[j], end[x])
                    reductions[j] = max(reductions[j], end[x] - update[x])
                    if policies:
                        runs[j].append(lane[x].run(lane[x].tables[ways[x]], policies[x]))
        messages = [self.messages(layout, j, bounds[j + 1]) for j in range(J)]
        estimate = self.estimate_s(layout, periods, ends, messages, bounds)
        soonest = [soonest_s(m) for m in messages]
        lower = update_s + self.lower_s(layout, periods, shortest, reductions, soonest)
        return Cut(bounds, tuple(map(tuple, runs)), float(estimate), float(lower), update_s)

    def lower_s(
        self,
        layout: Layout,
        periods: Sequence[Number],
        shortest: Sequence[Number],
        ends: Sequence[Number],
        transfers: Sequence[Number],
    ) -> Number:
        """A step does not take less.

        Each team's way to its first stage and back, and its own work; and, for each stage, as many ways to
        the end and back, one after another, as its bound on microbatches asks for; ways of the fastest slots.
        """
        M, n = layout.num_microbatches, len(layout.row)
        limits = self.limits(layout).unit
        # Of a split backward, part of each period has no place on the way.
        passing = 1.0 if layout.backward == "whole" else 1 - WEIGHT_SHARE
        there = list(
            itertools.accumulate(
                (
                    passing * p / layout.num_splits(j) + 2 * t
                    for j, (p, t) in enumerate(zip(shortest, transfers, strict=True))
                ),
                initial=0.0,
            )
        )
        result = 0.0
        for j, unit in enumerate(limits):
            own = sum(periods[j::n])
            if j < n:
                result = max(result, M * own + max(there[j], sum(ends[j::n])))
            if not layout.splits:
                result = max(result, there[j] + -(-M // unit[0]) * (there[-1] - there[j] - 2 * transfers[-1]))
        return result

    def estimate_s(
        self,
        layout: Layout,
        periods: Sequence[Number],
        ends: Sequence[Number],
        messages: Sequence[Sequence[tuple[Passage, Number]]],
        bounds: Sequence[int],
    ) -> Number:
        """Step time by formula.

        A microbatch takes at least as long as the busiest team, as the busiest link, and, by Little's law, as
        the way from a stage's forward to its backward divided by the microbatches that may be on it.
        """
        M = layout.num_microbatches
        by_team: dict[Team, Number] = {}
        by_channel: dict[tuple[object, object], Number] = {}
        for team, period, own in zip(layout.teams, periods, messages, strict=True):
            by_team[team] = by_team.get(team, 0.0) + period
            for passage, seconds in own:
                by_channel[passage.channel] = by_channel.get(passage.channel, 0.0) + seconds
        transfers = [max((seconds for _, seconds in own), default=0.0) for own in messages]
        longest = max(*by_team.values(), *by_channel.values(), self.waiting_s(layout, periods, transfers))
        # The others' first stages fill the pipeline, and drain it again.
        fills = {team: s / layout.num_splits(j) for j, (team, s) in enumerate(by_team.items())}
        others = (sum(fills.values()) - max(fills.values())) / layout.repeats
        idle = others if layout.backward == "whole" else SPLIT_IDLE * others
        exchange = max(
            self.exchange_s(team, float(self.pricer.params[b] - self.pricer.params[a]))
            for team, a, b in zip(layout.teams, bounds, bounds[1:], strict=False)
        )
        end = max(sum(ends[i :: len(by_team)]) for i in range(len(by_team)))
        return M * longest + idle + 2 * sum(transfers[: len(by_team)]) + end + exchange

    def exchange_s(self, team: Team, param_bytes: Number) -> Number:
        """Seconds of the gradients' way round the slots of a team, at the end of the step."""
        n = len(team)
        if n == 1:
            return 0.0
        pairs = [(team[i], team[(i + 1) % n]) for i in range(n)]
        links = [self.link(a, b) for a, b in pairs]
        return max(link.transfer_s(2 * (n - 1) / n * param_bytes) for link in links)

    def waiting_s(self, layout: Layout, periods: Sequence[Number], transfers: Sequence[Number]) -> Number:
        """Seconds a microbatch for which the bounds on what is in flight let a pipeline start another one."""
        limits = self.limits(layout)
        ways = [0.0]
        for period, transfer in zip(reversed(periods), reversed(transfers), strict=True):
            ways.append(ways[-1] + period + 2 * transfer)
        ways = ways[:0:-1]  # from each stage to the end and back
        result = max(
            way / unit[0] * layout.num_splits(j)
            for j, (way, unit) in enumerate(zip(ways, limits.unit, strict=True))
        )
        for lane, limit in enumerate(limits.lane if not layout.splits else ()):
            mine = ways[lane :: len(layout.row)]
            result = max(result, sum(mine) / limit)
        if layout.repeats > 1 and ways[0]:
            # The rounds of `interleaved` come to a halt where messages take as long as the stages.
            result *= 1 + 3 * 2 * sum(transfers) / ways[0]
        return result

    def shortest(self, price: Sequence[Price]) -> tuple[Number, tuple[int, ...] | None]:
        """The shortest longest price of consecutive stages, and where to cut for it."""
        J = len(price)
        high, bounds = INF, self.reach(price, INF)
        if bounds is None:
            return INF, None
        high = max(p[a, b] for p, a, b in zip(price, bounds, bounds[1:], strict=False))
        low = max(float(np.diagonal(p, 1).min()) for p in price) if J > 1 else high
        low = min(low, high) * (1 - 1e-12)
        if low <= 0:
            low = high * 1e-6
        while high > low * (1 + TOLERANCE):
            middle = math.sqrt(low * high) if high > 4 * low else (low + high) / 2
            found = self.reach(price, middle)
            if found is None:
                low = middle
            else:
                bounds = found
                high = min(middle, max(p[a, b] for p, a, b in zip(price, bounds, bounds[1:], strict=False)))
        return high, self.even(price, bounds, high)

    def reach(self, price: Sequence[Price], period: Number) -> tuple[int, ...] | None:
        """Boundaries where each stage takes all that fits the period, or None where that is too little."""
        n, J = self.n, len(price)
        bounds = [0]
        for j, p in enumerate(price):
            a, most = bounds[-1], n - (J - 1 - j)
            low = self.farthest(p, a, most, period)
            if low == a:
                return None
            bounds.append(low)
        return tuple(bounds) if bounds[-1] == n else None

    def even(self, price: Sequence[Price], bounds: tuple[int, ...], period: Number) -> tuple[int, ...]:
        """Shift what the last stages were left short of: boundaries move left while no stage gets slower."""
        result = list(bounds)
        limit = period * (1 + TOLERANCE)
        for j in range(len(price) - 1, 0, -1):
            while result[j] - result[j - 1] > 1:
                here = price[j][result[j] - 1, result[j + 1]]
                if here > min(limit, price[j - 1][result[j - 1], result[j]]):
                    break
                result[j] -= 1
        return tuple(result)

    def least_overflow(self, layout: Layout) -> tuple[Number, int, Mapping[str, Number]]:
        """How far a layout is from fitting at best.

        Returns:
            Bytes over (negative where it fits), the stage that is the furthest over, and for each group that
            is over the bytes that it needs per device.
        """
        members = self.stages(layout)
        if members is None or len(members) > self.n:
            return INF, 0, {}
        over = _over_bytes(members)
        least = min(float(o[np.isfinite(o)].min(initial=0.0)) for o in over)
        runs = [np.where(np.isinf(o), 0.0, o - least + 1.0) for o in over]
        price = [np.maximum.accumulate(r, axis=1) for r in runs]
        price = [np.where(np.isinf(o), INF, p) for o, p in zip(over, price, strict=True)]
        _, bounds = self.shortest(price)
        return (INF, 0, {}) if bounds is None else self.overflow_at(members, bounds)

    def overflow_at(
        self, members: Sequence[tuple[Member, ...]], bounds: Sequence[int]
    ) -> tuple[Number, int, Mapping[str, Number]]:
        """How far given boundaries are from fitting; as `least_overflow`."""
        over = _over_bytes(members)
        values = [float(o[a, b]) for o, a, b in zip(over, bounds, bounds[1:], strict=False)]
        needs: dict[str, Number] = {}
        for stage, value in zip(members, values, strict=True):
            for member in stage:
                if value > 0:
                    have = self.pricer.groups[member.slot.group].memory_bytes or 0.0
                    needs[member.slot.group] = max(needs.get(member.slot.group, 0.0), have + value)
        return max(values), values.index(max(values)), needs


def _over_bytes(members: Sequence[tuple[Member, ...]]) -> list[np.ndarray]:
    """Bytes too many of each stage, by its segments, in the most frugal way."""
    return [functools.reduce(np.maximum, [m.over_bytes for m in stage]) for stage in members]


def _worst(stage: tuple[Member, ...]) -> Price:
    return functools.reduce(np.maximum, [m.price for m in stage])
