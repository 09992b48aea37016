"""STAPO and JustRL on a real language model: the recipe smollm2-135m-cpu over seeds.

    python experiments/real_model.py                   # all runs: two hours on one thread
    python experiments/real_model.py --model FOLDER    # from weights on this disk
    python experiments/real_model.py --table           # the tables of the runs that are whole

A run is `stapo.py @recipes/smollm2-135m-cpu` with another method, seed or learning rate. Runs of
one seed have the same problems in the same order. Runs that are whole are not run again, and one
that was interrupted begins anew. Checkpoints are deleted. With --figure FILE it draws the steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "smollm2-135m-cpu"
METHODS = {"STAPO": "stapo", "JustRL": "justrl"}


class Setting(NamedTuple):
    """Flags beside those of the recipe, and the seeds of both methods."""

    name: str
    seeds: range
    flags: str = ""


SETTINGS = [
    Setting("recipe", range(5)),
    Setting("four times the rate", range(2), "--lr 1e-4"),
]
COLUMNS = {  # the rows of the table: text, key of a summary, factor, decimals
    "held out before, %": ("before", 1, 1),
    "held out after, %": ("after", 1, 1),
    "held out, gain": ("gain", 1, 1),
    "accuracy of the last step, %": ("accuracy", 100, 1),
    "entropy, nats": ("entropy", 1, 3),
    "entropy of the last step, nats": ("last_entropy", 1, 3),
    "rare tokens of right responses, %": ("rare", 100, 2),
    "silenced tokens, %": ("silenced", 100, 3),
    "length of the last step, tokens": ("length", 1, 1),
    "cut off at the last step, %": ("cut", 100, 1),
}


def folder(output: Path, setting: Setting, method: str, seed: int) -> Path:
    """Return the directory of a run."""
    return output / f"{setting.name}-{METHODS[method]}-{seed}".replace(" ", "-")


def run(path: Path, setting: Setting, method: str, seed: int, model: str) -> None:
    """Train one run, unless it is whole."""
    if path.exists():
        return
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = f"{sys.executable} {ROOT}/stapo.py @{RECIPE} --method {METHODS[method]} --seed {seed}"
    flags = [*setting.flags.split(), *(["--model", model] if model else [])]
    subprocess.run([*command.split(), *flags, "--output", partial], cwd=ROOT, check=True)
    shutil.rmtree(partial / "checkpoints")
    partial.rename(path)


def read(path: Path) -> tuple[list[dict], list[dict]]:
    """Return the steps and the evaluations of a run."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [next(iter(line["eval"].values())) for line in lines if "eval" in line]
    return [line for line in lines if "eval" not in line], evaluations


def summary(path: Path) -> dict[str, float]:
    """Return the numbers of a run: of the evaluations, of the last step, and over the steps.

    Entropy, rare and silenced tokens are means over the steps after the first, whose responses are
    sampled before any update.
    """
    steps, evaluations = read(path)
    later, last = steps[1:], steps[-1]
    before, after = evaluations[0]["mean"], evaluations[-1]["mean"]
    return {
        "before": before,
        "after": after,
        "gain": after - before,
        "accuracy": last["accuracy"],
        "entropy": fmean(step["entropy"] for step in later),
        "last_entropy": last["entropy"],
        "rare": fmean(step["low_prob_fraction"] or 0 for step in later),
        "silenced": fmean(step["silenced_fraction"] for step in later),
        "length": last["response_length"],
        "cut": last["truncated_fraction"],
    }


def with_error(values: list[float], factor: float, decimals: int) -> str:
    """Return the mean of independent values and its standard error."""
    mean, error = fmean(values) * factor, stdev(values) / len(values) ** 0.5 * factor
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def table(output: Path, setting: Setting) -> str:
    """Return a Markdown table: both methods, and JustRL minus STAPO, seed by seed."""
    runs = {}
    for seed in setting.seeds:
        paths = [folder(output, setting, method, seed) for method in METHODS]
        if all(path.exists() for path in paths):
            runs[seed] = [summary(path) for path in paths]
    if len(runs) < 2:
        return f"{setting.name}: fewer than two seeds are whole"
    seeds = ", ".join(map(str, runs))
    lines = [f"| {setting.name}, seeds {seeds} | STAPO | JustRL | JustRL - STAPO | higher |"]
    lines += ["|---|---|---|---|---|"]
    for text, (key, factor, decimals) in COLUMNS.items():
        stapo, justrl = ([pair[i][key] for pair in runs.values()] for i in (0, 1))
        gaps = [b - a for a, b in zip(stapo, justrl)]
        cells = [with_error(values, factor, decimals) for values in (stapo, justrl, gaps)]
        higher = f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"
        lines += [f"| {' | '.join([text, *cells, higher])} |"]
    return "\n".join(lines)


def figure(output: Path, file: Path) -> None:
    """Draw metrics by step: a thin line is a seed, and a thick line is the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")  # files only, no display
    import matplotlib.pyplot as plt

    panels = {"accuracy": "accuracy", "entropy": "entropy, nats"}
    panels |= {"low_prob_fraction": "share of rare tokens in right responses"}
    shown = [setting for setting in SETTINGS if table(output, setting)[0] == "|"]
    sizes = {"figsize": (10, 2.8 * len(shown)), "layout": "constrained", "squeeze": False}
    picture, axes = plt.subplots(len(shown), len(panels), **sizes)
    for row, setting in zip(axes, shown):
        for axis, (key, title) in zip(row, panels.items()):
            for method, colour in zip(METHODS, ("tab:blue", "tab:red")):
                paths = [folder(output, setting, method, seed) for seed in setting.seeds]
                curves = [[step[key] or 0 for step in read(p)[0]] for p in paths if p.exists()]
                numbers = range(1, len(curves[0]) + 1)
                for curve in curves:
                    axis.plot(numbers, curve, color=colour, alpha=0.3, linewidth=0.8)
                mean = [fmean(values) for values in zip(*curves)]
                axis.plot(numbers, mean, color=colour, linewidth=2, label=method)
            axis.set(title=f"{setting.name}: {title}", xlabel="step", ylim=(0, None))
            axis.title.set_fontsize(9)
    axes[0][0].legend()
    picture.savefig(file, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Run what is not whole, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "real-model")
    parser.add_argument("--model", default="", help="folder or Hub id; empty: the recipe's")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--figure", type=Path, help="draw this file")
    args: Any = parser.parse_args(argv)
    for setting in [] if args.table else SETTINGS:
        for seed in setting.seeds:
            for method in METHODS:
                path = folder(args.output, setting, method, seed)
                run(path, setting, method, seed, args.model)
    for setting in SETTINGS:
        print(table(args.output, setting), end="\n\n")
    if args.figure:
        figure(args.output, args.figure)


if __name__ == "__main__":
    main()
