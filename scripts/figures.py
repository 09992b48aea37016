"""Draw the curves of one run, or of several runs to compare them. Only matplotlib is needed.

    python scripts/figures.py runs/tiny                     # into runs/tiny/figures
    python scripts/figures.py runs/stapo-* runs/justrl-*    # several runs, into figures/

1. Runs whose flags differ in the seed alone become one line: the mean of the runs. A band shows the
   smallest and the largest run.
2. metrics.jsonl gives training.png, quantiles.png, updates.png and evaluation.png. A .csv file
   beside each picture has its numbers.
3. The script prints how far a run's score has moved from its first evaluation to its last.
4. If two lines have runs with the same seeds, it prints the difference of their accuracies, over
   the steps that all of these runs have.
"""

import argparse
import contextlib
import csv
import json
import math
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")  # files only, no display
plt.rcParams |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "savefig.dpi": 150}

METHODS = {  # name and colour; colour-blind readers can tell Okabe and Ito's colours apart
    "stapo": ("STAPO", "#D55E00"),
    "justrl": ("JustRL", "#0072B2"),
    "grpo": ("GRPO", "#009E73"),
    "20-entropy": ("20-Entropy", "#E69F00"),
    "full-mask": ("FullMask", "#CC79A7"),
    "high-entropy": ("High-entropy", "#56B4E9"),
    "random": ("Random", "#444444"),
}
FIGURES = {
    "training": {
        "accuracy": "accuracy of the rollouts",
        "response_length": "response length (tokens)",
        "entropy": "policy entropy (nats)",
        "reward": "mean reward",
        "silenced_fraction": "silenced share of all tokens",
        "sampling_gap": "sampling gap (nats)",
    },
    "quantiles": {f"entropy_p{p}": f"token entropy, p{p} (nats)" for p in (50, 80, 95, 99)}
    | {"tau_h": "threshold τ_h (nats)"},
    "updates": {
        "approx_kl": "approximate KL(π_old‖π_θ) (nats)",
        "grad_norm": "gradient norm before clipping",
        "clip_low": "share clipped at 1 − ε_low",
        "clip_high": "share clipped at 1 + ε_high",
    },
}
INCIDENTAL = set(  # the seed, and what does not change what a run computes, except by rounding
    "seed output resume versions steps save_every keep_last log_samples threads "
    "eval_every eval_benchmarks eval_limit eval_samples rollout_batch_size "
    "tokens_per_micro_batch gradient_checkpointing".split()
)

Series = dict[str, dict[int, float]]  # metric -> {step: value}


@dataclass
class Group:
    """Runs whose flags differ in the seed alone: one line in every panel."""

    label: str
    line: dict  # matplotlib's keywords for the line: colour, style, alpha
    runs: dict[int, Series]  # by seed


def read_lines(file: Path) -> list[dict]:
    """Return the rows of a .jsonl file. A run that goes on can leave a torn line at its end."""
    rows = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_metrics(run: Path) -> Series:
    """Return the numbers of a run's metrics.jsonl, without nulls. Raises ValueError if none.

    Scores are the metrics "eval/BENCHMARK, N problems". Step 0 is the model before training.
    """
    series: Series = defaultdict(dict)
    for row in read_lines(run / "metrics.jsonl"):
        for name, score in (row.pop("eval", None) or {}).items():
            row[f"eval/{name}, {score['problems']} problems"] = score["mean"]
        for key, value in row.items():
            if isinstance(value, int | float):
                series[key][row["step"]] = value
    if not series:
        raise ValueError(f"{run}/metrics.jsonl holds no step and no evaluation: wait for the first")
    return series


def group_runs(paths: list[Path]) -> list[Group]:
    """Read runs and group those that differ in the seed alone. Raises ValueError.

    The label of a group has the flags in which groups differ.
    """
    runs_of: dict[str, dict[int, Series]] = defaultdict(dict)  # the flags as JSON -> runs by seed
    for path in paths:
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
            seed, method = config["seed"], config["method"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no run directory of stapo.py: {error!r}") from error
        flags = {key: config[key] for key in sorted(config) if key not in INCIDENTAL}
        runs = runs_of[json.dumps({"method": method} | flags)]
        if seed in runs:
            raise ValueError(f"{path}: another run has its flags and its seed {seed}; give one")
        runs[seed] = read_metrics(path)
    all_flags = [json.loads(key) for key in runs_of]
    names = [*METHODS, *(flags["method"] for flags in all_flags)]  # the legend's order
    groups = []
    for flags in sorted(all_flags, key=lambda flags: names.index(flags["method"])):
        runs = runs_of[json.dumps(flags)]
        name, colour = METHODS.get(flags["method"], (flags["method"], "#8C8C8C"))
        differ = [key for key in flags if any(o.get(key) != flags[key] for o in all_flags)]
        settings = [f"{key} {flags[key]}" for key in differ if key != "method"]
        label = ", ".join([name, *settings]) + (f" ({len(runs)} runs)" if len(runs) > 1 else "")
        rank = sum(group.line["color"] == colour for group in groups)  # in a sweep of one method
        line = {"color": colour, "linestyle": ("-", "--", "-.", ":")[rank % 4]}
        groups.append(Group(label, line | {"alpha": 0.85**rank}, runs))
    return groups


def percent(share: float, _position: int | None = None) -> str:
    return f"{100 * share:.3g} %"


def draw_curves(stem: str, panels: dict, groups: list[Group], out: Path) -> None:
    """Draw a panel for each metric that the runs have, with a line and a band for each group."""
    rows = []
    for metric in panels:
        for group in groups:
            runs = [run[metric] for run in group.runs.values() if metric in run]
            for step in sorted(set().union(*runs)):
                values = [run[step] for run in runs if step in run]
                row = {"metric": metric, "group": group.label, "step": step}
                row |= {"mean": fmean(values), "min": min(values), "max": max(values)}
                rows.append(row | {"runs": len(values)})
    recorded = [metric for metric in panels if any(row["metric"] == metric for row in rows)]
    if not recorded:
        return
    with open(out / f"{stem}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    columns = 3 if len(recorded) > 4 else min(2, len(recorded))
    lines = math.ceil(len(recorded) / columns)
    options = {"figsize": (10.2, 2.8 * lines + 0.6), "squeeze": False, "layout": "constrained"}
    fig, axes = plt.subplots(lines, columns, **options)
    for ax in axes.flat[len(recorded) :]:
        ax.set_visible(False)
    for ax, metric in zip(axes.flat, recorded):
        for group in groups:
            mine = [r for r in rows if (r["metric"], r["group"]) == (metric, group.label)]
            x, mean, low, high = ([r[k] for r in mine] for k in ("step", "mean", "min", "max"))
            ax.plot(x, mean, marker="o" if len(x) <= 40 else "", markersize=3, **group.line)
            ax.fill_between(x, low, high, color=group.line["color"], alpha=0.2, linewidth=0)
        ax.set(xlabel="step")
        ax.set_title(textwrap.fill(panels[metric], 90 // columns), loc="left", fontsize="medium")
        ax.xaxis.get_major_locator().set_params(integer=True)
        if metric in ("accuracy", "silenced_fraction"):
            ax.yaxis.set_major_formatter(percent)
    handles = [plt.Line2D([], [], label=group.label, **group.line) for group in groups]
    fits = 120 // max(len(group.label) for group in groups) or 1  # labels side by side
    fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(groups), fits))
    fig.savefig(out / f"{stem}.png")
    plt.close(fig)


def mean_and_error(values: list[float], digits: int) -> str:
    """Write the mean of values in points, with its standard error if there are several."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):+.{digits}f}{error} points"


def read_rates(file: Path) -> dict[str, dict[int, float]]:
    """Return benchmark -> {problem: right responses in percent} of an evaluation's file."""
    correct = defaultdict(lambda: defaultdict(list))
    for row in read_lines(file):
        correct[row["benchmark"]][row["problem"]].append(100 * row["correct"])
    return {name: {n: fmean(of) for n, of in by.items()} for name, by in correct.items()}


def changes(run: Path) -> list[str]:
    """Return a line for each benchmark: how far its score moved from first to last evaluation.

    Only problems of both count. The standard error is that of the mean change of a problem.
    """
    steps = sorted(row["step"] for row in read_lines(run / "metrics.jsonl") if row.get("eval"))
    if len(steps) < 2:
        return []
    files = [run / "evaluations" / f"step_{step:06d}.jsonl" for step in (steps[0], steps[-1])]
    before, after = map(read_rates, files)
    lines = []
    for name in sorted(before.keys() & after.keys()):
        problems = before[name].keys() & after[name].keys()
        moved = [after[name][problem] - before[name][problem] for problem in problems]
        change = f"{mean_and_error(moved, 2)} ({len(moved)} problems)"
        lines.append(f"{run}: {name} {change} from step {steps[0]} to step {steps[-1]}")
    return lines


def differences(groups: list[Group]) -> list[str]:
    """Return a line for each group after the first: its accuracy minus the first group's.

    The standard error is that of the mean of the seeds' differences: two runs of a seed train on
    the same problems. The steps are those that all of these runs have.
    """
    first, *others = groups
    lines = []
    for group in others:
        gaps = {}
        for seed in sorted(first.runs.keys() & group.runs.keys()):
            one, other = (runs[seed].get("accuracy", {}) for runs in (first.runs, group.runs))
            if common := one.keys() & other.keys():
                gaps[seed] = {step: 100 * (other[step] - one[step]) for step in common}
        steps = sorted(set.intersection(*map(set, gaps.values()))) if gaps else []
        if not steps:
            continue
        texts = []
        for span in [steps, steps[-10:]] if len(steps) > 10 else [steps]:
            points = [fmean(gap[step] for step in span) for gap in gaps.values()]
            texts.append(f"{mean_and_error(points, 1)} over steps {span[0]} to {span[-1]}")
        name = f"{group.label} minus {first.label}, seeds {', '.join(map(str, gaps))}"
        lines.append(f"{name}: accuracy {', '.join(texts)}")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of stapo.py")
    parser.add_argument("--output", type=Path, help="default: RUN/figures, or figures for several")
    args = parser.parse_args(argv)
    out = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / "figures"
    try:
        groups = group_runs(args.runs)
        out.mkdir(parents=True, exist_ok=True)
        names = sorted({key for group in groups for run in group.runs.values() for key in run})
        scores = {n: f"{n[5:]}: mean accuracy (%)" for n in names if n.startswith("eval/")}
        for stem, panels in (FIGURES | {"evaluation": scores}).items():
            draw_curves(stem, panels, groups, out)
        for line in [line for run in args.runs for line in changes(run)] + differences(groups):
            print(line)
        print(f"figures in {out}")
    except (OSError, ValueError) as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main()
