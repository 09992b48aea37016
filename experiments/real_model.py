"""STAPO and JustRL on a real language model: the recipe smollm2-135m-cpu over seeds.

    python experiments/real_model.py                   # all runs: an hour and a half on one thread
    python experiments/real_model.py --model FOLDER    # from weights on this disk
    python experiments/real_model.py --table           # the tables of the runs that are whole

A run is `stapo.py @recipes/smollm2-135m-cpu` with another method, seed or learning rate. Runs of
one seed have the same problems in the same order. Runs that are whole are not run again, and one
that was interrupted begins anew. Checkpoints are deleted. With --figure FILE it draws the steps.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from runs import ROOT, cell, markdown, read_metrics

RECIPE = ROOT / "recipes" / "smollm2-135m-cpu"
METHODS = {"STAPO": "stapo", "JustRL": "justrl"}
SETTINGS = {  # the seeds of both methods, and flags beside those of the recipe
    "recipe": (range(5), ""),
    "four times the rate": (range(2), "--lr 1e-4"),
}
ROWS = {  # of the tables: a key of summary, and a format
    "held out before, %": ("before", ".1f"),
    "held out after, %": ("after", ".1f"),
    "entropy, nats": ("entropy", ".3f"),
    "rare tokens in right responses, %": ("rare", ".2f"),
    "silenced tokens, %": ("silenced", ".3f"),
    "length at the end, tokens": ("length", ".1f"),
    "cut off at the end, %": ("cut", ".1f"),
}


def folder(output: Path, setting: str, method: str, seed: int) -> Path:
    """Return the directory of a run."""
    return output / f"{setting}-{METHODS[method]}-{seed}".replace(" ", "-")


def run(path: Path, flags: str, model: str) -> None:
    """Train one run, unless it is whole. An empty `model` is the recipe's."""
    if path.exists():
        return
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "stapo.py", f"@{RECIPE}", *flags.split(), "--output", str(partial)]
    subprocess.run(command + (["--model", model] if model else []), cwd=ROOT, check=True)
    shutil.rmtree(partial / "checkpoints")
    partial.rename(path)


def summary(path: Path) -> dict[str, float]:
    """Return a run's numbers. Entropy, rare and silenced tokens are means over the steps.

    Step 1 is left out of these means: its responses are sampled before any update.
    """
    steps, scores = read_metrics(path)
    means = {"entropy": "entropy", "rare": "low_prob_fraction", "silenced": "silenced_fraction"}
    means = {name: fmean(step[key] or 0 for step in steps[1:]) for name, key in means.items()}
    means |= {"rare": means["rare"] * 100, "silenced": means["silenced"] * 100}
    means |= {"before": scores[0]["mean"], "after": scores[len(steps)]["mean"]}
    last = {"length": steps[-1]["response_length"], "cut": steps[-1]["truncated_fraction"] * 100}
    return means | last


def table(output: Path, setting: str) -> str:
    """Return a Markdown table of both methods, and of JustRL minus STAPO seed by seed."""
    runs = {}
    for seed in SETTINGS[setting][0]:
        paths = [folder(output, setting, method, seed) for method in METHODS]
        if all(path.exists() for path in paths):
            runs[seed] = [summary(path) for path in paths]
    if len(runs) < 2:
        return f"{setting}: fewer than two seeds are whole"
    seeds = ", ".join(map(str, runs))
    heading = [f"{setting}, seeds {seeds}", *METHODS, "JustRL - STAPO", "JustRL is higher"]
    rows = []
    for text, (key, form) in ROWS.items():
        stapo, justrl = ([pair[i][key] for pair in runs.values()] for i in (0, 1))
        gaps = [b - a for a, b in zip(stapo, justrl)]
        higher = f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"
        rows.append([text, *(cell(values, form) for values in (stapo, justrl, gaps)), higher])
    return markdown(heading, rows)


def figure(output: Path, file: Path) -> None:
    """Draw metrics by step: a thin line is a seed, and a thick line is the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")  # files only, no display
    import matplotlib.pyplot as plt

    panels = {"accuracy": "accuracy", "entropy": "entropy, nats"}
    panels |= {"low_prob_fraction": "share of rare tokens\nin right responses"}
    size = {"figsize": (9, 2.6 * len(SETTINGS)), "layout": "constrained"}
    picture, axes = plt.subplots(len(SETTINGS), len(panels), **size)
    for row, (setting, (seeds, _)) in zip(axes, SETTINGS.items()):
        for axis, (key, title) in zip(row, panels.items()):
            for method, colour in zip(METHODS, ("tab:blue", "tab:red")):
                paths = [folder(output, setting, method, seed) for seed in seeds]
                curves = [
                    [step[key] or 0 for step in read_metrics(p)[0]] for p in paths if p.exists()
                ]
                for curve in curves:
                    axis.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.4, lw=0.7)
                mean = [fmean(values) for values in zip(*curves)]
                axis.plot(range(1, len(mean) + 1), mean, color=colour, lw=2, label=method)
            axis.set_title(title, fontsize=10)
            axis.set(xlabel="step", ylim=(0, None))
        row[0].set_ylabel(setting)
    axes[0][0].legend()
    picture.savefig(file, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Run what is not whole, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default="runs/real-model")
    parser.add_argument("--model", default="", help="folder or Hub id; empty: the recipe's")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--figure", type=Path, help="draw this file")
    args = parser.parse_args(argv)
    output = args.output.resolve()
    for setting, (seeds, flags) in ({} if args.table else SETTINGS).items():
        for seed in seeds:
            for method in METHODS:
                flags_of_run = f"{flags} --method {METHODS[method]} --seed {seed}"
                run(folder(output, setting, method, seed), flags_of_run, args.model)
    print("\n\n".join(table(output, setting) for setting in SETTINGS))
    if args.figure:
        figure(output, args.figure)


if __name__ == "__main__":
    main()
