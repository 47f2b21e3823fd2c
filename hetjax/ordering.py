"""Plays tasks in virtual time and notes in which order they start; `schedule.py` makes schedules of that."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetjax.devices import Number
from hetjax.graph import StageGraph, Unit, in_flight_bounds


class Task(NamedTuple):
    """One piece of work of one member.

    Attributes:
        op: `G` gather parameters, `F` forward, `B` backward (of the inputs alone where it is split), `W`
            backward of the parameters where it is split, `R` reduce gradients, `U` update.
        stage: Number in the plan.
        microbatch: Number within the step, counted in the member's own parts; -1 for `G`, `R`, `U`, which
            are of the whole step, and -2 for the `G` that gathers once more for the backward.
        member: Number within the stage.
    """

    op: str
    stage: int
    microbatch: int
    member: int

    def __str__(self) -> str:
        member = f".{self.member}" if self.member else ""
        return f"{self.op}{self.stage}{member}" + ("" if self.microbatch < 0 else f"/{self.microbatch}")


class OrderPlay:
    """Plays the tasks in virtual time and notes in which order they start.

    Deadlock cannot happen: F and B of one member go in order of its parts, so nothing later fills the place
    of the lowest unfinished one in a stage; and a lane's bound keeps room for what that one still has to do
    in the lane. So its next task can always run.
    """

    def __init__(
        self,
        kind: str,
        prefer: str,
        graph: StageGraph,
        num_microbatches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        transfer_s: Mapping[tuple[Unit, Unit], Number],
    ) -> None:
        self.kind, self.graph, self.num_microbatches = kind, graph, num_microbatches
        self.preferred = ("F", "B") if prefer == "F" else ("B", "F")
        self.bounds = in_flight_bounds(kind, graph, num_microbatches)
        self.units = graph.units()
        index = {unit: u for u, unit in enumerate(self.units)}
        n = len(self.units)
        self.stage = [s for s, _ in self.units]
        self.lane = [graph.lanes[s][k] for s, k in self.units]
        self.split = [graph.is_split(unit) for unit in self.units]
        shares = [graph.weight_share(unit) for unit in self.units]
        pairs = list(zip(backward_s, shares, strict=True))
        self.seconds = {
            "F": forward_s,
            "B": [b * (1 - share) for b, share in pairs],
            "W": [b * share for b, share in pairs],
        }
        self.delay = transfer_s
        self.mine = [[u for u in range(n) if self.lane[u] == lane] for lane in range(graph.num_lanes)]
        self.splitting = [[u for u in us if self.split[u]] for us in self.mine]
        self.splits = [graph.num_splits(unit) for unit in self.units]
        self.parts = [num_microbatches * splits for splits in self.splits]
        self.bound = [self.bounds.unit[s][k] for s, k in self.units]
        # For each part within a microbatch: (unit, splits, part) that reads it, forward and backward, and
        # how long it travels.
        self.sent: dict[str, list[list[list[tuple[int, int, int, float]]]]] = {
            op: [[[] for _ in range(splits)] for splits in self.splits] for op in "FB"
        }
        waits = {op: [[0] * x for x in self.splits] for op in "FB"}
        for u, unit in enumerate(self.units):
            for consumer in graph.consumers(*unit):
                v = index[consumer]
                delay = float(transfer_s.get((unit, consumer), 0.0))
                for p, q, _ in graph.links(unit, consumer):
                    self.sent["F"][u][p].append((v, self.splits[v], q, delay))
                    self.sent["B"][v][q].append((u, self.splits[u], p, delay))
                    waits["F"][v][q] += 1
                    waits["B"][u][p] += 1
        # Parts that nobody reads have the cotangents of their outputs from their own `F`; that of others is
        # done before any cotangent can come.
        for u, parts in enumerate(self.sent["F"]):
            for p, readers in enumerate(parts):
                waits["B"][u][p] += not readers
        # Next part of each member; how many inputs each part still waits for whose sender is not done; when
        # the last of those that are on their way is there; when the part can run, once that is known.
        self.next = {"F": [0] * n, "B": [0] * n, "W": [0] * n}
        self.last = ["W" if split else "B" for split in self.split]  # what frees a part
        self.done = {"B": [0] * n}
        self.missing = {op: [one * num_microbatches for one in waits[op]] for op in "FB"}
        self.latest = {op: [[0.0] * parts for parts in self.parts] for op in "FB"}
        self.ready_s = {
            op: [[*(math.inf if wait else 0.0 for wait in waits), math.inf] for waits in self.missing[op]]
            for op in "FB"
        }
        # Of `ministage`: what each lane has yet to do, stage by stage.
        self.turns = [
            collections.deque([("F", u) for u in us] + [("B", u) for u in us[::-1]]) for us in self.mine
        ]
        self.lane_forwards_left = [sum(self.parts[u] for u in us) for us in self.mine]
        self.lane_left = [sum(self.parts[u] * (3 if self.split[u] else 2) for u in us) for us in self.mine]
        # Of `interleaved`, by lane and microbatch k: what is alive of k and later ones, and what k still has
        # to run forward; members whose B of a microbatch is not done; the lowest unfinished microbatch.
        self.need = [[len(us)] * num_microbatches for us in self.mine]
        self.unfinished = [n] * num_microbatches
        self.lowest = 0
        self.round = graph.num_lanes

    def least_s(self) -> Number:
        """No order is shorter: a lane's own work, and the way there and back for one microbatch."""
        index = {unit: u for u, unit in enumerate(self.units)}
        there, back = [0.0] * len(self.units), [0.0] * len(self.units)
        for u, unit in enumerate(self.units):
            for producer in self.graph.producers(*unit):
                p, delay = index[producer], float(self.delay.get((producer, unit), 0.0))
                there[u] = max(there[u], there[p] + self.seconds["F"][p] + delay)
                back[u] = max(back[u], back[p] + self.seconds["B"][p] + delay)
        return max(
            min(there[u] for u in us)
            + min(back[u] for u in us)
            + sum(self.parts[u] * sum(self.seconds[op][u] for op in "FBW") for u in us)
            for us in self.mine
        )

    def priority(self, op: str, u: int, m: int) -> tuple[Number, int, int]:
        """What a lane prefers: the smallest key among what is ready of an op."""
        stage = self.stage[u] if op == "F" else -self.stage[u]
        if self.kind == "gpipe":
            return stage, m, 0
        if self.kind == "1f1b":
            return m / self.splits[u], stage, 0
        return m // self.round, stage, m

    def admits(self, u: int, m: int) -> bool:
        """Whether the stated bound lets a member start `F` of part `m`."""
        if self.next["F"][u] - self.next[self.last[u]][u] >= self.bound[u]:
            return False
        if self.kind != "interleaved":
            return True
        lane = self.lane[u]
        return max(self.need[lane][self.lowest : m], default=0) < self.bounds.lane[lane]

    def pick(self, lane: int, now: float) -> tuple[str, int, float]:
        """The best task that the lane can start now.

        Returns:
            Its op and member; or no op, and when the next input that may change this arrives, of those that
            are on their way.
        """
        if self.kind == "ministage":
            return self.pick_in_turn(lane, now)
        wake_s = math.inf
        for op in self.preferred:
            if op == "B" and self.kind == "gpipe" and self.lane_forwards_left[lane]:
                continue
            following, ready_s, ready = self.next[op], self.ready_s[op], []
            for u in self.mine[lane]:
                m = following[u]
                begin = ready_s[u][m]
                if begin < wake_s and (op == "B" or self.admits(u, m)):
                    if begin <= now:
                        ready.append(u)
                    else:
                        wake_s = begin
            if len(ready) == 1:
                return op, ready[0], now
            if ready:
                return op, min(ready, key=lambda u: self.priority(op, u, following[u])), now
        return self.pick_weights(lane, wake_s)

    def pick_weights(self, lane: int, wake_s: float) -> tuple[str, int, float]:
        """The oldest `W` that can start: what is done when nothing that others wait for can be."""
        following, done = self.next["W"], self.done["B"]
        ready = [u for u in self.splitting[lane] if following[u] < done[u]]
        if not ready:
            return "", 0, wake_s
        return "W", min(ready, key=lambda u: (following[u] / self.splits[u], -self.stage[u])), wake_s

    def pick_in_turn(self, lane: int, now: float) -> tuple[str, int, float]:
        """The lane's next task stage by stage, if it can start now."""
        turns = self.turns[lane]
        while turns and self.next[turns[0][0]][turns[0][1]] == self.parts[turns[0][1]]:
            turns.popleft()
        if not turns:
            return self.pick_weights(lane, math.inf)
        op, u = turns[0]
        begin = self.ready_s[op][u][self.next[op][u]]
        return (op, u, now) if begin <= now else self.pick_weights(lane, begin)

    def start(self, op: str, u: int) -> Task:
        """Account for a task that starts."""
        m = self.next[op][u]
        lane = self.lane[u]
        self.next[op][u] += 1
        if op == "F":
            self.lane_forwards_left[lane] -= 1
            if self.kind == "interleaved":
                for k in range(self.lowest, m):
                    self.need[lane][k] += 1
        self.lane_left[lane] -= 1
        return Task(op, self.stage[u], m, self.units[u][1])

    def run(self, longest_s: Number) -> tuple[list[Task], float]:
        """Play the whole step, or as much of it as begins before a time.

        Returns:
            All tasks in order of their start, and how long the step takes in virtual time.
        """
        order = [Task("G", s, -1, k) for s, k in self.units]
        reduces = _Reduces(self)
        # Events: (time, sequence, op, member, part): a task is done; or, without an op, (..., lane, 0): an
        # input of a lane that had no work arrives.
        events: list[tuple[float, int, str, int, int]] = []
        sequence = 0
        idle = [True] * self.graph.num_lanes
        now, touched, drained = 0.0, set(range(self.graph.num_lanes)), False
        while True:
            for lane in sorted(touched):
                if not idle[lane]:
                    continue
                sequence += 1
                op, u, wake_s = self.pick(lane, now)
                if not op:
                    if wake_s < math.inf:
                        heapq.heappush(events, (wake_s, sequence, "", lane, 0))
                    continue
                task = self.start(op, u)
                order.append(task)
                idle[lane] = False
                drained |= self.lane_left[lane] == 0
                heapq.heappush(events, (now + self.seconds[op][u], sequence, op, u, task.microbatch))
            if drained:
                order += reduces.ready()
            if not events:
                break
            now, touched = events[0][0], set()
            if now >= longest_s:
                return order, now
            while events and events[0][0] == now:
                _, _, op, u, m = heapq.heappop(events)
                if not op:
                    touched.add(u)
                    continue
                idle[self.lane[u]] = True
                touched.add(self.lane[u])
                for lane, arrival in self.finish(op, u, m, now):
                    if not idle[lane]:
                        continue
                    if arrival <= now:
                        touched.add(lane)
                    else:
                        sequence += 1
                        heapq.heappush(events, (arrival, sequence, "", lane, 0))
                if op == self.last[u] and self.kind == "interleaved":
                    touched |= self.settle(m)
        left = [
            str(self.units[u]) for u in range(len(self.units)) if self.next[self.last[u]][u] < self.parts[u]
        ]
        assert not left, f"a schedule never deadlocks, and {left} still have work"
        return order + [Task("U", s, -1, k) for s, k in self.units], now

    def finish(self, op: str, u: int, m: int, now: float) -> list[tuple[int, float]]:
        """Account for a task that is done.

        Returns:
            Lanes whose next part will have all its inputs now, and from when on.
        """
        if op == self.last[u]:
            self.lower(u, m)
        if op == "W":
            return []
        if op == "B":
            self.done["B"][u] += 1
        result = []
        microbatch, part = divmod(m, self.splits[u])
        if op == "F" and not self.sent[op][u][part]:
            self.provide("B", u, m, now)
        for v, others, other, delay in self.sent[op][u][part]:
            m = microbatch * others + other
            ready_s = self.provide(op, v, m, now + delay)
            if ready_s < math.inf and self.next[op][v] == m and (op == "B" or self.admits(v, m)):
                result.append((self.lane[v], ready_s))
        return result

    def provide(self, op: str, u: int, m: int, arrival: float) -> float:
        """Note when an input of a part arrives.

        Returns:
            When the part has all of them; infinite if that is not known yet.
        """
        missing, latest = self.missing[op][u], self.latest[op][u]
        missing[m] -= 1
        if arrival > latest[m]:
            latest[m] = arrival
        if missing[m]:
            return math.inf
        self.ready_s[op][u][m] = latest[m]
        return latest[m]

    def lower(self, u: int, m: int) -> None:
        """Note that a member keeps nothing of a part any more."""
        if self.kind == "interleaved":
            for k in range(self.lowest, m + 1):
                self.need[self.lane[u]][k] -= 1

    def settle(self, m: int) -> set[int]:
        """Note one member's last task of a microbatch.

        Returns:
            The lanes that may admit more, because the lowest unfinished microbatch moved.
        """
        self.unfinished[m] -= 1
        before = self.lowest
        while self.lowest < self.num_microbatches and self.unfinished[self.lowest] == 0:
            self.lowest += 1
        return set(range(self.graph.num_lanes)) if self.lowest != before else set()


class _Reduces:
    """`R` of each member once its lane has no `F` or `B` left, the last stage first, in every lane alike."""

    def __init__(self, play: OrderPlay) -> None:
        self.play = play
        self.waiting = [list(reversed(us)) for us in play.mine]

    def ready(self) -> list[Task]:
        """Tasks that can be issued now: all `B` of their stage have been."""
        play, result = self.play, []
        for lane, units in enumerate(self.waiting):
            while units and play.lane_left[lane] == 0 and self._issued(play.stage[units[0]]):
                s, k = play.units[units.pop(0)]
                result.append(Task("R", s, -1, k))
        return result

    def _issued(self, stage: int) -> bool:
        play = self.play
        return all(
            play.next[play.last[u]][u] == play.parts[u] for u, (s, _) in enumerate(play.units) if s == stage
        )


def with_gathers(graph: StageGraph, order: list[Task]) -> list[Task]:
    """The order with `G` and `R` of parameters that come and go where they belong.

    A stage's parameters are gathered while its lane runs the stage before, so that no more than two stages'
    are there at once; its gradients are reduced as soon as its last `B` is issued.
    """
    passing = {u for u in graph.units() if graph.is_gathered(u)}
    if not passing:
        return order
    in_lane: dict[int, list[Unit]] = {}
    for s, k in graph.units():
        in_lane.setdefault(graph.lanes[s][k], []).append((s, k))
    # By the first task of a stage on a lane: what is gathered when it is issued, unless it has been.
    ahead: dict[tuple[str, Unit], list[Task]] = {}
    for units in in_lane.values():
        for i, (s, k) in enumerate(units):
            if (s, k) not in passing:
                continue
            own = [("F", Task("G", s, -1, k), units[max(i - 1, 0)])]
            if graph.gathers is not None and graph.gathers[s][k] == 2:
                own.append(("B", Task("G", s, -2, k), units[min(i + 1, len(units) - 1)]))
            for op, gather, before in own:
                for unit in {before, (s, k)}:
                    ahead.setdefault((op, unit), []).append(gather)
    issued: set[Task] = set()

    def is_last(task: Task) -> bool:
        return task.op == ("W" if graph.is_split((task.stage, task.member)) else "B")

    num_left = {s: sum(1 for t in order if t.stage == s and is_last(t)) for s, _ in passing}
    result: list[Task] = []
    for task in order:
        unit = task.stage, task.member
        if task.op in "GR" and unit in passing:
            continue
        if task.op in "FB" and task.microbatch == 0:
            due = [g for g in ahead.get((task.op, unit), []) if g not in issued]
            result += due
            issued.update(due)
        result.append(task)
        if task.stage in num_left and is_last(task):
            num_left[task.stage] -= 1
            if num_left[task.stage] == 0:
                members = range(len(graph.lanes[task.stage]))
                result += [Task("R", task.stage, -1, j) for j in members if (task.stage, j) in passing]
    return result
