"""All stages of one slot together: how each is run, and which segments are recomputed, so that they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetjax.devices import Number
from hetjax.planner import remat
from hetjax.planner.pricer import INF, Member, Table

Span = tuple[int, int]
"""A run of segments."""


class Lane(NamedTuple):
    """How a slot runs its stages, and what that takes.

    Attributes:
        ways: For each stage the number of its way.
        seconds: Of a microbatch, by stage.
        ends: Seconds at the end of the step, by stage.
        updates: Part of them that follows everybody's reductions.
        policies: Remat of each segment, by stage; empty where none has been chosen.
    """

    ways: tuple[int, ...]
    seconds: list[float]
    ends: list[float]
    updates: list[float]
    policies: list[tuple[str, ...]]

    def total_s(self, num_microbatches: int) -> float:
        """Seconds of a microbatch, with the end of the step shared out."""
        return sum(self.seconds) + sum(self.ends) / num_microbatches


def best_lane(
    members: Sequence[Member], spans: Sequence[Span], lane_bound: int, given: Sequence[int | None]
) -> Lane | None:
    """The ways in which a slot takes the least time for its stages, or None where none fits.

    The best way that is the same for all stages, then, stage by stage, another one where that is better.

    Args:
        members: The slot in each of its stages.
        spans: Their segments.
        lane_bound: Parts of all stages that are kept at once, at most.
        given: For each stage its way, or None where it may be any.
    """
    if any(m.never[span] for m, span in zip(members, spans, strict=True)):
        return None
    M = members[0].load.num_microbatches
    options = range(len(members[0].tables))
    if any(way is not None and way not in options for way in given):
        return None
    if len(members) == 1 and given[0] is None:
        prices = [float(table.price[spans[0]]) for table in members[0].tables]
        return _lane(members, spans, (prices.index(min(prices)),), lane_bound)
    # What each way takes at least, were memory ample.
    least = [
        [float(t.work_s[span] + t.again_s[0][span] + t.end_s(span) / M) for t in m.tables]
        for m, span in zip(members, spans, strict=True)
    ]
    best: Lane | None = None
    for ways in dict.fromkeys(tuple(c if way is None else way for way in given) for c in options):
        if best is None or sum(own[w] for own, w in zip(least, ways, strict=True)) < best.total_s(M):
            best = _shorter(best, _lane(members, spans, ways, lane_bound), M)
    for stage in [s for s, way in enumerate(given) if way is None] if best else ():
        for way in options:
            assert best is not None, "the loop is empty then"
            if least[stage][way] < best.seconds[stage] + best.ends[stage] / M:
                ways = (*best.ways[:stage], way, *best.ways[stage + 1 :])
                best = _shorter(best, _lane(members, spans, ways, lane_bound), M)
    return best


def rough_lane(members: Sequence[Member], spans: Sequence[Span]) -> Lane | None:
    """As `best_lane`, for stages that fit each by itself: what is repeated is not of whole segments."""
    if any(m.never[span] for m, span in zip(members, spans, strict=True)):
        return None
    M = members[0].load.num_microbatches
    ways, seconds, ends, updates = [], [], [], []
    for member, span in zip(members, spans, strict=True):
        prices = [float(table.price[span]) for table in member.tables]
        way = prices.index(min(prices))
        if prices[way] == INF:
            return None
        table = member.tables[way]
        num_bytes = float(table.pricer.param_bytes[span])
        ways.append(way)
        ends.append(float(table.end(num_bytes)))
        updates.append(float(table.update(num_bytes)))
        seconds.append(prices[way] - ends[-1] / M)
    return Lane(tuple(ways), seconds, ends, updates, [])


def _shorter(one: Lane | None, other: Lane | None, num_microbatches: int) -> Lane | None:
    if one is None or other is None:
        return one or other
    return other if other.total_s(num_microbatches) < one.total_s(num_microbatches) else one


def _lane(
    members: Sequence[Member], spans: Sequence[Span], ways: tuple[int, ...], lane_bound: int
) -> Lane | None:
    """Stages in given ways; None where memory is too small."""
    tables = [m.tables[way] for m, way in zip(members, ways, strict=True)]
    pricer, pairs = tables[0].pricer, list(zip(tables, spans, strict=True))
    steps = [float(t.work_s[span]) for t, span in pairs]
    ends, updates = [], []
    for t, span in pairs:
        num_bytes = float(pricer.param_bytes[span])
        ends.append(float(t.end(num_bytes)))
        updates.append(float(t.update(num_bytes)))
    if tables[0].load.passing:
        if any(t.room(span) < 0 for t, span in pairs):
            return None
        steps = [s + float(t.again_s[-1][span]) for s, (t, span) in zip(steps, pairs, strict=True)]
        return Lane(ways, steps, ends, updates, [("offloaded",) * (b - a) for a, b in spans])
    room = _room(pairs)
    if sum(float(t.kept(0, span)) for t, span in pairs) <= room:
        steps = [s + float(t.again_s[0][span]) for s, (t, span) in zip(steps, pairs, strict=True)]
        return Lane(ways, steps, ends, updates, [(pricer.policies[0],) * (b - a) for a, b in spans])
    kept, again = zip(*(t.by_policy(*span) for t, span in pairs), strict=True)
    chosen = remat.choose(kept, again, [t.load.in_flight for t in tables], lane_bound, room)
    if chosen is None:
        return None
    repeats = [float(s[np.arange(len(at)), at].sum()) for s, at in zip(again, chosen, strict=True)]
    policies = [tuple(pricer.policies[i] for i in at) for at in chosen]
    return Lane(ways, [s + r for s, r in zip(steps, repeats, strict=True)], ends, updates, policies)


def _room(pairs: Sequence[tuple[Table, Span]]) -> Number:
    """Bytes that the activations of all stages may take."""
    workspace = max(float(t.workspace(span)) for t, span in pairs)
    return pairs[0][0].capacity - workspace - sum(float(t.fixed(span)) for t, span in pairs)
