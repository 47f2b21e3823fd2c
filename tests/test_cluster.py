import pathlib

import jax
import pytest

from hetjax.cluster import Cluster
from hetjax.errors import UserError

MESHES = pathlib.Path(__file__).parent.parent / "meshes"
TWO = """
description = "two"
[groups.a100]
kind = "a100-80"
num_devices = 4
[groups.v100]
kind = "v100-16"
num_devices = 8
memory_gib = 12
[[links]]
between = ["a100", "v100"]
bandwidth_gb_per_s = 12.5
latency_us = 20
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def cpu(**groups):
    tables = {name: {"kind": "cpu", "num_devices": n} for name, n in groups.items()}
    return Cluster.from_dict({"name": "c", "groups": tables, "default_link": {"bandwidth_gb_per_s": 5}})


def test_a_file_gives_groups_in_order_with_the_catalogues_figures(tmp_path):
    cluster = Cluster.load(write(tmp_path, TWO))
    assert cluster.name == "mine"
    assert [g.name for g in cluster.groups] == ["a100", "v100"]
    assert cluster.group("a100").dtype == "bfloat16"
    assert cluster.group("v100").dtype == "float16"
    assert cluster.group("a100").memory_bytes == 75.2 * 2**30
    assert cluster.group("v100").memory_bytes == 12 * 2**30
    assert cluster.num_cpu_devices() == 0


def test_links_are_the_same_both_ways_and_inside_a_group_its_own(tmp_path):
    cluster = Cluster.load(write(tmp_path, TWO))
    assert cluster.link("v100", "a100") == cluster.link("a100", "v100")
    assert cluster.link("v100", "a100").transfer_s(12.5e9) == pytest.approx(1 + 20e-6)
    assert cluster.link("a100", "a100").bandwidth_gb_per_s == 240


def test_a_cluster_survives_the_way_through_a_dict(tmp_path):
    cluster = Cluster.load(write(tmp_path, TWO))
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_measured_speeds_replace_the_catalogues(tmp_path):
    cluster = Cluster.load(write(tmp_path, TWO)).with_tflops({"v100": 50.0})
    assert cluster.group("v100").achieved_tflops == 50.0
    assert (
        cluster.group("a100").achieved_tflops
        == Cluster.load(write(tmp_path, TWO)).group("a100").achieved_tflops
    )
    with pytest.raises(UserError, match="has no group 'x'. Its groups: a100, v100"):
        cluster.with_tflops({"x": 1.0})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "a100-80"', 'kind = "a100"', r"mine.toml: groups.a100.kind: Device kind 'a100' is not in"),
        ("num_devices = 4", "num_devices = 0", r"groups.a100.num_devices = 0: .* greater than or equal to 1"),
        ("num_devices = 4", "", r"mine.toml: key 'groups.a100.num_devices' is missing"),
        ("num_devices = 4", "devices = 4", r"unknown key 'groups.a100.devices'. Allowed: kind, num_devices"),
        ("num_devices = 4", "num_devices = true", r"groups.a100.num_devices = True: .* valid integer"),
        ("num_devices = 4", f"num_devices = {10**20}", r"num_devices = 10{20}: .* less than or equal to"),
        ("memory_gib = 12", "memory_gib = -1", r"groups.v100.memory_gib = -1: .* greater than 0"),
        ("memory_gib = 12", "memory_gib = inf", r"groups.v100.memory_gib = inf: .* finite number"),
        ("memory_gib = 12", 'name = "v"', r"unknown key 'groups.v100.name'. A group is named by its table"),
        ("[groups.v100]", '[groups.""]', r"a group is named ''. Give it a name that can be printed"),
        ("12.5", "nan", r"links.0.bandwidth_gb_per_s = nan: "),
        ("latency_us = 20", "latency_us = inf", r"links.0.latency_us = inf: .* finite number"),
        ("12.5", "0", r"links.0.bandwidth_gb_per_s = 0: .* greater than 0"),
        ('["a100", "v100"]', '["a100", "b"]', r"links: 'b' is not a group. The groups are: a100, v100"),
        ('["a100", "v100"]', '["a100", "a100"]', r"names one group twice; set its intra_bandwidth"),
        (
            "latency_us = 20",
            "latency = 20",
            r"unknown key 'links.0.latency'. Allowed: between, bandwidth_gb_per_s",
        ),
        (
            'description = "two"',
            "nonsense = 1",
            r"unknown key 'nonsense'. Allowed: name, groups, description",
        ),
        ('description = "two"', "two", r"mine.toml is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_told_where_and_what_is_allowed(tmp_path, old, new, message):
    assert old in TWO
    with pytest.raises(UserError, match=message):
        Cluster.load(write(tmp_path, TWO.replace(old, new)))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TWO, encoding="utf-8-sig")
    assert Cluster.load(path) == Cluster.load(write(tmp_path, TWO))


def test_a_pair_without_link_or_given_twice_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"links: none joins 'a100' and 'v100'. Add it to \[\[links\]\], or give"
    ):
        Cluster.load(write(tmp_path, TWO[: TWO.index("[[links]]")]))
    with pytest.raises(UserError, match="the pair a100 and v100 is given twice"):
        Cluster.load(write(tmp_path, TWO + TWO[TWO.index("[[links]]") :]))


def test_a_missing_or_empty_file_is_told_plainly(tmp_path):
    path = write(tmp_path, TWO)
    with pytest.raises(UserError, match=r"no.toml does not exist. There are: .*mine.toml"):
        Cluster.load(path.with_name("no.toml"))
    with pytest.raises(UserError, match=r"needs at least one group, as a table \[groups.NAME\]"):
        Cluster.load(write(tmp_path, 'description = "x"'))
    with pytest.raises(UserError, match="cannot be read"):
        Cluster.load(tmp_path)


def test_devices_are_handed_out_in_file_order():
    cluster = cpu(left=3, right=2)
    assert cluster.num_cpu_devices() == 5
    attached = cluster.attach()
    found = jax.devices("cpu")
    assert attached == {"left": found[:3], "right": found[3:5]}


def test_too_few_devices_say_how_to_get_more():
    with pytest.raises(
        UserError,
        match=r"Group 'right' of cluster 'c' needs 5 devices of backend 'cpu'; 8 are attached and 4 of them "
        r"belong to the groups before it. Call jax.config.update\('jax_num_cpu_devices', 9\)",
    ):
        cpu(left=4, right=5).attach()


def test_a_missing_backend_is_named():
    cluster = Cluster.from_dict({"name": "c", "groups": {"g": {"kind": "tpu-v4", "num_devices": 1}}})
    with pytest.raises(
        UserError, match="Group 'g' of cluster 'c' needs JAX backend 'tpu', which is not available"
    ):
        cluster.attach()


def test_a_backend_of_another_platform_is_refused():
    table = {"kind": "t4", "num_devices": 1, "backend": "cpu"}
    cluster = Cluster.from_dict({"name": "c", "groups": {"g": table}})
    with pytest.raises(
        UserError, match="Group 'g' is of platform 'gpu', and backend 'cpu' gives devices of .* cpu"
    ):
        cluster.attach()


class Fake:
    def __init__(self, kind, platform="gpu"):
        self.device_kind, self.platform = kind, platform

    def memory_stats(self):
        return {"bytes_limit": 2**34}


def test_mixed_and_mistaken_kinds_are_refused(monkeypatch):
    cluster = Cluster.from_dict({"name": "c", "groups": {"g": {"kind": "t4", "num_devices": 2}}})
    monkeypatch.setattr(jax, "devices", lambda backend: [Fake("Tesla T4"), Fake("NVIDIA L4")])
    with pytest.raises(UserError, match="Group 'g' would hold devices of several kinds: NVIDIA L4, Tesla T4"):
        cluster.attach()
    monkeypatch.setattr(jax, "devices", lambda backend: [Fake("NVIDIA L4")] * 2)
    with pytest.raises(
        UserError, match=r"of kind 't4' in the cluster file, and .* 'NVIDIA L4' \(kind 'l4'\)"
    ):
        cluster.attach()


def test_detection_makes_a_group_of_each_kind(monkeypatch):
    assert [(g.kind, g.num_devices) for g in Cluster.detect().groups] == [("cpu", 8)]
    monkeypatch.setattr(
        jax, "devices", lambda backend: [Fake("Tesla T4"), Fake("NVIDIA L4"), Fake("Tesla T4")]
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    groups = Cluster.detect().groups
    assert [(g.name, g.num_devices, g.memory_gib) for g in groups] == [("t4", 2, 16.0), ("l4", 1, 16.0)]
    monkeypatch.setattr(jax, "devices", lambda backend: [Fake("Quantum 9000")])
    with pytest.raises(UserError, match="Attached device 'Quantum 9000' .* is not in the catalogue"):
        Cluster.detect()


@pytest.mark.parametrize("path", sorted(MESHES.glob("*.toml")), ids=lambda p: p.stem)
def test_each_cluster_file_of_the_repository_is_read(path):
    cluster = Cluster.load(path)
    assert cluster.name == path.stem
    assert cluster.description
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    for a in cluster.groups:
        for b in cluster.groups:
            assert cluster.link(a.name, b.name).bandwidth_gb_per_s > 0


def test_devices_of_several_hosts_are_joined_by_the_slower_way():
    group = Cluster.load(MESHES / "zorse_a.toml").group("a100")
    assert group.inner_link(8).bandwidth_gb_per_s == 240
    assert group.inner_link(16).bandwidth_gb_per_s == 10
