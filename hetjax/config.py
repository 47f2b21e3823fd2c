"""The job file: what to train, on which data, how, checked key by key before anything starts.

TOML has no null: the word "none" stands for it, in the file and on the command line.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import jax.numpy as jnp
import optax
import pydantic

from hetjax.data import DataConfig
from hetjax.errors import UserError

PositiveInt = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
WeightDecay = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]


class Section(pydantic.BaseModel):
    """A section of the job file: unknown keys and values of the wrong type are refused."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class _Optimizer(Section):
    """What every optimizer has.

    Attributes:
        learning_rate: The peak.
        schedule: "constant"; "linear" or "cosine" decay over all steps; or "warmup_stable_decay": constant
            until the last `decay_steps`, then linear.
        warmup_steps: Steps of linear rise to the peak at the beginning; at most half of the run.
        decay_steps: Of "warmup_stable_decay"; "none" takes a fifth of the steps.
        final_share: Learning rate at the end as a share of the peak.
        clip_norm: Largest global norm of the gradients; "none" does not clip.
    """

    learning_rate: PositiveFloat = 1e-3
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    warmup_steps: Annotated[int, pydantic.Field(ge=0, lt=2**31)] = 0
    decay_steps: PositiveInt | None = None
    final_share: Share = 0.1
    clip_norm: PositiveFloat | None = None


class AdamConfig(_Optimizer):
    """Adam and its kin without weight decay."""

    name: Literal["adam", "nadam", "adamax", "adabelief"]
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: PositiveFloat = 1e-8


class AdamWConfig(_Optimizer):
    """Adam with decoupled weight decay. `b2` is that of language models, not optax's 0.999."""

    name: Literal["adamw", "nadamw"] = "adamw"
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: WeightDecay = 0.1


class LionConfig(_Optimizer):
    """Lion: wants a learning rate three to ten times smaller than AdamW's."""

    name: Literal["lion"]
    b1: Decay = 0.9
    b2: Decay = 0.99
    weight_decay: WeightDecay = 0.1


class SGDConfig(_Optimizer):
    """Plain or momentum gradient descent."""

    name: Literal["sgd"]
    momentum: Decay | None = None
    nesterov: bool = False


class RMSPropConfig(_Optimizer):
    """RMSProp."""

    name: Literal["rmsprop"]
    decay: Decay = 0.9
    eps: PositiveFloat = 1e-8
    momentum: Decay | None = None


class AdafactorConfig(_Optimizer):
    """Adafactor: factored second moments, for when optimizer memory binds."""

    name: Literal["adafactor"]
    momentum: Decay | None = None
    min_dim_size_to_factor: PositiveInt = 128
    multiply_by_parameter_scale: bool = False


OptimizerConfig = Annotated[
    AdamConfig | AdamWConfig | LionConfig | SGDConfig | RMSPropConfig | AdafactorConfig,
    pydantic.Field(discriminator="name"),
]


class TrainConfig(Section):
    """The loop.

    Attributes:
        num_steps: Optimizer steps in all.
        seed: Of initialisation and dropout; the order of the data has its own, data.seed.
        eval_every: Steps between validations; "none" validates at the end only.
        checkpoint_every: Steps between checkpoints; "none" writes one at the end only.
        max_checkpoints: How many of the latest are kept; "none" keeps all.
        log_every: Steps between lines where the output is no terminal.
        timeline_every: Steps between those whose tasks are timed, for the busy shares; an early one is timed
            in any case. The loop waits for such a step. "none" times no step.
        tensorboard: Whether to write event files.
    """

    num_steps: PositiveInt = 300
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    eval_every: PositiveInt | None = 100
    checkpoint_every: PositiveInt | None = 100
    max_checkpoints: PositiveInt | None = 3
    log_every: PositiveInt = 10
    timeline_every: PositiveInt | None = 50
    tensorboard: bool = True


class PlanConfig(Section):
    """What the planner is told; None leaves a choice to it.

    Attributes:
        num_microbatches: Slices of the global batch.
        schedule: Order of the tasks.
        remat: What the backward pass recomputes: "none" nothing, "full" all, "dots" all but the matmuls.
        row_split: Whether unlike groups may share a stage, each with its part of the rows.
        profile: File of measurements to plan with, as `run.py profile` writes it; "none" plans with analytic
            costs.
        features: "runtime" plans what training runs; "all" also what can be planned and simulated only, for
            `run.py plan`.
        pin: Segments that stay on groups, like "0-3=a100".
        exclude: Groups that stay idle.
        budget_s: Seconds after which the planner takes the best that it has.
        seed: Of the order in which it tries small changes.
    """

    num_microbatches: PositiveInt | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "ministage"] | None = None
    remat: Literal["none", "full", "dots"] | None = None
    row_split: Literal["never", "allowed"] = "allowed"
    profile: str | None = None
    features: Literal["runtime", "all"] = "runtime"
    pin: list[str] = []
    exclude: list[str] = []
    budget_s: PositiveFloat | None = None
    seed: int = 0


class Config(Section):
    """A job.

    Attributes:
        description: A line for a person.
        model: `family` and the fields of that family; checked by whoever builds the model.
        data: Section [data].
        optimizer: Section [optimizer].
        train: Section [train].
        plan: Section [plan].
    """

    description: str = ""
    model: dict[str, Any]
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    train: TrainConfig = TrainConfig()
    plan: PlanConfig = PlanConfig()


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a job file and put the command line's settings over it.

    Args:
        path: A TOML file.
        overrides: `section.key=value` each; values as in TOML, and a bare word is a string.

    Returns:
        The job. Its [model] section is not checked here.

    Raises:
        UserError: The file is missing or not TOML, or a key or a value is wrong; names where, which and what
            is allowed.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = ", ".join(sorted(str(p) for p in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        raise UserError(
            f"Job file {path} does not exist." + (f" There are: {near}." if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Job file {path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"Job file {path} is not valid TOML: {error}.") from None
    set_keys: set[tuple[str, ...]] = set()
    for text in overrides:
        keys, value = parse_override(text)
        _put(content, keys, value, text)
        set_keys.add(keys)
    return _validate(content, path, set_keys)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split `section.key=value` into its keys and its value.

    Args:
        text: As after `--set`. The value is read as TOML; what is not TOML is taken as a string.

    Raises:
        UserError: There is no "=" or no section.
    """
    left, sign, right = text.partition("=")
    keys = tuple(part.strip() for part in left.split("."))
    if not sign or not all(keys) or (len(keys) < 2 and keys != ("description",)):
        raise UserError(f"--set {text}: write it as section.key=value, such as --set train.num_steps=100.")
    right = right.strip()
    try:
        return keys, tomllib.loads(f"value = {right}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, {"True": True, "False": False, "None": "none"}.get(right, right)


def _put(content: dict[str, Any], keys: tuple[str, ...], value: Any, text: str) -> None:
    node: Any = content
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {text}: {key!r} is a value and has no keys below it.")
    node[keys[-1]] = value


def _validate(content: dict[str, Any], path: Path, set_keys: set[tuple[str, ...]]) -> Config:
    if not isinstance(content.get("model"), dict):
        raise UserError(f"{path} has no section [model]. Add one, with family set to the model's.")
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict):
        name = optimizer.setdefault("name", "adamw")
        if not isinstance(name, str):
            raise UserError(
                f"{path}: [optimizer] name = {name!r} is not known. {_suggest('', list(OPTIMIZERS))}"
            )
        if ("optimizer", "name") in set_keys and optimizer["name"] in OPTIMIZERS:
            # another optimizer than the file's: what the file says for its own only does not apply
            fields = OPTIMIZERS[optimizer["name"]][0].model_fields
            for key in [k for k in optimizer if k not in fields and ("optimizer", k) not in set_keys]:
                del optimizer[key]
    for section, table in content.items():
        if (
            section in Config.model_fields
            and section not in ("model", "description")
            and isinstance(table, dict)
        ):
            _read_none(_section_class(section, content), table)
    try:
        return Config.model_validate(content)
    except pydantic.ValidationError as error:
        faults = [_fault(detail, content, path, set_keys) for detail in error.errors()]
        raise UserError("\n".join(dict.fromkeys(faults))) from None


def _read_none(section_class: type[pydantic.BaseModel] | None, table: dict[str, Any]) -> None:
    """Turn the word "none" into None for the fields that may be None."""
    for key, value in table.items():
        field = section_class.model_fields.get(key) if section_class else None
        choices = get_args(field.annotation) if field else ()
        named = any("none" in get_args(choice) for choice in (*choices, field and field.annotation))
        if value == "none" and type(None) in choices and not named:
            table[key] = None


def _fault(detail: Any, content: dict[str, Any], path: Path, set_keys: set[tuple[str, ...]]) -> str:
    loc = [str(part) for part in detail["loc"]]
    section = loc[0]
    if section == "optimizer" and len(loc) > 1:
        loc.pop(1)  # pydantic names the member of the union there
    key = loc[1] if len(loc) > 1 else None
    from_command_line = tuple(loc[:2]) in set_keys or (key is None and any(k[0] == section for k in set_keys))
    where = "--set" if from_command_line else str(path)
    match detail["type"]:
        case "extra_forbidden":
            if key is None:
                hint = _suggest(section, list(Config.model_fields))
                return f"{where}: there is no section [{section}]. {hint}"
            section_class = _section_class(section, content)
            assert section_class is not None, "an unknown optimizer is another error"
            fields = list(section_class.model_fields)
            of = f" for {content['optimizer']['name']}" if section == "optimizer" else ""
            return f"{where}: [{section}] has no key {key!r}{of}. {_suggest(key, fields)}"
        case "union_tag_invalid":
            given = content[section]["name"]
            hint = _suggest(str(given), list(OPTIMIZERS))
            return f"{where}: [{section}] name = {given!r} is not known. {hint}"
        case "literal_error":
            given = repr(detail["input"])
            hint = _suggest(str(detail["input"]), _literals(detail))
            return f"{where}: [{section}] {key} = {given} is not known. {hint}"
        case "value_error":
            return f"{where}: {detail['ctx']['error']}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    name = f"[{section}] {key}" if key else f"[{section}]"
    return f"{where}: {name} = {json.dumps(detail['input'], default=str)}: {message}."


def _literals(detail: Any) -> list[str]:
    return [part.strip().strip("'") for part in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]


def _section_class(section: str, content: Mapping[str, Any]) -> type[pydantic.BaseModel] | None:
    if section == "optimizer":
        return OPTIMIZERS.get(content["optimizer"].get("name"), (None, None))[0]
    return {"data": DataConfig, "train": TrainConfig, "plan": PlanConfig}[section]


def _suggest(given: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(allowed)}."


Schedule = Callable[[Any], Any]


def learning_rate(config: Any, num_steps: int) -> Schedule:
    """Build the learning rate as a function of the number of steps done.

    Args:
        config: An [optimizer] section.
        num_steps: Steps of the whole run.

    Raises:
        UserError: The decay is longer than what the warm-up leaves of the run.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, num_steps // 2)
    main = _SCHEDULES[config.schedule](config, num_steps - warmup)
    if not warmup:
        return main
    # the first step already moves: (step + 1) / warmup of the peak
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, main], [warmup])


def _constant(config: Any, num_steps: int) -> Schedule:
    return optax.constant_schedule(config.learning_rate)


def _linear(config: Any, num_steps: int) -> Schedule:
    return optax.linear_schedule(config.learning_rate, config.learning_rate * config.final_share, num_steps)


def _cosine(config: Any, num_steps: int) -> Schedule:
    return optax.cosine_decay_schedule(config.learning_rate, num_steps, config.final_share)


def _warmup_stable_decay(config: Any, num_steps: int) -> Schedule:
    decay = config.decay_steps or max(num_steps // 5, 1)
    if decay > num_steps:
        raise UserError(
            f"[optimizer] decay_steps = {decay}, and {num_steps} steps are left after the warm-up. "
            "Lower decay_steps."
        )
    return optax.join_schedules([_constant(config, num_steps), _linear(config, decay)], [num_steps - decay])


_SCHEDULES: dict[str, Callable[[Any, int], Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "warmup_stable_decay": _warmup_stable_decay,
}

Build = Callable[[Any, Schedule], optax.GradientTransformation]


def _adam(function: Any) -> Build:
    return lambda c, rate: function(rate, b1=c.b1, b2=c.b2, eps=c.eps)


def _adamw(function: Any) -> Build:
    return lambda c, rate: function(rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay)


# name -> its section's class, and what builds it
OPTIMIZERS: dict[str, tuple[type[Section], Build]] = {
    "adamw": (AdamWConfig, _adamw(optax.adamw)),
    "nadamw": (AdamWConfig, _adamw(optax.nadamw)),
    "adam": (AdamConfig, _adam(optax.adam)),
    "nadam": (AdamConfig, _adam(optax.nadam)),
    "adamax": (AdamConfig, _adam(optax.adamax)),
    "adabelief": (AdamConfig, _adam(optax.adabelief)),
    "lion": (LionConfig, lambda c, rate: optax.lion(rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay)),
    "sgd": (SGDConfig, lambda c, rate: optax.sgd(rate, momentum=c.momentum, nesterov=c.nesterov)),
    "rmsprop": (
        RMSPropConfig,
        lambda c, rate: optax.rmsprop(rate, decay=c.decay, eps=c.eps, momentum=c.momentum),
    ),
    "adafactor": (
        AdafactorConfig,
        lambda c, rate: optax.adafactor(
            rate,
            momentum=c.momentum,
            min_dim_size_to_factor=c.min_dim_size_to_factor,
            multiply_by_parameter_scale=c.multiply_by_parameter_scale,
        ),
    ),
}


def build_optimizer(config: Any, num_steps: int) -> tuple[optax.GradientTransformation, Schedule]:
    """Build the optax transformation of an [optimizer] section, without its clip, which needs the whole tree.

    Args:
        config: An [optimizer] section.
        num_steps: Steps of the whole run.

    Returns:
        The transformation, and the learning rate by step.

    Raises:
        UserError: Warm-up and decay are longer than the run.
    """
    rate = learning_rate(config, num_steps)

    def as_float32(step: Any) -> Any:
        return jnp.asarray(rate(step), jnp.float32)

    _, build = OPTIMIZERS[config.name]
    return build(config, as_float32), as_float32
