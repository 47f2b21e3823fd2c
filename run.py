"""Train flax models over accelerators that are not all alike: plan, train, and see what is attached."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

import hetjax
import models
from hetjax import data, devices, doctor, profile_measure, profile_report, train
from hetjax.checkpoint import CheckpointError, quiet_background_errors
from hetjax.cluster import Cluster
from hetjax.config import Config, build_optimizer, load_config
from hetjax.cost import Costs
from hetjax.errors import UserError
from hetjax.outdir import JOB_FILE, check_free, choose_out_dir
from hetjax.plan import Plan
from hetjax.planner import choices, predict
from hetjax.profile import Profile, ProfiledCosts, require_kinds
from hetjax.profile_formats import IMPORTERS, import_profile
from hetjax.program import Program
from hetjax.program import trace as trace_program
from hetjax.report import Display, show_summary, show_text
from hetjax.runtime import Trainer

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A job file, such as models/gpt_small.toml, or the name of one in models/."
    ),
]
Mesh = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Cluster file, such as meshes/cpu_2x.toml. Without: the devices that are attached.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Set any key of the job file. May be given many times."
    ),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan (JSON, as plan --out writes it).")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Plan with these measurements (JSON, as profile writes it); short for --set plan.profile=FILE.",
    ),
]


@app.command(
    "train",
    epilog="""
[bold]Examples[/bold]

python run.py train models/gpt_small.toml --mesh meshes/cpu_2x.toml

python run.py train gpt_tiny --mesh meshes/cpu_2x.toml --steps 50 --set optimizer.learning_rate=3e-3

python run.py train gpt_small --mesh meshes/cpu_2x.toml --out runs/gpt_small --resume
""",
)
def train_command(
    model: ModelArgument,
    mesh: Mesh = None,
    plan_file: PlanFile = None,
    profile: ProfileFile = None,
    settings: Settings = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train so many steps; short for --set train.num_steps=N.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where checkpoints and metrics go. Without: runs/MODEL, or runs/MODEL-2, ..."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the latest checkpoint of --out (or of the latest runs/MODEL)."
        ),
    ] = False,
) -> None:
    """Train a model: print the plan, train by it, validate, write checkpoints.

    Ctrl-C or SIGTERM end the run after the step under way, with a checkpoint; --resume goes on from there.
    """
    console = Console()
    job_file = models.path(model)
    more = [f"train.num_steps={steps}"] if steps else []
    config = load_config(job_file, [*(settings or ()), *more, *profile_setting(profile)])
    model_config = models.parse(config.model, str(job_file))
    out_dir = choose_out_dir(out, job_file.stem, resume=resume)
    changed = changes_since(out_dir, config) if resume else []
    cluster, plan = read_cluster(mesh, plan_file)
    start_jax(cluster)
    cluster = cluster or Cluster.detect()
    cluster.attach()
    optimizer, rate = build_optimizer(config.optimizer, config.train.num_steps)

    text = data.load(config.data)
    show_text(console, str(text))
    program = trace(config, model_config)
    plan = plan_for(program, measured(cluster), config) if plan is None else predicted(program, plan, config)
    show_text(console, f"\n{plan}\n")
    trainer = Trainer(program, plan, optimizer, clip_norm=config.optimizer.clip_norm)
    job = train.Job(
        trainer=trainer,
        batches=text,
        validation=text.validation_batches,
        settings=config.train,
        num_tokens_per_step=config.data.global_batch * config.data.seq_len,
        validation_bytes=text.validation_bytes,
        learning_rate=rate,
        loss_scaled=trainer.loss_scale is not None,
        predicted_step_time_s=plan.predicted.get("step_time_s"),
        utilisation=utilisation(program, plan),
    )
    with contextlib.closing(trainer):
        fresh: Any = None if resume else trainer.init(seed=config.train.seed)
        with claimed(out_dir, resume=resume):
            state = train.restore(trainer, text, out_dir) if resume else fresh
            for line in changed:
                show_text(console, f"changed since this run began: {line}")
            if resume and state.step >= config.train.num_steps:
                done = f"{out_dir} has all {state.step} steps already. To train on, raise train.num_steps."
                show_text(console, done)
            else:
                run_job(job, state, plan, config, out_dir, console)


@contextlib.contextmanager
def claimed(out_dir: Path, *, resume: bool) -> Generator[None]:
    """Create a run's directory if need be, and keep other processes out of it.

    The lock is the system's: it goes with this process, however that ends.

    Raises:
        UserError: Another process trains there, or a run has begun there since this one looked.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(out_dir, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"The output directory {out_dir} cannot be written to: {error}. Give another --out."
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is training in {out_dir}. Wait until it ends, or give another --out."
            ) from None
        except OSError:  # a file system without locks
            pass
        if not resume:
            check_free(out_dir)
        yield
    finally:
        os.close(lock)


def run_job(job: train.Job, state: Any, plan: Plan, config: Config, out_dir: Path, console: Console) -> None:
    """Train in a claimed directory, and print the summary."""
    try:
        (out_dir / JOB_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        plan.save(out_dir / "plan.json")
    except OSError as error:
        raise UserError(
            f"The output directory {out_dir} cannot be written to: {error}. Give another --out."
        ) from None
    verb = f"Going on at step {state.step}" if state.step else "Training"
    show_text(
        console, f"{verb}, writing to {out_dir}. Ctrl-C ends after the step under way, with a checkpoint."
    )
    display = Display(console, num_steps=job.settings.num_steps, log_every=job.settings.log_every)
    try:
        with train.StopSignals() as stop, display:
            summary = train.Loop(job, out_dir, display, stop).run(state)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted again: ended at once, without a checkpoint of this step.")
        raise typer.Exit(128 + signal.SIGINT) from None
    show_summary(console, summary)
    (out_dir / "summary.json").write_text(
        json.dumps(dataclasses.asdict(summary), indent=2) + "\n", encoding="utf-8"
    )
    if summary.stopped_by:
        raise typer.Exit(128 + signal.Signals[summary.stopped_by])


@app.command(
    "plan",
    epilog="""
[bold]Examples[/bold]

python run.py plan models/gpt_1.3b.toml --mesh meshes/a100x4_v100x8.toml --set data.global_batch=512

python run.py plan gpt_small --mesh meshes/cpu_2x.toml --out plan.json
""",
)
def plan_command(
    model: ModelArgument,
    mesh: Mesh = None,
    plan_file: PlanFile = None,
    profile: ProfileFile = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="SEGMENTS=GROUP", help="Keep segments on a group, like 0-3=a100. Many times."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help="Leave a group idle. Many times.")
    ] = None,
    complete: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the boundaries and groups of a half-written plan (JSON: stages with segments and "
            "members, each with a group), and decide the rest.",
        ),
    ] = None,
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan as JSON, to edit and to give to train --plan."),
    ] = None,
) -> None:
    """Print the plan of a model for a cluster. Needs none of the cluster's devices.

    With --plan, checks that plan against the model instead of making one.
    """
    job_file = models.path(model)
    config = load_config(job_file, [*(settings or ()), *profile_setting(profile)])
    told = config.plan.model_copy(
        update={"pin": [*config.plan.pin, *(pin or ())], "exclude": [*config.plan.exclude, *(exclude or ())]}
    )
    config = config.model_copy(update={"plan": told})
    model_config = models.parse(config.model, str(job_file))
    cluster, plan = read_cluster(mesh, plan_file)
    if cluster is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_platforms", "cpu")
    cluster = cluster or Cluster.detect()
    program = trace(config, model_config)
    if plan is not None:
        plan = predicted(program, plan, config)
    else:
        plan = plan_for(program, cluster, config, complete)
    if as_json:
        print(plan.to_json())
    else:
        show_text(Console(), f"{program}\n\n{plan}")
    if out is not None:
        try:
            plan.save(out)
        except OSError as error:
            raise UserError(f"The plan cannot be written to {out}: {error}.") from None
        Console(stderr=True).print(f"Plan written to {out}.", markup=False, highlight=False, soft_wrap=True)


@app.command(
    "profile",
    epilog="""
[bold]Examples[/bold]

python run.py profile gpt_small --mesh meshes/cpu_2x.toml --out profile.json

python run.py plan gpt_small --mesh meshes/cpu_2x.toml --profile profile.json

python run.py profile --import sailor tests/data/sailor --out sailor.json
""",
)
def profile_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Job file of the model to measure. Without: only --import."),
    ] = None,
    mesh: Mesh = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile is written.")] = Path(
        "profile.json"
    ),
    rows: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="Rows on one device to measure, those within the global batch."),
    ] = ",".join(map(str, profile_measure.DEFAULT_ROWS)),
    remat: Annotated[
        str, typer.Option(metavar="NAME,...", help="Remat policies whose backward is measured.")
    ] = ",".join(profile_measure.REMAT),
    imported: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--import",
            metavar="FORMAT PATH",
            help=f"Take in measurements of others. Formats: {', '.join(IMPORTERS)}.",
        ),
    ] = None,
) -> None:
    """Measure a model's segments and the links between the attached devices, for plan and train --profile.

    What is measured goes before what is imported, and both before what --out holds already.
    """
    console = Console()
    if model is None and imported is None:
        raise UserError("profile needs a MODEL to measure, or --import FORMAT PATH.")
    found, names = Profile(), dict[str, str]()
    if imported is not None:
        found = import_profile(*imported)
    if model is not None:
        measured_profile, names = measure_profile(model, mesh, settings or (), rows, remat)
        found = found.merge(measured_profile)
    for note in (note for origin in found.origins for note in origin.notes):
        show_text(console, note)
    profile_report.show(console, found, names)
    if out.exists():
        found = Profile.load(out).merge(found)
    try:
        found.save(out)
    except OSError as error:
        raise UserError(f"The profile cannot be written to {out}: {error}.") from None
    Console(stderr=True).print(f"Profile written to {out}.", markup=False, highlight=False, soft_wrap=True)


def measure_profile(
    model: str, mesh: Path | None, settings: Sequence[str], rows: str, remat: str
) -> tuple[Profile, dict[str, str]]:
    """Measure a job's model on a cluster; returns the profile and names of its segment classes."""
    job_file = models.path(model)
    config = load_config(job_file, settings)
    model_config = models.parse(config.model, str(job_file))
    cluster = None if mesh is None else Cluster.load(mesh)
    start_jax(cluster)
    cluster = cluster or Cluster.detect()
    program = trace(config, model_config)
    optimizer, _ = build_optimizer(config.optimizer, config.train.num_steps)
    choice = profile_measure.parse_choice(rows, remat)
    status = Console(stderr=True)
    profile = profile_measure.measure(
        program, cluster, optimizer, choice, lambda text: show_text(status, f"measuring {text}")
    )
    classes = profile_measure.portable_classes(program)
    return profile, {classes[s.segment_class]: s.name for s in reversed(program.segments())}


@app.command(
    "doctor",
    epilog="""
[bold]Examples[/bold]

python run.py doctor

python run.py doctor --mesh meshes/cpu_2x.toml
""",
)
def doctor_command(
    mesh: Mesh = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look at what is attached: groups, memory, versions, measured speeds; and say what is off."""
    cluster = None if mesh is None else Cluster.load(mesh)
    start_jax(cluster)
    found = doctor.examine(cluster)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        show_text(Console(), "\n".join(doctor.report_lines(found)))


def read_cluster(mesh: Path | None, plan_file: Path | None) -> tuple[Cluster | None, Plan | None]:
    """Read the cluster file and the plan; a plan brings its own cluster, and both have to agree."""
    cluster = None if mesh is None else Cluster.load(mesh)
    plan = None if plan_file is None else Plan.load(plan_file)
    if plan is None:
        return cluster, None
    if cluster is not None:
        shape = {g.name: (g.kind, g.num_devices) for g in cluster.groups}
        planned = {g.name: (g.kind, g.num_devices) for g in plan.cluster.groups}
        if shape != planned:
            raise UserError(
                f"The plan {plan_file} is for cluster {plan.cluster.name!r} with groups {_groups(planned)}, "
                f"and {mesh} has {_groups(shape)}. Leave out --mesh, or make a plan for that cluster."
            )
        for group in cluster.groups:
            for key in ("platform", "backend", "compute_dtype", "memory_gib"):
                given, planned_for = getattr(group, key), getattr(plan.cluster.group(group.name), key)
                stated = given is not None or key != "memory_gib"  # else the plan's is this machine's
                if stated and given != planned_for:
                    raise UserError(
                        f"The plan {plan_file} is for {key} = {planned_for} of group {group.name!r}, and "
                        f"{mesh} has {given}. Leave out --mesh, or make a plan for that cluster."
                    )
    return plan.cluster, plan


def _groups(shape: Mapping[str, tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({count} x {kind})" for name, (kind, count) in shape.items())


def start_jax(cluster: Cluster | None) -> None:
    """Set JAX up before it starts: CPU devices, no accelerator that is not used, compiled programs kept."""
    wanted: dict[str, Any] = {}
    flags: Any = jax.config
    if not flags.jax_compilation_cache_dir:  # an environment variable or a caller goes first
        wanted["jax_compilation_cache_dir"] = str(data.cache_folder(data.DataConfig()) / "compiled")
        wanted["jax_persistent_cache_min_compile_time_secs"] = 0.1
    if cluster is not None and cluster.num_cpu_devices():
        wanted["jax_num_cpu_devices"] = cluster.num_cpu_devices()
    if cluster is not None and all(group.jax_backend == "cpu" for group in cluster.groups):
        wanted["jax_platforms"] = "cpu"
    for name, value in wanted.items():
        # JAX has started where this file is used as a library; what it then lacks, Cluster.attach reports
        with contextlib.suppress(RuntimeError):
            jax.config.update(name, value)


def trace(config: Config, model_config: models.ModelConfig) -> Program:
    """Trace the model of a job on shapes alone."""
    vocab_size = config.data.resolved_vocab_size
    model = models.build(model_config, seq_len=config.data.seq_len, vocab_size=vocab_size)
    spec = data.batch_spec(config.data)
    return trace_program(model.loss_fn, model.init_fn, spec, eval_loss_fn=model.eval_loss_fn)


def with_memory(cluster: Cluster) -> Cluster:
    """Give CPU groups without `memory_gib` this machine's memory, in equal parts, and say so."""
    unknown = [g.name for g in cluster.groups if g.kind == "cpu" and g.memory_gib is None]
    if not unknown:
        return cluster
    share = round(doctor.machine_memory_gib() / cluster.num_cpu_devices(), 1)
    names = ", ".join(f"'{name}'" for name in unknown)
    print(
        f"No memory_gib for the CPU devices of {names}: {share} GiB each, of this machine, are taken.",
        file=sys.stderr,
    )
    groups = [g.model_copy(update={"memory_gib": share}) if g.name in unknown else g for g in cluster.groups]
    return cluster.model_copy(update={"groups": tuple(groups)})


def measured(cluster: Cluster) -> Cluster:
    """Measure the groups whose kind has no speed of its own, so that predictions mean something."""
    unknown = [g.name for g in cluster.groups if g.kind == "cpu" and g.tflops is None]
    if not unknown:
        return cluster
    attached = cluster.attach()
    return cluster.with_tflops(doctor.measure_tflops(cluster, {name: attached[name] for name in unknown}))


def plan_for(program: Program, cluster: Cluster, config: Config, complete: Path | None = None) -> Plan:
    """Let the planner plan, with what the job file and the person fix."""
    cluster, costs = with_profile(program, with_memory(cluster), config)
    told = config.plan
    if complete is not None:
        unused = [n for n in ("pin", "exclude", "num_microbatches", "schedule", "remat") if getattr(told, n)]
        if unused:
            raise UserError(
                f"--complete takes its choices from {complete}, and plan.{unused[0]} is set too. Write it "
                "into that file, or leave it out."
            )
        partial = choices.read_partial(complete)
        shared = next((i for i, stage in enumerate(partial.stages) if len(stage.members) > 1), None)
        if shared is not None and told.row_split == "never":
            raise UserError(
                f"Stage {shared} of {complete} has several members, and plan.row_split is 'never'. Give it "
                "one member, or leave plan.row_split out."
            )
        return choices.complete_plan(
            program, cluster, partial, costs=costs, features=told.features, budget_s=told.budget_s
        )
    return hetjax.make_plan(
        program,
        cluster,
        num_microbatches=told.num_microbatches,
        schedule=told.schedule,
        remat=told.remat,
        allow_row_split=told.row_split == "allowed",
        costs=costs,
        features=told.features,
        pins=choices.read_pins(told.pin, program),
        exclude=told.exclude,
        budget_s=told.budget_s,
        seed=told.seed,
    )


def predicted(program: Program, plan: Plan, config: Config) -> Plan:
    """Check a plan that was given, and predict it anew: a person may have edited it."""
    plan.check(program)
    cluster, costs = with_profile(program, plan.cluster, config)
    return predict(program, dataclasses.replace(plan, cluster=cluster), costs)


def profile_setting(profile: Path | None) -> list[str]:
    """The setting that --profile is short for."""
    return [] if profile is None else [f"plan.profile={json.dumps(str(profile))}"]


def with_profile(program: Program, cluster: Cluster, config: Config) -> tuple[Cluster, Costs | None]:
    """The cluster with the job's profile's links, and its costs; says where the figures come from."""
    if config.plan.profile is None:
        return cluster, None
    profile = Profile.load(config.plan.profile)
    require_kinds(profile, cluster, config.plan.profile)
    cluster = profile.apply(cluster)
    costs = ProfiledCosts(profile_measure.of_program(profile, program))
    for line in profile_report.source_lines(program, cluster, costs):
        print(line, file=sys.stderr)
    return cluster, costs


def utilisation(program: Program, plan: Plan) -> Callable[[float], float] | None:
    """Give model FLOPs utilisation as a function of the step time; None where a peak is not known."""
    used = {(m.group, d) for s in plan.stages for m in s.members for d in m.devices}
    groups = [plan.cluster.group(name) for name, _ in used]
    if any(g.kind == "cpu" for g in groups):
        return None
    peak = sum(devices.lookup(g.kind).peak(g.dtype) * 1e12 for g in groups)
    flops = 3 * program.global_batch * sum(s.forward_flops_per_row for s in program.segments())
    return lambda step_time_s: flops / step_time_s / peak


def changes_since(out_dir: Path, config: Config) -> list[str]:
    """Compare the job with the one that a run began with.

    Returns:
        A line for each changed key outside [model] and [data].

    Raises:
        UserError: A key of [model] changed: the checkpoint is of another model.
    """
    now = json.loads(config.model_dump_json())
    try:
        written = Config.model_validate_json((out_dir / JOB_FILE).read_text(encoding="utf-8"))
        before = json.loads(written.model_dump_json())
        for job in (before, now):  # with what they leave to its default
            job["model"] = models.parse(job["model"]).model_dump(mode="json")
    except (OSError, ValueError):  # gone, or not a job of this version: the checkpoint's shapes decide
        return []

    def differences(section: str) -> list[str]:
        a, b = before.get(section, {}), now[section]
        keys = [k for k in {**a, **b} if a.get(k) != b.get(k)]
        return [f"{section}.{k} = {a.get(k)} then, {b.get(k)} now" for k in keys]

    if differences("model"):
        raise UserError(
            f"The run in {out_dir} is of another model: {'; '.join(differences('model'))}. "
            "Set these back, or begin a new run."
        )
    return [line for section in ("optimizer", "train", "plan") for line in differences(section)]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit status 2: a user's mistake; 1: a failed run; 128 + n: ended by signal n."""
    quiet_background_errors()
    try:
        app(args=arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except (train.NonFiniteError, CheckpointError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
