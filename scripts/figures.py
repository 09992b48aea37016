"""Draw the curves of one run, or of several runs to compare them. Only matplotlib is needed.

    python scripts/figures.py runs/tiny                     # into runs/tiny/figures
    python scripts/figures.py runs/stapo-* runs/justrl-*    # several runs, into figures/

1. Runs whose flags differ in the seed alone become one line: the mean of the runs. A band shows the
   smallest and the largest run. Data that has moved is the same data.
2. metrics.jsonl gives training.png, quantiles.png, updates.png and evaluation.png. A .csv file
   beside each picture has its numbers.
3. The script prints how far a run's score has moved from its first evaluation to its last. For two
   lines whose runs have the same seeds, it prints the differences of their accuracies.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

os.environ["MPLBACKEND"] = "agg"  # that of a notebook ends a program without its packages

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

matplotlib.rcParams |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}

METHODS = {  # name and colour; colour-blind readers can tell Okabe and Ito's colours apart
    "stapo": ("STAPO", "#0072B2"),
    "justrl": ("JustRL", "#D55E00"),
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
    "seed output resume versions id steps save_every keep_last log_samples threads "
    "report_to eval_every eval_benchmarks eval_limit eval_samples rollout_batch_size "
    "cuda_graphs tokens_per_micro_batch gradient_checkpointing".split()
)

Series = dict[str, dict[int, float]]  # metric -> {step: value}


@dataclass
class Group:
    """Runs whose flags differ in the seed alone: one line in every panel."""

    label: str
    line: dict  # matplotlib's keywords for the line: colour, style, alpha
    runs: dict[int, Series]  # by seed


def read_jsonl(file: Path) -> list[dict]:
    """support.files has it too, but this script runs beside any versions, and from anywhere."""
    lines = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def read_metrics(run: Path) -> Series:
    """Return the numbers of a run's metrics.jsonl, without nulls.

    Scores are the metrics "held-out accuracy, BENCHMARK (N problems)", from 0 to 1, and "held-out
    reward, ...". Step 0 is the model before training.
    """
    series: Series = defaultdict(dict)
    for row in read_jsonl(run / "metrics.jsonl"):
        for name, score in (row.pop("eval", None) or {}).items():
            name += f" ({score['problems']} problems)"
            row[f"held-out accuracy, {name}"] = score["mean"] / 100
            row[f"held-out reward, {name}"] = score["reward"]
        for key, value in row.items():
            if isinstance(value, int | float):
                series[key][row["step"]] = value
    return series


def held_out(groups: list[Group]) -> list[str]:
    """Return the metrics of evaluations, accuracies first.

    A reward of 1 or -1, or of 1 or 0, says what the accuracy says, and is left out.
    """
    runs = [run for group in groups for run in group.runs.values()]
    metrics = []
    for metric in sorted(name for name in set().union(*runs) if name.startswith("held-out")):
        accuracy = metric.replace("held-out reward", "held-out accuracy")
        pairs = [(x, run[accuracy][n]) for run in runs for n, x in run.get(metric, {}).items()]
        if metric == accuracy or any(min(abs(x - a), abs(x - 2 * a + 1)) > 1e-6 for x, a in pairs):
            metrics.append(metric)
    return metrics


def is_run(path: Path) -> bool:
    """Whether a path is a run of stapo.py with a whole step or an evaluation."""
    config = path / "config.json"  # a checkpoint has one, too
    of_run = config.is_file() and "data_fingerprint" in config.read_text("utf-8")
    return of_run and any(read_metrics(path))


def group_runs(paths: list[Path]) -> list[Group]:
    """Read runs and group those that differ in the seed alone.

    The label of a group has the flags in which groups differ.
    """
    runs_of: dict[str, dict[int, Series]] = defaultdict(dict)  # the flags as JSON -> runs by seed
    for path in paths:
        config = json.loads((path / "config.json").read_text("utf-8"))
        flags = {key: config[key] for key in sorted(config) if key not in INCIDENTAL}
        flags["data"] = flags.pop("data_fingerprint")  # the same problems, wherever they are
        may_change = INCIDENTAL | {"step", "data", "model"}
        flags["changes"] = [each for each in config["changes"] if each.keys() - may_change]
        runs, seed, run = runs_of[json.dumps(flags)], config["seed"], read_metrics(path)
        if seed in runs:
            print(f"{path}: has the flags and the seed of a run before it; the longer one is drawn")
        runs[seed] = max(runs.get(seed, {}), run, key=lambda each: len(each.get("step", ())))
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


def wrapped(text: str, width: int) -> str:
    """Return a text in lines for matplotlib, which would read formulas between two $."""
    return textwrap.fill(text, width).replace("$", r"\$")


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
    labels = [wrapped(group.label, 120) for group in groups]
    height = 2.8 * lines + 0.6 + 0.2 * sum(label.count("\n") for label in labels)
    fig = Figure(figsize=(10.2, height), layout="constrained")
    for place, metric in enumerate(recorded, start=1):
        ax = fig.add_subplot(lines, columns, place)
        for group in groups:
            mine = [r for r in rows if (r["metric"], r["group"]) == (metric, group.label)]
            x, mean, low, high = ([r[k] for r in mine] for k in ("step", "mean", "min", "max"))
            ax.plot(x, mean, marker="o" if len(x) <= 40 else "", markersize=3, **group.line)
            ax.fill_between(x, low, high, color=group.line["color"], alpha=0.2, linewidth=0)
        ax.set(xlabel="step")
        ax.set_title(wrapped(panels[metric], 90 // columns), loc="left", fontsize="medium")
        ax.xaxis.get_major_locator().set_params(integer=True)
        if "accuracy" in metric or metric == "silenced_fraction":
            ax.yaxis.set_major_formatter(percent)
    handles = [Line2D([], [], label=x, **group.line) for x, group in zip(labels, groups)]
    fits = 120 // max(len(group.label) for group in groups) or 1  # labels side by side
    fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(groups), fits))
    fig.savefig(out / f"{stem}.png", dpi=150)


def mean_and_error(values: list[float], digits: int) -> str:
    """Write the mean of values, with its standard error if there are several."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):+.{digits}f}{error}"


def changes(run: Path) -> list[str]:
    """Return a line for each benchmark: how far its score moved from first to last evaluation.

    Only problems of both count. The standard error is that of the mean change of a problem.
    """
    lines = read_jsonl(run / "metrics.jsonl")
    evals = {line["step"]: line["eval"] for line in lines if line.get("eval")}
    if len(evals) < 2:
        return []
    steps = min(evals), max(evals)
    before, after = defaultdict(list), defaultdict(list)  # (benchmark, problem) -> its responses
    for step, responses in zip(steps, (before, after)):
        for row in read_jsonl(run / "evaluations" / f"step_{step:06d}.jsonl"):
            responses[row["benchmark"], row["problem"]].append(100 * row["correct"])
    lines = []
    both = sorted(before.keys() & after.keys())
    for name in dict.fromkeys(benchmark for benchmark, _ in both):
        moved = [fmean(after[key]) - fmean(before[key]) for key in both if key[0] == name]
        first, last = (evals[step][name]["reward"] for step in steps)
        change = f"{mean_and_error(moved, 2)} points ({len(moved)} problems), "
        change += f"mean reward {first:.3f} to {last:.3f}"
        lines.append(f"{run}: {name} {change}, from step {steps[0]} to step {steps[1]}")
    return lines


def differences(groups: list[Group], metrics: list[str]) -> list[str]:
    """Return lines for each group after the first: its accuracies minus the first group's.

    The standard error is that of the mean of the seeds' differences: two runs of a seed train on
    the same problems. Runs without a common seed or step have no line.
    """
    first, *others = groups
    lines = []
    for group in others:
        seeds = sorted(first.runs.keys() & group.runs.keys())
        name = f"{group.label} minus {first.label}, seeds {', '.join(map(str, seeds))}"
        pairs = [(first.runs[seed], group.runs[seed]) for seed in seeds]
        for metric in metrics:
            series = [run.get(metric, {}) for pair in pairs for run in pair]
            steps = sorted(set.intersection(*map(set, series)) - {0}) if series else []
            if steps:
                lines.append(f"{name}: {metric} {difference(metric, pairs, steps)}")
    return lines


def difference(metric: str, pairs: list[tuple[Series, Series]], steps: list[int]) -> str:
    """Say how far the second runs of pairs are above the first, over these steps.

    The last ten steps, or the last evaluation, are told apart.
    """
    factor, digits, unit = (100, 1, " points") if "accuracy" in metric else (1, 3, "")
    last = steps[-10:] if metric == "accuracy" else steps[-1:]
    texts = []
    for span in [steps, last] if last != steps else [steps]:
        means = [[fmean(run[metric][step] for step in span) for run in pair] for pair in pairs]
        gaps = [factor * (other - one) for one, other in means]
        where = f"over steps {span[0]} to {span[-1]}" if len(span) > 1 else f"at step {span[0]}"
        texts.append(f"{mean_and_error(gaps, digits)}{unit} {where}")
    return ", ".join(texts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of stapo.py")
    parser.add_argument("--output", type=Path, help="default: RUN/figures, or figures for several")
    args = parser.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):  # as in support/progress.py
        sys.stdout.reconfigure(errors="replace")
    runs = list(filter(is_run, args.runs))
    out = args.output or (runs[0] if len(runs) == 1 else Path()) / "figures"
    out = out.expanduser()  # no shell expands --output=~/x
    others = ", ".join(str(path) for path in args.runs if path not in runs)
    if not runs:
        sys.exit(f"figures.py: no run of stapo.py with a step: {others}")
    if others:
        print(f"left out, because no run of stapo.py with a step: {others}")
    try:
        groups = group_runs(runs)
        out.mkdir(parents=True, exist_ok=True)
        scores = held_out(groups)
        for stem, panels in (FIGURES | {"evaluation": dict(zip(scores, scores))}).items():
            draw_curves(stem, panels, groups, out)
        lines = [line for run in runs for line in changes(run)]
        lines += differences(groups, ["accuracy", *scores])
        print(*lines, f"figures in {out}", sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main()
