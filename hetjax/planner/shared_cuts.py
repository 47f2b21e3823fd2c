"""Boundaries inside a segment: two neighbours share its rows, each as many as its speed asks for.

With few segments a stage, whole ones leave some stages busy for much longer than others. A segment between
two stages can be a stage of its own whose rows both of them run; what that costs besides (its parameters in
both places, a sum of two gradients at the end of the step) is part of what the simulator sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetjax.devices import Number
from hetjax.plan import Member, Plan, Stage
from hetjax.planner.explain import Candidate
from hetjax.workload import timed

if TYPE_CHECKING:
    from hetjax.planner.search import Search

MOST_STAGES = 64
"""With more of them nothing is tried."""

ROUNDS = 24
"""Halvings of the period's range."""

POLICIES_LEFT = 400
"""Policies of segments that are raised, until memory suffices."""

EXCHANGE_SHARE = 0.05
"""Neighbours whose link takes longer than this share of the step for the sum of gradients share nothing."""

MOST_BASES = 8
"""Plans whose boundaries are moved into segments."""

WORTH = 1.25
"""Of them no one takes longer than this times the shortest."""

Piece = tuple[int, int, int, int]
"""Start and stop of a run of segments, and of its rows."""


def bases(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best of each number of microbatches and of stages, the fastest first."""
    found: dict[tuple[int, int], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.rank):
        found.setdefault((candidate.plan.num_microbatches, len(candidate.plan.stages)), candidate)
    shortest = min(c.simulation.step_time_s for c in candidates)
    return [c for c in found.values() if c.simulation.step_time_s <= WORTH * shortest][:MOST_BASES]


def shared(search: Search, best: Candidate) -> Iterator[tuple[str, Plan]]:
    """Variants of a pipeline with segments that neighbours share.

    Args:
        search: Its program, cluster and choices.
        best: A candidate; others than `1f1b` pipelines of stages of one member each have no variants.

    Yields:
        A label and a plan whose memory may still be too small.
    """
    plan = best.plan
    lanes = [stage.members[0] for stage in plan.stages]
    plain = plan.schedule == "1f1b" and all(len(stage.members) == 1 for stage in plan.stages)
    apart = len({(m.group, m.devices) for m in lanes}) == len(lanes)
    whole = all(m.splits == 1 for m in lanes)
    if not (plain and apart and whole and 1 < len(lanes) <= MOST_STAGES) or search.pricer.pins:
        return
    if search.program.rows_mode != "split" or search.pricer.skips:
        return
    dealer = _Dealer(search, plan)
    for inside in (False, True):  # also between groups, or within them alone
        pieces = dealer.best(inside)
        if pieces is None:
            continue
        for ahead in (plan.ahead, plan.ahead + 1, plan.ahead + 3):
            made = dealer.plan_of(pieces, ahead)
            if made is None:
                break
            yield f"{best.label}, boundaries inside segments", made


class _Dealer:
    """Deals the segments of a plan anew to its lanes.

    Args:
        search: Prices come from it.
        plan: Whose lanes, axes and policies are kept.
    """

    def __init__(self, search: Search, plan: Plan) -> None:
        self.search, self.plan, self.program = search, plan, search.program
        self.lanes = [stage.members[0] for stage in plan.stages]
        self.rows = plan.global_batch // plan.num_microbatches
        self.segments = search.pricer.segments
        self.policy = [r for stage in plan.stages for r in stage.members[0].remat]
        self.known: dict[tuple[object, ...], Number] = {}

    def seconds(self, lane: int, segment: int, rows: int) -> Number:
        """Forward and backward of some rows of a segment."""
        member, policy = self.lanes[lane], self.policy[segment]
        key = (
            member.group,
            tuple(sorted(member.axes.items())),
            self.search.pricer.alike[segment],
            rows,
            policy,
        )
        if key not in self.known:
            group, costs = self.search.cluster.group(member.group), self.search.costs
            s = self.segments[segment]
            self.known[key] = costs.forward_s(s, group, rows, member.axes) + costs.backward_s(
                s, group, rows, member.axes, policy
            )
        return self.known[key]

    def quantum(self, lane: int) -> int:
        """Rows that a lane's devices share evenly, at least."""
        return self.lanes[lane].axis("dp") * self.lanes[lane].axis("fsdp")

    def may_share(self, lane: int, inside: bool) -> bool:
        """Whether a lane and the next one may run rows of the same segment."""
        a, b = self.lanes[lane], self.lanes[lane + 1]
        if inside and a.group != b.group:
            return False
        link = self.search.cluster.link_between(a.group, a.devices, b.group, b.devices)
        size = max(s.param_bytes for s in self.segments[1:-1]) if len(self.segments) > 2 else 0.0
        busy_s = self.plan.num_microbatches * max(sum(m.seconds or (0.0,)) for m in self.lanes)
        return link.transfer_s(size) <= EXCHANGE_SHARE * busy_s

    def best(self, inside: bool) -> list[list[Piece]] | None:
        """The pieces of each lane with the shortest longest period; None where whole segments are as good."""
        shares = [self.may_share(j, inside) for j in range(len(self.lanes) - 1)]
        high = max(
            sum(self.seconds(j, i, self.rows) for i in range(*stage.segments))
            for j, stage in enumerate(self.plan.stages)
        )
        low, found = 0.5 * high, None
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            pieces = self.deal(middle, shares)
            if pieces is None:
                low = middle
            else:
                high, found = middle, pieces
        return found

    def deal(self, period: Number, shares: Sequence[bool]) -> list[list[Piece]] | None:
        """Pieces that keep each lane busy for no longer than a period, or None where that is too short."""
        n, J, rows = len(self.segments), len(self.lanes), self.rows
        i, begin, dealt = 0, 0, []
        for j in range(J):
            own: list[Piece] = []
            spent: Number = 0.0
            if begin:
                spent = self.seconds(j, i, rows - begin)
                own.append((i, i + 1, begin, rows))
                i, begin = i + 1, 0
            start = i
            while i < n - (J - 1 - j) and spent + self.seconds(j, i, rows) <= period:
                spent += self.seconds(j, i, rows)
                i += 1
            if i > start:
                own.append((start, i, 0, rows))
            if j + 1 < J and i < n - (J - 1 - j) and shares[j]:
                begin = self.part(j, i, period - spent)
                if begin:
                    own.append((i, i + 1, 0, begin))
                    spent += self.seconds(j, i, begin)
            if not own or spent > period:
                return None
            dealt.append(own)
        return dealt if i == n else None

    def part(self, lane: int, segment: int, left_s: Number) -> int:
        """The most rows of a segment that fit the time that is left, which the next lane can complete."""
        mine, others = self.quantum(lane), self.quantum(lane + 1)
        for rows in range(self.rows - self.rows % mine, 0, -mine):
            fits = rows < self.rows and (self.rows - rows) % others == 0
            if fits and self.seconds(lane, segment, rows) <= left_s:
                return rows
        return 0

    def plan_of(self, dealt: Sequence[Sequence[Piece]], ahead: int) -> Plan | None:
        """The plan of some pieces, with more recompute where memory asks for it; None where none fits."""
        runs: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
        for lane, pieces in enumerate(dealt):
            for piece in pieces:
                runs.setdefault(piece[:2], []).append((lane, piece))
        policies = {
            (lane, i): self.policy[i]
            for lane, own in enumerate(dealt)
            for a, b, *_ in own
            for i in range(a, b)
        }
        for _ in range(POLICIES_LEFT):
            plan = dataclasses.replace(self._made(runs, policies), ahead=ahead)
            over = {
                (name, device)
                for _, name, device, _ in self.search.overshoots(plan.device_memory(self.program).items())
            }
            if not over:
                return timed(plan, self.program, self.search.costs)
            for lane, member in enumerate(self.lanes):
                if (member.group, member.devices[0]) in over and not self._raise(lane, policies):
                    return None
        return None

    def _raise(self, lane: int, policies: dict[tuple[int, int], str]) -> bool:
        """Recompute one more segment of a lane; False where all are as frugal as can be."""
        order = self.search.pricer.policies
        for now, following in zip(order, order[1:], strict=False):
            for key, policy in policies.items():
                if key[0] == lane and policy == now:
                    policies[key] = following
                    return True
        return False

    def _made(self, runs, policies: dict[tuple[int, int], str]) -> Plan:
        stages = []
        for (start, stop), members in sorted(runs.items()):
            made: list[Member] = [
                dataclasses.replace(
                    self.lanes[lane],
                    rows=piece[2:],
                    remat=tuple(policies[lane, i] for i in range(start, stop)),
                    seconds=None,
                )
                for lane, piece in members
            ]
            stages.append(Stage((start, stop), tuple(made)))
        return dataclasses.replace(self.plan, stages=tuple(stages))
