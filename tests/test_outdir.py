import pytest

from hetjax import outdir
from hetjax.errors import UserError
from hetjax.train import CHECKPOINTS


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(path, *, steps=(), job=True):
    """A directory as a run leaves it."""
    path.mkdir(parents=True)
    if job:
        (path / outdir.JOB_FILE).write_text("{}")
    for step in steps:
        (path / CHECKPOINTS / str(step)).mkdir(parents=True)
    return path


def chosen(name="gpt", out=None, *, resume=False):
    return outdir.choose_out_dir(out, name, resume=resume)


def test_nothing_is_created_by_choosing(here):
    assert chosen() == outdir.RUNS / "gpt"
    assert list(here.iterdir()) == []


def test_a_new_run_gets_the_number_after_the_highest(here):
    for name in ("gpt", "gpt-2", "gpt-10"):
        run(outdir.RUNS / name)
    assert chosen() == outdir.RUNS / "gpt-11"
    assert chosen("gpt-2") == outdir.RUNS / "gpt-2-2"


OTHERS = {"gpt": ["gpt-large", "gpt2", "gpt_3"], "7": ["78", "7b"], "[a]": ["a"], "g*": ["gpt"]}


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in OTHERS for other in OTHERS[name]])
def test_another_jobs_run_is_not_taken_for_one_of_this_job(name, other):
    run(outdir.RUNS / other, steps=[5])
    assert chosen(name) == outdir.RUNS / name
    with pytest.raises(UserError, match="holds no finished checkpoint to resume"):
        chosen(name, resume=True)


@pytest.mark.parametrize("name", ["job[1]", "what?", "7", "a-b", "é"])
def test_a_name_of_any_characters_finds_its_own_runs(name):
    run(outdir.RUNS / name, steps=[5])
    assert chosen(name) == outdir.RUNS / f"{name}-2"
    assert chosen(name, resume=True) == outdir.RUNS / name


def test_resume_takes_the_latest_run_or_the_one_that_is_given(here):
    run(outdir.RUNS / "gpt", steps=[5])
    run(outdir.RUNS / "gpt-2", steps=[5, 10])
    assert chosen(resume=True) == outdir.RUNS / "gpt-2"
    assert chosen(out=outdir.RUNS / "gpt", resume=True) == outdir.RUNS / "gpt"


def test_a_run_without_a_finished_checkpoint_cannot_be_resumed(here):
    out = run(here / "mine")
    (out / CHECKPOINTS / "5.tmp").mkdir(parents=True)
    with pytest.raises(UserError, match="mine holds no finished checkpoint .* new run, and give another"):
        chosen(out=out, resume=True)
    with pytest.raises(UserError, match="to begin a new run\\.$"):
        chosen(out=here / "nowhere", resume=True)


def test_a_directory_that_holds_a_run_is_refused_and_told_whether_it_can_go_on(here):
    done, begun = run(here / "done", steps=[5]), run(here / "begun")
    with pytest.raises(UserError, match="done holds a run already. Add --resume to go on with it"):
        chosen(out=done)
    with pytest.raises(UserError, match="begun holds a run that ended before its first checkpoint. Remove"):
        chosen(out=begun)
    bare = run(here / "bare", steps=[5], job=False)  # its job file was lost
    with pytest.raises(UserError, match="bare holds a run already"):
        outdir.check_free(bare)


def test_a_file_is_refused_and_a_directory_without_a_run_is_taken(here):
    (here / "notes").write_text("")
    with pytest.raises(UserError, match="--out .*notes is a file. Give a directory"):
        chosen(out=here / "notes")
    (here / "empty").mkdir()
    assert chosen(out=here / "empty") == here / "empty"
    assert chosen(out=here / "new") == here / "new"
