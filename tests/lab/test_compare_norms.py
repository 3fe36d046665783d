"""Every registered norm can be compared on the command line."""

import json

from memnorm import norms
from memnorm.lab.cli import main


def test_every_registered_norm_runs_in_a_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--norms", ",".join(norms.available()), "--batch-sizes", "2", "--epochs", "0.01", "--json"]
    code = main([*words, "--seeds", "1", "--test-images", "20", "--threads", "1"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    rows = json.loads(captured.out)["rows"]
    assert {row["norm"].removesuffix("-2").lower().replace("-", "_") for row in rows} == set(norms.available())
    for row in rows:
        assert (row["n"], row["failed"], row["diverged"]) == (1, 0, 0), row
        assert 0 <= row["test_error"] <= 100
    assert (tmp_path / "compare/report.html").exists()
