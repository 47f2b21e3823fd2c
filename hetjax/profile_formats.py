"""Importers: measurements that other projects published, as profiles of hetjax.

Zorse (benson-guo/zorse, `data/model_latencies.json`): milliseconds of one layer. Sailor (eth-easl/sailor): a
folder with `profiles/MODEL/KIND/profile.json`, `llm_info.json` and `network/`. What is wrong in them by their
own standards is left out or replaced, and `Origin.notes` says so.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from hetjax.cluster import Curve
from hetjax.errors import UserError
from hetjax.profile import Entry, LinkEntry, Origin, Point, Profile, explain, read_json

ZORSE_KINDS = {
    "a100x40": "a100-40",
    "a100x80": "a100-80",
    "p100": "p100-12",
    "rtx_3090": "rtx3090",
    "v100-pciex16": "v100-pcie-16",
    "v100x16": "v100-16",
    "v100x32": "v100-32",
}
"""Zorse's names where the catalogue has others; its P100 has the peak of the PCIe card."""

SAILOR_KINDS = {
    "A100-40": "a100-40",
    "A100-80": "a100-80",
    "GH-96": "gh200-96",
    "RTX-2080": "rtx2080ti",
    "RTX-3090": "rtx3090",
    "Titan-RTX": "titan-rtx",
    "V100-16": "v100-16",
}
"""Sailor's names; others stay, in lower case.

Its RTX 2080 is taken for the Ti: it updates parameters at 0.90 of the Titan's speed, and the memory of the Ti
has 0.92 of the Titan's bandwidth, that of the plain one 0.67.
"""

OFF_TREND = 0.01
"""A whole multiple of 0.5 ms that is this far off the mean of its neighbours was not measured."""

FITTED_ROWS = (1, 16)
"""Microbatches at which a fitted line stands in for measurements that the file lacks."""


def zorse_profile(path: str | Path) -> Profile:
    """Import Zorse's layer latencies.

    Segment classes are `MODEL/seqN`, one layer each; kinds as in `ZORSE_KINDS`, else as Zorse writes them.
    The backward is without recompute.

    Args:
        path: `model_latencies.json`, or the folder that holds it.

    Raises:
        UserError: It is missing or not in that format.
    """
    path = _in_folder(path, "model_latencies.json")
    entries, notes = [], []
    for (model, kind, seq, dtype), figures in _leaves(read_json(path, "Zorse's profile"), 4, path):
        place = f"{path}: {model} {kind} {seq} {dtype}"
        try:
            table = _zorse_table(figures)
            source = "imported from zorse"
            if table is None:
                continue
            if len(figures) == 2:
                source += " (its fitted line)"
            for name, times in zip(("forward", "backward"), table, strict=True):
                for rows, old in _replace_round(times):
                    notes.append(
                        f"{model} {kind} seq {seq}: {name} at microbatch {rows} was {old:g} ms, round and "
                        f"off trend; {times[rows] * 1e3:g} ms interpolated"
                    )
            points = [
                Point(rows=r, forward_s=f, backward_s=table[1][r])
                for r, f in sorted(table[0].items())
                if r in table[1]
            ]
            entries.append(
                Entry.model_validate(
                    {
                        "segment_class": f"{model}/seq{seq}",
                        "kind": ZORSE_KINDS.get(kind, kind),
                        "dtype": dtype,
                        "points": points,
                        "source": source,
                    }
                )
            )
        except pydantic.ValidationError as error:
            raise UserError(f"{place}: {explain(error)}") from None
        except (TypeError, ValueError, IndexError) as error:
            raise UserError(f"{place}: not a list of latencies ({error}).") from None
    if not entries:
        raise UserError(f"{path} holds no latencies in Zorse's format (model, kind, sequence length, dtype).")
    return Profile(origins=(_origin("zorse", notes),), entries=tuple(entries))


def _zorse_table(figures: Any) -> tuple[dict[int, float], dict[int, float]] | None:
    """Seconds by microbatch, forward and backward; None for older figures without a microbatch."""
    if isinstance(figures, float) or (len(figures) == 2 and not isinstance(figures[0], list)):
        return None
    if len(figures) == 2:
        lines = [{r: (slope * r + above) / 1e3 for r in FITTED_ROWS} for slope, above in figures]
        return lines[0], lines[1]
    forward, backward = ({i + 1: x / 1e3 for i, x in enumerate(times)} for times in figures[2:4])
    return forward, backward


def _replace_round(times: dict[int, float]) -> list[tuple[int, float]]:
    """Replace round figures that are off trend by the mean of their neighbours; microbatch and old ms."""
    found = []
    for rows in sorted(times):
        if rows - 1 in times and rows + 1 in times:
            ms, mean = times[rows] * 1e3, (times[rows - 1] + times[rows + 1]) / 2
            if math.isclose(2 * ms, round(2 * ms), rel_tol=1e-15) and abs(times[rows] / mean - 1) > OFF_TREND:
                found.append((rows, ms))
                times[rows] = mean
    return found


def sailor_profile(path: str | Path) -> Profile:
    """Import Sailor's layer profiles and networks.

    Segment classes are `MODEL/embedding`, `MODEL/layer`, `MODEL/head`, and `MODEL/part3` for what lies
    between; layers that the model's sizes tell alike are one class, with the mean of their times. The update,
    which the file gives for the whole model, is divided by parameter bytes. Everything is in float32. Links:
    inside a host, between hosts of one kind, and between kinds, all in one zone.

    Args:
        path: A folder with `profiles/` and `llm_info.json`, and maybe `network/`.

    Raises:
        UserError: Something is missing or not in that format.
    """
    path = Path(path)
    info = read_json(path / "llm_info.json", "Sailor's table of models")
    files = sorted((path / "profiles").glob("*/*/profile.json"))
    if not files:
        raise UserError(f"{path} holds no profiles/MODEL/KIND/profile.json, as Sailor's format has it.")
    entries: list[Entry] = []
    notes: list[str] = []
    for file in files:
        model, kind = file.parts[-3:-1]
        if model not in info:
            raise UserError(f"{path / 'llm_info.json'} has no model {model!r}, which {file} is of.")
        sizes = info[model]
        layers = next(iter(sizes.values()))
        data = read_json(file, "Sailor's profile")
        tables = [table for _, table in _leaves(data, 2, file)]
        if any(len(table) != len(layers) for table in tables):
            notes.append(
                f"{model} on {kind} left out: {len(tables[0])} layers, and the model has {len(layers)}"
            )
            continue
        try:
            entries += _sailor_entries(model, SAILOR_KINDS.get(kind, kind.lower()), data, sizes)
        except pydantic.ValidationError as error:
            raise UserError(f"{file}: {explain(error)}") from None
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{file}: not {{microbatch: {{tp: {{layer: [f, b, u]}}}}}} ({error!r})."
            ) from None
    links = tuple(sailor_links(path / "network")) if (path / "network").is_dir() else ()
    return Profile(origins=(_origin("sailor", notes),), entries=tuple(entries), links=links)


def _sailor_entries(model: str, kind: str, data: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[Entry]:
    """One entry a class and tp."""
    by_tp: dict[int, dict[int, Mapping[str, Sequence[float]]]] = {}
    for rows, tables in data.items():
        for tp, table in tables.items():
            by_tp.setdefault(int(tp), {})[int(rows)] = table
    entries = []
    for name, layers in sailor_classes(next(iter(sizes.values()))).items():
        for tp, by_rows in sorted(by_tp.items()):
            points = []
            for rows, table in sorted(by_rows.items()):
                forward, backward = (sum(table[str(x)][i] for x in layers) / len(layers) for i in (0, 1))
                points.append(Point(rows=rows, forward_s=forward, backward_s=backward))
            # The same figure stands at every layer: the optimizer's step of the whole model.
            whole = sum(table["0"][2] for table in by_rows.values()) / len(by_rows)
            held = sizes.get(str(tp))
            num_bytes = total = None
            if held is not None:
                num_bytes = sum(held[str(x)]["params_bytes"] for x in layers) / len(layers)
                total = sum(layer["params_bytes"] for layer in held.values())
            entries.append(
                Entry(
                    segment_class=f"{model}/{name}",
                    kind=kind,
                    dtype="float32",
                    tp=tp,
                    points=tuple(points),
                    update_s=whole * num_bytes / total if whole and total and num_bytes else None,
                    param_bytes=num_bytes,
                    count=len(layers),
                    source="imported from sailor",
                )
            )
    return entries


def sailor_classes(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Name runs of alike layers: `embedding` first, `layer` for the longest, `head` last, `partN` between.

    Args:
        layers: By layer number its sizes, one tp of one model of `llm_info.json`.
    """
    fields = ("params_floats", "act_input_floats", "act_output_floats", "act_mem_floats")
    numbers = sorted(int(x) for x in layers)
    runs = [
        list(run)
        for _, run in itertools.groupby(numbers, key=lambda x: tuple(layers[str(x)].get(f) for f in fields))
    ]
    longest = max(runs, key=len)
    names: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        if run is longest:
            names["layer"] = run
        else:
            names["embedding" if i == 0 else "head" if run is runs[-1] else f"part{i}"] = run
    return names


def sailor_links(path: str | Path) -> Iterator[LinkEntry]:
    """Read the links of Sailor's `network/` folder.

    They are `intra` and `inter_host` by kind, and `groups` between unlike kinds. `num_devices` counts the
    devices of each host that sent at once; the bandwidth is that of the host.

    Raises:
        UserError: A file is missing or not in that format.
    """
    path = Path(path)
    alike = read_json(path / "network_coeffs_all_homo.json", "Sailor's network")
    zones = read_json(path / "multizone_bandwidths_het.json", "Sailor's network")
    try:
        for scope, key in (("intra", "intra"), ("inter_host", "inter")):
            for kind, counts in alike[key].items():
                for count, figures in counts.items():
                    yield _sailor_link(kind, kind, scope, int(count), figures)
        zone = next(iter(zones))
        for a, counts in zones[zone].items():
            for count, receivers in counts.items():
                for b, figures in receivers.get(zone, {}).items():
                    if a < b and count in figures:
                        yield _sailor_link(a, b, "groups", int(count), figures[count])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not in the format of Sailor's network/ ({error!r}).") from None


def _sailor_link(a: str, b: str, scope: Any, count: int, figures: Sequence[Any]) -> LinkEntry:
    coefficients, cap = figures
    return LinkEntry(
        kinds=(SAILOR_KINDS.get(a, a.lower()), SAILOR_KINDS.get(b, b.lower())),
        scope=scope,
        num_devices=count,
        bandwidth_gb_per_s=cap / 1e9,
        latency_us=0.0,  # part of the curve
        curve=sailor_curve(coefficients, cap),
        source="imported from sailor",
    )


def sailor_curve(coefficients: Sequence[float], cap_bytes_per_s: float) -> Curve:
    """Sample Sailor's polynomial: GB/s = a x**2 + b x + c, with x = log2 of the message in MB (1e6 bytes).

    The polynomial turns negative for short messages and falls again for long ones. A shorter message never
    takes longer here, and a longer one never has less bandwidth; the cap bounds all.

    Args:
        coefficients: a, b and c.
        cap_bytes_per_s: Bandwidth of the longest messages.

    Returns:
        Two points for each doubling of the size, from 8 kB to 8 GB.
    """
    a, b, c = coefficients
    steps = [i / 2 for i in range(-14, 27)]
    rates, most = [], -math.inf
    for x in steps:
        most = max(most, (a * x + b) * x + c)
        rates.append(min(most, cap_bytes_per_s / 1e9))
    times = [2**x / rate if rate > 0 else math.inf for x, rate in zip(steps, rates, strict=True)]
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    return tuple((1e6 * 2**x, 2**x / t) for x, t in zip(steps, times, strict=True))


def _in_folder(path: str | Path, name: str) -> Path:
    path = Path(path)
    return path / name if path.is_dir() else path


def _leaves(data: Any, depth: int, path: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys and value of everything `depth` dicts deep."""
    if depth == 0:
        yield (), data
        return
    if not isinstance(data, Mapping):
        raise UserError(f"{path}: a table is wanted where {str(data)[:40]!r} stands.")
    for key, inner in data.items():
        for keys, value in _leaves(inner, depth - 1, path):
            yield (key, *keys), value


def _origin(name: str, notes: Sequence[str]) -> Origin:
    today = datetime.date.today().isoformat()
    return Origin(what=f"imported from {name}", date=today, notes=tuple(notes))


IMPORTERS: Mapping[str, Callable[[str | Path], Profile]] = {
    "zorse": zorse_profile,
    "sailor": sailor_profile,
}
"""What `run.py profile --import` knows, by name."""


def import_profile(name: str, path: str | Path) -> Profile:
    """Import a profile of a named format.

    Raises:
        UserError: No such format, or the files are not in it.
    """
    if name not in IMPORTERS:
        raise UserError(f"--import {name}: not known. Allowed: {', '.join(IMPORTERS)}.")
    return IMPORTERS[name](path)
