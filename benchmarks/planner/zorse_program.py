"""Zorse's Llamas as programs, and their costs from Zorse's own layer profile.

Zorse (arXiv 2507.10392) trains Llamas of 7B to 65B at a global batch of 1M tokens on three clusters, and
released the milliseconds of one layer on each kind by microbatch (tests/data/zorse, MIT). What is assumed
beyond it:

- A row is one sequence. Forward FLOPs of a layer: 2 x weights x tokens, and 4 s^2 h of attention (not
  causal), as in Zorse's own accounting.
- Attention and MLP of a layer, where it is cut in two, share its time by their FLOPs.
- The head's time is the layer's at the same rows times the ratio of their FLOPs (so: at the layer's FLOP/s);
  its loss is not counted. The embedding's is the memory traffic of the rows that it looks up.
- Kept for the backward, in values per token of the compute dtype, with flash attention and eager operations.
  `none`: input, normed, q, k, v, attention's output, MLP's input, normed (8 h) and gate, its silu, up, their
  product (4 f). `dots`: without what elementwise work gives back (6 h + 2 f). `full`: the input. Head: input,
  normed, logits and float32 probabilities (2 h + 3 V).

Run alone it prints the tokens per second that perfect balance without communication would give, with each
layer recomputed and without, from the profile: no plan of whole layers at the profiled microbatches can be
faster.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hetjax import profile_formats
from hetjax.cluster import Cluster, Group
from hetjax.cost import BANDWIDTH_SHARE
from hetjax.devices import lookup
from hetjax.profile import Entry, Point, Profile, ProfiledCosts
from hetjax.program import Edge, SegmentInfo

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "zorse"

GLOBAL_TOKENS = 2**20
"""Zorse's global batch."""

VOCAB = 49152

SEQ_LENS: Mapping[str, int] = {"a": 4096, "b": 1024, "c": 512}
"""Sequence length on each of Zorse's clusters."""

MODELS: Mapping[str, tuple[str, ...]] = {
    "a": ("7b", "13b", "33b", "65b"),
    "b": ("7b", "13b", "33b"),
    "c": ("7b", "13b", "33b"),
}
"""Sizes that the profile has at the cluster's sequence length on all of its kinds."""


@dataclasses.dataclass(frozen=True)
class LlamaSizes:
    """Sizes of one of Zorse's Llamas.

    Attributes:
        name: `7b`, `13b`, `33b` or `65b`.
        num_layers: Blocks.
        hidden: Width h.
        layer_params: Parameters of a block.
    """

    name: str
    num_layers: int
    hidden: int
    layer_params: int

    @property
    def mlp_hidden(self) -> int:
        """Width f of the MLP: what the parameters beside 4 h^2 of attention and two norms leave."""
        h = self.hidden
        return (self.layer_params - 4 * h * h - 2 * h) // (3 * h)

    def forward_flops(self, part: str, seq_len: int) -> float:
        """Of one sequence through a `layer`, its `attention` or `mlp`, the `head` or the `embedding`."""
        h, s = self.hidden, seq_len
        attention, mlp = 8.0 * h * h * s + 4.0 * s * s * h, 6.0 * h * self.mlp_hidden * s
        table = {"attention": attention, "mlp": mlp, "layer": attention + mlp}
        return {**table, "head": 2.0 * h * VOCAB * s, "embedding": 0.0}[part]

    def num_params(self, part: str) -> int:
        """Parameters of a part; a norm belongs to what follows it."""
        h = self.hidden
        attention = 4 * h * h + h
        table = {"attention": attention, "mlp": self.layer_params - attention, "layer": self.layer_params}
        return {**table, "head": VOCAB * h + h, "embedding": VOCAB * h}[part]

    def kept_values(self, part: str) -> dict[str, float]:
        """Values per token, each of the compute dtype, that a part keeps for its backward, by policy."""
        h, f, v = self.hidden, self.mlp_hidden, VOCAB
        table = {
            "attention": (6 * h, 5 * h, h),
            "mlp": (2 * h + 4 * f, h + 2 * f, h),
            "layer": (8 * h + 4 * f, 6 * h + 2 * f, h),
            "head": (2 * h + 3 * v, h + v, h),
            "embedding": (1, 1, 1),
        }
        return dict(zip(("none", "dots", "full"), map(float, table[part]), strict=True))


@dataclasses.dataclass(frozen=True)
class LlamaProgram:
    """A Llama as planner and simulator see it; a `ProgramLike`.

    Attributes:
        sizes: Of the model.
        seq_len: Tokens of a row.
        halves: Whether attention and MLP are segments of their own.
        global_batch: Rows of one step.
        rows_mode: As in `ProgramLike`.
        tied: Nothing: Llama's head is not its embedding.
    """

    sizes: LlamaSizes
    seq_len: int
    halves: bool
    global_batch: int
    rows_mode: str = "split"
    tied: tuple[tuple[int, int, float], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Of the structure."""
        return f"llama-{self.sizes.name}-{self.seq_len}{'-halves' if self.halves else ''}"

    @property
    def per_layer(self) -> int:
        """Segments of one layer."""
        return 2 if self.halves else 1

    @property
    def num_segments(self) -> int:
        """Embedding, layers, head."""
        return 2 + self.sizes.num_layers * self.per_layer

    def segments(self) -> list[SegmentInfo]:
        """In model order."""
        inside = ("attention", "mlp") if self.halves else ("layer",)
        layers = [(f"{p}[{i}]", p) for i in range(self.sizes.num_layers) for p in inside]
        named = [("embedding", "embedding"), *layers, ("head", "head")]
        return [self._segment(index, name, part) for index, (name, part) in enumerate(named)]

    def edges(self) -> list[Edge]:
        """From each segment to the next."""
        boundary = self._boundary
        return [Edge(i, i + 1, boundary) for i in range(self.num_segments - 1)]

    @property
    def _boundary(self) -> float:
        return 4.0 * self.seq_len * self.sizes.hidden

    def _segment(self, index: int, name: str, part: str) -> SegmentInfo:
        params = self.sizes.num_params(part)
        kept = self.sizes.kept_values(part)
        return SegmentInfo(
            index=index,
            name=name,
            segment_class=segment_class(self.sizes.name, self.seq_len, part),
            num_params=params,
            param_bytes=4 * params,
            forward_flops_per_row=self.sizes.forward_flops(part, self.seq_len),
            boundary_bytes_per_row=8.0 if part == "head" else self._boundary,
            activation_bytes_per_row={policy: 4.0 * self.seq_len * n for policy, n in kept.items()},
        )


def segment_class(model: str, seq_len: int, part: str) -> str:
    """Class of a part of a model at a sequence length, in programs and in the profile."""
    return f"llama-{model}-{seq_len}/{part}"


def llama_sizes(model: str) -> LlamaSizes:
    """Sizes of `7b`, `13b`, `33b` or `65b`, from Zorse's table of models."""
    table = json.loads((DATA / "model_stats.json").read_text())[f"deepspeedllama_{model}"]
    return LlamaSizes(model, table["num_layers"], table["hidden_size"], table["parameters_per_layer"])


def program(model: str, seq_len: int, *, halves: bool = True) -> LlamaProgram:
    """One of Zorse's Llamas at a sequence length and a global batch of 1M tokens."""
    return LlamaProgram(llama_sizes(model), seq_len, halves, GLOBAL_TOKENS // seq_len)


def programs(cluster_name: str, *, halves: bool = True) -> dict[str, LlamaProgram]:
    """The models that Zorse's profile has for cluster `a`, `b` or `c`, by their sizes' names."""
    return {m: program(m, SEQ_LENS[cluster_name], halves=halves) for m in MODELS[cluster_name]}


def cluster(cluster_name: str) -> Cluster:
    """Zorse's cluster `a`, `b` or `c`, every kind computing in float16 as in its profile."""
    loaded = Cluster.load(ROOT / "meshes" / f"zorse_{cluster_name}.toml")
    groups = tuple(g.model_copy(update={"compute_dtype": "float16"}) for g in loaded.groups)
    return loaded.model_copy(update={"groups": groups})


@functools.cache
def _imported() -> dict[tuple[str, str], Entry]:
    """Zorse's layers in float16 by class and kind."""
    found = profile_formats.zorse_profile(DATA)
    return {(e.segment_class, e.kind): e for e in found.entries if e.dtype == "float16"}


def layer_points(model: str, kind: str, seq_len: int) -> tuple[Point, ...]:
    """One layer's times on one device of a kind, by rows, the faulty ones interpolated.

    Raises:
        KeyError: The profile lacks the model, the kind or the length.
    """
    return _imported()[f"deepspeedllama_{model}/seq{seq_len}", kind].points


def zorse_profile(cluster_names: Iterable[str] = ("a", "b", "c")) -> Profile:
    """Times of every part of every model on the clusters' kinds, at the clusters' sequence lengths."""
    entries: dict[tuple, Entry] = {}
    for name in cluster_names:
        kinds = sorted({g.kind for g in cluster(name).groups})
        for model in MODELS[name]:
            for kind in kinds:
                for entry in _entries(llama_sizes(model), kind, SEQ_LENS[name]):
                    entries[entry.key] = entry
                    repeated = _recomputed(entry)
                    entries[repeated.key] = repeated
    return Profile(entries=tuple(entries.values()))


def _entries(sizes: LlamaSizes, kind: str, seq_len: int) -> list[Entry]:
    """The parts of one model on one kind: the layer as profiled, the others by the module's assumptions."""
    points = layer_points(sizes.name, kind, seq_len)
    whole = sizes.forward_flops("layer", seq_len)

    def entry(part: str, source: str, found: tuple[Point, ...]) -> Entry:
        name = segment_class(sizes.name, seq_len, part)
        return Entry(segment_class=name, kind=kind, dtype="float16", points=found, source=source)

    result = [entry("layer", "imported: Zorse's profile of a layer", points)]
    for part in ("attention", "mlp", "head"):
        share = sizes.forward_flops(part, seq_len) / whole
        scaled = tuple(
            Point(rows=p.rows, forward_s=share * p.forward_s, backward_s=share * p.backward_s) for p in points
        )
        result.append(
            entry(part, f"imported: Zorse's profile of a layer times {share:.3f}, by FLOPs", scaled)
        )
    looked_up = seq_len * sizes.hidden / (lookup(kind).memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_SHARE)
    # Forward: reads and writes 2 bytes a value. Backward: reads 2, adds to float32.
    found = tuple(
        Point(rows=p.rows, forward_s=4 * looked_up * p.rows, backward_s=10 * looked_up * p.rows)
        for p in points
    )
    return [*result, entry("embedding", "imported: traffic of the looked-up rows", found)]


def _recomputed(entry: Entry) -> Entry:
    """The same with the whole forward repeated in the backward, its input kept in host memory."""
    points = tuple(
        Point(rows=p.rows, forward_s=p.forward_s, backward_s=p.forward_s + p.backward_s) for p in entry.points
    )
    return entry.model_copy(update={"remat": "offloaded", "points": points})


def zorse_costs(cluster_names: Iterable[str] = ("a", "b", "c")) -> ProfiledCosts:
    """`Costs` of these programs from Zorse's profile; collectives, updates and copies are analytic."""
    return ProfiledCosts(zorse_profile(cluster_names))


def ceiling_tokens_per_s(model: str, groups: Iterable[Group], seq_len: int, *, recompute: bool) -> float:
    """Tokens per second of the layers alone in perfect balance, each kind at its best profiled microbatch."""
    num_layers = llama_sizes(model).num_layers
    rate = 0.0
    for group in groups:
        points = layer_points(model, group.kind, seq_len)
        forwards = 2 if recompute else 1
        rate += group.num_devices / min((forwards * p.forward_s + p.backward_s) / p.rows for p in points)
    return rate * seq_len / num_layers


def main(as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False) -> None:
    """Print the ceilings of Zorse's clusters and models in thousands of tokens per second."""
    figures: list[dict[str, Any]] = [
        {
            "cluster": name,
            "model": model,
            **{
                key: ceiling_tokens_per_s(model, cluster(name).groups, SEQ_LENS[name], recompute=recompute)
                for key, recompute in (("with_recompute", True), ("no_recompute", False))
            },
        }
        for name in MODELS
        for model in MODELS[name]
    ]
    if as_json:
        typer.echo(json.dumps(figures))
        return
    typer.echo("Ceilings of the layers alone, thousands of tokens/s")
    typer.echo(f"{'':<10}{'with recompute':>15}{'no recompute':>14}{'ratio':>8}")
    for f in figures:
        ratio = f["no_recompute"] / f["with_recompute"]
        name = f"{f['cluster'].upper()} {f['model'].upper()}"
        columns = f"{f['with_recompute'] / 1e3:>15.1f}{f['no_recompute'] / 1e3:>14.1f}{ratio:>8.2f}"
        typer.echo(f"{name:<10}{columns}")


if __name__ == "__main__":
    typer.run(main)
