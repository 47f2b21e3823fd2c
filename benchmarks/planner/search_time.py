"""Search time of the planner on one core, by the size of the cluster.

A Llama of 34 segments (7B-like) by analytic costs; clusters of equal parts of 1, 3 or 5 kinds in hosts of 8.
Sailor reports 4,900 s for three kinds of 256 GPUs (arXiv 2504.17096).

The last line has `gpus_8_s`, `kinds_3x256_s`, `devices_10240_s` and `growth` (seconds by device count)
as JSON, each the median of three searches.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import typer

from benchmarks.planner import zorse_program
from hetjax.cluster import Cluster
from hetjax.planner import make_plan

KINDS = {"a100-80": 200, "v100-16": 10, "a10g": 12, "h100-80": 400, "t4": 6}
"""Device kinds, and GB/s between their hosts."""


def cluster_of(num_kinds: int, num_devices: int) -> Cluster:
    """So many devices of so many kinds, in equal parts."""
    each = num_devices // num_kinds
    groups = {
        kind: {
            "kind": kind,
            "num_devices": each - each % 8 if each >= 8 else each,
            "devices_per_host": 8,
            "inter_host_bandwidth_gb_per_s": rate / 8,
        }
        for kind, rate in list(KINDS.items())[:num_kinds]
    }
    return Cluster.from_dict({"name": "made", "groups": groups, "default_link": {"bandwidth_gb_per_s": 12.5}})


def search_s(cluster: Cluster, num_rounds: int) -> float:
    """Median seconds of a search, as the core counts them."""
    times = []
    program = zorse_program.program("7b", 1024, halves=False)
    for _ in range(num_rounds):
        begin = time.process_time()
        make_plan(program, cluster)
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main(num_rounds: int = 3) -> None:
    """Print search times."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures: dict[str, object] = {}
    cases = (("gpus_8_s", 2, 8), ("kinds_3x256_s", 3, 768), ("devices_10240_s", 5, 10_240))
    for name, num_kinds, num_devices in cases:
        figures[name] = search_s(cluster_of(num_kinds, num_devices), num_rounds)
        typer.echo(f"{num_devices} devices of {num_kinds} kinds: {figures[name]:.2f} s")
    growth = {}
    for num_devices in (24, 96, 384, 1536, 6144):
        growth[num_devices] = search_s(cluster_of(3, num_devices), num_rounds)
        typer.echo(f"{num_devices} devices of 3 kinds: {growth[num_devices]:.2f} s")
    typer.echo(json.dumps({**figures, "growth": growth}))


if __name__ == "__main__":
    typer.run(main)
