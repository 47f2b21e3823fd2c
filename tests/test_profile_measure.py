"""profile_measure.py: what is measured is stored under the program's classes, and plans are made from it."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.cluster import Cluster
from hetjax.errors import UserError
from hetjax.profile import Profile, ProfiledCosts
from hetjax.profile_measure import (
    Choice,
    measure,
    of_program,
    parse_choice,
    portable_classes,
    timed,
    usable_rows,
)
from tests import zoo

CHOICE = Choice(rows=(1, 2), remat=("none", "full"), message_bytes=(1024, 65536))


def cluster(**kinds: int) -> Cluster:
    groups = {name: {"kind": "cpu", "num_devices": n, "memory_gib": 4} for name, n in kinds.items()}
    link = {"bandwidth_gb_per_s": 1.0}
    return Cluster.from_dict({"name": "here", "groups": groups, "default_link": link})


def program(specimen: zoo.Specimen, rows: int | None = None) -> hetjax.Program:
    batch = (
        specimen.batch
        if rows is None
        else jax.tree.map(lambda a: np.resize(a, (rows, *a.shape[1:])), specimen.batch)
    )
    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    return hetjax.trace(specimen.loss_fn, specimen.init_fn, spec, **specimen.trace_options)


@pytest.fixture(scope="module")
def traced() -> hetjax.Program:
    return program(zoo.gpt())


@pytest.fixture(scope="module")
def profile(traced) -> Profile:
    told: list[str] = []
    found = measure(traced, cluster(left=1, right=2), optax.adamw(1e-3), CHOICE, told.append)
    assert told
    return found


def test_every_class_gets_positive_times_at_every_row_count_and_policy(traced, profile):
    classes = set(portable_classes(traced).values())
    assert {(e.segment_class, e.remat) for e in profile.entries} == {
        (c, remat) for c in classes for remat in CHOICE.remat
    }
    for entry in profile.entries:
        assert [p.rows for p in entry.points] == [1, 2]
        assert all(p.forward_s > 0 and p.backward_s > 0 and (p.peak_bytes or 0) > 0 for p in entry.points)
        assert entry.kind == "cpu" and entry.source.startswith("measured")
    assert sum(e.count for e in profile.entries if e.remat == "none") == traced.num_segments


def test_the_update_is_measured_with_the_bytes_that_a_segment_owns(traced, profile):
    updates = [e for e in profile.entries if e.update_s]
    owned = sum(4 * int(np.prod(traced.piece_spec(p).shape)) for p in traced.pieces if traced.trainable(p))
    assert all((e.update_s or 0) > 0 for e in updates)
    assert sum(e.count * (e.param_bytes or 0) for e in updates) == owned


def test_links_between_and_inside_groups_are_measured(profile):
    assert [(x.scope, x.groups, x.num_devices) for x in profile.links] == [
        ("intra", ("right", "right"), 1),
        ("groups", ("left", "right"), 1),
    ]
    for link in profile.links:
        assert link.latency_us > 0 and all(rate > 0 for _, rate in link.curve)
        assert [size for size, _ in link.curve] == [1024, 65536]


def test_the_profile_says_on_what_and_with_what_it_was_measured(profile):
    (origin,) = profile.origins
    assert origin.what == "measured" and origin.devices == {"cpu": "cpu"}
    assert set(origin.versions) == {"python", "jax", "jaxlib"} and origin.versions["jax"] == jax.__version__
    assert len(origin.date) == 10


def test_a_measured_profile_holds_for_another_global_batch(profile):
    other = program(zoo.gpt(), rows=16)
    costs = ProfiledCosts(of_program(profile, other))
    group = cluster(left=1).groups[0]
    assert all(costs.source(s, group).startswith("measured") for s in other.segments())


def test_a_plan_made_from_a_measured_profile_runs_a_step(traced, profile, tmp_path):
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == profile
    here = loaded.apply(cluster(left=1, right=2))
    assert here.link("left", "right").curve == loaded.links[1].curve
    plan = hetjax.make_plan(traced, here, costs=ProfiledCosts(of_program(loaded, traced)))
    trainer = hetjax.Trainer(traced, plan, optax.adamw(1e-3))
    _, metrics = trainer.step(trainer.init(0), zoo.gpt().batch)
    assert np.isfinite(float(metrics["loss"]))
    trainer.close()


@pytest.mark.parametrize(
    "specimen", [zoo.tied, zoo.partial_sums, zoo.dropout, zoo.scanned], ids=lambda f: f.__name__
)
def test_any_kind_of_segment_can_be_measured(specimen):
    choice = Choice(rows=(2,), remat=("none",), message_bytes=(1024,))
    traced = program(specimen())
    found = measure(traced, cluster(one=2), optax.sgd(1e-3), choice)
    assert {e.segment_class for e in found.entries} == set(portable_classes(traced).values())


def test_an_optimizer_that_needs_the_whole_tree_has_no_update_and_says_so(traced):
    told: list[str] = []
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3))
    small = dataclasses.replace(CHOICE, rows=(1,), remat=("none",))
    found = measure(traced, cluster(one=1), optimizer, small, told.append)
    assert not any(e.update_s for e in found.entries)
    assert sum("of the update: This optax transformation needs" in text for text in told) == 1


def test_a_group_with_too_little_memory_is_not_measured_there(traced):
    tiny = Cluster.from_dict(
        {"name": "c", "groups": {"one": {"kind": "cpu", "num_devices": 1, "memory_gib": 1e-6}}}
    )
    choice = dataclasses.replace(CHOICE, rows=(1,), remat=("none",))
    assert measure(traced, tiny, None, choice).entries == ()


def test_rows_above_the_global_batch_are_left_out(traced):
    assert usable_rows((4, 1, 4, 1000), traced) == (1, 4)
    with pytest.raises(UserError, match="within the global batch of 8 rows"):
        usable_rows((9,), traced)


@pytest.mark.parametrize("rows", ["0", "-1", "two", "", "1.5", "1,,x"])
def test_row_counts_that_are_none_are_refused(rows):
    with pytest.raises(UserError, match="--rows"):
        parse_choice(rows, "none")


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="--remat all: give some of none, dots, full"):
        parse_choice("1,2", "all")
    assert parse_choice(" 1, 2", "full,none,full") == Choice(rows=(1, 2), remat=("full", "none"))


def test_a_timed_run_is_warmed_up_and_repeated():
    calls: list[int] = []
    assert timed(lambda: calls.append(1), repeat=False) > 0
    assert 2 + 5 <= len(calls) <= 2 + 50
