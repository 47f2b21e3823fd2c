"""Seconds of the simulator on one core: 64 stages and 256 microbatches, 32,768 tasks and as many messages.

A Llama of 64 segments, one to a stage, on eight groups of eight devices joined by links that are busy most of
the time: ordered, and played with each device's memory over time, as the planner does with every plan that it
looks at. `--kind` takes the other schedules; `interleaved` deals the stages to eight lanes, and so does
`ministage`, with parameters that come and go.

The last line has `seconds` (both together), `schedule_s` and `play_s` as JSON, medians of `--num-rounds`: the
process's own time on one core, so that what else the machine does does not count.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import typer

from benchmarks.planner import zorse_program
from hetjax.cluster import GIB, Cluster
from hetjax.cost import AnalyticCosts, ProgramLike
from hetjax.plan import Member, Plan, Stage
from hetjax.schedule import plan_schedule
from hetjax.simulate import simulate
from hetjax.workload import timed

KINDS = ("a100-80", "v100-32", "a10g", "h100-80", "l4", "a100-40", "t4", "v100-16")


def plan_of(program: ProgramLike, kind: str, num_stages: int, num_microbatches: int) -> Plan:
    """A plan with a stage for every few segments; no device has two, unless the schedule is of such plans."""
    # Room enough for any schedule: it is timed, not planned for.
    groups = {f"g{i}": {"kind": name, "num_devices": 8, "memory_gib": 999} for i, name in enumerate(KINDS)}
    cluster = Cluster.from_dict(
        {"name": "eight", "groups": groups, "default_link": {"bandwidth_gb_per_s": 1.5, "latency_us": 20}}
    )
    shared, gathered = kind in ("interleaved", "ministage"), kind == "ministage"
    each = -(-num_stages // len(KINDS))
    cuts = [program.num_segments * s // num_stages for s in range(num_stages + 1)]
    rows = program.global_batch // num_microbatches
    stages = []
    for s in range(num_stages):
        device = (0,) if shared else (s % each,)
        member = Member(
            f"g{s % len(KINDS) if shared else s // each}",
            device,
            {},
            (0, rows),
            ("full",) * (cuts[s + 1] - cuts[s]),
            "gathered" if gathered else "resident",
        )
        stages.append(Stage((cuts[s], cuts[s + 1]), (member,)))
    return Plan(
        cluster, program.fingerprint, program.num_segments, program.global_batch, num_microbatches, kind,
        tuple(stages),
    )  # fmt: skip


def median_s(call: Callable[[], object], num_rounds: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(num_rounds):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main(num_rounds: int = 5, num_stages: int = 64, num_microbatches: int = 256, kind: str = "1f1b") -> None:
    """Print the seconds of ordering and playing one plan."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    program = zorse_program.program("7b", 1024, halves=True)
    costs = AnalyticCosts()
    plan = timed(plan_of(program, kind, num_stages, num_microbatches), program, costs)
    edges = program.edges()
    schedule = plan_schedule(plan, edges)
    result = simulate(plan, program, costs, schedule)
    figures = {
        "seconds": median_s(lambda: simulate(plan, program, costs), num_rounds),
        "schedule_s": median_s(lambda: plan_schedule(plan, edges), num_rounds),
        "play_s": median_s(lambda: simulate(plan, program, costs, schedule), num_rounds),
    }
    tasks, messages = len(schedule.order), len(result.passages)
    peak_gib = max(result.peak_bytes.values()) / GIB
    typer.echo(
        f"{kind}, {num_stages} stages, {num_microbatches} microbatches: {tasks:,} tasks, "
        f"{messages:,} messages, a step of {result.step_time_s:.2f} s, peak {peak_gib:.2f} GiB"
    )
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
