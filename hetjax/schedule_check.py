"""Verifying a schedule: every task once, no deadlock, the stated bound."""

from __future__ import annotations

from hetjax.errors import UserError
from hetjax.schedule import Schedule, Task


def check_schedule(schedule: Schedule) -> None:
    """Verify a schedule: every task once, no deadlock, the stated bound.

    Raises:
        UserError: Names the first task or stage that is wrong.
    """
    graph, M = schedule.graph, schedule.num_microbatches
    expected = {Task(op, s, -1, k) for op in "GRU" for s, k in graph.units()}
    if graph.gathers is not None:
        expected |= {Task("G", s, -2, k) for s, k in graph.units() if graph.gathers[s][k] == 2}
    for s, k in graph.units():
        ops = "FBW" if graph.is_split((s, k)) else "FB"
        expected |= {Task(op, s, m, k) for op in ops for m in range(M * graph.num_splits((s, k)))}
    seen: set[Task] = set()
    for number, lane in enumerate(schedule.lanes):
        for task in lane:
            if task not in expected:
                raise UserError(f"Lane {number} has task {task}, which the plan does not know.")
            if task in seen:
                raise UserError(f"Task {task} is listed twice (lane {number}).")
            if graph.lanes[task.stage][task.member] != number:
                right = graph.lanes[task.stage][task.member]
                raise UserError(f"Task {task} is in lane {number} and belongs in lane {right}.")
            seen.add(task)
    if seen != expected:
        raise UserError(f"Task {min(expected - seen)} is in no lane.")
    _check_deadlock(schedule)
    _check_order(schedule)
    _check_bounds(schedule)


def _check_deadlock(schedule: Schedule) -> None:
    """Play the lanes without time: every lane's head must get its turn."""
    done: set[Task] = set()
    heads = [0] * len(schedule.lanes)
    moved = True
    while moved:
        moved = False
        for number, lane in enumerate(schedule.lanes):
            while heads[number] < len(lane):
                task = lane[heads[number]]
                if not all(d in done for d in schedule.dependencies(task)):
                    break
                done.add(task)
                heads[number] += 1
                moved = True
    stuck = [(n, lane[heads[n]]) for n, lane in enumerate(schedule.lanes) if heads[n] < len(lane)]
    if stuck:
        number, task = stuck[0]
        missing = next(d for d in schedule.dependencies(task) if d not in done)
        raise UserError(f"Deadlock: lane {number} waits at {task} for {missing}, which can never run.")


def _check_order(schedule: Schedule) -> None:
    """`order` agrees with the lanes and the dependencies."""
    if len(schedule.order) != sum(map(len, schedule.lanes)):
        raise UserError(
            f"order has {len(schedule.order)} tasks, and the lanes {sum(map(len, schedule.lanes))}."
        )
    heads = [0] * len(schedule.lanes)
    done: set[Task] = set()
    for task in schedule.order:
        number = schedule.graph.lanes[task.stage][task.member]
        lane = schedule.lanes[number]
        if heads[number] == len(lane) or lane[heads[number]] != task:
            raise UserError(f"order has {task} where it does not stand in lane {number}.")
        missing = [d for d in schedule.dependencies(task) if d not in done]
        if missing:
            raise UserError(f"order has {task} before {missing[0]}, which it needs.")
        heads[number] += 1
        done.add(task)


def _check_bounds(schedule: Schedule) -> None:
    """Replay each lane and count what is alive."""
    for number, lane in enumerate(schedule.lanes):
        alive: dict[tuple[int, int], int] = {}
        for task in lane:
            unit = task.stage, task.member
            if task.op == "F":
                alive[unit] = alive.get(unit, 0) + 1
            elif task.op == ("W" if schedule.graph.is_split(unit) else "B"):
                alive[unit] = alive.get(unit, 0) - 1
            bound = schedule.bounds.unit[task.stage][task.member]
            if alive.get(unit, 0) > bound:
                raise UserError(
                    f"Stage {task.stage} keeps {alive[unit]} microbatches at {task}, and the bound of "
                    f"{schedule.kind} is {bound}."
                )
            if sum(alive.values()) > schedule.bounds.lane[number]:
                raise UserError(
                    f"Lane {number} keeps {sum(alive.values())} microbatches at {task}, and the bound of "
                    f"{schedule.kind} is {schedule.bounds.lane[number]}."
                )
