"""How near the analytic costs come to the Llama layers that Zorse measured, with no profile.

Compared are forward and backward of one layer (32 tokens to 64k) with `AnalyticCosts` on the kinds of Zorse's
released profile (tests/data/zorse, MIT; faulty figures interpolated), at every size, length, dtype and
microbatch that was measured. An error is |estimate / measured - 1|.

What is known of a layer: 2 FLOPs a weight and token, 4 s^2 h of attention (not causal, as in Zorse's own
accounting), and the values that it keeps (`zorse_program`). Attention keeps its probabilities, one value a
head and pair of tokens, where there is no flash attention: before Ampere, on AMD's W6800, in float32.

What the figures rest on: the achieved TFLOP/s of the catalogue are fitted to this very profile, one number a
kind and dtype (`--fit` prints them), so `median_error` tells whether ONE number a kind and traffic from data
sheets explain all sizes. `median_error_held_out` takes a kind's own number away: its products run at the
median share of the peak that the other kinds reached in 16 bits, as for a kind that nobody measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Annotated

import numpy as np
import typer

from benchmarks import common
from benchmarks.planner import zorse_program
from hetjax import profile_formats
from hetjax.cluster import Group
from hetjax.cost import AnalyticCosts
from hetjax.devices import CATALOGUE, DEFAULT_SHARE_OF_PEAK
from hetjax.program import SegmentInfo

HEAD_DIM = 128
"""Of every Llama here."""

NO_FLASH_ATTENTION = ("p100-12", "p40", "t4", "v100-16", "v100-32", "v100-pcie-16", "w6800")


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer at one microbatch on one device of a kind.

    Attributes:
        kind: Key of the catalogue.
        dtype: Compute dtype.
        model: Size's name.
        seq_len: Tokens of a row.
        rows: Of the microbatch.
        forward_s: Measured.
        backward_s: Measured, without recompute.
    """

    kind: str
    dtype: str
    model: str
    seq_len: int
    rows: int
    forward_s: float
    backward_s: float


def cases() -> list[Case]:
    """Every Llama layer in Zorse's profile, on kinds of the catalogue."""
    found = []
    for entry in profile_formats.zorse_profile(zorse_program.DATA).entries:
        name, seq = entry.segment_class.split("/seq")
        model = name.removeprefix("deepspeedllama_")
        if model != name and entry.kind in CATALOGUE:
            found += [
                Case(entry.kind, entry.dtype, model, int(seq), p.rows, p.forward_s, p.backward_s)
                for p in entry.points
            ]
    return found


def layer(case: Case) -> SegmentInfo:
    """The layer of a case, as a program would state it."""
    sizes = zorse_program.llama_sizes(case.model)
    params, boundary = sizes.num_params("layer"), 4.0 * case.seq_len * sizes.hidden
    kept = 4.0 * case.seq_len * sizes.kept_values("layer")["none"]
    if case.kind in NO_FLASH_ATTENTION or case.dtype == "float32":
        kept += 4.0 * case.seq_len**2 * sizes.hidden / HEAD_DIM
    flops = sizes.forward_flops("layer", case.seq_len)
    return SegmentInfo(0, "layer", "layer", params, 4 * params, flops, boundary, {"none": kept})


def estimate(case: Case, tflops: float | None = None) -> tuple[float, float]:
    """Analytic seconds of forward and backward.

    Args:
        case: What is run.
        tflops: In place of the catalogue's achieved figure.
    """
    group = Group.model_validate(
        {
            "name": "one",
            "kind": case.kind,
            "num_devices": 1,
            "compute_dtype": case.dtype,
            "platform": "gpu",
            "tflops": tflops,
        }
    )
    segment, costs = layer(case), AnalyticCosts()
    forward = costs.forward_s(segment, group, case.rows, {})
    return float(forward), float(costs.backward_s(segment, group, case.rows, {}, "none"))


def errors(some: Iterable[Case], tflops: float | None = None) -> np.ndarray:
    """Errors `[case, 2]` of forward and backward."""
    some = list(some)
    measured = np.array([(c.forward_s, c.backward_s) for c in some])
    return np.abs(np.array([estimate(c, tflops) for c in some]) / measured - 1)


def fit(some: Iterable[Case]) -> float:
    """The achieved TFLOP/s of one kind and dtype with the least median error."""
    some = list(some)
    # Time is (time of the products at 1 TFLOP/s) / tflops + the rest.
    rest = np.array([estimate(c, 1e12) for c in some])
    products = np.array([estimate(c, 1.0) for c in some]) - rest
    measured = np.array([(c.forward_s, c.backward_s) for c in some])
    kind = CATALOGUE[some[0].kind]
    peak = max(kind.peak(some[0].dtype), kind.peak("float32"))
    grid = np.geomspace(0.05, 1, 600) * peak
    return float(min(grid, key=lambda x: np.median(np.abs((products / x + rest) / measured - 1))))


def share_of_others(kind: str) -> float:
    """Median share of the peak that the catalogue's other measured kinds reach in 16 bits."""
    shares = [
        k.achieved_tflops["float16"] / max(k.peak("float16"), k.peak("float32"))
        for k in CATALOGUE.values()
        if "float16" in k.achieved_tflops and k.name != kind
    ]
    return statistics.median(shares)


def held_out_tflops(kind: str, dtype: str) -> float:
    """What a kind would be taken for, had nobody measured it."""
    entry = CATALOGUE[kind]
    return share_of_others(kind) * max(entry.peak(dtype), entry.peak("float32"))


def figures(by_kind: Mapping[tuple[str, str], list[Case]]) -> dict[str, float]:
    """Print the table and return the medians over all cases."""
    found: dict[str, list[np.ndarray]] = {}
    common.say(f"{'':<22}{'cases':>6}{'TFLOP/s':>9}{'F':>7}{'B':>7}{'held out F':>12}{'B':>7}")
    for (kind, dtype), some in sorted(by_kind.items(), key=lambda x: (x[0][1], x[0][0])):
        own, other = errors(some), errors(some, held_out_tflops(kind, dtype))
        bits = "float32" if dtype == "float32" else "16bit"
        for name in ("", f"_{bits}"):
            found.setdefault(f"median_error{name}", []).append(own)
            found.setdefault(f"median_error_held_out{name}", []).append(other)
        columns = [np.median(errors_[:, i]) for errors_ in (own, other) for i in (0, 1)]
        common.say(
            f"{kind:<13}{dtype:<9}{len(some):>6}{CATALOGUE[kind].achieved(dtype):>9.1f}"
            f"{columns[0]:>7.1%}{columns[1]:>7.1%}{columns[2]:>12.1%}{columns[3]:>7.1%}"
        )
    result = {name: float(np.median(np.concatenate(parts))) for name, parts in found.items()}
    for i, name in enumerate(("forward", "backward")):
        result[f"median_error_{name}"] = float(
            np.median(np.concatenate([part[:, i] for part in found["median_error"]]))
        )
    return result


def main(
    fitted: Annotated[bool, typer.Option("--fit", help="Print the achieved TFLOP/s that fit best.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone, as JSON.")] = False,
) -> None:
    """Compare the analytic time of Llama layers with Zorse's profile."""
    del as_json  # Figures are JSON in any case.
    by_kind: dict[tuple[str, str], list[Case]] = {}
    for case in cases():
        by_kind.setdefault((case.kind, case.dtype), []).append(case)
    common.introduce(
        "Analytic costs of a Llama layer against Zorse's profile. A kind that nobody measured is taken to "
        f"reach {DEFAULT_SHARE_OF_PEAK:.0%} of its peak."
    )
    if fitted:
        common.finish({f"{kind}_{dtype}": fit(some) for (kind, dtype), some in sorted(by_kind.items())})
        return
    common.finish(figures(by_kind))


if __name__ == "__main__":
    typer.run(main)
