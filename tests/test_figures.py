"""figures.py on run directories whose numbers are known: its CSV and its PNGs."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, check_png, read_csv, write_rows

plt = pytest.importorskip("matplotlib.pyplot", reason="figures.py needs matplotlib")
import figures  # noqa: E402

from support.files import append_rows  # noqa: E402


def metrics(step: int, accuracy: float, **more) -> dict:
    row = {"step": step, "accuracy": accuracy, "reward": 2 * accuracy - 1, "entropy": 0.5}
    quantiles = {f"entropy_p{p}": p / 100 for p in (50, 80, 95, 99)}
    row |= {"silenced_fraction": 0.0, "loss": None, "approx_kl": 0.1}
    return row | quantiles | more


def write_run(path: Path, rows: list[dict], **flags) -> Path:
    path.mkdir()
    config = {"method": "stapo", "seed": 0, "tau_p": 0.002, "q": 0.75, "output": str(path)}
    (path / "config.json").write_text(json.dumps(config | flags))
    write_rows(path / "metrics.jsonl", *rows)
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of numbers: drawing takes nearly all of the time."""
    monkeypatch.setattr(figures, "save", lambda fig, path: plt.close(fig))


def test_seeds_become_a_mean_with_a_band_and_other_flags_another_line(tmp_path, undrawn):
    seeds = [
        [metrics(1, 0.3), metrics(2, 0.7)],
        [metrics(1, 0.1), metrics(2, 0.2), metrics(3, 0.6)],
        [metrics(1, 0.8), {"step": 2, "accuracy": None}],
    ]
    runs = [write_run(tmp_path / f"{seed}", rows, seed=seed) for seed, rows in enumerate(seeds)]
    config = runs[1] / "config.json"  # of a version with the flags in another order
    config.write_text(json.dumps(dict(reversed(json.loads(config.read_text()).items()))))
    runs.append(write_run(tmp_path / "other", [metrics(1, 0.5)], tau_p=0.01))
    runs.append(write_run(tmp_path / "base", [metrics(1, 0.4)], method="justrl"))
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "evaluation.csv"
    old.write_text(",".join(figures.COLUMNS) + "\n")  # of other runs
    (tmp_path / "latest").symlink_to("0")  # the same run by another name
    names = [*map(str, runs), str(tmp_path / "latest")]
    figures.main([*names, "--output", str(tmp_path / "out")])
    rows = read_csv(tmp_path / "out" / "training.csv")
    found = {
        (row["group"], int(row["step"])): [float(row[k]) for k in ("mean", "min", "max", "runs")]
        for row in rows
        if row["metric"] == "accuracy"
    }
    label = "STAPO, tau_p 0.002 (3 runs)"
    assert found == {
        (label, 1): pytest.approx([0.4, 0.1, 0.8, 3]),
        (label, 2): pytest.approx([0.45, 0.2, 0.7, 2]),
        (label, 3): pytest.approx([0.6, 0.6, 0.6, 1]),
        ("STAPO, tau_p 0.01", 1): [0.5, 0.5, 0.5, 1],
        ("JustRL", 1): [0.4, 0.4, 0.4, 1],
    }
    assert not old.exists()


def test_methods_that_the_legend_does_not_know_are_told_apart(tmp_path, undrawn, monkeypatch):
    """As two settings of one method are."""
    flags = [{"method": "mine"}, {"method": "yours"}, {"method": "yours", "q": 0.5}, {}]
    runs = [write_run(tmp_path / f"{i}", [metrics(1, 0.5)], **f) for i, f in enumerate(flags)]
    groups = figures.group_runs(runs, 1)
    assert [g.label for g in groups] == ["STAPO", "mine", "yours, q 0.75", "yours, q 0.5"]
    assert len({json.dumps(group.line) for group in groups}) == 4
    assert len({group.line["linestyle"] for group in groups[1:]}) == 3
    monkeypatch.chdir(tmp_path)
    figures.main([*map(str, runs), str(runs[0])])  # figures/ is of no run; a run counts once
    assert {row["runs"] for row in read_csv(tmp_path / "figures" / "training.csv")} == {"1"}
    assert not list(tmp_path.glob("*/figures"))


def test_smoothing_spares_evaluations_and_other_problems_are_other_curves(tmp_path, monkeypatch):
    labels, save = {}, figures.save

    def read_labels(fig, path):
        labels[path.stem] = {ax.get_ylabel(): ax.get_xlabel() for ax in fig.axes}
        save(fig, path)

    monkeypatch.setattr(figures, "save", read_labels)
    rows = [metrics(s, s / 10, silenced_fraction=1e-5 * (s % 2)) for s in range(1, 7)]
    evals = ((2, 10.0, 30, "1"), (4, 90.0, 8, "2"), (5, 50.0, 30, "3"), (6, 30.0, 30, "1"))
    for step, mean, problems, mark in evals:
        score = {"mean": mean, "problems": problems, "problems_fingerprint": 16 * mark}
        rows[step - 1]["eval"] = {"aime24": score}
    run = write_run(tmp_path / "run", rows)
    figures.main([str(run), "--smooth", "3"])
    table = read_csv(run / "figures" / "training.csv")
    means = [float(row["mean"]) for row in table if row["metric"] == "accuracy"]
    assert means == pytest.approx([0.1, 0.15, 0.2, 0.3, 0.4, 0.5])
    scores = read_csv(run / "figures" / "evaluation.csv")
    found = [(row["metric"], int(row["step"]), float(row["mean"])) for row in scores]
    curve, other = (f"eval/aime24, 30 problems #{mark * 6}" for mark in "13")
    expected = [(curve, 2, 10.0), (curve, 6, 30.0), (other, 5, 50.0)]
    assert found == [*expected, ("eval/aime24, 8 problems #222222", 4, 90.0)]
    assert labels["training"]["policy entropy (nats)"] == "step (mean of the last 3 values)"
    names = ("30 problems #111111", "30 problems #333333", "8 problems")
    panels = {f"aime24, {name}\n(mean accuracy, %)": "step" for name in names}
    assert labels["evaluation"] == labels["evaluation"] | panels
    for name in ("training", "quantiles", "updates", "evaluation"):
        check_png(run / "figures" / f"{name}.png", "#D55E00")


def test_a_run_that_goes_on_can_be_drawn_at_any_time(tmp_path, undrawn, capsys):
    """After the evaluation before step 1, and again amid the writing of the third step's line."""
    score = {"mean": 10.0, "problems": 30}
    first = {"step": 0, "eval": {"aime24": score}}
    run = write_run(tmp_path / "run", [first])
    figures.main([str(run)])
    assert [path.name for path in (run / "figures").iterdir()] == ["evaluation.csv"]
    rows = [first, metrics(1, 0.4), metrics(2, 0.5), {"step": 2, "eval": {"aime24": score}}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 3, "accu')
    figures.main([str(run)])
    output = capsys.readouterr()
    assert output.err == "" and str(run / "figures") in output.out
    assert [row["step"] for row in read_csv(run / "figures" / "evaluation.csv")] == ["0", "2"]
    assert {row["step"] for row in read_csv(run / "figures" / "training.csv")} == {"1", "2"}


def test_the_change_of_a_score_has_the_error_of_paired_problems(tmp_path, undrawn, capsys):
    """Problems 0, 1 and 2 move by +100, +50 and 0 points: 50 ± 50 / sqrt 3.

    A fourth problem and a third sample are left of a stopped evaluation. The file "other" has other
    problems at the end than at the start.
    """
    score = {"mean": 50.0, "problems": 3, "samples": 2}
    evals = [{"step": n, "eval": {"sums": score, "other": score}} for n in (0, 1, 2)]
    run = write_run(tmp_path / "run", [evals[0], metrics(1, 0.4), *evals[1:]])
    (run / "evaluations").mkdir()
    for step, right in ((0, "00- 10 01 --"), (1, "11 11 11"), (2, "11- 11 10 11")):
        answers = [
            {"benchmark": name, "problem": problem, "sample": sample}
            | {"fingerprint": made_from, "correct": {"1": True, "0": False}.get(mark)}
            | {"response": "a\u2028b"}  # text, not the end of a line
            for name, made_from in (("sums", "same"), ("other", f"of step {step}"))
            for problem, marks in enumerate(right.split())
            for sample, mark in enumerate(marks)
        ]
        append_rows(run / "evaluations" / f"step_{step:06d}.jsonl", answers)
    figures.main([str(run)])
    words = f"{run}: sums +50.00 ± 28.87 points (3 problems) from step 0 to step 2"
    assert capsys.readouterr().out.splitlines()[0] == words
    (run / "evaluations" / "step_000000.jsonl").unlink()  # a copy that has the metrics alone
    figures.main([str(run)])
    assert capsys.readouterr().out.startswith("figures in")


def test_methods_are_compared_seed_by_seed(tmp_path, undrawn, capsys):
    """Seeds 0 and 1 differ by -10 and -20 points, in the last ten steps by -12 and -20.

    Seed 2 has no run of JustRL. JustRL's run of seed 0 has one step more.
    """
    for seed in (0, 1, 2):
        rows = [metrics(step, 0.5 + seed / 10) for step in range(1, 13)]
        write_run(tmp_path / f"stapo-{seed}", rows, seed=seed)
    behind = {0: [0.0, 0.0, *[0.12] * 10, 0.5], 1: [0.2] * 12}
    for seed, gaps in behind.items():
        rows = [metrics(step, 0.5 + seed / 10 - gap) for step, gap in enumerate(gaps, 1)]
        write_run(tmp_path / f"justrl-{seed}", rows, seed=seed, method="justrl")
    figures.main([*map(str, sorted(tmp_path.iterdir())), "--output", str(tmp_path / "out")])
    said = "JustRL (2 runs) minus STAPO (3 runs), seeds 0, 1: accuracy "
    said += "-15.0 ± 5.0 points over steps 1 to 12, -16.0 ± 4.0 points over steps 3 to 12"
    assert capsys.readouterr().out.splitlines()[0] == said


def test_a_run_whose_files_have_moved_stays_in_its_group(tmp_path, undrawn, capsys):
    hashes = {"data_fingerprint": "a", "model_fingerprint": "b", "reward_fingerprint": "c"}
    places = [{"data": f"{at}/d.jsonl", "model": f"{at}/m"} for at in ("here", "there")]
    places = [place | {"reward": f"{place['model']}/r.py:right"} for place in places]
    for seed, place in enumerate(places):  # --resume has given seed 1 the new places
        for method, accuracy in (("stapo", 0.5), ("justrl", 0.4)):
            at = place if method == "stapo" else places[1 - seed]
            flags = at | hashes | {"method": method, "seed": seed}
            write_run(tmp_path / f"{method}-{seed}", [metrics(1, accuracy)], **flags)
    figures.main([*map(str, sorted(tmp_path.iterdir())), "--output", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    difference = "JustRL (2 runs) minus STAPO (2 runs), seeds 0, 1: accuracy -10.0 ± 0.0 points"
    assert lines[0] == f"{difference} over steps 1 to 1"
    other = tmp_path / "other"
    flags = places[0] | hashes | {"reward": "here/m/r.py:wrong", "method": "stapo", "seed": 2}
    write_run(other, [metrics(1, 0.5)], **flags)
    groups = figures.group_runs([tmp_path / "stapo-0", other], 1)
    assert [len(group.series) for group in groups] == [1, 1]  # another function of the same file


def test_a_difference_names_its_steps_seeds_and_other_flags(tmp_path, undrawn, capsys):
    """Seeds 0 and 1 count over the steps of the shortest run. Seed 2 has two runs of STAPO."""
    for name, seed, steps, gap in (("0", 0, 12, 0.1), ("1", 1, 10, 0.2), ("2", 2, 12, 0.0)):
        rows = [metrics(step, 0.5) for step in range(1, 13)]
        write_run(tmp_path / f"stapo-{name}", rows, seed=seed, lr=1e-6)
        rows = [metrics(step, 0.5 - gap * (step <= 10)) for step in range(1, steps + 1)]
        write_run(tmp_path / f"justrl-{name}", rows, seed=seed, lr=2e-6, method="justrl")
    write_run(tmp_path / "stapo-2-crashed", [metrics(1, 0.9)], seed=2, lr=1e-6)
    figures.main([*map(str, sorted(tmp_path.iterdir())), "--output", str(tmp_path / "out")])
    name = "JustRL (3 runs) minus STAPO (4 runs)"
    said = f"{name}: without seed 2, which has several runs of one method\n"
    said += f"{name}, seeds 0, 1, lr 2e-06 and not 1e-06: accuracy "
    said += "-15.0 ± 5.0 points over steps 1 to 10\n"
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert f"in the curves: {tmp_path}/stapo-2, {tmp_path}/stapo-2-crashed\n" in printed


def test_errors_are_one_line_that_names_the_file(tmp_path, undrawn):
    def error(*argv) -> str:
        with pytest.raises(SystemExit) as caught:
            figures.main([*map(str, argv)])
        message = str(caught.value)
        assert message.startswith("figures.py: ") and "\n" not in message
        return message

    run = write_run(tmp_path / "run", [metrics(1, 0.5)])
    assert "nowhere" in error(run, tmp_path / "nowhere")
    assert "--smooth 0" in error(run, "--smooth", 0)
    assert str(run / "config.json") in error(run, "--output", run / "config.json")
    (run / "metrics.jsonl").unlink()
    assert "wait for the first" in error(run)
    spoiled = [
        ("config.json", "[]", "no run directory"),
        ("metrics.jsonl", "", "holds no step"),
    ]
    for number, (file, text, said) in enumerate(spoiled):
        run = write_run(tmp_path / str(number), [metrics(1, 0.5)])
        (run / file).write_text(text)
        message = error(run)
        assert said in message and str(run) in message
        assert file in message or file == "config.json"  # then the directory is no run's


@pytest.mark.parametrize("name", ["training.csv", "evaluation.csv", "evaluation.png"])
def test_files_of_anybody_else_stay_as_they_are(name, tmp_path, undrawn):
    run = write_run(tmp_path / "run", [metrics(1, 0.5)])
    (tmp_path / name).write_text("model,score\nmine,40\n")
    with pytest.raises(SystemExit, match=re.escape(f"{tmp_path / name}: was not written")):
        figures.main([str(run), "--output", str(tmp_path)])
    assert (tmp_path / name).read_text() == "model,score\nmine,40\n"
    assert {path.name for path in tmp_path.iterdir()} == {"run", name}


def test_a_full_disk_leaves_the_old_table_and_the_next_call_draws(tmp_path, undrawn, monkeypatch):
    run = write_run(tmp_path / "run", [metrics(1, 0.3)])
    figures.main([str(run)])
    old = read_csv(run / "figures" / "training.csv")

    def full(writer):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(figures.csv.DictWriter, "writeheader", full)
        with pytest.raises(SystemExit, match="No space left on device"):
            figures.main([str(run)])
    assert read_csv(run / "figures" / "training.csv") == old
    figures.main([str(run)])


def test_figures_imports_nothing_of_the_project():
    text = (ROOT / "scripts" / "figures.py").read_text()
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"matplotlib"}
