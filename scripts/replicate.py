"""The paper's comparison at a tiny scale: every method, several seeds, sweeps of tau_p and q.

    python scripts/replicate.py --jobs 2

Runs that are complete are not run again; one that is not begins anew. Prints a table (mean and
standard deviation over seeds) and draws the paper's figures 1, 3 and 5 (methods), 6 (ablations),
7 (tau_p) and the sweep of q.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("grpo", "20-entropy", "justrl", "stapo", "full-mask", "high-entropy", "random")
SWEEPS = {"tau_p": (0.0005, 0.01, 0.05), "q": (0.25, 0.5, 1.0)}  # defaults: 0.002 and 0.75
WHOLE, END = slice(None), slice(-10, None)  # steps averaged
COLUMNS = {  # of the table: key in metrics.jsonl, steps, factor
    "accuracy, whole run": ("accuracy", WHOLE, 100),
    "accuracy, last 10 steps": ("accuracy", END, 100),
    "entropy, last 10 steps": ("entropy", END, 1),
    "silenced, %": ("silenced_fraction", WHOLE, 100),
}


def train(folder: Path, steps: int, flags: list[str]) -> None:
    """Run stapo.py on one thread unless `folder` holds all its steps already."""
    log = folder / "metrics.jsonl"
    if not log.exists() or len(log.read_text().splitlines()) < steps:
        command = [sys.executable, "stapo.py", "@tests/tiny/args", "--steps", str(steps), *flags]
        command += ["--save_every", "0", "--output", str(folder)]
        shutil.rmtree(folder, ignore_errors=True)
        print(" ".join(command[1:]), flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, env=one_thread, **quiet)


def table(groups: dict[str, list[Path]]) -> str:
    """A row for each group of runs: mean ± standard deviation over them, in percent or nats."""
    lines = [["", "runs", *COLUMNS], ["---"] * (len(COLUMNS) + 2)]
    for name, folders in groups.items():
        runs = [[json.loads(row) for row in (f / "metrics.jsonl").open()] for f in folders]
        cells = []
        for key, part, factor in COLUMNS.values():
            values = [factor * statistics.fmean(row[key] for row in run[part]) for run in runs]
            deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3g}{deviation}")
        lines.append([name, str(len(folders)), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tests/tiny")
    parser.add_argument("--output", type=Path, default=Path("runs/replication"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep_seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    output = args.output.resolve()
    plan = [(m, f"--method {m}", args.seeds) for m in args.methods]
    for flag, values in SWEEPS.items():
        plan += [(f"{flag} {x}", f"--{flag} {x}", args.sweep_seeds) for x in values]
    groups: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = []
        for name, flags, seeds in plan:
            groups[name] = [output / f"{name.replace(' ', '-')}-{s}" for s in range(seeds)]
            for seed, folder in enumerate(groups[name]):
                line = f"--model {args.model} --lr {args.lr} {flags} --seed {seed}"
                waiting.append(pool.submit(train, folder, args.steps, line.split()))
        for run in waiting:
            run.result()  # raises what the run raised
    groups = {name: folders for name, folders in groups.items() if folders}
    print(table(groups))
    some = groups.get("stapo", [])[: args.sweep_seeds]
    figures = {
        "methods": [f for m in METHODS[:5] for f in groups.get(m, [])],
        "ablation": [f for m in ("stapo", *METHODS[5:]) for f in groups.get(m, [])],
    }
    for flag, values in SWEEPS.items():
        figures[flag] = some + [f for x in values for f in groups.get(f"{flag} {x}", [])]
    for name, folders in figures.items():
        if len(folders) > len(some):
            command = [sys.executable, "scripts/figures.py", *map(str, folders), "--smooth", "10"]
            command += ["--output", str(output / f"figures-{name}")]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
