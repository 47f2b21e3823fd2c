import pytest

from benchmarks import common
from benchmarks.planner import cost_check
from benchmarks.planner.cost_check import FIGURES, POLICIES, ratio

ROWS = (2,)


@pytest.fixture(scope="module")
def gpt():
    model = cost_check.build("gpt", seq_len=32, vocab=128, embed_dim=64, num_layers=1)
    return list(cost_check.checks("gpt", common.trace(model, 8), ROWS))


@pytest.fixture(scope="module")
def loop():
    return list(cost_check.loop_checks(seq_len=16, width=32, rows=ROWS))


def test_stated_parameters_boundaries_and_residuals_are_those_of_the_compiled_segments(gpt, loop):
    assert len(gpt) == 3 * len(POLICIES)  # embeddings, block, norm with head
    for check in [*gpt, *loop]:
        for figure in ("param", "boundary"):
            assert ratio(getattr(check, figure)) == pytest.approx(1, abs=1e-3), (check.name, figure)
        stated, found = check.residual
        assert stated == pytest.approx(found), (check.name, check.remat)


def test_stated_flops_are_those_of_the_compiled_segments(gpt, loop):
    large = [check for check in [*gpt, *loop] if cost_check.counts(check, "flops")]
    assert {check.name for check in large} == {"blocks/0", "norm", "down+up"}
    for check in large:
        assert ratio(check.flops) == pytest.approx(1, abs=0.05), (check.name, check.remat)
        assert ratio(check.backward_flops) == pytest.approx(1, abs=0.15), (check.name, check.remat)
    assert sum(c.share for c in gpt if c.remat == "none") == pytest.approx(1)


def test_a_loops_body_counts_as_often_as_it_runs(loop):
    layer = 2 * 2 * (16 * 32) * (4 * 32) * 2  # two products of 2 rows of 16 x 32 with 32 x 128
    for check in loop:
        assert check.flops[0] == pytest.approx(cost_check.LOOP_LENGTH * layer, rel=0.03)


def test_the_reserved_workspace_is_within_the_range_that_is_known(gpt):
    # Too much where nothing is recomputed, a little less than XLA:CPU takes where a table is looked up.
    for check in gpt:
        assert 0.5 < ratio(check.workspace) < 8, (check.name, check.remat)


def test_an_error_is_relative_and_nothing_against_nothing_is_none():
    assert ratio((0.0, 0.0)) == 1
    assert ratio((3.0, 2.0)) == 1.5
    assert ratio((1.0, 0.0)) == float("inf")


def test_figures_are_medians_and_leave_out_what_is_too_small_for_flops(gpt):
    figures = cost_check.errors(gpt)
    assert set(figures) >= {f"{f}_error" for f in FIGURES}
    assert figures["worst_flops_error"] < 0.1 < max(abs(ratio(c.flops) - 1) for c in gpt)
    assert figures["residual_error"] <= figures["worst_residual_error"]
