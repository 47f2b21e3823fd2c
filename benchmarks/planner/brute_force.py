"""Every plan of a small instance, for `optimality.py`: what the planner could have found, by trying it all.

The space, for a program whose segments form a chain:

- any subset of the groups, each cut into any number of equal slots, with devices that are left over idle; of
  a slot work as many devices as divide the rows, as `dp`, as `fsdp`, or with `tp` of 2, 4 or 8 inside, which
  may leave some over too;
- the slots in any order, those of one group also apart; any neighbours of different groups may share a stage,
  with the rows that make the slower of them as fast as can be on the whole model (`rows.share_rows`);
- each team of slots runs 1, 2, ... stages, dealt in rounds; all boundaries between segments;
- all numbers of microbatches that divide the global batch; `1f1b` and `gpipe` for one stage a team,
  `interleaved` for several; every `ahead`;
- for each member the ways that no other way beats, and with each the remat policies of its segments (`none`,
  `dots`, `full`) that recompute the least of all that fit, found exactly.

Not in it: replicated pipelines of unlike shape (`planner.replicas`), parts, other residencies, backwards that
are split. A plan counts if it fits by `Plan.device_memory` and in simulation, as for the planner.

Bounds from below leave out what cannot be faster than the best so far: for each lane, filling up to it, its
own work, draining from it and the end of the step; for each link, what passes it; for each stage, the way to
the end and back as often as its bound on microbatches in flight asks for. The rest is simulated, the most
promising first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.planner.brute_ways import Choice, Way, cheapest
from hetjax.cluster import Cluster
from hetjax.cost import Costs, ProgramLike
from hetjax.devices import DTYPE_BYTES
from hetjax.graph import Bounds, StageGraph, in_flight_bounds
from hetjax.plan import Member, Plan, Stage
from hetjax.planner.rows import share_rows
from hetjax.schedule import Schedule, plan_schedule
from hetjax.simulate import simulate
from hetjax.workload import timed

Slot = tuple[str, tuple[int, ...]]
"""A group and some of its devices."""

Team = tuple[Slot, ...]
"""Slots that share a stage."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Teams in order, repeats, and number of microbatches."""

    teams: tuple[Team, ...]
    num_microbatches: int
    repeats: int

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.teams) * self.repeats

    def team(self, stage: int) -> Team:
        """Who runs a stage."""
        return self.teams[stage % len(self.teams)]


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan that fits and its simulated step."""

    plan: Plan
    step_s: float


class Space:
    """All plans of an instance.

    Args:
        program: A chain of segments.
        cluster: Few groups of few devices.
        costs: Seconds of segments.
    """

    def __init__(self, program: ProgramLike, cluster: Cluster, costs: Costs) -> None:
        self.program, self.cluster, self.costs = program, cluster, costs
        self.segments = list(program.segments())
        self.n = len(self.segments)
        self.edges = list(program.edges())
        assert [(e.producer, e.consumer) for e in self.edges] == [(i, i + 1) for i in range(self.n - 1)], (
            "bounds and memory here are those of a chain"
        )
        self.crossing = np.array([0.0, *[float(e.bytes_per_row) for e in self.edges], 0.0])
        self.params = self.runs([s.param_bytes for s in self.segments])
        self.capacity = {
            g.name: math.inf if g.memory_bytes is None else float(g.memory_bytes) for g in cluster.groups
        }
        self.size = {g.name: DTYPE_BYTES[g.dtype] / 4 for g in cluster.groups}
        self.ways = functools.cache(self._ways)
        self.least = functools.cache(self._least)
        self.shares = functools.cache(self._shares)
        self.cuts = functools.cache(self._cuts)
        self.bounds = functools.cache(self._bounds)
        self.num_simulated = 0

    # ---- prices ----

    def runs(self, values: Sequence[float]) -> np.ndarray:
        """Sums over every run of segments."""
        prefix = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
        return prefix[None, :] - prefix[:, None]

    def of_params(self, seconds) -> np.ndarray:
        """A function of the parameters' bytes for every run of segments."""
        result = np.zeros((self.n + 1, self.n + 1))
        for a, b in itertools.combinations(range(self.n + 1), 2):
            result[a, b] = seconds(float(self.params[a, b]))
        return result

    def used(self, num_devices: int, rows: int) -> int:
        """The most devices that share the rows evenly."""
        return next(d for d in range(min(num_devices, rows), 0, -1) if rows % d == 0)

    def _ways(self, group: str, num_devices: int, rows: int) -> tuple[Way, ...]:
        used = self.used(num_devices, rows)
        axes: list[dict[str, int]] = [{"dp": used}]
        if used > 1:
            axes.append({"fsdp": used})
        for tp in (2, 4, 8):
            host = self.cluster.group(group).devices_per_host or num_devices
            if tp <= min(num_devices, host):
                axes.append({"fsdp": self.used(num_devices // tp, rows), "tp": tp})
        return tuple(Way(self, group, a, rows) for a in axes)

    def _least(self, group: str, num_devices: int, rows: int) -> dict[str, np.ndarray]:
        """For each kind of seconds the least of any way."""
        ways = self.ways(group, num_devices, rows)
        result = {op: np.minimum.reduce([getattr(w, op) for w in ways]) for op in "FBGRU"}
        return {**result, "P": np.minimum.reduce([w.F + w.B for w in ways])}

    def _shares(self, team: Team, rows: int) -> tuple[int, ...] | None:
        if len(team) == 1:
            return (rows,)

        def seconds(slot: Slot, own: int) -> float:
            way = self.ways(slot[0], len(slot[1]), own)[0]
            return float(way.F[0, self.n] + way.B[0, self.n])

        return share_rows(
            [len(devices) for _, devices in team], [functools.partial(seconds, slot) for slot in team], rows
        )

    def members(self, layout: Layout, stage: int) -> list[tuple[Slot, int, int]]:
        """Slot, first row and rows of each member."""
        team = layout.team(stage)
        shares = self.shares(team, self.program.global_batch // layout.num_microbatches) or ()
        starts = itertools.accumulate(shares, initial=0)
        return list(zip(team, starts, shares, strict=False))

    # ---- what there is ----

    def layouts(self) -> Iterator[Layout]:
        """Teams x numbers of microbatches x repeats."""
        batch = self.program.global_batch
        for teams in self.rows():
            for M in (m for m in range(1, batch + 1) if batch % m == 0):
                if any(self.shares(team, batch // M) is None for team in teams):
                    continue
                for repeats in range(1, self.n // len(teams) + 1 if len(teams) > 1 else 2):
                    yield Layout(teams, M, repeats)

    def rows(self) -> Iterator[tuple[Team, ...]]:
        """Slots in every order, in every way merged to teams."""
        options = [range(g.num_devices + 1) for g in self.cluster.groups]
        for counts in itertools.product(*options):
            names = [g.name for g, k in zip(self.cluster.groups, counts, strict=True) for _ in range(k)]
            for order in orders(names):
                slots = self.slots(
                    order, dict(zip((g.name for g in self.cluster.groups), counts, strict=True))
                )
                for joins in itertools.product((False, True), repeat=max(len(slots) - 1, 0)):
                    teams: list[list[Slot]] = [[slots[0]]] if slots else []
                    for join, slot in zip(joins, slots[1:], strict=True):
                        if join:
                            teams[-1].append(slot)
                        else:
                            teams.append([slot])
                    if not teams or len(teams) > self.n:
                        continue
                    if any(len({name for name, _ in t}) < len(t) for t in teams):
                        continue
                    if len(teams) == 1 and list(order) != names:
                        continue  # the order within a stage that is alone does not matter
                    yield tuple(tuple(t) for t in teams)

    def slots(self, order: Sequence[str], counts: Mapping[str, int]) -> list[Slot]:
        """Slots with their devices, handed out in order."""
        result, taken = [], dict.fromkeys(counts, 0)
        for name in order:
            each = self.cluster.group(name).num_devices // counts[name]
            result.append((name, tuple(range(taken[name], taken[name] + each))))
            taken[name] += each
        return result

    def _cuts(self, num_stages: int) -> np.ndarray:
        inner = list(itertools.combinations(range(1, self.n), num_stages - 1))
        return np.array([(0, *c, self.n) for c in inner], int)

    # ---- bounds from below ----

    def message_s(self, a: Slot, b: Slot, rows: int, cut: np.ndarray | int):
        """Seconds on the link and in all, of a message forward from a to b at a cut."""
        link = self.cluster.link_between(a[0], a[1], b[0], b[1])
        occupied = self.crossing[cut] * (rows * self.size[a[0]] / (link.bandwidth_gb_per_s * 1e9))
        return occupied, occupied + link.latency_us * 1e-6

    def lower(self, layout: Layout) -> np.ndarray:
        """No plan of a layout is faster, for each of its cuts."""
        cuts = self.cuts(layout.num_stages)
        M, num_teams = layout.num_microbatches, len(layout.teams)
        rows = self.program.global_batch // M
        fill, drain = np.zeros(len(cuts)), np.zeros(len(cuts))
        result, update = np.zeros(len(cuts)), np.zeros(len(cuts))
        channels: dict[tuple[object, object], np.ndarray] = {}
        finished = np.zeros(len(cuts))
        work: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        first: list[dict[str, np.ndarray]] = []
        for j in range(layout.num_stages):
            a, b = cuts[:, j], cuts[:, j + 1]
            per_member = []
            for k, (slot, _, own) in enumerate(self.members(layout, j)):
                least = self.least(slot[0], len(slot[1]), own)
                mine = {op: m[a, b] for op, m in least.items()}
                per_member.append(mine)
                total = work.get((j % num_teams, k))
                work[j % num_teams, k] = {
                    op: mine[op] + (0.0 if total is None else total[op]) for op in "PGRU"
                }
            first.append({op: np.minimum.reduce([m[op] for m in per_member]) for op in "FBR"})
        for i, team in enumerate(layout.teams):
            for k, slot in enumerate(team):
                mine = work[i, k]
                done = np.maximum(fill, mine["G"]) + M * mine["P"]
                finished = np.maximum(finished, np.maximum(done + mine["R"], done + drain))
                if len(team) > 1:
                    other = team[(k + 1) % len(team)]
                    link = self.cluster.link_between(slot[0], slot[1], other[0], other[1])
                    share = 2 * (len(team) - 1) / len(team) / (link.bandwidth_gb_per_s * 1e9)
                    held = self.params[
                        cuts[:, i::num_teams][:, : layout.repeats], cuts[:, i + 1 :: num_teams]
                    ]
                    exchange = held.sum(axis=1) * share + link.latency_us * 1e-6
                    # A message may go while the next stage's gradients are reduced.
                    reduced = mine["R"] if layout.repeats == 1 else 0.0
                    finished = np.maximum(finished, done + reduced + exchange)
                update = np.maximum(update, mine["U"])
            message = 0.0
            if i + 1 < num_teams and len(team) == len(layout.teams[i + 1]) == 1:
                message = self.message_s(team[0], layout.teams[i + 1][0], rows, cuts[:, i + 1])[1]
            fill = fill + first[i]["F"] + message
            drain = drain + first[i]["B"] + message
        for j in range(layout.num_stages - 1):
            one, two = layout.team(j), layout.team(j + 1)
            if len(one) == len(two) == 1:
                occupied, _ = self.message_s(one[0], two[0], rows, cuts[:, j + 1])
                for channel in channels_of(one[0], two[0]):
                    channels[channel] = channels.get(channel, 0.0) + M * occupied
        result = finished + update
        for seconds in channels.values():
            result = np.maximum(result, seconds + update)
        return result

    # ---- plans ----

    def _bounds(self, layout: Layout, kind: str, ahead: int) -> Bounds:
        return in_flight_bounds(kind, self.graph(layout, ahead), layout.num_microbatches)

    def graph(self, layout: Layout, ahead: int) -> StageGraph:
        """Lanes and rows, as the schedule needs them."""
        number = {slot: i for i, slot in enumerate(s for team in layout.teams for s in team)}
        stages = range(layout.num_stages)
        return StageGraph(
            lanes=tuple(tuple(number[slot] for slot in layout.team(j)) for j in stages),
            edges=tuple((j, j + 1) for j in stages[:-1]),
            rows=tuple(tuple((r, r + own) for _, r, own in self.members(layout, j)) for j in stages),
            ahead=ahead,
        )

    def variants(self, layout: Layout) -> list[tuple[str, int]]:
        """Schedules and how far ahead, as long as that changes a bound."""
        M = layout.num_microbatches
        kind = "1f1b" if layout.repeats == 1 else "interleaved"
        result, before = [], None
        for ahead in range(M + 2 * layout.num_stages if len(layout.teams) > 1 else 1):
            bounds = self.bounds(layout, kind, ahead)
            if bounds == before:
                break
            result.append((kind, ahead))
            before = bounds
        return [*result, ("gpipe", 0)] if kind == "1f1b" and len(layout.teams) > 1 else result

    def waiting(self, layout: Layout, cut: Sequence[int], bounds: Bounds, kind: str) -> dict:
        """Bytes of boundary values that wait for each (stage, member), before they are divided over `dp`."""
        result = {(j, k): 0.0 for j in range(layout.num_stages) for k in range(len(layout.team(j)))}
        for j in range(layout.num_stages - 1):
            for k, (a, start_a, rows_a) in enumerate(self.members(layout, j)):
                for i, (_, start_b, rows_b) in enumerate(self.members(layout, j + 1)):
                    common = min(start_a + rows_a, start_b + rows_b) - max(start_a, start_b)
                    if common <= 0:
                        continue
                    num_bytes = self.crossing[cut[j + 1]] * common * self.size[a[0]]
                    in_a, in_b = bounds.unit[j][k], bounds.unit[j + 1][i]
                    result[j + 1, i] += (max(in_a - in_b, 0) + 1) * num_bytes
                    result[j, k] += (in_a if kind == "gpipe" else 2) * num_bytes
        return result

    def choices(
        self, layout: Layout, cut: Sequence[int], i: int, k: int, kind: str, bounds: Bounds, waiting: Mapping
    ) -> list[Choice]:
        """For one slot: the ways, each with its cheapest policies that fit, that no other beats."""
        stages = range(i, layout.num_stages, len(layout.teams))
        slot, _, rows = self.members(layout, i)[k]
        lane = list(dict.fromkeys(s for team in layout.teams for s in team)).index(slot)
        found = []
        for ways in itertools.product(self.ways(slot[0], len(slot[1]), rows), repeat=layout.repeats):
            room = self.capacity[slot[0]]
            workspace = 0.0
            for way, j in zip(ways, stages, strict=True):
                static, temporary = way.fixed_bytes(cut[j], cut[j + 1])
                room -= static + waiting[j, k] / way.shards
                workspace = max(workspace, temporary)
            in_flight = [bounds.unit[j][k] for j in stages]
            fronts = [w.frontier(cut[j], cut[j + 1]) for w, j in zip(ways, stages, strict=True)]
            at = cheapest(fronts, in_flight, bounds.lane[lane], room - workspace)
            if at is None:
                continue
            repeat_s = tuple(float(f[1][x]) for f, x in zip(fronts, at, strict=True))
            period = sum(
                w.F[cut[j], cut[j + 1]] + w.B[cut[j], cut[j + 1]] for w, j in zip(ways, stages, strict=True)
            )
            end = sum(
                w.G[cut[j], cut[j + 1]] + w.R[cut[j], cut[j + 1]] + w.U[cut[j], cut[j + 1]]
                for w, j in zip(ways, stages, strict=True)
            )
            remat = tuple(f[2][x] for f, x in zip(fronts, at, strict=True))
            found.append(Choice(ways, remat, repeat_s, float(period) + sum(repeat_s), float(end)))
        found.sort(key=lambda c: (c.period_s, c.end_s))
        kept: list[Choice] = []
        for choice in found:
            if not kept or choice.end_s < kept[-1].end_s * (1 - 1e-9):
                kept.append(choice)
        return kept

    def bound(
        self, layout: Layout, cut: Sequence[int], chosen: Sequence[Sequence[Choice]], bounds: Bounds
    ) -> float:
        """No plan with these choices is faster."""
        M, num_teams = layout.num_microbatches, len(layout.teams)
        F, B, end = {}, {}, {}
        for j in range(layout.num_stages):
            for k, choice in enumerate(chosen[j % num_teams]):
                way, a, b = choice.ways[j // num_teams], cut[j], cut[j + 1]
                F[j, k] = float(way.F[a, b])
                B[j, k] = float(way.B[a, b]) + choice.repeat_s[j // num_teams]
                end[j, k] = float(way.G[a, b]), float(way.R[a, b]), float(way.U[a, b])
        fill = {(0, k): 0.0 for k in range(len(layout.teams[0]))}
        drain = {(0, k): end[0, k][1] for k in range(len(layout.teams[0]))}
        ways: list[tuple[tuple[int, int], tuple[int, int], float]] = []
        for j in range(layout.num_stages - 1):
            two = self.members(layout, j + 1)
            for k, (a, start_a, rows_a) in enumerate(self.members(layout, j)):
                for i, (b, start_b, rows_b) in enumerate(two):
                    common = min(start_a + rows_a, start_b + rows_b) - max(start_a, start_b)
                    if common <= 0:
                        continue
                    _, message = self.message_s(a, b, common, cut[j + 1])
                    u, v = (j, k), (j + 1, i)
                    fill[v] = max(fill.get(v, 0.0), fill[u] + F[u] + message)
                    drain[v] = max(drain.get(v, 0.0), drain[u] + B[u] + message)
                    ways.append((u, v, message))
        trip = {u: F[u] + B[u] for u in F}
        for u, v, message in reversed(ways):
            trip[u] = max(trip[u], F[u] + B[u] + 2 * message + trip[v])
        result, update = 0.0, 0.0
        for i in range(num_teams):
            for k, choice in enumerate(chosen[i]):
                gather, reduce, up = (
                    sum(end[j, k][x] for j in range(i, layout.num_stages, num_teams)) for x in range(3)
                )
                begin = max(fill[i, k], gather)
                done = begin + M * choice.period_s
                result = max(result, done + reduce, done + drain[i, k])
                update = max(update, up)
                rounds = (M - 1) // bounds.unit[i][k]
                result = max(result, begin + (rounds + 1) * trip[i, k] + drain[i, k])
        return result + update

    def plan(
        self, layout: Layout, cut: Sequence[int], chosen: Sequence[Sequence[Choice]], kind: str, ahead: int
    ) -> Plan:
        """As the planner writes it."""
        stages = []
        for j in range(layout.num_stages):
            members = []
            for (slot, row, own), choice in zip(
                self.members(layout, j), chosen[j % len(layout.teams)], strict=True
            ):
                way = choice.ways[j // len(layout.teams)]
                members.append(
                    Member(
                        group=slot[0],
                        devices=slot[1][: way.used],
                        axes=dict(way.axes),
                        rows=(row, row + own),
                        remat=choice.remat[j // len(layout.teams)],
                    )
                )
            stages.append(Stage((int(cut[j]), int(cut[j + 1])), tuple(members)))
        plan = Plan(
            cluster=self.cluster,
            fingerprint=self.program.fingerprint,
            num_segments=self.n,
            global_batch=self.program.global_batch,
            num_microbatches=layout.num_microbatches,
            schedule=kind,
            stages=tuple(stages),
            ahead=ahead,
        )
        return timed(plan, self.program, self.costs)

    def step_s(self, plan: Plan, shorter_than_s: float, schedule: Schedule | None = None) -> float | None:
        """The simulated step of a plan; None where it does not fit or cannot be shorter."""
        if any(b > self.capacity[name] for (name, _), b in plan.device_memory(self.program).items()):
            return None
        schedule = schedule or plan_schedule(plan, self.edges)
        if schedule.length_s >= shorter_than_s:
            return None
        self.num_simulated += 1
        result = simulate(plan, self.program, self.costs, schedule)
        if any(b > self.capacity[name] for (name, _), b in result.peak_bytes.items()):
            return None
        return float(result.step_time_s)

    def plans(
        self, layout: Layout, cut: Sequence[int], kind: str, ahead: int, shorter_than_s: float
    ) -> Iterator[Plan]:
        """Plans of a cut layout whose bound is below a time."""
        bounds = self.bounds(layout, kind, ahead)
        waiting = self.waiting(layout, cut, bounds, kind)
        options: list[list[Choice]] = []
        for i, team in enumerate(layout.teams):
            for k in range(len(team)):
                options.append(self.choices(layout, cut, i, k, kind, bounds, waiting))
                if not options[-1]:
                    return
        for flat in itertools.product(*options):
            rest = iter(flat)
            chosen = [[next(rest) for _ in team] for team in layout.teams]
            if self.bound(layout, cut, chosen, bounds) < shorter_than_s:
                yield self.plan(layout, cut, chosen, kind, ahead)

    def search(self, best_s: float, resolution: float, *, any_plan: bool = False) -> Found | None:
        """The fastest plan of the space, if it is faster than a time.

        Args:
            best_s: Time to beat.
            resolution: Relative difference from which on a plan counts as faster.
            any_plan: Return the first plan that fits.
        """
        queue: list[tuple[float, int, int, Layout]] = []
        for number, layout in enumerate(self.layouts()):
            lower = self.lower(layout)
            limit = best_s * (1 - resolution)
            queue += [(float(lower[c]), number, int(c), layout) for c in np.flatnonzero(lower < limit)]
        queue.sort(key=lambda item: item[:3])
        found: Found | None = None
        for lower, _, c, layout in queue:
            if lower >= best_s * (1 - resolution):
                break
            cut = tuple(map(int, self.cuts(layout.num_stages)[c]))
            seen: set[tuple] = set()
            for kind, ahead in self.variants(layout)[: 1 if any_plan else None]:
                for plan in self.plans(layout, cut, kind, ahead, best_s * (1 - resolution)):
                    schedule = plan_schedule(plan, self.edges)
                    members = (m for stage in plan.stages for m in stage.members)
                    key = schedule.lanes, tuple((*m.axes.items(), *m.remat, m.seconds) for m in members)
                    if key in seen:
                        continue
                    seen.add(key)
                    step = self.step_s(plan, best_s * (1 - resolution), schedule)
                    if step is not None and step < best_s * (1 - resolution):
                        best_s, found = step, Found(plan, step)
                        if any_plan:
                            return found
        return found


def channels_of(a: Slot, b: Slot) -> list[tuple[object, object]]:
    """Channels of a boundary's messages, forward and backward, as the simulator names them."""
    ends: tuple[object, object] = (a, b) if a[0] == b[0] else (a[0], b[0])
    return [ends, ends[::-1]]


def orders(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The distinct orders of names, some of which are alike."""
    if not names:
        yield ()
    for name in sorted(set(names)):
        rest = list(names)
        rest.remove(name)
        for order in orders(rest):
            yield (name, *order)
