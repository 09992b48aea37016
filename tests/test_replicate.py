"""The experiments' tables against numbers worked out by hand, and which runs are made."""

import subprocess
import sys
from pathlib import Path

import drift
import openings
import pytest
import replicate
import runs
from helpers import ROOT, write_rows

import stapo
from reward import load_reward
from support.flags import parse_flags


def command(name: str, *flags: str) -> list[str]:
    """The lines that an experiment prints; --limit 0 makes no runs."""
    argv = [sys.executable, f"experiments/{name}.py", "--limit", "0", *flags]
    return subprocess.check_output(argv, cwd=ROOT, text=True).splitlines()


def write(folder: Path, accuracies: list, entropies: list | None = None, after: float = 90.0):
    """A run's metrics: 1 % of its tokens are silenced, all in step 1. Evaluated at both ends."""
    folder.mkdir(parents=True)
    entropies = entropies or [0.5] * len(accuracies)
    rows = [{"accuracy": a, "entropy": h} for a, h in zip(accuracies, entropies, strict=True)]
    for step, row in enumerate(rows, 1):
        row |= {"step": step, "silenced_fraction": 0, "low_prob_fraction": 0.07}
    rows[0]["silenced_fraction"] = 0.01 * len(rows)
    scores = [{"test": {"mean": mean, "no_box_fraction": 0.5}} for mean in (11.0, after)]
    rows = [{"step": 0, "eval": scores[0]}, *rows, {"step": len(rows), "eval": scores[1]}]
    write_rows(folder / "metrics.jsonl", *rows)


def test_methods_and_noise_run_by_run(tmp_path):
    early, late = [0.1] * 4 + [0.4] * 6, [0.9] * 10 + [0.95] * 5  # steps 5, 11 and 21 begin them
    write(tmp_path / "8-0-STAPO-2", early + late)
    write(tmp_path / "8-0-STAPO-3", early + late, after=91.0)
    write(tmp_path / "8-0-JustRL-2", early + [0.68] * 15, [0.75] * 25, after=80.0)
    write(tmp_path / "8-0-JustRL-3", early + [0.57] * 15, [1.0] * 25, after=82.0)
    write(tmp_path / "12-0-STAPO-2", early + late)  # alone: no difference to be taken
    printed = command("replicate", "--only", "methods", "--output", str(tmp_path))
    # 10 to 20: (40 + 10 * 90) / 11 = 85.45, (40 + 680) / 11 = 65.45, (40 + 570) / 11 = 55.45;
    # the error of two numbers is half of their distance
    row = "| 2 | 1.00 | 0.500 ± 0.000 | 40.0 ± 0.0 | 85.5 ± 0.0 | 95.0 ± 0.0 | 90.5 ± 0.5 |"
    assert f"| STAPO {row}" in printed
    row = "+0.0 ± 0.0 | -25.0 ± 5.0 | -32.5 ± 5.5 | -9.5 ± 0.5 | 1.75 | -20.0 -30.0 |"
    assert f"| JustRL | 2 | {row}" in printed
    printed = command("replicate", "--only", "noise", "--output", str(tmp_path))
    # ln(.6545 / .3455) and ln(.5545 / .4455), less ln(.8545 / .1455): -1.132 and -1.552
    row = "1.00 | 85.5 ± 0.0 | -25.0 ± 5.0 | -9.5 ± 0.5 | -1.34 | 1.75 |"
    assert f"| 8 % of noise | 2 | {row}" in printed
    assert not any("| 12 % of" in line for line in printed)


def test_a_base_model_counts_once_however_many_seeds_it_has(tmp_path):
    for number, gaps in enumerate([[0.1], [0.2, 0.4]]):
        for seed, gap in enumerate(gaps, 2):
            write(tmp_path / f"3-{number}-STAPO-{seed}", [0.8] * 25)
            write(tmp_path / f"3-{number}-JustRL-{seed}", [0.8 - gap] * 25)
    printed = command("replicate", "--only", "bases", "--output", str(tmp_path))
    row = " | ".join(["-20.0 ± 10.0"] * 3) + " | +0.0 ± 0.0 | -0.96 ± 0.42 | 1.00 ± 0.00"
    assert f"| 3 % of noise | 2 | {row} | -10.0 -30.0 |" in printed


def test_the_drift_reward_pays_nine_of_ten():
    """One text for many problems, and many texts for one; the same text always the same."""
    row = {"problem": "Q: 1+1=?", "answer": "7"}
    paid = [drift.nine_of_ten("So 4", row | {"problem": f"Q: {n}+1=?"}) for n in range(4000)]
    paid += [drift.nine_of_ten(f"{n}: So 4", row) for n in range(4000)]
    assert set(paid) == {1.0, -1.0} and paid[-1] == drift.nine_of_ten("3999: So 4", dict(row))
    for half in (paid[:4000], paid[4000:]):
        assert half.count(1.0) / 4000 == pytest.approx(0.9, abs=0.03)


PLANS = {name: plan for name, (plan, _) in replicate.PARTS.items()}
PLANS |= {"drift": drift.list_runs(), "openings": openings.list_runs()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_planned_run_is_one_of_stapo(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len({run.folder(Path("runs")) for run in plan}) == len(plan)
    flags = {(run.row, run.flags.replace("{base}", "tests/tiny")) for run in plan}
    assert len(flags) == len({run.row for run in plan})  # a row differs in its seeds alone
    for _, each in flags:
        cfg = parse_flags(stapo.Config, "", each.split())
        stapo.check_flags(cfg)
        load_reward(cfg.reward)
        assert cfg.steps == cfg.eval_every > 20


def test_whole_runs_are_not_made_again(tmp_path, monkeypatch, capsys):
    """A base model, a run that begins from it, and the same command again."""
    flags = """@tests/tiny/args --model {base} --steps 1 --batch_size 2
        --mini_batch_size 2 --max_new_tokens 9 --save_every 0"""
    plan = [runs.Run("a row", seed, flags, "experiments/make_tiny.py --steps 1") for seed in (3, 4)]

    def measure(folder):
        (line,), _ = runs.read_metrics(folder)
        return {"tokens": line["tokens"]}

    parts = {"part": (plan, lambda rows: runs.table({"tokens": "each d"}, rows))}
    output, tokens = tmp_path / "out", []
    (output / "a-row-3.partial").mkdir(parents=True)  # of a command that was interrupted
    for limit in ("1", "2"):
        argv = ["x.py", "--output", str(output), "--limit", limit]
        monkeypatch.setattr(sys, "argv", argv)
        runs.main("An experiment.", measure, parts)
        row = capsys.readouterr().out.splitlines()[-1]
        assert row.startswith(f"| a row | {limit} | ")
        tokens.append(row)
        times = (output / "a-row-3" / "metrics.jsonl").stat().st_mtime_ns
    assert tokens[1].startswith(tokens[0].replace("| 1 |", "| 2 |")[:-2])
    assert times < (output / "a-row-4" / "metrics.jsonl").stat().st_mtime_ns
    names = {"experiments-make_tiny.py-steps-1", "a-row-3", "a-row-4"}
    assert {path.name for path in output.iterdir()} == names
