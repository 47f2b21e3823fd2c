"""config.py: every key of a job file can be set, and every mistake in one is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.config import OPTIMIZERS, build_optimizer, learning_rate, load_config, parse_override
from hetjax.errors import UserError

JOB = """
description = "for a test"
[model]
family = "gpt"
num_layers = 2
[data]
tokenizer = "bytes"
[optimizer]
name = "adamw"
clip_norm = 1.0
[train]
num_steps = 100
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def message(path, *overrides):
    with pytest.raises(UserError) as error:
        load_config(path, list(overrides))
    return str(error.value)


def test_the_command_line_goes_over_the_file(job):
    config = load_config(
        job,
        [
            "model.num_layers=4",
            "train.num_steps=7",
            "train.tensorboard=False",
            "optimizer.learning_rate=1",
            "optimizer.clip_norm=none",
            "data.source=text",
            "data.paths=/texts/*.txt",
            "data.vocab_size=none",
            'data.tokenizer="bpe"',
            "plan.num_microbatches=4",
            "plan.schedule=1f1b",
            "plan.remat=none",
            "train.eval_every=None",
            "description=two words",
        ],
    )
    assert config.model == {"family": "gpt", "num_layers": 4}
    assert (config.train.num_steps, config.train.tensorboard, config.train.eval_every) == (7, False, None)
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm) == (1, None)
    assert (config.data.source, config.data.paths) == ("text", ("/texts/*.txt",))
    assert (config.data.tokenizer, config.data.vocab_size) == ("bpe", None)
    assert (config.plan.num_microbatches, config.plan.schedule, config.plan.remat) == (4, "1f1b", "none")
    assert config.description == "two words"


def test_another_optimizer_drops_the_keys_that_only_the_files_one_has(job):
    job.write_text(JOB.replace("clip_norm", "weight_decay = 0.1\nclip_norm"))
    config = load_config(job, ["optimizer.name=sgd", "optimizer.momentum=0.9"])
    fields = config.optimizer.model_dump()
    assert (fields["name"], fields["momentum"], fields["clip_norm"]) == ("sgd", 0.9, 1.0)
    assert "no key 'weight_decay' for sgd" in message(job, "optimizer.name=sgd", "optimizer.weight_decay=0.1")


def test_an_optimizer_without_a_name_is_adamw(job):
    job.write_text(JOB.replace('name = "adamw"', ""))
    assert load_config(job).optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "train.num_step=3",
            "--set: [train] has no key 'num_step'. Did you mean 'num_steps'? Allowed: num_steps, seed,",
        ),
        (
            "trian.num_steps=3",
            "there is no section [trian]. Did you mean 'train'? Allowed: description, model, data,",
        ),
        (
            "optimizer.momentum=1",
            "--set: [optimizer] has no key 'momentum' for adamw. Allowed: learning_rate, ",
        ),
        (
            "optimizer.name=adamm",
            "--set: [optimizer] name = 'adamm' is not known. Did you mean 'adam'? Allowed: adam",
        ),
        (
            "data.tokenizer=bpx",
            "--set: [data] tokenizer = 'bpx' is not known. Did you mean 'bpe'? Allowed: bytes, bpe.",
        ),
        (
            "plan.schedule=gpip",
            "[plan] schedule = 'gpip' is not known. Did you mean 'gpipe'? Allowed: gpipe, 1f1b,",
        ),
        ("train.num_steps=-1", "--set: [train] num_steps = -1: input should be greater than 0."),
        ("train.num_steps=ten", '--set: [train] num_steps = "ten": input should be a valid integer.'),
        ("train.num_steps=true", "--set: [train] num_steps = true: input should be a valid integer."),
        (f"train.num_steps={10**20}", "[train] num_steps = 100000000000000000000: input should be less"),
        ("data.seq_len=true", "--set: [data] seq_len = true: input should be a valid integer."),
        (f"data.global_batch={10**20}", "[data] global_batch = 100000000000000000000: input should be less"),
        (f"data.vocab_size={10**10}", "[data] vocab_size = 10000000000: input should be less"),
        ("optimizer.name=[1]", "[optimizer] name = [1] is not known. Allowed: adamw, nadamw, adam"),
        ("optimizer.learning_rate=inf", "[optimizer] learning_rate = Infinity: input should be a finite"),
        (
            "optimizer.weight_decay=inf",
            "[optimizer] weight_decay = Infinity: input should be a finite number.",
        ),
        ("optimizer.b1=1.5", "--set: [optimizer] b1 = 1.5: input should be less than 1."),
        ("train=3", "--set train=3: write it as section.key=value, such as --set train.num_steps=100."),
        ("train.num_steps", "write it as section.key=value"),
        ("data.source.x=1", "--set data.source.x=1: 'source' is a value and has no keys below it."),
        ("model=3", "write it as section.key=value"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_what_is_allowed(job, override, expected):
    job.write_text(JOB.replace("[data]", '[data]\nsource = "stdlib"'))
    assert expected in message(job, override)


def test_a_mistake_in_the_file_names_the_file(job):
    job.write_text(JOB + "sed = 3\n")
    assert message(job).startswith(f"{job}: [train] has no key 'sed'. Did you mean 'seed'?")
    job.write_text(JOB + "seed = -3\nlog_every = 0\n")
    assert len(message(job).splitlines()) == 2
    job.write_text("[train]\n")
    assert message(job) == f"{job} has no section [model]. Add one, with family set to the model's."
    job.write_text("[model\n")
    assert f"Job file {job} is not valid TOML" in message(job)
    job.write_bytes(b"\xff\xfe\x00")
    assert f"Job file {job} cannot be read" in message(job)


def test_a_missing_file_lists_what_is_there(job):
    assert message(job.with_name("jobb.toml")).endswith(f"does not exist. There are: {job}.")


def test_values_are_read_as_toml_and_bare_words_are_strings():
    assert parse_override("a.b=[1, 2]") == (("a", "b"), [1, 2])
    assert parse_override("a.b = 1e-3") == (("a", "b"), 1e-3)
    assert parse_override("a.b=x=y") == (("a", "b"), "x=y")
    assert parse_override('a.b="3"') == (("a", "b"), "3")


SCHEDULES = {
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0 - 0.9 * 4 / 8, 1.0 - 0.9 * 7 / 8, 0.1],
    "cosine": [0.5, 1.0, 0.55, 0.1 + 0.9 * (1 + np.cos(np.pi * 7 / 8)) / 2, 0.1],
    "warmup_stable_decay": [0.5, 1.0, 1.0, 1.0 - 0.9 * 3 / 4, 0.1],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_and_ends_at_its_final_share(job, name):
    settings = ["warmup_steps=2", f"schedule={name}", "learning_rate=1.0", "final_share=0.1"]
    if name == "warmup_stable_decay":
        settings.append("decay_steps=4")
    rate = learning_rate(load_config(job, [f"optimizer.{s}" for s in settings]).optimizer, 10)
    assert [float(rate(jnp.asarray(s))) for s in (0, 1, 6, 9, 10)] == pytest.approx(SCHEDULES[name], abs=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_a_parameter(job, name):
    job.write_text(JOB.replace('"adamw"', f'"{name}"'))
    tx, rate = build_optimizer(load_config(job).optimizer, 100)
    params = {"w": jnp.ones((4, 4))}
    updates, _ = jax.jit(tx.update)({"w": jnp.full((4, 4), 0.1)}, tx.init(params), params)
    assert 0 < float(jnp.abs(jax.tree.leaves(updates)[0]).max()) < 1
    assert float(rate(0)) == pytest.approx(1e-3)


def test_adamw_of_the_job_file_is_that_of_optax(job):
    config = load_config(
        job, ["optimizer.schedule=constant", "optimizer.b2=0.99", "optimizer.weight_decay=0.3"]
    )
    ours, _ = build_optimizer(config.optimizer, 100)
    theirs = optax.adamw(1e-3, b1=0.9, b2=0.99, weight_decay=0.3)
    params, grads = {"w": jnp.arange(3.0)}, {"w": jnp.ones(3)}
    a, _ = ours.update(grads, ours.init(params), params)
    b, _ = theirs.update(grads, theirs.init(params), params)
    assert np.allclose(jax.tree.leaves(a)[0], jax.tree.leaves(b)[0], rtol=1e-6)


def test_a_warm_up_takes_at_most_half_of_the_run_and_a_decay_that_is_longer_is_refused(job):
    long, half = (load_config(job, [f"optimizer.warmup_steps={n}"]).optimizer for n in (100, 50))
    assert all(learning_rate(long, 100)(n) == learning_rate(half, 100)(n) for n in (0, 30, 50, 99))
    config = load_config(job, ["optimizer.schedule=warmup_stable_decay", "optimizer.decay_steps=11"])
    with pytest.raises(UserError, match="decay_steps = 11, and 10 steps are left after the warm-up"):
        learning_rate(config.optimizer, 10)
