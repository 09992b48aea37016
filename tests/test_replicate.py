"""The replication's table, against numbers worked out by hand."""

import json

import pytest
import replicate


def write(folder, accuracies):
    folder.mkdir()
    row = {"entropy": 0.5, "silenced_fraction": 0.001}
    lines = [json.dumps(row | {"accuracy": a}) + "\n" for a in accuracies]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_table_averages_steps_then_seeds(tmp_path):
    # whole runs: 0.2 and 0.45 -> 32.5 ± 17.7 percent; last ten steps: 0.3 and 0.7 -> 50 ± 28.3
    runs = [
        write(tmp_path / "stapo-0", [0.1] * 10 + [0.3] * 10),
        write(tmp_path / "stapo-1", [0.2] * 10 + [0.7] * 10),
    ]
    head, _, both, one = replicate.table({"stapo": runs, "q 1.0": runs[:1]}).splitlines()
    assert head.count("|") == both.count("|") == one.count("|")
    assert both == "| stapo | 2 | 32.5 ± 18 | 50 ± 28 | 0.5 ± 0 | 0.1 ± 0 |"
    assert one == "| q 1.0 | 1 | 20 | 30 | 0.5 | 0.1 |"


def test_complete_runs_are_not_run_again_and_incomplete_ones_are(tmp_path, monkeypatch):
    folder, commands = write(tmp_path / "stapo-0", [0.1] * 3), []
    monkeypatch.setattr(replicate.subprocess, "run", lambda command, **_: commands.append(command))
    replicate.train(folder, 3, ["--seed", "0"])
    assert commands == []
    replicate.train(folder, 4, ["--seed", "0"])
    assert commands[0][2:5] == ["@tests/tiny/args", "--steps", "4"]


def test_a_failing_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(replicate.sys, "executable", "false")  # a program that fails at once
    with pytest.raises(replicate.subprocess.CalledProcessError, match="--tau_p.*2.0"):
        replicate.train(tmp_path / "run", 1, ["--tau_p", "2.0"])
