"""How far the planner's plans are from the best there are, on random small instances.

Each instance has 1 to 4 groups of 1 to 4 devices of unlike kinds, dtypes and memories, joined by unlike
links, and a chain of 2 to 8 unlike segments: an embedding, blocks or their halves, a head; or all at random.
Memory is from ample to a little less than what is needed. The more groups, the fewer devices, so that all
plans can be tried: `brute_force.py` says exactly what space that is. What the planner finds beyond it
(replicated pipelines of unlike shape) counts as a gap of 0.

A gap is the planner's step over the best step of the space, less 1, both simulated; a better plan is looked
for from `--resolution` (relative) on, so a gap below that counts as 0. Also compared: each group alone as the
planner plans it; one stage for each group in file order with layers in proportion to speed, 1F1B, at its best
number of microbatches; and 100 plans drawn from the space.

The last line has `worst_gap`, `median_gap`, `instances`, `worse_than_plain` (instances where one of those
plain answers is faster than the planner's), `infeasible` (nothing fits, and the planner says so) and `missed`
(a plan fits and the planner refuses) as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.planner.brute_force import Layout, Space
from benchmarks.planner.chain_program import ChainProgram
from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts
from hetjax.errors import UserError
from hetjax.plan import Plan
from hetjax.planner import make_plan
from hetjax.program import SegmentInfo

KINDS = ("h100-80", "a100-80", "v100-16", "a10g", "l4", "t4", "p40", "rtx3090", "tpu-v3", "cpu")

NUM_RANDOM = 100
"""Random plans of each instance."""


def segment(index: int, name: str, params: float, flops: float, boundary: float, kept: float) -> SegmentInfo:
    """A segment of so many parameters; FLOPs and float32 bytes per row."""
    activations = {"none": kept, "dots": max(kept / 4, min(boundary, kept)), "full": min(boundary, kept)}
    return SegmentInfo(index, name, name, int(params), 4 * int(params), flops, boundary, activations)


def chain(draw: random.Random, num_segments: int) -> ChainProgram:
    """A model: Llama-like, its layers whole or halved, or segments at random."""
    hidden, seq = draw.choice((512, 1024, 2048)), draw.choice((128, 512, 2048))
    boundary = 4.0 * seq * hidden
    style = draw.choice(("layers", "halves", "random"))
    parts = []
    for i in range(num_segments):
        if style == "random":
            params = 10 ** draw.uniform(4, 7.5)
            kept = boundary * draw.uniform(1, 20)
            flops = 2 * params * seq * draw.choice((0.1, 1, 1, 4))
            parts.append(segment(i, f"s{i}", params, flops, boundary * draw.uniform(0.2, 2), kept))
        elif i == 0:
            parts.append(segment(i, "embed", draw.choice((4000, 32000)) * hidden, 0.0, boundary, boundary))
        elif i == num_segments - 1:
            vocab = draw.choice((4000, 32000))
            flops = 2.0 * vocab * hidden * seq
            parts.append(segment(i, "head", vocab * hidden, flops, 8.0, 8.0 * seq * vocab))
        elif style == "layers" or i % 2:
            share = 1.0 if style == "layers" else 1 / 3
            flops = 24.0 * hidden**2 * seq * share + 4.0 * seq**2 * hidden
            kept = 17 * boundary * share + 64.0 * seq**2
            parts.append(
                segment(
                    i, "attention" if share < 1 else "layer", 12 * hidden**2 * share, flops, boundary, kept
                )
            )
        else:
            parts.append(segment(i, "mlp", 8 * hidden**2, 16.0 * hidden**2 * seq, boundary, 11 * boundary))
    return ChainProgram(tuple(parts), draw.choice((4, 6, 8, 12, 16)))


def instance(seed: int, index: int) -> tuple[ChainProgram, Cluster]:
    """The instance of a number; the same for the same seed."""
    draw = random.Random(f"{seed}/{index}")
    num_groups = draw.choice((1, 2, 2, 2, 3, 3, 4))
    most_devices = {1: (1, 2, 3, 4), 2: (1, 2, 3, 4), 3: (1, 1, 2), 4: (1,)}[num_groups]
    counts = [draw.choice(most_devices) for _ in range(num_groups)]
    num_segments = draw.randint(2, 8 if sum(counts) <= 4 else 6)
    program = chain(draw, num_segments)
    # Parameters, gradients, moments and a copy: what one device would need to hold it all.
    state_gib = sum(s.num_params for s in program.parts) * 18 / 2**30
    kept_gib = (
        sum(s.activation_bytes_per_row["none"] for s in program.parts) / 2 * program.global_batch / 2**30
    )
    groups: dict[str, dict[str, Any]] = {}
    for i, count in enumerate(counts):
        table: dict[str, Any] = {"kind": draw.choice(KINDS), "num_devices": count}
        if draw.random() < 0.2:
            table["compute_dtype"] = draw.choice(("float32", "bfloat16"))
        if draw.random() < 0.6:
            need = state_gib + kept_gib * draw.choice((0.05, 0.3, 1))
            table["memory_gib"] = need * draw.uniform(0.5, 2) / draw.choice((1, 1, sum(counts)))
        elif table["kind"] == "cpu":
            table["memory_gib"] = 64.0
        if draw.random() < 0.3:
            table["intra_bandwidth_gb_per_s"] = 10 ** draw.uniform(-0.5, 2)
        groups[f"g{i}"] = table
    links = [
        {
            "between": [f"g{i}", f"g{j}"],
            "bandwidth_gb_per_s": 10 ** draw.uniform(-1.3, 2),
            "latency_us": draw.choice((1, 20, 500)),
        }
        for i in range(num_groups)
        for j in range(i)
    ]
    return program, Cluster.from_dict({"name": f"{seed}/{index}", "groups": groups, "links": links})


# ---- plain answers ----


def alone(program: ChainProgram, cluster: Cluster) -> Iterator[tuple[str, Plan]]:
    """Each group alone, as the planner plans it."""
    names = [g.name for g in cluster.groups]
    for name in names if len(names) > 1 else ():
        try:
            yield f"{name} alone", make_plan(program, cluster, exclude=[n for n in names if n != name])
        except UserError:
            continue


def proportional(space: Space) -> Iterator[tuple[str, Plan]]:
    """A stage for each group in file order, layers in proportion to speed, every number of microbatches."""
    cluster, batch = space.cluster, space.program.global_batch
    groups = cluster.groups
    if not 1 < len(groups) <= space.n:
        return
    teams = tuple(((g.name, tuple(range(g.num_devices))),) for g in groups)
    for M in (m for m in range(1, batch + 1) if batch % m == 0):
        whole = [space.least(g.name, g.num_devices, batch // M)["P"] for g in groups]
        speeds = np.array([1 / p[0, space.n] for p in whole])
        targets = np.cumsum(speeds)[:-1] / speeds.sum()
        reached = whole[0][0] / whole[0][0, space.n]
        cut = [0]
        for i, target in enumerate(targets):
            least, most = cut[-1] + 1, space.n - (len(targets) - i)
            cut.append(min(range(least, most + 1), key=lambda b: abs(reached[b] - target)))
        layout = Layout(teams, M, 1)
        for plan in space.plans(layout, (*cut, space.n), "1f1b", 0, math.inf):
            yield "in proportion to speed", plan
            break


def drawn(space: Space, draw: random.Random, shorter_than_s: float) -> Iterator[tuple[str, Plan]]:
    """Random plans of the space whose bound is below a time."""
    rows = list(space.rows())
    batch = space.program.global_batch
    counts = [m for m in range(1, batch + 1) if batch % m == 0]
    num_drawn = 0
    while num_drawn < NUM_RANDOM:
        teams, M = draw.choice(rows), draw.choice(counts)
        if any(space.shares(team, batch // M) is None for team in teams):
            continue
        num_drawn += 1
        repeats = draw.randint(1, space.n // len(teams)) if len(teams) > 1 else 1
        layout = Layout(teams, M, repeats)
        cuts = space.cuts(layout.num_stages)
        kind, ahead = draw.choice(space.variants(layout))
        cut = tuple(map(int, cuts[draw.randrange(len(cuts))]))
        yield from (("drawn", p) for p in space.plans(layout, cut, kind, ahead, shorter_than_s))


# ---- one instance ----


def examine(seed: int, index: int, resolution: float) -> dict[str, Any]:
    """Gap and comparisons of one instance."""
    program, cluster = instance(seed, index)
    row: dict[str, Any] = {"index": index, "gap": 0.0, "status": "planned", "plain": None, "best": None}
    begin = time.perf_counter()
    space = Space(program, cluster, AnalyticCosts())
    try:
        ours = make_plan(program, cluster)
    except UserError:
        ours = None
    row["plan_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    if ours is None:
        found = space.search(math.inf, 0.0, any_plan=True)
        row["status"] = "infeasible" if found is None else "missed"
    else:
        step_s = float(ours.predicted["step_time_s"])
        found = space.search(step_s, resolution)
        row["gap"] = 0.0 if found is None else step_s / found.step_s - 1
        draw = random.Random(f"{seed}/{index}/plans")
        for label, plan in (*alone(program, cluster), *proportional(space), *drawn(space, draw, step_s)):
            other = plan.predicted.get("step_time_s") or space.step_s(plan, math.inf)
            if other is not None and other < step_s * (1 - 1e-9):
                row["plain"] = f"{label}: {step_s / other - 1:.2%} faster"
    row["ours"], row["best"] = described(ours), None if found is None else described(found.plan)
    row |= {"brute_s": time.perf_counter() - begin, "simulated": space.num_simulated}
    return row


def described(plan: Plan | None) -> str:
    """One line: schedule, and each stage's segments, members and policies."""
    if plan is None:
        return "none"
    stages = []
    for stage in plan.stages:
        members = [
            f"{m.group}[{','.join(map(str, m.devices))}]"
            + "".join(f" {a}={n}" for a, n in m.axes.items() if n > 1)
            + f" r{m.num_rows} {'/'.join(dict.fromkeys(m.remat))}"
            for m in stage.members
        ]
        stages.append(f"{stage.segments[0]}-{stage.segments[1] - 1} " + " + ".join(members))
    head = f"{plan.schedule} M={plan.num_microbatches} ahead={plan.ahead}"
    return f"{head}: " + " | ".join(stages)


def _examine(arguments: tuple[int, int, float]) -> dict[str, Any]:
    return examine(*arguments)


def main(
    instances: Annotated[int, typer.Option(min=1, help="How many.")] = 300,
    seed: Annotated[int, typer.Option(help="Of all instances.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first instance.")] = 0,
    resolution: Annotated[float, typer.Option(min=0, help="Smallest gap that is looked for.")] = 1e-3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Only the last line.")] = False,
) -> None:
    """Print the instances with gaps and the figures."""
    arguments = [(seed, first + i, resolution) for i in range(instances)]
    rows = []
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        for row in map(_examine, arguments) if pool is None else pool.imap(_examine, arguments):
            rows.append(row)
            if not as_json:
                typer.echo(
                    f"{row['index']}: {row['status']}, gap {row['gap']:.3%}, "
                    f"planned in {row['plan_s']:.2f} s, tried in {row['brute_s']:.2f} s "
                    f"({row['simulated']} simulated)" + (f"; {row['plain']}" if row["plain"] else "")
                )
                if row["best"] is not None:
                    typer.echo(f"  planner {row['ours']}\n  best    {row['best']}")
    gaps = [row["gap"] for row in rows if row["status"] == "planned"]
    figures = {
        "worst_gap": max(gaps, default=0.0),
        "median_gap": statistics.median(gaps) if gaps else 0.0,
        "instances": len(rows),
        "over_1_percent": sum(gap > 0.01 for gap in gaps),
        "worse_than_plain": sum(row["plain"] is not None for row in rows),
        "infeasible": sum(row["status"] == "infeasible" for row in rows),
        "missed": sum(row["status"] == "missed" for row in rows),
        "resolution": resolution,
    }
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
