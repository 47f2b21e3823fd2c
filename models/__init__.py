"""Models to train: families written in flax against hetjax's public names, and their sizes as TOML files.

    config = models.load("gpt_small", {"num_layers": 4})
    model = models.build(config, seq_len=256, vocab_size=4096)
    program = hetjax.trace(model.loss_fn, model.init_fn, model.batch_spec(global_batch=8))

A family is a module with a config class and a `build`; to add one, name it in `_FAMILIES`. A model file's
`[model]` section says which family it is of and sets the fields of that config; its other sections belong to
the training loop.
"""

from __future__ import annotations

import importlib
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

import pydantic

import hetjax
from models.common import Model, ModelConfig

__all__ = ["Model", "ModelConfig", "build", "families", "load", "names", "parse", "path"]

_FAMILIES = {"gpt": ("models.gpt", "GPTConfig"), "llama": ("models.llama", "LlamaConfig")}
_FOLDER = pathlib.Path(__file__).parent


def families() -> tuple[str, ...]:
    """The families that `family` in a model file may name."""
    return tuple(sorted(_FAMILIES))


def names() -> tuple[str, ...]:
    """The sizes that ship with hetjax: the model files of this folder, without their ending."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.toml")))


def path(name: str | pathlib.Path) -> pathlib.Path:
    """Find a model file.

    Args:
        name: A path, or the name of one of `names()`.

    Raises:
        hetjax.UserError: There is neither.
    """
    given = pathlib.Path(name)
    if given.is_file():
        return given
    shipped = _FOLDER / f"{name}.toml"
    if given.name == str(name) and shipped.is_file():
        return shipped
    known = ", ".join(names())
    raise hetjax.UserError(f"No model file {str(name)!r}. Give the path of a TOML file, or one of: {known}.")


def load(name: str | pathlib.Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the `[model]` section of a model file.

    Args:
        name: A path, or one of `names()`.
        overrides: Fields that replace the file's.

    Raises:
        hetjax.UserError: No such file, not TOML, no `[model]`, an unknown family or key, or a wrong value.
    """
    file = path(name)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise hetjax.UserError(f"{file} is not a TOML file: {error}.") from None
    if not isinstance(content.get("model"), dict):
        known = ", ".join(families())
        raise hetjax.UserError(f"{file} has no section [model]. Add one, with family set to one of: {known}.")
    return parse(content["model"] | dict(overrides or {}), where=str(file))


def parse(section: Mapping[str, Any], where: str = "the model config") -> ModelConfig:
    """Check the fields of a `[model]` section.

    Args:
        section: `family` and the fields of that family's config.
        where: The file, for messages.

    Raises:
        hetjax.UserError: An unknown family or key, a missing field, or a wrong value.
    """
    family = section.get("family")
    if not isinstance(family, str) or family not in _FAMILIES:
        given = "no family" if family is None else f"family = {family!r}"
        raise hetjax.UserError(f"[model] in {where} has {given}. Set it to one of: {', '.join(families())}.")
    module, class_name = _FAMILIES[family]
    config_class = getattr(importlib.import_module(module), class_name)
    try:
        return config_class(**section)
    except pydantic.ValidationError as error:
        faults = "; ".join(_fault(detail) for detail in error.errors())
        allowed = ", ".join(config_class.model_fields)
        raise hetjax.UserError(
            f"[model] in {where} does not describe a {family}: {faults}. Its keys are: {allowed}."
        ) from None


def _fault(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}"
        case "missing":
            return f"{key!r} is missing"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            return f"{key} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def build(config: ModelConfig, *, seq_len: int, vocab_size: int) -> Model:
    """Make a model of a config that `load` or `parse` returned.

    Args:
        config: Its family decides which.
        seq_len: Longest sequence.
        vocab_size: Number of token ids.
    """
    for module, class_name in _FAMILIES.values():
        family = importlib.import_module(module)
        if isinstance(config, getattr(family, class_name)):
            return family.build(config, seq_len=seq_len, vocab_size=vocab_size)
    known = ", ".join(families())
    raise hetjax.UserError(f"models.build got a {type(config).__name__}. Give a config of one of: {known}.")
