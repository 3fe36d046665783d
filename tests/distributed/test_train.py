"""`memnorm train` under torchrun."""

import json
import math

import pytest
from helpers.lab import timeless, tiny
from helpers.ranks import torchrun

from memnorm.lab.cli import main
from memnorm.lab.errors import UsageError
from memnorm.lab.runner import run
from memnorm.lab.store import Store

RUN = {"precision": "float64", "augment": False, "learning_rate": 0.02}


def train(root, spec, *flags, torchrun_flags=()):
    """Start `memnorm train` under torchrun, and return the stored result and metrics."""
    config = root / "run.yaml"
    config.write_text(spec.as_yaml())
    words = [
        "-m",
        "memnorm.lab",
        "train",
        "--config",
        str(config),
        "--trust-config",
        "--runs",
        str(root),
        "--device",
        "cpu",
        *flags,
    ]
    torchrun(*words, processes=2, flags=torchrun_flags)
    folder = Store(root).run(spec.but(processes=2))
    return folder.result(), folder.metrics()


@pytest.mark.slow
def test_with_a_joint_batch_it_is_the_run_of_one_process(tmp_path):
    """44 images in batches of 8: the last one of an epoch is smaller. The numbers equal those of one process up to
    rounding.
    """
    spec = tiny(norm="mbn", scheme="double", norm_options={"sync": True}, **RUN)
    result, lines = train(tmp_path, spec)
    alone = run(spec, Store(tmp_path / "alone"))
    assert result["status"] == alone["status"] == "finished"
    assert len(lines) == 3
    for mine, theirs in zip(lines, Store(tmp_path / "alone").run(spec).metrics(), strict=True):
        for name in ("train_loss", "test_loss"):
            assert math.isclose(mine[name], theirs[name], rel_tol=1e-9)
        for name in ("iteration", "epoch", "train_error", "test_error", "learning_rate", "strength"):
            assert mine[name] == theirs[name]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "scheme", "forwards"), [("bn", "single", 1), ("mbn", "double", 2)])
def test_a_run_with_a_killed_process_that_torchrun_restarts_equals_an_uninterrupted_one(
    norm, scheme, forwards, tmp_path
):
    """It dies in a forward of iteration 7. Every process resumes with its own memory."""
    spec = tiny(model="helpers.killed_rank:net", iterations=20, evaluations=2, norm=norm, scheme=scheme)
    ends = {}
    for name, at in (("undisturbed", None), ("killed", 7 * forwards + 1)):
        root = tmp_path / name
        root.mkdir()
        dies = spec.but(model_options={"dies_at": at, "mark": str(root / "died")})
        ends[name] = train(root, dies, "--checkpoint-seconds", "0", torchrun_flags=("--max-restarts=1",))
    assert (tmp_path / "killed/died").exists()
    sessions = json.loads(next((tmp_path / "killed").glob("*/env.json")).read_text())["sessions"]
    assert [session["iteration"] for session in sessions] == [0, 7]
    (killed, killed_lines), (undisturbed, lines) = ends["killed"], ends["undisturbed"]
    assert killed["digest_of_weights"] == undisturbed["digest_of_weights"]
    assert timeless(killed_lines) == timeless(lines)


def test_without_torchrun_there_is_one_process(tmp_path):
    with pytest.raises(UsageError, match=r"processes: 2, and there is 1\. Start it with: torchrun --nproc-per-node 2"):
        run(tiny(processes=2), Store(tmp_path))
    assert main(["train", "--processes", "3", "--batch-size", "2"]) == 2
