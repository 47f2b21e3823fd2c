"""What `print(plan)` tells and `--json` gives: figures, what binds, what was rejected and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetjax.cluster import GIB
from hetjax.cost import ProgramLike
from hetjax.devices import Number
from hetjax.plan import Plan, counted
from hetjax.planner.limit import Limit
from hetjax.simulate import Simulation


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that fits, with its simulation.

    Attributes:
        label: Which groups in which order, for a person.
        plan: What was simulated.
        simulation: Its step.
    """

    label: str
    plan: Plan
    simulation: Simulation

    @property
    def rank(self) -> tuple[Number, int, str]:
        """Order of preference: step time, then fewer stages, then the name."""
        time = self.simulation.step_time_s
        return float(f"{time:.9e}"), len(self.plan.stages), self.label


def predictions(
    best: Candidate,
    candidates: Sequence[Candidate],
    unfit: Mapping[str, str],
    limit: Limit,
    program: ProgramLike,
) -> dict[str, object]:
    """Everything predicted of a plan, as its JSON holds it."""
    step = best.simulation.step_time_s
    memory = best.plan.member_memory(program)
    others: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.rank):
        if candidate.label != best.label:
            others.setdefault(candidate.label, candidate)
    # The alternatives that a person asks for first: each group alone, then the best of the rest.
    plain = [c for label, c in others.items() if " alone" in label]
    shown = sorted([*plain, *[c for c in others.values() if c not in plain][:3]], key=lambda c: c.rank)
    rejected: list[dict[str, object]] = [
        {
            "what": f"{c.label}, {counted(c.plan.num_microbatches, 'microbatch')}",
            "step_time_s": c.simulation.step_time_s,
            "why": f"{c.simulation.step_time_s / step:.2f} times as long: {binds(c.simulation)}",
        }
        for c in shown
    ]
    rejected += [
        {"what": what, "step_time_s": None, "why": f"does not fit: {why}"} for what, why in unfit.items()
    ]
    rows_per_s = program.global_batch / step if step else 0.0
    tokens = getattr(program, "tokens_per_row", None)
    return {
        "step_time_s": step,
        "rows_per_s": rows_per_s,
        **({} if tokens is None else {"tokens_per_s": rows_per_s * tokens}),
        "limit": {
            "step_time_s": limit.step_time_s,
            "with_links_s": limit.with_links_s,
            "group_shares": dict(limit.group_shares),
        },
        "efficiency": limit.step_time_s / step if step else 1.0,
        "binds": binds(best.simulation),
        "groups": {name: dataclasses.asdict(use) for name, use in best.simulation.groups.items()},
        "memory_gib": [
            [memory[s, k].total_bytes / GIB for k in range(len(stage.members))]
            for s, stage in enumerate(best.plan.stages)
        ],
        "rejected": rejected,
    }


def binds(simulation: Simulation) -> str:
    """What keeps the step from being shorter, in a few words."""
    name, use = max(simulation.groups.items(), key=lambda item: (item[1].busy, item[0]))
    moving, link = max(simulation.groups.items(), key=lambda item: (item[1].transfer, item[0]))
    if link.transfer > max(use.busy, 0.5):
        return f"transfers of group {moving}, on their way {link.transfer:.0%} of the step"
    if use.busy > 0.85:
        return f"compute of group {name}, busy {use.busy:.0%} of the step"
    return f"filling and draining the pipeline: even group {name} is busy only {use.busy:.0%} of the step"
