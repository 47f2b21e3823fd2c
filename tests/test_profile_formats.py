"""profile_formats.py: values read by hand from the files of Zorse and Sailor."""

import json
import math
import pathlib

import pytest

from hetjax.errors import UserError
from hetjax.profile import Entry, Profile
from hetjax.profile_formats import (
    import_profile,
    sailor_classes,
    sailor_curve,
    sailor_profile,
    zorse_profile,
)

DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def zorse() -> Profile:
    return zorse_profile(DATA / "zorse")


@pytest.fixture(scope="module")
def sailor() -> Profile:
    return sailor_profile(DATA / "sailor")


def one(profile: Profile, segment_class: str, kind: str, dtype: str, tp: int = 1) -> Entry:
    (found,) = [e for e in profile.entries if e.key == (segment_class, kind, dtype, tp, "none")]
    return found


# ---- Zorse ----


def test_zorses_milliseconds_by_microbatch_become_seconds_by_rows(zorse):
    points = one(zorse, "deepspeedllama_7b/seq1024", "t4", "float16").points
    assert [p.rows for p in points] == [1, 2, 3, 4]
    table = json.loads((DATA / "zorse/model_latencies.json").read_text())
    forward, backward = table["deepspeedllama_7b"]["t4"]["1024"]["float16"][2:]
    assert [p.forward_s * 1e3 for p in points] == pytest.approx(forward)
    assert [p.backward_s * 1e3 for p in points] == pytest.approx(backward)


def test_zorses_round_figures_at_microbatch_2_are_interpolated_and_no_others(zorse):
    notes = zorse.origins[0].notes
    replaced = {tuple(note.split()[i].rstrip(":") for i in (0, 1, 3, 4)) for note in notes}
    h100 = {
        (f"deepspeedllama_{size}", "h100-nvl", "4096", name)
        for size in ("7b", "13b", "33b", "65b")
        for name in ("forward", "backward")
    }
    a100 = {
        ("deepspeedllama_7b", "a100x80", "4096", "forward"),
        ("deepspeedllama_33b", "a100x80", "4096", "backward"),
        ("deepspeedllama_65b", "a100x80", "4096", "backward"),
    }
    assert replaced == h100 | a100
    points = one(zorse, "deepspeedllama_13b/seq4096", "h100-nvl", "float16").points
    # neighbours of the backward: 22.1489 and 65.6206 ms, in whose place the file has 25.0
    assert points[1].backward_s == pytest.approx((22.148864458072914e-3 + 65.6206145875e-3) / 2)
    assert points[0].backward_s == pytest.approx(22.148864458072914e-3)


def test_zorses_kinds_get_the_catalogues_names(zorse):
    assert {"a100-40", "a100-80", "h100-nvl", "v100-16", "a10g", "t4", "p100-12", "rtx3090"} <= set(
        zorse.kinds
    )


def test_zorses_lines_without_a_table_are_told_apart(zorse):
    entry = one(zorse, "deepspeedllama_7b/seq512", "v100-32", "float32")
    assert "line" in entry.source and [p.rows for p in entry.points] == [1, 16]


# ---- Sailor ----


def test_sailors_alike_layers_are_one_class_with_their_mean(sailor):
    entry = one(sailor, "OPT-350/layer", "v100-16", "float32", tp=4)
    point = next(p for p in entry.points if p.rows == 4)
    # layer 1 took 0.009751 and 0.019784 s, each of layers 2 to 24 took 0.009555 and 0.019837 s
    assert point.forward_s == pytest.approx((0.009751 + 23 * 0.009555) / 24)
    assert point.backward_s == pytest.approx((0.019784 + 23 * 0.019837) / 24)
    assert entry.count == 24
    head = one(sailor, "OPT-350/head", "v100-16", "float32", tp=4)
    assert next(p for p in head.points if p.rows == 4).forward_s == 0.018957


def test_sailors_update_of_the_whole_model_is_divided_by_parameter_bytes(sailor):
    parts = [one(sailor, f"OPT-350/{name}", "v100-16", "float32") for name in ("embedding", "layer", "head")]
    whole = sum(e.count * (e.update_s or 0) for e in parts)
    # 0.004854, 0.004843, 0.004853 s at microbatches 1, 2, 4
    assert whole == pytest.approx(0.00485, rel=2e-3)
    sizes = json.loads((DATA / "sailor/llm_info.json").read_text())["OPT-350"]["1"]
    assert parts[1].param_bytes == sizes["1"]["params_bytes"]


def test_a_sailor_profile_of_another_number_of_layers_is_left_out_and_said_so(sailor):
    assert sailor.origins[0].notes == ("GPT-Neo-2.7 on GH-96 left out: 26 layers, and the model has 34",)
    assert not [e for e in sailor.entries if e.kind == "gh200-96" and e.segment_class.startswith("GPT-Neo")]


def test_layers_between_the_longest_run_and_the_head_have_a_name_of_their_own():
    sizes = [1, 2, 2, 2, 3, 4]
    layers = {str(i): {"params_floats": size} for i, size in enumerate(sizes)}
    assert sailor_classes(layers) == {"embedding": [0], "layer": [1, 2, 3], "part2": [4], "head": [5]}


def test_sailors_links_follow_its_polynomial_where_it_rises(sailor):
    (link,) = [
        x
        for x in sailor.links
        if x.kinds == ("a100-80", "a100-80") and (x.scope, x.num_devices) == ("inter_host", 4)
    ]
    assert link.bandwidth_gb_per_s == pytest.approx(13.536072890209141)
    x = 4  # log2 of 16 MB
    expected = -0.10119137 * x**2 + 1.26955142 * x + 9.54895121
    assert dict(link.curve)[16e6] == pytest.approx(expected)


@pytest.mark.parametrize(
    "coefficients",
    [
        (0.80818532, 16.40103598, 32.98046678),
        (-0.2045115, 7.21163513, 22.24208487),
        (-0.10119137, 1.26955142, 9.54895121),
        (-4.04649103e-05, 6.61562401e-04, 1.12642631e-01),
    ],
)
def test_a_curve_is_positive_capped_and_longer_messages_never_take_less(coefficients):
    curve = sailor_curve(coefficients, 9e9)
    times = [size / rate for size, rate in curve]
    assert all(0 < rate <= 9 for _, rate in curve)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(times, times[1:], strict=False))
    assert curve[0][0] == pytest.approx(1e6 / 128) and curve[-1][0] > 8e9
    assert all(math.isfinite(rate) for _, rate in curve)


# ---- what is not in the format ----


def test_an_unknown_format_names_those_that_are_known():
    with pytest.raises(UserError, match="--import megatron: not known. Allowed: zorse, sailor"):
        import_profile("megatron", "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no latencies in Zorse's format"),
        ('{"m": 1}', "a table is wanted where '1' stands"),
        ('{"m": {"t4": {"512": {"float16": [[1, 2], [1, 2], ["a"], [1]]}}}}', "m t4 512 float16: not a list"),
        ('{"m": {"t4": {"512": {"float16": [[1, 2], [1, 2], [-1], [1]]}}}}', r"forward_s = -0\.001"),
        ('{"m": {"t4": {"512": {"int4": [[1, 2], [1, 2], [1], [1]]}}}}', "dtype = 'int4'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_file_that_is_not_zorses_is_refused(tmp_path, content, message):
    (tmp_path / "model_latencies.json").write_text(content)
    with pytest.raises(UserError, match=message):
        zorse_profile(tmp_path)


def sailor_folder(folder, profile, info='{"M": {"1": {"0": {"params_bytes": 4}}}}'):
    (folder / "profiles/M/V100-16").mkdir(parents=True)
    (folder / "profiles/M/V100-16/profile.json").write_text(profile)
    (folder / "llm_info.json").write_text(info)
    return folder


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ('{"1": {"1": {"0": [0.1, 0.2]}}}', "profile.json: not {microbatch"),
        ('{"1": {"1": {"0": [-0.1, 0.2, 0.3]}}}', r"forward_s = -0\.1"),
        ('{"1": 2}', "a table is wanted where '2' stands"),
    ],
)
def test_a_folder_that_is_not_sailors_is_refused(tmp_path, profile, message):
    with pytest.raises(UserError, match=message):
        sailor_profile(sailor_folder(tmp_path, profile))


def test_what_sailors_folder_lacks_is_named(tmp_path):
    with pytest.raises(UserError, match=r"llm_info\.json does not exist"):
        sailor_profile(tmp_path)
    sailor_folder(tmp_path, '{"1": {"1": {"0": [0.1, 0.2, 0.3]}}}', info="{}")
    with pytest.raises(UserError, match="has no model 'M'"):
        sailor_profile(tmp_path)
