"""profile.py: the store keeps figures exactly, gaps are filled on the safe side, and the limit is one."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.cluster import Cluster, Group
from hetjax.cost import AnalyticCosts
from hetjax.errors import UserError
from hetjax.profile import Entry, LinkEntry, Origin, Point, Profile, ProfiledCosts, require_kinds
from tests import fake_program

SEGMENT = dataclasses.replace(fake_program.segment(0, 1000, 1e9, 4e3, 1e5), segment_class="layer")
GROUP = Group(name="g", kind="v100-16", num_devices=8)


def entry(*points: tuple[int, float, float], **more) -> Entry:
    fields: dict[str, Any] = {
        "segment_class": "layer",
        "kind": "v100-16",
        "dtype": "float16",
        "source": "measured here",
    }
    made = tuple(Point(rows=r, forward_s=f, backward_s=b) for r, f, b in points)
    return Entry(**(fields | {"points": made} | more))


def costs(*entries: Entry) -> ProfiledCosts:
    return ProfiledCosts(Profile(entries=entries))


def forward(of: ProfiledCosts, rows: int, **axes: int) -> float:
    return float(of.forward_s(SEGMENT, GROUP, rows, axes))


def backward(of: ProfiledCosts, rows: int, remat: str, **axes: int) -> float:
    return float(of.backward_s(SEGMENT, GROUP, rows, axes, remat))


# ---- rows ----


def test_measured_rows_give_what_was_measured_and_rows_between_lie_on_the_line():
    of = costs(entry((2, 3.0, 5.0), (4, 4.0, 9.0)))
    assert [forward(of, r) for r in (2, 3, 4)] == [3.0, 3.5, 4.0]
    assert [backward(of, r, "none") for r in (2, 3, 4)] == [5.0, 7.0, 9.0]


def test_fewer_rows_than_measured_take_no_less_than_the_first_point():
    assert forward(costs(entry((4, 4.0, 8.0), (8, 8.0, 16.0))), 1) == 4.0


@pytest.mark.parametrize(
    ("points", "rows", "expected"),
    [
        # the rise between the last two points is 3 a row, more than 5 / 3 of the last point
        (((2, 2.0, 1.0), (3, 5.0, 1.0)), 5, 11.0),
        # the rise is 0.5 a row; the last point's own is 1
        (((2, 3.0, 1.0), (4, 4.0, 1.0)), 8, 8.0),
        # measured with noise: the last point is below the one before
        (((2, 3.0, 1.0), (4, 2.0, 1.0)), 8, 4.0),
        (((2, 3.0, 1.0),), 4, 6.0),
    ],
)
def test_more_rows_than_measured_take_the_larger_time_per_row(points, rows, expected):
    assert forward(costs(entry(*points)), rows) == pytest.approx(expected)


def test_dp_and_fsdp_divide_the_rows_and_the_fullest_device_counts():
    of = costs(entry((1, 1.0, 2.0), (8, 8.0, 16.0)))
    assert forward(of, 8, dp=2, fsdp=2) == 2.0
    assert forward(of, 9, dp=2, fsdp=2) == 3.0


# ---- tp, dtype, remat ----


def test_a_measured_tp_is_looked_up():
    of = costs(entry((1, 1.0, 2.0)), entry((1, 0.7, 1.5), tp=2))
    assert forward(of, 1, tp=2) == 0.7 and backward(of, 1, "none", tp=2) == 1.5


def test_another_tp_scales_the_nearest_measured_one_as_the_analytic_costs_do():
    of, analytic = costs(entry((1, 1.0, 2.0)), entry((1, 0.7, 1.5), tp=2)), AnalyticCosts()
    ratio = analytic.forward_s(SEGMENT, GROUP, 1, {"tp": 4}) / analytic.forward_s(
        SEGMENT, GROUP, 1, {"tp": 2}
    )
    assert forward(of, 1, tp=4) == pytest.approx(0.7 * max(ratio, 0.5))


def test_bfloat16_and_float16_stand_in_for_each_other_and_float32_does_not():
    of = costs(entry((1, 1.0, 2.0), kind="a100-40"))
    half, full = (
        Group(name="g", kind="a100-40", num_devices=1, compute_dtype=d) for d in ("bfloat16", "float32")
    )
    assert of.forward_s(SEGMENT, half, 1, {}) == 1.0
    assert of.forward_s(SEGMENT, full, 1, {}) == AnalyticCosts().forward_s(SEGMENT, full, 1, {})


def test_a_policy_that_was_not_measured_adds_its_share_of_the_measured_forward():
    of = costs(entry((1, 1.0, 2.0)))
    assert backward(of, 1, "full") == 3.0
    assert of.recompute_s(SEGMENT, GROUP, 1, {}, "full") == 1.0
    assert of.recompute_s(SEGMENT, GROUP, 1, {}, "none") == 0.0


def test_of_a_measured_policy_forward_and_backward_together_are_as_measured():
    of = costs(entry((1, 1.0, 2.0)), entry((1, 0.75, 2.75), remat="full"))
    assert forward(of, 1) == 1.0
    assert forward(of, 1) + backward(of, 1, "full") == 0.75 + 2.75
    assert of.recompute_s(SEGMENT, GROUP, 1, {}, "full") == 0.5
    assert backward(of, 1, "none") == 2.0


def test_a_backward_measured_with_recompute_alone_stands_for_every_lesser_policy():
    of = costs(entry((1, 1.0, 2.8), remat="full"))
    assert [backward(of, 1, r) for r in ("none", "dots", "full")] == [2.8] * 3


# ---- gaps and sources ----


def test_what_the_profile_lacks_comes_from_the_fallback_and_says_so():
    of, analytic = costs(entry((1, 1.0, 2.0))), AnalyticCosts()
    other = dataclasses.replace(SEGMENT, segment_class="head")
    assert of.forward_s(other, GROUP, 4, {}) == analytic.forward_s(other, GROUP, 4, {})
    assert of.backward_s(other, GROUP, 4, {}, "full") == analytic.backward_s(other, GROUP, 4, {}, "full")
    assert of.recompute_s(other, GROUP, 4, {}, "full") == analytic.recompute_s(other, GROUP, 4, {}, "full")
    assert of.limit_s(other, GROUP, 4) == analytic.limit_s(other, GROUP, 4)
    assert of.update_s(1e6, GROUP, {}) == analytic.update_s(1e6, GROUP, {})
    assert of.gather_s(1e6, GROUP, {"fsdp": 2}) == analytic.gather_s(1e6, GROUP, {"fsdp": 2})
    assert of.reduce_s(1e6, GROUP, {"dp": 2}) == analytic.reduce_s(1e6, GROUP, {"dp": 2})
    assert of.offload_s(1e6, GROUP) == analytic.offload_s(1e6, GROUP)
    assert of.source(SEGMENT, GROUP) == "measured here"
    assert of.source(other, GROUP) == analytic.source(other, GROUP)
    assert of.source(other, GROUP).startswith("analytic")


def test_the_update_is_the_measured_seconds_per_byte_of_all_segments():
    of = costs(
        entry((1, 1.0, 2.0), update_s=0.3, param_bytes=200.0, count=2),
        entry((1, 1.0, 2.0), segment_class="head", update_s=0.4, param_bytes=100.0),
    )
    assert of.update_s(1000.0, GROUP, {"fsdp": 2}) == pytest.approx(1.0 / 500 * 1000 / 2)


# ---- the limit ----

one_point = st.tuples(st.integers(1, 32), st.integers(0, 1000), st.integers(0, 1000))
one_entry = st.tuples(
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "dots", "full"]),
    st.lists(one_point, min_size=1, max_size=4, unique_by=lambda point: point[0]),
)


@settings(max_examples=200, deadline=None)
@given(
    drawn=st.lists(one_entry, min_size=1, max_size=6, unique_by=lambda item: item[:2]),
    rows=st.integers(1, 200),
    dp=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4, 8]),
    remat=st.sampled_from(["none", "dots", "full"]),
)
def test_the_limit_is_never_above_forward_and_backward(drawn, rows, dp, tp, remat):
    entries = [entry(*sorted(points), tp=t, remat=r) for t, r, points in drawn]
    of, axes = costs(*entries), {"dp": dp, "tp": tp}
    taken = of.forward_s(SEGMENT, GROUP, rows, axes) + of.backward_s(SEGMENT, GROUP, rows, axes, remat)
    share_of_group = dp * tp / GROUP.num_devices
    assert of.limit_s(SEGMENT, GROUP, rows) <= taken * share_of_group * (1 + 1e-9) + 1e-12


def test_the_limit_is_the_best_measured_time_per_row_over_all_devices():
    of = costs(entry((1, 1.0, 2.0), (4, 2.0, 4.0)), entry((1, 0.7, 1.5), tp=2))
    assert of.limit_s(SEGMENT, GROUP, 16) == pytest.approx(1.5 * 16 / 8)


# ---- the store ----


def whole_profile() -> Profile:
    return Profile(
        origins=(
            Origin(what="measured", devices={"cpu": "cpu"}, versions={"jax": "0.10.2"}, date="2026-01-31"),
        ),
        entries=(
            entry((1, 0.1 + 0.2, 1 / 3), (2, 0.5, 0.7), update_s=0.01, param_bytes=4e6, count=3),
            entry((1, 0.9, 2.8), remat="full", tp=2),
        ),
        links=(link("intra", ("v100-16", "v100-16")), link("groups", ("v100-16", "t4"), 2.0)),
    )


def link(scope, kinds, rate=10.0, **more) -> LinkEntry:
    fields: dict[str, Any] = {
        "curve": ((1e3, rate / 4), (1e6, rate)),
        "source": "measured here",
        "latency_us": 7.0,
    }
    return LinkEntry(scope=scope, kinds=kinds, bandwidth_gb_per_s=rate, **(fields | more))


def test_a_saved_profile_loads_to_the_same_figures(tmp_path):
    profile = whole_profile()
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    Profile().save(tmp_path / "empty.json")
    assert Profile.load(tmp_path / "empty.json") == Profile()


def test_merging_keeps_both_and_the_later_figure_of_one_key():
    old = whole_profile()
    new = Profile(
        origins=(*old.origins, Origin(what="imported from zorse", date="2026-02-01")),
        entries=(entry((1, 5.0, 5.0)), entry((1, 1.0, 1.0), kind="t4")),
        links=(link("groups", ("t4", "v100-16"), 3.0),),
    )
    both = old.merge(new)
    assert len(both.entries) == 3 and len(both.links) == 2 and len(both.origins) == 2
    assert forward(ProfiledCosts(both), 1) == 5.0
    assert both.links[1].bandwidth_gb_per_s == 3.0
    assert both.kinds == ("t4", "v100-16")
    assert both.merge(both) == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no profile of hetjax: its format is 'list'"),
        ('{"t4": {}}', "its format is None"),
        ('{"format": "hetjax-profile-1", "extra": 1}', "extra"),
        (
            json.dumps({"format": "hetjax-profile-1", "entries": [{"kind": "t4"}]}),
            r"entries\.0\.segment_class: Field",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_profile_is_named_with_those_that_are_there(tmp_path):
    whole_profile().save(tmp_path / "there.json")
    with pytest.raises(UserError, match=r"absent\.json does not exist\. There are: .*there\.json"):
        Profile.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": [{"rows": 1, "forward_s": -1.0, "backward_s": 1.0}]}, r"points\.0\.forward_s = -1\.0"),
        ({"points": [{"rows": 0, "forward_s": 1.0, "backward_s": 1.0}]}, r"points\.0\.rows = 0"),
        ({"points": [{"rows": 2, "forward_s": 1, "backward_s": 1}] * 2}, "have to rise"),
        ({"points": []}, r"entries\.0\.points = \[\]"),
        ({"dtype": "int8"}, r"dtype = 'int8'"),
    ],
)
def test_impossible_figures_are_named(tmp_path, change, message):
    data = json.loads(whole_profile().model_dump_json())
    data["entries"][0] |= change
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        Profile.load(path)


def test_two_entries_of_one_key_are_refused(tmp_path):
    data = json.loads(whole_profile().model_dump_json())
    data["entries"] *= 2
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="given twice"):
        Profile.load(tmp_path / "p.json")


# ---- links ----


def two_groups(**more) -> Cluster:
    groups: dict[str, Any] = {
        "a": {"kind": "v100-16", "num_devices": 4} | more,
        "b": {"kind": "t4", "num_devices": 2},
    }
    return Cluster.from_dict(
        {"name": "c", "groups": groups, "default_link": {"bandwidth_gb_per_s": 1.0, "latency_us": 50.0}}
    )


def test_applied_links_take_the_place_of_the_cluster_files():
    found = whole_profile().apply(two_groups())
    inside, between = found.group("a").intra_link, found.link("b", "a")
    assert (inside.bandwidth_gb_per_s, inside.latency_us) == (10.0, 7.0)
    assert inside.rate_gb_per_s(1e3) == 2.5
    assert (between.bandwidth_gb_per_s, between.curve) == (2.0, ((1e3, 0.5), (1e6, 2.0)))
    assert found.group("b") == two_groups().group("b")


def test_a_link_measured_in_these_groups_goes_before_one_of_their_kinds():
    kinds = ("v100-16", "t4")
    profile = Profile(links=(link("groups", kinds, 2.0), link("groups", kinds, 5.0, groups=("b", "a"))))
    assert profile.apply(two_groups()).link("a", "b").bandwidth_gb_per_s == 5.0
    other = Profile(links=(link("groups", kinds, 5.0, groups=("b", "z")),))
    assert other.apply(two_groups()) == two_groups()


def test_the_figures_of_as_many_devices_as_a_host_has_are_taken():
    kinds = ("v100-16", "v100-16")
    profile = Profile(links=tuple(link("inter_host", kinds, float(n), num_devices=n) for n in (1, 2, 4, 8)))
    one = profile.apply(two_groups(devices_per_host=2)).group("a")
    assert one.inter_host_link.bandwidth_gb_per_s == 2.0
    assert profile.apply(two_groups()).group("a").inter_host_link.bandwidth_gb_per_s == 4.0


def test_a_profile_of_other_kinds_than_the_clusters_is_refused():
    with pytest.raises(UserError, match="figures of t4, v100-16, and cluster 'c' has groups of a100-40"):
        require_kinds(
            whole_profile(),
            Cluster.from_dict({"name": "c", "groups": {"a": {"kind": "a100-40", "num_devices": 1}}}),
            "p.json",
        )
    require_kinds(whole_profile(), two_groups(), "p.json")
