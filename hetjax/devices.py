"""Device catalogue: peaks by dtype, memory, bandwidth; every number with its source.

Peaks are dense (no sparsity) with float32 accumulation. Memory in GiB (2**30 bytes) and rates in GB/s (1e9
bytes) or TFLOP/s (1e12 a second), per device. `achieved_tflops` is what the matrix products of a transformer
layer reached where somebody measured layers, with the memory traffic beside them taken off by the model of
`hetjax.cost`; elsewhere a kind has no such figure and `achieved` estimates it from the peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hetjax.errors import UserError

Number = float | int
"""What a person may write where a rate, a size or a time is meant."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of one element of each compute dtype."""

DEFAULT_SHARE_OF_PEAK = 0.65
"""Achieved share of the peak where nobody measured: the median of the kinds here that were, in 16 bits."""

_VENDOR = "vendor data sheet"
_HMC = "hmc-tech.com GPU page (dense tensor figure)"
_ZORSE = "fitted to Zorse's released profile of Llama layers by benchmarks/planner/catalogue.py --fit"
_GCP = "docs.cloud.google.com/tpu/docs"
_KNOWN = "general knowledge, not checked against the vendor's sheet"


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A model of accelerator: its figures per device and where each comes from.

    Attributes:
        name: Key in the catalogue, as cluster files write it.
        platform: JAX platform: `gpu`, `tpu` or `cpu`.
        compute_dtype: The dtype that its groups compute in unless the cluster file says otherwise.
        peak_tflops: Dense peak by dtype.
        memory_gib: Memory, or None where it depends on the machine (`cpu`).
        usable_memory_gib: What an allocator can get of it, or None where memory is unknown.
        memory_bandwidth_gb_per_s: Of the device's own memory.
        intra_bandwidth_gb_per_s: Between two devices of one host, per direction.
        host_bandwidth_gb_per_s: Between device and host memory, per direction.
        achieved_tflops: Of the products of transformer layers, by dtype; empty where nobody measured. The two
            16-bit dtypes run alike.
        pattern: Regular expression that matches `jax.Device.device_kind`.
        sources: For each numeric field above, and each dtype of `peak_tflops` and `achieved_tflops` as
            `peak_tflops.<dtype>`, where the number comes from.
    """

    name: str
    platform: str
    compute_dtype: str
    peak_tflops: Mapping[str, Number]
    memory_gib: Number | None
    usable_memory_gib: Number | None
    memory_bandwidth_gb_per_s: Number
    intra_bandwidth_gb_per_s: Number
    host_bandwidth_gb_per_s: Number
    achieved_tflops: Mapping[str, Number]
    pattern: str
    sources: Mapping[str, str]

    def peak(self, dtype: str) -> Number:
        """Dense peak in TFLOP/s; a dtype that the hardware lacks runs at the rate of float32."""
        return self.peak_tflops.get(dtype, self.peak_tflops["float32"])

    def achieved(self, dtype: str) -> Number:
        """TFLOP/s to expect of large matrix products: measured where known, else a share of the peak.

        A 16-bit dtype that the hardware computes slower than float32 is computed in float32.
        """
        known = self._measured(dtype)
        if known is not None:
            return self.achieved_tflops[known]
        return DEFAULT_SHARE_OF_PEAK * max(self.peak(dtype), self.peak("float32"))

    def achieved_source(self, dtype: str) -> str:
        """In words, where `achieved` comes from."""
        known = self._measured(dtype)
        if known is None:
            return f"{DEFAULT_SHARE_OF_PEAK:.0%} of {self.name}'s peak in {dtype}"
        return f"{self.name}'s achieved TFLOP/s in {known}: {self.sources[f'achieved_tflops.{known}']}"

    def _measured(self, dtype: str) -> str | None:
        """The measured dtype that stands for one."""
        alike = (dtype,) if dtype == "float32" else (dtype, "float16", "bfloat16")
        return next((d for d in alike if d in self.achieved_tflops), None)


def _kind(
    name: str,
    pattern: str,
    *,
    half: tuple[Number, str],
    f32: tuple[Number, str],
    memory: tuple[Number, str],
    bandwidth: tuple[Number, str],
    intra: tuple[Number, str],
    host: Number,
    usable: Number | None = None,
    achieved: Number | None = None,
    achieved_f32: Number | None = None,
    like: str | None = None,
    bf16: bool = True,
    dtype: str | None = None,
    platform: str = "gpu",
) -> DeviceKind:
    """One row of the catalogue; every `(number, source)` pair is split into the field and its source.

    `half` is the peak of float16, and of bfloat16 where the hardware has it; the default compute dtype is
    bfloat16, else float16.
    """
    peaks = {"float16": half, "float32": f32} | ({"bfloat16": half} if bf16 else {})
    usable_source = (
        "reported by drivers" if usable else "94% of memory_gib: context and allocator take the rest"
    )
    sources = {f"peak_tflops.{d}": source for d, (_, source) in peaks.items()} | {
        "memory_gib": memory[1],
        "usable_memory_gib": usable_source,
        "memory_bandwidth_gb_per_s": bandwidth[1],
        "intra_bandwidth_gb_per_s": intra[1],
        "host_bandwidth_gb_per_s": "about 80% of what PCIe or C2C give per direction nominally",
    }
    reached = {d: x for d, x in (("float16", achieved), ("float32", achieved_f32)) if x is not None}
    source = f"{_ZORSE}, of {like}" if like else _ZORSE
    sources |= {f"achieved_tflops.{d}": source for d in reached}
    return DeviceKind(
        name=name,
        platform=platform,
        compute_dtype=dtype or ("bfloat16" if bf16 else "float16"),
        peak_tflops=MappingProxyType({d: value for d, (value, _) in peaks.items()}),
        memory_gib=memory[0],
        usable_memory_gib=usable or round(memory[0] * 0.94, 2),
        memory_bandwidth_gb_per_s=bandwidth[0],
        intra_bandwidth_gb_per_s=intra[0],
        host_bandwidth_gb_per_s=host,
        achieved_tflops=MappingProxyType(reached),
        pattern=pattern,
        sources=MappingProxyType(sources),
    )


def _v(number: Number) -> tuple[Number, str]:
    return number, _VENDOR


def _k(number: Number) -> tuple[Number, str]:
    return number, _KNOWN


def _h(number: Number) -> tuple[Number, str]:
    return number, _HMC


def _nvlink(total: Number) -> tuple[Number, str]:
    """Usable NVLink per direction from the total of both directions per GPU."""
    return total / 2 * 0.8, f"NVLink {total:g} GB/s in both directions per GPU (vendor), 80% of one direction"


_PCIE3 = (12.0, "PCIe 3.0 x16, 16 GB/s nominal, about 12 achieved")
_PCIE4 = (25.0, "PCIe 4.0 x16, 32 GB/s nominal, about 25 achieved")
_PAIRS4 = (25.0, "an NVLink bridge joins a pair only, so PCIe 4.0 x16")
_PAIRS5 = (50.0, "an NVLink bridge joins a pair only, so PCIe 5.0 x16")
_A10G = "baseten.co, A10 against A10G; Zorse's measured 61 TFLOP/s supports 70"
_SYS = "sysrqmts.com"


# fmt: off
def _nvidia() -> Iterator[DeviceKind]:
    yield _kind("p100-sxm2", r"P100-SXM2", half=_h(21.2), f32=_k(10.6), memory=_v(16), bandwidth=_v(732),
                intra=_nvlink(160), host=12, bf16=False, achieved=8.9, achieved_f32=8.9,
                like="the P100 of 12 GB, by peak")
    yield _kind("p100-12", r"P100-PCIE-12", half=_h(18.7), f32=_k(9.3), memory=_v(12), bandwidth=_v(549),
                intra=_PCIE3, host=12, bf16=False, achieved=7.83, achieved_f32=7.89)
    yield _kind("p40", r"\bP40\b", half=_v(0.18), f32=_v(11.8), memory=_v(24), bandwidth=_v(346),
                intra=_PCIE3, host=12, bf16=False, dtype="float32", achieved=8.31, achieved_f32=9.05)
    yield _kind("v100-16", r"V100-SXM\d-16", half=_h(125), f32=_k(15.7), memory=_v(16), bandwidth=_v(900),
                intra=_nvlink(300), host=12, bf16=False, achieved=90.8, achieved_f32=14.4)
    yield _kind("v100-32", r"V100-SXM\d-32", half=_h(125), f32=_k(15.7), memory=_v(32), bandwidth=_v(900),
                intra=_nvlink(300), host=12, bf16=False, achieved=90.8, achieved_f32=14,
                like="the V100 of 16 GB in float16")
    yield _kind("v100-pcie-16", r"V100-PCIE-16", half=_h(112), f32=_k(14), memory=_v(16), bandwidth=_v(900),
                intra=_PCIE3, host=12, bf16=False, achieved=72.8, achieved_f32=13.1)
    yield _kind("t4", r"\bT4\b", half=_h(65), f32=_k(8.1), memory=_v(16), bandwidth=(320, _SYS),
                intra=_PCIE3, host=12, usable=15, bf16=False, achieved=25.3, achieved_f32=4.21)
    yield _kind("a100-40", r"A100.*40GB", half=_v(312), f32=_k(19.5), memory=_v(40), bandwidth=(1555, _SYS),
                intra=_nvlink(600), host=25, achieved=214, achieved_f32=18.8)
    yield _kind("a100-80", r"A100-SXM.*80GB", half=_v(312), f32=_k(19.5), memory=_v(80), bandwidth=_v(2039),
                intra=_nvlink(600), host=25, achieved=232)
    yield _kind("a100-80-pcie", r"A100 80GB PCIe|A100-PCIE-80GB", half=_v(312), f32=_k(19.5), memory=_v(80),
                bandwidth=_v(1935), intra=_PAIRS4, host=25)
    yield _kind("a40", r"\bA40\b", half=_h(149.7), f32=_k(37.4), memory=_h(48), bandwidth=_h(696),
                intra=_PAIRS4, host=25)
    yield _kind("a6000", r"RTX A6000", half=_v(154.8), f32=_k(38.7), memory=_v(48), bandwidth=_v(768),
                intra=_PAIRS4, host=25, achieved=98.2, achieved_f32=21)
    yield _kind("a10", r"\bA10$", half=(125, "baseten.co, A10 against A10G"), f32=_k(31.2), memory=_v(24),
                bandwidth=(600, _SYS), intra=_PCIE4, host=25)
    yield _kind("a10g", r"\bA10G\b", half=(70, _A10G), f32=_k(35), memory=_v(24), bandwidth=(600, _A10G),
                intra=(10.0, "PCIe without peer access"), host=12, usable=22.5, achieved=61.5,
                achieved_f32=18.4)
    yield _kind("l4", r"\bL4\b", half=_h(121), f32=_k(30.3), memory=_v(24), bandwidth=_h(300),
                intra=_PCIE4, host=25, usable=22.5, achieved=50.4, achieved_f32=10.1)
    yield _kind("l40s", r"\bL40S\b", half=_h(362), f32=_k(91.6), memory=_h(48), bandwidth=_h(864),
                intra=_PCIE4, host=25, achieved_f32=40.3)
    yield _kind("rtx2080ti", r"RTX 2080 Ti", half=_k(53.8), f32=_k(13.4), memory=_k(11), bandwidth=_k(616),
                intra=_PCIE3, host=12, bf16=False)
    yield _kind("titan-rtx", r"TITAN RTX", half=_k(130.5), f32=_k(16.3), memory=_k(24), bandwidth=_k(672),
                intra=_PCIE3, host=12, bf16=False)
    yield _kind("rtx3090", r"RTX 3090", half=_k(71), f32=_k(35.6), memory=_k(24), bandwidth=_k(936),
                intra=_PAIRS4, host=25)
    yield _kind("rtx4090", r"RTX 4090", half=_k(165), f32=_k(82.6), memory=_k(24), bandwidth=_k(1008),
                intra=(20.0, "PCIe 4.0 x16 through the host: no peer access"), host=25)
    yield _kind("h100-80", r"H100 80GB HBM3|H100 SXM", half=_v(989), f32=_v(67), memory=_v(80),
                bandwidth=_v(3350), intra=_nvlink(900), host=50)
    yield _kind("h100-pcie", r"H100 PCIe", half=_v(756), f32=_v(51), memory=_v(80), bandwidth=_v(2000),
                intra=_PAIRS5, host=50)
    yield _kind("h100-nvl", r"H100 NVL", half=_v(835), f32=_v(60), memory=_v(94), bandwidth=_k(3900),
                intra=_PAIRS5, host=50, achieved=360, achieved_f32=42.9)
    yield _kind("h200", r"\bH200", half=(989, "lzwjava.github.io, H100 against H200"), f32=_v(67),
                memory=(140.4, "nvidia-smi: 143,771 MiB"), bandwidth=_v(4800), intra=_nvlink(900), host=50,
                usable=139)
    yield _kind("gh200-96", r"GH200", half=_v(990), f32=_v(67), memory=(95.6, "nvidia-smi: 97,871 MiB"),
                bandwidth=_v(4000), intra=(251.0, "Sailor's measured bandwidth inside a node of 4"), host=360)
    yield _kind("h800", r"H800", half=_v(989), f32=_v(67), memory=_v(80), bandwidth=_v(3350),
                intra=_nvlink(400), host=50)
    yield _kind("h20", r"H20\b", half=_k(148), f32=_k(44), memory=_k(96), bandwidth=_k(4000),
                intra=_nvlink(900), host=50)


def _tpu(name: str, pattern: str, peak: Number, memory: Number, bandwidth: Number, ici: Number, source: str,
         host: Number = 12) -> DeviceKind:
    """A TPU chip; `ici` is GB/s per direction on one axis of the torus."""
    return _kind(name, pattern, half=(peak, source), f32=(peak / 6, "six bfloat16 passes"),
                 memory=(memory, source), bandwidth=(bandwidth, source), intra=(ici, f"one axis: {source}"),
                 host=host, platform="tpu")


def _others() -> Iterator[DeviceKind]:
    yield _tpu("tpu-v2", r"TPU v2", 45, 16, 650, 62, _KNOWN)
    yield _tpu("tpu-v3", r"TPU v3", 123, 32, 900, 82, _KNOWN)
    yield _tpu("tpu-v4", r"TPU v4", 275, 32, 1200, 50, "glennklockwood.com/garden/tpuv4")
    yield _tpu("tpu-v5e", r"TPU v5 ?(lite|e)", 197, 16, 819, 50, _GCP + "/v5e")
    yield _tpu("tpu-v5p", r"TPU v5p|TPU v5$", 459, 95, 2765, 100, _GCP + "/v5p")
    yield _tpu("tpu-v6e", r"TPU v6 ?(lite|e)", 918, 32, 1600, 100, _GCP + "/v6e")
    half_board = "zexron.com and the ROCm documentation; half of the board, one GCD"
    fabric = (50.0, "Infinity Fabric, 50 GB/s per direction and link")
    for name, peak, f32 in (("mi250", 181, 22.6), ("mi250x", 191.5, 23.9)):
        yield _kind(name, rf"{name.upper()}$", half=(peak, half_board), f32=_k(f32), memory=(64, half_board),
                    bandwidth=(1600, half_board), intra=fabric, host=25)
    yield _kind("mi300x", r"MI300X", half=_k(1307), f32=_k(163), memory=_v(192), bandwidth=_v(5300),
                intra=(50.0, "Infinity Fabric, one link of 128 GB/s to each peer"), host=50)
    yield _kind("w6800", r"W6800", half=_v(35.7), f32=_v(17.8), memory=_v(32), bandwidth=_v(512),
                intra=_PCIE4, host=25, bf16=False, achieved=16.7)
    assumed = "assumed: CPUs differ; `tflops` and `memory_gib` of the group in the cluster file override it"
    rates = ("memory", "intra", "host")
    yield DeviceKind(
        name="cpu", platform="cpu", compute_dtype="float32", peak_tflops=MappingProxyType({"float32": 0.1}),
        memory_gib=None, usable_memory_gib=None, memory_bandwidth_gb_per_s=20, intra_bandwidth_gb_per_s=5,
        host_bandwidth_gb_per_s=5, achieved_tflops=MappingProxyType({}), pattern=r"^cpu$",
        sources=MappingProxyType({"peak_tflops.float32": assumed}
                                 | {f"{rate}_bandwidth_gb_per_s": assumed for rate in rates}),
    )
# fmt: on


CATALOGUE: Mapping[str, DeviceKind] = MappingProxyType({k.name: k for k in (*_nvidia(), *_others())})
"""Every known kind by name."""


def lookup(name: str) -> DeviceKind:
    """The kind of that name.

    Raises:
        UserError: No such kind; lists the nearest names.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    stem = re.split(r"[-_ ]", name.lower())[0]
    near = [k for k in CATALOGUE if stem and (k.startswith(stem) or stem in k)] or list(CATALOGUE)
    raise UserError(
        f"Device kind {name!r} is not in the catalogue (hetjax/devices.py). Known kinds: {', '.join(near)}."
    )


def recognise(device_kind: str, platform: str) -> DeviceKind | None:
    """The catalogue's kind of an attached device, from what JAX calls it, or None.

    Args:
        device_kind: `jax.Device.device_kind`, such as `NVIDIA A100-SXM4-80GB`.
        platform: `jax.Device.platform`; `cuda` and `rocm` count as `gpu`.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    return next(
        (k for k in CATALOGUE.values() if k.platform == platform and re.search(k.pattern, device_kind)), None
    )
