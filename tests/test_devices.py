import dataclasses
import re

import pytest

from hetjax import devices
from hetjax.errors import UserError

KINDS = list(devices.CATALOGUE.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_each_number_names_its_source(kind):
    numbers = {f"peak_tflops.{dtype}" for dtype in kind.peak_tflops}
    numbers |= {f"achieved_tflops.{dtype}" for dtype in kind.achieved_tflops}
    for field in dataclasses.fields(kind):
        if isinstance(getattr(kind, field.name), (int, float)):
            numbers.add(field.name)
    assert numbers == set(kind.sources)
    assert all(kind.sources.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_figures_are_possible(kind):
    assert kind.compute_dtype in kind.peak_tflops
    assert kind.compute_dtype in devices.DTYPE_BYTES
    for dtype in kind.peak_tflops:
        assert 0 < kind.achieved(dtype) < max(kind.peak(dtype), kind.peak("float32"))
    assert kind.memory_gib is None or kind.usable_memory_gib < kind.memory_gib


@pytest.mark.parametrize("name", ["v100-16", "v100-32", "t4", "p100-sxm2", "w6800"])
def test_kinds_without_bfloat16_compute_in_float16(name):
    kind = devices.lookup(name)
    assert "bfloat16" not in kind.peak_tflops
    assert kind.compute_dtype == "float16"


def test_a_p40_computes_in_float32_since_its_float16_is_slower():
    kind = devices.lookup("p40")
    assert kind.compute_dtype == "float32"
    assert kind.peak("float16") < kind.peak("float32")


@pytest.mark.parametrize(
    ("text", "platform", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "cuda", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "gpu", "a100-80-pcie"),
        ("Tesla V100-SXM2-16GB", "gpu", "v100-16"),
        ("Tesla T4", "gpu", "t4"),
        ("NVIDIA A10G", "gpu", "a10g"),
        ("NVIDIA A10", "gpu", "a10"),
        ("NVIDIA L4", "gpu", "l4"),
        ("NVIDIA L40S", "gpu", "l40s"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100-80"),
        ("NVIDIA H100 NVL", "gpu", "h100-nvl"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA GH200 480GB", "gpu", "gh200-96"),
        ("NVIDIA GeForce RTX 4090", "gpu", "rtx4090"),
        ("AMD Instinct MI250X", "rocm", "mi250x"),
        ("TPU v5 lite", "tpu", "tpu-v5e"),
        ("TPU v5", "tpu", "tpu-v5p"),
        ("TPU v4", "tpu", "tpu-v4"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_attached_devices_are_recognised(text, platform, name):
    found = devices.recognise(text, platform)
    assert found is not None
    assert found.name == name


def test_an_unheard_of_device_is_not_recognised():
    assert devices.recognise("Quantum 9000", "gpu") is None


def test_each_device_text_matches_one_kind_only():
    names = ["NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB", "TPU v5 lite", "TPU v5"]
    for text in names:
        matches = [k.name for k in KINDS if re.search(k.pattern, text)]
        assert len(matches) == 1, (text, matches)


def test_a_wrong_kind_is_told_the_near_ones():
    with pytest.raises(UserError, match=r"Device kind 'a100' is not in the catalogue .* a100-40, a100-80"):
        devices.lookup("a100")
    with pytest.raises(UserError, match=r"Device kind 'zzz' is not in the catalogue .* v100-16"):
        devices.lookup("zzz")
