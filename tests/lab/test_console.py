"""Titles of runs and the lines of a log."""

import io

import pytest
from helpers.lab import tiny
from rich.console import Console

from memnorm.lab.console import LogLines, title
from memnorm.lab.listen import Outcome

PLAIN_TITLE = "MBN-2 helpers.lab:net synthetic batch 8 seed 0"


def test_a_run_is_called_by_its_norm_network_data_batch_and_seed():
    assert title(tiny(norm="mbn", scheme="double", learning_rate=0.1)) == PLAIN_TITLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strength": (0.5,)}, "strength=[0.5]"),
        ({"norm_options": {"decay": 0.5}}, "decay=0.5"),
        ({"every": 4}, "every=4"),
        ({"learning_rate": 0.03, "holdout": 4}, "learning_rate=0.03 holdout=4"),
    ],
)
def test_runs_that_differ_in_a_setting_have_different_titles(changes, words):
    spec = tiny(**{"norm": "mbn", "scheme": "double", "learning_rate": 0.1, **changes})
    assert title(spec) == PLAIN_TITLE.replace("MBN-2", f"MBN-2 {words}")


def test_a_log_has_a_line_when_a_run_begins_and_when_it_ends():
    spec = tiny(learning_rate=0.1)
    console = Console(file=io.StringIO(), width=200)
    lines = LogLines(console, 2)
    lines.began(spec, 0)
    lines.began(spec, 1_234)
    lines.ended(Outcome(spec, "finished", result={"final": {"test_error": 12.345}}))
    lines.ended(Outcome(spec, "diverged", result={"diverged_at": 7}))
    lines.ended(Outcome(spec, "failed", "[out] of luck"))
    name = "BN helpers.lab:net synthetic batch 8 seed 0"
    assert console.file.getvalue().splitlines() == [
        f"{name} begins, 12 iterations",
        f"{name} resumes at iteration 1,234, 12 iterations",
        f"[1/2] {name}: test error 12.35 %",
        f"[2/2] {name} diverged at iteration 7",
        f"[3/2] {name} FAILED: [out] of luck",
    ]


def test_control_characters_in_a_message_do_not_reach_the_terminal():
    console = Console(file=io.StringIO(), width=200)
    LogLines(console, 1).message(tiny(learning_rate=0.1), "is being worked on by \x1b[2Jsomeone")
    assert r"worked on by \x1b[2Jsomeone" in console.file.getvalue()
