"""The paper's comparison at a tiny scale: every method, several seeds, sweeps of tau_p and q.

    python tests/replicate.py --output runs/replication                 # about an hour on one core
    python tests/replicate.py --output runs/hot --lr 6e-4 --seeds 3     # where training is rough

Runs that are complete are not run again. Prints a table (mean and standard deviation over seeds)
and draws the paper's figures 1 and 3 (methods), 5 (full-mask), 6 (ablations), 7 (tau_p) and q.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("grpo", "20-entropy", "justrl", "stapo", "full-mask", "high-entropy", "random")
TAU_P, Q = (0.0005, 0.01, 0.05), (0.25, 0.5, 1.0)  # beside the defaults, 0.002 and 0.75
ENDS = 10  # steps averaged at each end of a run


def train(folder: Path, steps: int, flags: list[str]) -> Path:
    """Run stapo.py unless `folder` holds all its steps already."""
    log = folder / "metrics.jsonl"
    if not log.exists() or len(log.read_text().splitlines()) < steps:
        command = [sys.executable, "stapo.py", "@tests/tiny/args", "--steps", str(steps), *flags]
        command += ["--save_every", "0", "--resume", "True", "--output", str(folder)]
        print(" ".join(command[1:]), flush=True)
        subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL, stdout=-3)
    return folder


def summary(folders: list[Path]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over runs, in percent or nats, of both ends of the curves."""
    runs = [[json.loads(x) for x in (f / "metrics.jsonl").open()] for f in folders]

    def over(key: str, part: slice, scale: float = 1.0) -> tuple[float, float]:
        values = [statistics.fmean(scale * row[key] for row in run[part]) for run in runs]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    first, last = slice(0, ENDS), slice(-ENDS, None)
    return {
        "accuracy, first": over("accuracy", first, 100),
        "accuracy, last": over("accuracy", last, 100),
        "entropy, first": over("entropy", first),
        "entropy, last": over("entropy", last),
        "silenced, %": over("silenced_fraction", slice(None), 100),
    }


def table(groups: dict[str, list[Path]]) -> str:
    rows = {name: summary(folders) for name, folders in groups.items()}
    columns = list(next(iter(rows.values())))
    lines = [["", "runs", *columns], ["---"] * (len(columns) + 2)]
    for name, found in rows.items():
        cells = [f"{mean:.3g} ± {spread:.2g}" for mean, spread in found.values()]
        lines.append([name, str(len(groups[name])), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/replication"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep_seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    parser.add_argument("--batch_size", type=int, default=16, help="a quarter of it a mini-batch")
    args = parser.parse_args()
    output = args.output.resolve()
    flags = f"--lr {args.lr} --batch_size {args.batch_size} "
    flags += f"--mini_batch_size {args.batch_size // 4}"

    def runs(name: str, seeds: int, extra: str) -> list[Path]:
        return [
            train(output / f"{name}-{s}", args.steps, f"{flags} {extra} --seed {s}".split())
            for s in range(seeds)
        ]

    groups = {m: runs(m, args.seeds, f"--method {m}") for m in METHODS}
    sweep = args.sweep_seeds
    tau_p = {f"tau_p {x}": runs(f"tau_p-{x}", sweep, f"--tau_p {x}") for x in TAU_P if sweep}
    q = {f"q {x}": runs(f"q-{x}", sweep, f"--q {x}") for x in Q if sweep}
    print(table(groups | tau_p | q))
    stapo = groups["stapo"]
    figures = {
        "figure1-methods": [f for m in METHODS[:4] for f in groups[m]],
        "figure5-full-mask": groups["justrl"] + groups["full-mask"] + stapo,
        "figure6-ablation": stapo + groups["high-entropy"] + groups["random"],
        "figure7-tau_p": stapo[:sweep] + [f for x in tau_p.values() for f in x],
        "sweep-q": stapo[:sweep] + [f for x in q.values() for f in x],
    }
    for name, folders in figures.items() if sweep else list(figures.items())[:3]:
        command = [sys.executable, "figures.py", *map(str, folders), "--output"]
        subprocess.run([*command, str(output / name)], cwd=ROOT, check=True, stdout=-3)


if __name__ == "__main__":
    main()
