"""hetjax's planner against Zorse's on Zorse's own clusters, profile and batches, under one simulator.

For clusters A, B and C of the paper (arXiv 2507.10392; meshes/zorse_{a,b,c}.toml), Llama 7B to 65B as its
profile has them, 1M tokens a step: tokens per second of hetjax's plan, of Zorse's (`zorse_baseline`, at its
best), and of the limit. hetjax cuts attention and MLP of a layer apart; Zorse cuts between layers, as
published.

Two plans of hetjax: `all` may split backwards, which is not played yet; `runtime` is what `Trainer` runs
today. Efficiency is `busy` (share of the step in which devices compute, each weighted by its speed) times
`pace` (what they do in that time, of what they do at their best number of rows and without recompute).

The link figures of the mesh files decide much on B and C: each pair of groups shares one link, and C's
regions are joined by 1 GB/s in all. Zorse's own score gives every device the pair's whole bandwidth; under
the simulator its plans share it as hetjax's do.

The last line has `median_ratio`, `worst_ratio` (tokens/s over Zorse's), `median_efficiency` (of the limit
without recompute), the same for `runtime`, and the table as JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any

import typer

from benchmarks.planner import zorse_baseline, zorse_program
from hetjax.planner import compute_limit, make_plan, relaxation


def compare(cluster_name: str, model: str) -> dict[str, Any]:
    """Figures of one model on one cluster."""
    cluster, costs = zorse_program.cluster(cluster_name), zorse_program.zorse_costs((cluster_name,))
    seq_len = zorse_program.SEQ_LENS[cluster_name]
    program = zorse_program.program(model, seq_len, halves=True)
    whole = zorse_program.program(model, seq_len, halves=False)
    tokens = zorse_program.GLOBAL_TOKENS
    limit = compute_limit(program, cluster, costs)
    kinds = relaxation.find_kinds(program, cluster, costs)
    speeds = dict(zip([g.name for g in cluster.groups], 1 / (kinds.counts @ kinds.seconds), strict=True))
    _, theirs = zorse_baseline.baseline_plan(whole, cluster, costs, model)
    row: dict[str, Any] = {
        "cluster": cluster_name,
        "model": model,
        "zorse_tokens_per_s": theirs["tokens_per_s"],
        "limit_tokens_per_s": tokens / limit.step_time_s,
        "limit_with_links_tokens_per_s": tokens / limit.with_links_s if limit.with_links_s else None,
    }
    for features in ("all", "runtime"):
        begin = time.perf_counter()
        plan = make_plan(program, cluster, costs=costs, features=features)
        step_s = plan.predicted["step_time_s"]
        used = plan.predicted["groups"]
        busy = sum(speeds[name] * used[name]["busy"] for name in used) / sum(speeds.values())
        row[features] = {
            "tokens_per_s": tokens / step_s,
            "ratio": tokens / step_s / theirs["tokens_per_s"],
            "efficiency": limit.step_time_s / step_s,
            "busy": busy,
            "pace": limit.step_time_s / step_s / busy,
            "search_s": time.perf_counter() - begin,
            "plan": f"{len(plan.stages)} stages, {plan.num_microbatches} microbatches, {plan.schedule}, "
            f"{plan.ahead} ahead, backward {plan.backward}",
        }
    return row


def main(
    cluster: Annotated[str, typer.Option(help="a, b or c; all of them when empty.")] = "",
    model: Annotated[str, typer.Option(help="7b, 13b, 33b or 65b; all of them when empty.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Only the last line.")] = False,
) -> None:
    """Print the table and its figures."""
    rows = []
    for name in (cluster,) if cluster else zorse_program.MODELS:
        for size in zorse_program.MODELS[name]:
            if model in ("", size):
                rows.append(compare(name, size))
                if not as_json:
                    typer.echo(_line(rows[-1]))
    figures: dict[str, Any] = {}
    for prefix, features in (("", "all"), ("runtime_", "runtime")):
        ratios = [row[features]["ratio"] for row in rows]
        figures[f"{prefix}median_ratio"] = statistics.median(ratios)
        figures[f"{prefix}worst_ratio"] = min(ratios)
        figures[f"{prefix}median_efficiency"] = statistics.median(r[features]["efficiency"] for r in rows)
    typer.echo(json.dumps({**figures, "rows": rows}))


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['cluster'].upper()} {row['model'].upper():<4}"]
    parts.append(f"zorse {row['zorse_tokens_per_s'] / 1e3:6.1f}k")
    for features in ("all", "runtime"):
        own = row[features]
        parts.append(
            f"{features} {own['tokens_per_s'] / 1e3:6.1f}k ({own['ratio']:.2f}x, "
            f"{own['efficiency']:.3f} of the limit = {own['busy']:.3f} busy x {own['pace']:.3f} pace, "
            f"{own['search_s']:.0f} s)"
        )
    parts.append(f"limit {row['limit_tokens_per_s'] / 1e3:6.1f}k")
    return "; ".join(parts) + f"; {row['all']['plan']}"


if __name__ == "__main__":
    typer.run(main)
