"""figures.py on run directories whose numbers are known: its CSV, its PNGs and what it prints."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers import ROOT, TINY, check_png, read_csv, run, write_rows

import stapo
from support.files import append_jsonl

pytest.importorskip("matplotlib", reason="figures.py needs matplotlib")
import figures  # noqa: E402


def metrics(step: int, accuracy: float, **more) -> dict:
    row = {"step": step, "accuracy": accuracy, "silenced_fraction": 0.0, "approx_kl": 0.1}
    return row | {f"entropy_p{p}": p / 100 for p in (50, 80, 95, 99)} | more


def evaluated(step: int, mean: float, problems: int = 40, **more) -> dict:
    return {"step": step, "eval": {"sums": {"mean": mean, "problems": problems} | more}}


def write_run(path: Path, rows: list[dict], **flags) -> Path:
    path.mkdir()
    config = {"method": "stapo", "seed": 0, "tau_p": 0.002, "q": 0.75, "output": str(path)}
    config |= {"data_fingerprint": "8 problems", "changes": []}
    (path / "config.json").write_text(json.dumps(config | flags))
    write_rows(path / "metrics.jsonl", *rows)
    return path


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(figures.Figure, "savefig", lambda *_, **__: None)


def test_seeds_become_a_mean_with_a_band_and_other_flags_another_line(tmp_path, monkeypatch):
    seeds = [
        [metrics(1, 0.3), metrics(2, 0.7)],
        [metrics(1, 0.1), metrics(2, 0.2), metrics(3, 0.6)],
        [metrics(1, 0.8), {"step": 2, "accuracy": None}],
    ]
    runs = [write_run(tmp_path / f"{seed}", rows, seed=seed) for seed, rows in enumerate(seeds)]
    runs.append(write_run(tmp_path / "other", [metrics(1, 0.5)], tau_p=0.01))
    runs.append(write_run(tmp_path / "base", [metrics(1, 0.4)], method="justrl"))
    monkeypatch.chdir(tmp_path)  # several runs: into figures/
    figures.main([*map(str, runs)])
    found = {
        (row["group"], int(row["step"])): [float(row[k]) for k in ("mean", "min", "max", "runs")]
        for row in read_csv(tmp_path / "figures" / "training.csv")
        if row["metric"] == "accuracy"
    }
    label = "STAPO, tau_p 0.002 (3 runs)"
    assert found == {
        (label, 1): pytest.approx([0.4, 0.1, 0.8, 3]),
        (label, 2): pytest.approx([0.45, 0.2, 0.7, 2]),
        (label, 3): pytest.approx([0.6, 0.6, 0.6, 1]),
        ("STAPO, tau_p 0.01", 1): [0.5, 0.5, 0.5, 1],
        ("JustRL, tau_p 0.002", 1): [0.4, 0.4, 0.4, 1],
    }
    check_png(tmp_path / "figures" / "training.png", "#D55E00")


def test_a_run_that_goes_on_can_be_drawn_at_any_time(tmp_path, capsys):
    """After the evaluation before step 1, and again amid the writing of the third step's line."""
    # a reward of 1 or -1 says what the accuracy says, and is not drawn
    score, name = {"mean": 10.0, "problems": 30, "reward": -0.8}, "questions-with-a-long-name.test"
    first = {"step": 0, "eval": {name: score}}
    run = write_run(tmp_path / "run", [first])
    figures.main([str(run)])
    assert {path.stem for path in (run / "figures").iterdir()} == {"evaluation"}
    eight = {"step": 2, "eval": {name: {"mean": 90.0, "problems": 8, "reward": 0.8}}}
    steps = [metrics(1, 0.4, tau_h=1.25), metrics(2, 0.5, tau_h=None)]  # None: nothing to silence
    rows = [first, *steps, {"step": 2, "eval": {name: score}}, eight]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 3, "accu')
    figures.main([str(run)])
    output = capsys.readouterr()
    assert output.err == "" and f"figures in {run}/figures" in output.out
    scores = [(row["metric"], row["step"]) for row in read_csv(run / "figures" / "evaluation.csv")]
    other = (f"held-out accuracy, {name} (8 problems)", "2")  # of other problems: another curve
    assert scores == [(f"held-out accuracy, {name} (30 problems)", step) for step in "02"] + [other]
    quantiles = read_csv(run / "figures" / "quantiles.csv")
    assert [row["mean"] for row in quantiles if row["metric"] == "tau_h"] == ["1.25"]
    assert {row["step"] for row in read_csv(run / "figures" / "training.csv")} == {"1", "2"}
    for stem in ("training", "quantiles", "updates", "evaluation"):
        check_png(run / "figures" / f"{stem}.png", "#0072B2")


def test_the_change_of_a_score_has_the_error_of_paired_problems(tmp_path, undrawn, capsys):
    """Problems 0, 1 and 2 move by +100, +50 and 0 points: 50 ± 50 / sqrt 3."""
    evals = [evaluated(step, 50.0, problems=3, reward=0.25 + step / 10) for step in (0, 1, 2)]
    run = write_run(tmp_path / "run", [evals[0], metrics(1, 0.4), *evals[1:]])
    (run / "evaluations").mkdir()
    for step, right in ((0, "00 10 01"), (1, "11 11 11"), (2, "11 11 10 11")):
        answers = [
            {"benchmark": "sums", "problem": problem, "sample": sample, "correct": mark == "1"}
            | {"response": "a\u2028b"}  # text, not the end of a line
            for problem, marks in enumerate(right.split())
            for sample, mark in enumerate(marks)
        ]
        append_jsonl(run / "evaluations" / f"step_{step:06d}.jsonl", answers)
    figures.main([str(run)])
    words = f"{run}: sums +50.00 ± 28.87 points (3 problems), mean reward 0.250 to 0.450, "
    assert capsys.readouterr().out.splitlines()[0] == words + "from step 0 to step 2"


def test_methods_are_compared_seed_by_seed(tmp_path, undrawn, capsys):
    """In training JustRL is 10 and 20 points behind, in the last ten steps 12 and 20.

    Held out it is 4 and 2 points behind at step 2, and 9 and 5 at step 4. At step 0 all are equal.
    Its run of seed 1 has one step less. Seed 2 has no run of it.
    """
    for seed in (0, 1, 2):
        rows = [metrics(step, 0.5) for step in range(1, 14)]
        rows += [evaluated(step, 50.0, reward=0.5 + step / 10) for step in (0, 2, 4)]
        write_run(tmp_path / f"stapo-{seed}", rows, seed=seed)
    behind = [0.0, 0.0, *[0.12] * 10, 0.5], [0.2] * 12
    for seed, (gaps, held_out) in enumerate(zip(behind, ([0, 4, 9], [0, 2, 5]))):
        rows = [metrics(step, 0.5 - gap) for step, gap in enumerate(gaps, 1)]
        rows += [evaluated(2 * i, 50.0 - x, reward=0.5 - x / 100) for i, x in enumerate(held_out)]
        write_run(tmp_path / f"justrl-{seed}", rows, seed=seed, method="justrl")
    figures.main([*map(str, sorted(tmp_path.iterdir())), "--output", str(tmp_path / "out")])
    name = "JustRL (2 runs) minus STAPO (3 runs), seeds 0, 1: "
    said = [line.removeprefix(name) for line in capsys.readouterr().out.splitlines()]
    forty = "sums (40 problems)"
    assert said[:-1] == [
        "accuracy -15.0 ± 5.0 points over steps 1 to 12, -16.0 ± 4.0 points over steps 3 to 12",
        f"held-out accuracy, {forty} -5.0 ± 1.5 points over steps 2 to 4, -7.0 ± 2.0 points "
        "at step 4",
        f"held-out reward, {forty} -0.350 ± 0.015 over steps 2 to 4, -0.470 ± 0.020 at step 4",
    ]


def test_flags_that_changed_in_the_middle_make_a_line_of_their_own(tmp_path):
    """But not the steps, nor where model and data are."""
    moved = {"step": 1, "steps": [1, 2], "data": ["a", "b"], "model": ["c", "d"]}
    changes = [], [moved], [moved | {"tau_p": [0.01, 0.002]}]
    for seed, each in enumerate(changes):
        write_run(tmp_path / str(seed), [metrics(1, 0.5)], seed=seed, changes=each)
    groups = figures.group_runs([tmp_path / str(seed) for seed in range(3)])
    assert [sorted(group.runs) for group in groups] == [[0, 1], [2]]


# Runs are one line if they differ in the seed, in what is saved and reported, or by rounding.
ONE_LINE = """seed output resume data steps save_every keep_last log_samples threads report_to
    eval_every eval_benchmarks eval_limit eval_samples rollout_batch_size cuda_graphs
    tokens_per_micro_batch gradient_checkpointing""".split()


def test_any_other_flag_makes_a_line_of_its_own(tmp_path):
    config = asdict(stapo.Config())
    first = write_run(tmp_path / "first", [metrics(1, 0.5)], **config)
    for name in config:
        flags = config | {"seed": 1, name: "another"}
        groups = figures.group_runs([first, write_run(tmp_path / name, [metrics(1, 0.5)], **flags)])
        assert len(groups) == 1 + (name not in ONE_LINE), name


def test_real_runs_that_differ_in_the_seed_alone_are_one_line(tmp_path, undrawn):
    """Whatever a run writes into its config.json, the id and the changes of a resume included.

    Data that has moved is the same data. A file with other rows is other data.
    """
    same, other = (TINY / "test.jsonl").read_text(), (TINY / "train.jsonl").read_text()
    for seed, text in enumerate((same, same, other)):
        (tmp_path / f"{seed}.jsonl").write_text(text)
        run(tmp_path / f"{seed}", f"--steps 1 --seed {seed} --data {tmp_path}/{seed}.jsonl")
    stapo.main(["--resume", str(tmp_path / "0"), "--steps", "2"])
    runs = [tmp_path / f"{seed}" for seed in range(3)]
    first, second = figures.group_runs(runs)
    assert sorted(first.runs) == [0, 1] and "data 4000 problems" in second.label


def test_of_two_runs_with_the_same_flags_and_seed_the_longer_is_drawn(tmp_path, capsys):
    steps = {"trial": [0.1], "whole": [0.3, 0.4], "again": [0.2]}
    runs = [
        write_run(tmp_path / name, [metrics(i, x) for i, x in enumerate(accuracies, 1)])
        for name, accuracies in steps.items()
    ]
    (group,) = figures.group_runs(runs)
    assert group.runs[0]["accuracy"] == {1: 0.3, 2: 0.4}
    assert capsys.readouterr().out.count("the longer one is drawn") == 2


def test_labels_with_dollars_and_of_long_flags(tmp_path, monkeypatch):
    """A $ begins no formula, and all of a label can be read in the picture."""
    texts, drawn = ["Think, then " * 30 + end for end in (r"$\boxed{}$", r"$\boxed{$$")], []
    rows = [metrics(1, 0.5)]
    runs = [write_run(tmp_path / x[-3:], rows, instruction=x) for x in texts]
    real = figures.Figure.savefig

    def draw(self, *args, **options):
        real(self, *args, **options)
        legend, (width, height) = self.legends[0], self.canvas.get_width_height()
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width and 0 <= box.y0 < box.y1 < height / 2
        drawn.append([text.get_text() for text in legend.get_texts()])

    monkeypatch.setattr(figures.Figure, "savefig", draw)
    figures.main([*map(str, runs), "--output", str(tmp_path / "out")])
    found = [" ".join(label.split()).replace(r"\$", "$") for label in drawn[0]]
    assert found == [f"STAPO, instruction {text}" for text in texts]


def test_a_notebooks_backend_does_not_matter(tmp_path):
    """It is a package that other environments lack. tokens.py and credit.py import figures.py."""
    run_ = write_run(tmp_path / "run", [metrics(1, 0.3)])
    environment = os.environ | {"MPLBACKEND": "inline", "HOME": str(tmp_path)}
    for argv in ([run_, "--output=~/drawn"], ["--help"]):
        command = [sys.executable, ROOT / "scripts" / "figures.py", *argv]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "drawn" / "training.png").exists()


def test_what_is_no_run_is_named_and_left_out(tmp_path, capsys):
    """`runs/*` has folders of eval.py and tokens.py, logs, checkpoints and runs without a step."""
    good = write_run(tmp_path / "good", [metrics(1, 0.3)])
    begun = write_run(tmp_path / "begun", [], seed=1)
    folders = {"eval": "flags.json", "tokens": "rows.jsonl", "step_000001": "config.json"}
    for name, file in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text('{"model_type": "qwen3"}')
    (tmp_path / "log").write_text("step 1")
    figures.main([*map(str, sorted(tmp_path.iterdir()))])
    said = capsys.readouterr().out.splitlines()
    names = ", ".join(str(tmp_path / n) for n in ("begun", "eval", "log", "step_000001", "tokens"))
    assert said[0] == f"left out, because no run of stapo.py with a step: {names}"
    assert said[-1] == f"figures in {good}/figures" and (good / "figures/training.png").exists()
    with pytest.raises(SystemExit, match=f"^figures.py: no run of stapo.py .* {begun}$"):
        figures.main([str(begun)])
