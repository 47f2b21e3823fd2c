import math
import random

import pytest

from benchmarks.planner import optimality
from benchmarks.planner.brute_force import Layout, Space
from hetjax.cost import AnalyticCosts
from hetjax.simulate import simulate


def spaces(count: int):
    for index in range(count):
        program, cluster = optimality.instance(7, index)
        yield Space(program, cluster, AnalyticCosts()), random.Random(index)


def test_no_plan_is_faster_than_the_bounds_that_leave_it_out_and_all_fit():
    checked = 0
    for space, draw in spaces(8):
        rows = list(space.rows())
        for _ in range(6):
            teams, M = draw.choice(rows), draw.choice([1, 2, space.program.global_batch])
            if any(space.shares(team, space.program.global_batch // M) is None for team in teams):
                continue
            repeats = draw.randint(1, space.n // len(teams)) if len(teams) > 1 else 1
            layout = Layout(teams, M, repeats)
            kind, ahead = draw.choice(space.variants(layout))
            at = draw.randrange(len(space.cuts(layout.num_stages)))
            cut = tuple(map(int, space.cuts(layout.num_stages)[at]))
            for plan in space.plans(layout, cut, kind, ahead, math.inf):
                plan.check(space.program)
                step_s = simulate(plan, space.program, space.costs).step_time_s
                assert space.lower(layout)[at] <= step_s * (1 + 1e-9), plan
                left = list(space.plans(layout, cut, kind, ahead, step_s * (1 + 1e-9)))
                assert plan in left, plan
                checked += 1
    assert checked > 10


def test_the_search_finds_what_trying_every_plan_finds():
    program, cluster = next(
        (p, c)
        for p, c in (optimality.instance(3, i) for i in range(100))
        if [g.num_devices for g in c.groups] == [1, 1] and p.num_segments <= 4 and p.global_batch <= 6
    )
    space = Space(program, cluster, AnalyticCosts())
    times = [
        space.step_s(plan, math.inf)
        for layout in space.layouts()
        for cut in space.cuts(layout.num_stages)
        for kind, ahead in space.variants(layout)
        for plan in space.plans(layout, tuple(map(int, cut)), kind, ahead, math.inf)
    ]
    found = space.search(math.inf, 0.0)
    assert found is not None
    assert found.step_s == pytest.approx(min(t for t in times if t is not None))
