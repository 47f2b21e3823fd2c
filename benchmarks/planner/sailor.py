"""hetjax's planner on Sailor's data: OPT-350M, global batch 1,024, mixed A100-40 and V100-16 on GCP's
network.

The best plans of published planners on these profiles reach, by that project's formula ((M - 1) x slowest
stage + sum of stages + transfers + update + gradient sum), 0.0769 iterations/s on 16 + 16 GPUs (Sailor) and
0.1855 on 32 + 96 (Metis); quoted, not run again. hetjax's plan is scored by the same formula
(`sailor_data.score`) and by hetjax's simulator. Also the lab of RTX 2080 Ti, RTX 3090 and Titan RTX joined by
0.11 GB/s.

The last line has `ratio_16_16` and `ratio_32_96`: the smaller of the two ratios (formula and simulator) of
the plan that `Trainer` runs today, over the published figure; `*_all` with everything that can be planned.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from benchmarks.planner import sailor_data
from hetjax.cluster import Cluster
from hetjax.planner import make_plan


def plan_and_score(cluster: Cluster, features: str) -> dict[str, Any]:
    """Iterations per second of hetjax's plan for OPT-350M, simulated and by Sailor's formula."""
    program, costs = sailor_data.program(), sailor_data.costs()
    begin = time.perf_counter()
    plan = make_plan(program, cluster, costs=costs, features=features)
    search_s = time.perf_counter() - begin
    return {
        "simulated_per_s": 1 / plan.predicted["step_time_s"],
        "formula_per_s": 1 / sailor_data.score(plan, program, costs).total_s,
        "limit_per_s": sailor_data.compute_limit_per_s(cluster),
        "search_s": search_s,
        "plan": str(plan).split("\n\n")[1],
    }


def main(as_json: Annotated[bool, typer.Option("--json", help="Only the last line.")] = False) -> None:
    """Print the plans and their figures."""
    figures: dict[str, Any] = {}
    clusters: dict[str, tuple[Cluster, float | None]] = {
        f"{a}_{v}": (sailor_data.mixed_cluster(a, v), max(sailor_data.PUBLISHED_PER_S[f"{a}+{v}"].values()))
        for a, v in ((16, 16), (32, 96))
    }
    clusters["lab"] = sailor_data.lab_cluster(), None
    for name, (cluster, published) in clusters.items():
        for features, suffix in (("runtime", ""), ("all", "_all")):
            found = plan_and_score(cluster, features)
            figures[f"plan_{name}{suffix}"] = found
            slower = min(found["simulated_per_s"], found["formula_per_s"])
            if published is not None:
                figures[f"ratio_{name}{suffix}"] = slower / published
            if not as_json:
                against = (
                    "" if published is None else f", {slower / published:.2f} times {published} (published)"
                )
                typer.echo(
                    f"{name.replace('_', ' + ')}, {features}: simulated {found['simulated_per_s']:.4f} it/s, "
                    f"formula {found['formula_per_s']:.4f}, limit {found['limit_per_s']:.4f}{against}; "
                    f"found in {found['search_s']:.1f} s"
                )
                typer.echo(found["plan"] + "\n")
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
