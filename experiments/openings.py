"""Why the entropy criterion is there: a useful token, rare because it is one of many.

    python experiments/openings.py --jobs 2            # everything: 45 minutes on two cores
    python experiments/openings.py --short --jobs 2    # one seed of "condition": 15 minutes

A model like tests/tiny, for the same sums, begins each response with one of 800 opening words. 32
of them are useful: the sum is worked out behind them. 768 are followed by a guess. Each word has
p = 0.0011 in the base model, which is below tau_p, and H is 6.7 nats there, which is above most
candidates. So FullMask silences a useful opening in a right answer, and STAPO mostly keeps it.

The set-ups differ in what earns +1, beside a right answer:
- condition: a useful opening.
- worked: two operations are written down, behind any opening.
- plain: nothing.

Makes the base model, then the runs; runs that are whole are not run again. Prints a table for each
set-up and draws openings.png, from what is whole.
"""

import argparse
import json
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))  # --reward loads this file by its path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import make_tiny
import replicate
from replicate import mean_of

import stapo
from reward import is_correct
from rollout import Tokenizer, TokenStats, encode_prompt, load_model, load_tokenizer

TINY = replicate.ROOT / "tests" / "tiny"
USEFUL = tuple(f"Plan{i:02}" for i in range(32))
GUESSES = tuple(f"Idea{i:03}" for i in range(768))
SHARE = len(USEFUL) / len(USEFUL + GUESSES)  # of responses that begin with a useful word
WORKED = 0.75  # share of pre-training texts that work the sum out, to learn the skill from
PRETRAINING, STEPS = 850, 32
SETUPS = {  # a flag of stapo.py
    "condition": "--reward experiments/openings.py:useful_and_right",
    "worked": "--reward experiments/openings.py:worked_and_right",
    "plain": "",
}
METHODS = {
    "STAPO": "stapo",
    "FullMask": "full-mask",
    "JustRL": "justrl",
    "random candidates": "random",
    "highest entropy": "high-entropy",
}
COLOURS = replicate.COLOURS | {"highest entropy": "#E69F00"}


def useful_and_right(response: str, row: dict) -> float:
    """The reward of "condition": +1 for a right answer behind a useful opening, else -1."""
    right = is_correct(response, str(row["answer"]))
    return 1.0 if right and response.startswith(USEFUL) else -1.0


def worked_and_right(response: str, row: dict) -> float:
    """The reward of "worked": +1 for a right answer and two operations, else -1."""
    right = is_correct(response, str(row["answer"]))
    return 1.0 if right and response.count("=") >= 2 else -1.0


# -------------------------------------------------------------------------------- the base models


def make_tokenizer() -> Tokenizer:
    """The one of tests/tiny, and a token for each opening word."""
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.add_tokens([*USEFUL, *GUESSES])
    return tokenizer


def text_row(
    tokenizer: Tokenizer, printable: list[int], problem: str, rng: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Prompt, response and labels of one text of the pre-training, such as

        Plan07 7+12=19. Then 19-5=14. So \\boxed{14}
        Idea123 so \\boxed{37}

    The opening's label is drawn anew, whatever the text's opening is: so every text teaches the
    true shares of the openings. Noise replaces tokens behind the opening, as in make_tiny.
    """
    useful = rng.random() < WORKED
    word = rng.choice(USEFUL if useful else GUESSES)
    if useful:
        text = make_tiny.solution(problem, True, rng).partition(" ")[2]  # without its own opening
    else:
        text = f"so \\boxed{{{rng.randint(-58, 100)}}}"  # the range of the answers
    first, *rest = tokenizer(f"{word} {text}").input_ids
    rest = [rng.choice(printable) if rng.random() < make_tiny.NOISE else i for i in rest]
    rest += [tokenizer.eos_token_id]
    label = rng.choice(USEFUL if rng.random() < SHARE else GUESSES)
    labels = [tokenizer.convert_tokens_to_ids(label), *rest]
    return encode_prompt(tokenizer, problem, ""), [first, *rest], labels


def make_base(folder: Path, steps: int = PRETRAINING) -> None:
    """Pre-train the base model on fresh problems; the held-out ones of tests/tiny are left out."""
    rng = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    held_out = {json.loads(line)["problem"] for line in (TINY / "test.jsonl").open()}
    printable = make_tiny.printable_ids(load_tokenizer(str(TINY)))  # no opening word
    tokenizer = make_tokenizer()

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        while len(rows) < 64:
            problem = make_tiny.problem(rng)
            if problem not in held_out:
                rows += [text_row(tokenizer, printable, problem, rng)]
        return make_tiny.padded(rows, tokenizer.pad_token_id)

    model = make_tiny.make_model(tokenizer)
    make_tiny.pretrain(model, draw, steps, tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def describe_base(folder: Path) -> str:
    """p of the useful words, and H, where the responses to the held-out problems begin."""
    model, tokenizer = load_model(str(folder)), make_tokenizer()
    problems = [json.loads(line)["problem"] for line in (TINY / "test.jsonl").open()]
    prompts = [torch.tensor([encode_prompt(tokenizer, problem, "")]) for problem in problems]
    logp = torch.cat([model(ids).logits[:, -1].log_softmax(dim=1) for ids in prompts])  # (N, V)
    p = logp.exp()[:, tokenizer.convert_tokens_to_ids(list(USEFUL))]  # (N, 32)
    entropy = -(logp.exp() * logp).sum(dim=1).mean()
    return (
        f"a useful word has p {p.mean():.5f} ({p.min():.5f} to {p.max():.5f}), "
        f"{p.sum(dim=1).mean():.4f} in sum, H {entropy:.2f} nats"
    )


# ------------------------------------------------------------------------------------------- runs


def counted(method: stapo.Method) -> stapo.Method:
    """The same method, which writes a line for each mini-batch to the run's openings.jsonl."""
    tokenizer = make_tokenizer()
    useful_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(USEFUL)))
    equals = torch.tensor([i for i in range(len(tokenizer)) if "=" in tokenizer.decode([i])])

    def choose(batch: stapo.Batch, stats: TokenStats, cfg: stapo.Config) -> stapo.Choice:
        choice = method.choose(batch, stats, cfg)
        first = torch.arange(len(batch.ids)), batch.mask.int().argmax(dim=1)  # of each response
        tokens = stats.logp, batch.advantages, batch.mask
        useful = torch.isin(batch.ids[first], useful_ids)  # (B,)
        worked = (torch.isin(batch.ids, equals) & batch.mask).sum(dim=1) >= 2  # both operations
        rare = useful & stapo.spurious_candidates(*tokens, tau_p=cfg.tau_p)[first]
        sets = {"useful": useful, "worked": worked, "rare": rare}
        sets |= {"silenced": rare & ~choice.keep[first]}
        counts = {"responses": len(useful)} | {name: int(rows.sum()) for name, rows in sets.items()}
        with (Path(cfg.output) / "openings.jsonl").open("a") as file:
            file.write(json.dumps(counts) + "\n")
        return choice

    return method._replace(choose=choose, reads="A > 0")  # what is counted needs p under pi_theta


class Run(NamedTuple):
    setup: str  # one of SETUPS
    method: str  # one of METHODS
    seed: int

    def folder(self, output: Path) -> Path:
        return output / f"{self.setup}-{self.method}-{self.seed}".replace(" ", "-")


def make_plan(short: bool) -> list[Run]:
    """A seed of every method before the next seed, so that an interrupted plan has full tables.

    Seeds 2 and 3 chose the number of useful words, so these are 4 and up.
    """
    if short:
        return [Run("condition", method, 4) for method in METHODS]
    plan = [Run("condition", method, seed) for seed in range(4, 9) for method in METHODS]
    for setup in ("worked", "plain"):
        plan += [Run(setup, method, seed) for seed in (4, 5) for method in list(METHODS)[:3]]
    return plan


def train(run: Run, output: Path) -> None:
    """One run from its beginning, evaluated on the held-out problems before and after."""
    folder = run.folder(output)
    shutil.rmtree(folder, ignore_errors=True)
    command = f"""experiments/openings.py train @tests/tiny/args --method {METHODS[run.method]}
        --steps {STEPS} --seed {run.seed} {SETUPS[run.setup]} --save_every 0
        --eval_every {STEPS} --eval_benchmarks tests/tiny/test.jsonl --eval_samples 1"""
    where = ["--model", str(output / "base"), "--output", str(folder)]
    replicate.quiet_run([*command.split(), *where])


def run_all(plan: list[Run], output: Path, jobs: int) -> None:
    """The base model and the runs that are not there yet, `jobs` at a time."""
    left = [run for run in plan if replicate.read_run(run.folder(output), STEPS) is None]
    print(f"{len(plan) - len(left)} of {len(plan)} runs are whole")

    base, partial = output / "base", output / "base.partial"
    if left and not base.exists():
        replicate.quiet_run(["experiments/openings.py", "base", str(partial)])
        partial.rename(base)  # it gets its name when it is whole
    with ThreadPoolExecutor(jobs) as pool:
        trained = pool.map(lambda run: train(run, output), left)
        list(tqdm(trained, total=len(left), unit="run"))


# --------------------------------------------------------------------- numbers, tables and picture

COLUMNS = {
    "half are worked out, step": ".1f",
    "accuracy, 10 to 20": ".1f",
    "21 to 30": ".1f",
    "last five": ".1f",
    "held out": ".1f",
    "useful openings, %": ".1f",
    "entropy, last five": ".2f",
    "rare useful openings": ".1f",
    "silenced": ".1f",
}


def measure(folder: Path, steps: int) -> dict[str, Any] | None:
    """The numbers of a whole run: shares in percent, entropy in nats. None: it is not whole.

    "held out" is the share of right answers to the held-out problems, whatever the reward asks.
    "useful openings" are the share of responses that begin with a useful word, over the last five.
    "rare useful openings" are the ones in right answers with p below tau_p, in steps 1 to 15;
    "silenced" of these were left out of the loss. "lines" has the metrics and counts of each step.
    """
    lines = replicate.read_run(folder, steps)
    if lines is None:
        return None
    counts = [json.loads(line) for line in (folder / "openings.jsonl").open()]
    per_step = len(counts) // steps  # mini-batches
    for i, line in enumerate(lines):
        here = counts[i * per_step : (i + 1) * per_step]
        line |= {key: sum(count[key] for count in here) for key in here[0]}
    last = f"{steps - 4} to {steps}"
    spans = {"accuracy, 10 to 20": "10 to 20", "21 to 30": "21 to 30", "last five": last}
    found = {name: 100 * mean_of(lines, "accuracy", span) for name, span in spans.items()}
    rows = [json.loads(line) for line in (folder / f"evaluations/step_{steps:06}.jsonl").open()]
    found["held out"] = 100 * fmean(is_correct(row["response"], row["gold"]) for row in rows)
    found["useful openings, %"] = 100 * mean_of(lines, "useful", last) / lines[0]["responses"]
    found["entropy, last five"] = mean_of(lines, "entropy", last)
    found["rare useful openings"] = sum(line["rare"] for line in lines[:15])
    found["silenced"] = sum(line["silenced"] for line in lines[:15])
    half = [line["step"] for line in lines if line["worked"] >= line["responses"] / 2]
    found["half are worked out, step"] = min(half, default=None)
    return found | {"lines": lines}


def draw(found: dict[str, dict[str, dict[int, dict]]], file: Path) -> None:
    """Accuracy against the step in each set-up: means, in bands from lowest to highest run."""
    size = (4 * len(found) + 1, 4)
    figure, axes = plt.subplots(1, len(found), figsize=size, layout="constrained", squeeze=False)
    for panel, (setup, methods) in zip(axes[0], found.items()):
        for method, runs in methods.items():
            curves = [[100 * line["accuracy"] for line in run["lines"]] for run in runs.values()]
            columns = list(zip(*curves))
            x, colour = range(1, len(columns) + 1), COLOURS[method]
            panel.plot(x, [fmean(column) for column in columns], color=colour, label=method)
            ends = [min(column) for column in columns], [max(column) for column in columns]
            panel.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)
        panel.set(title=setup, xlabel="step", ylabel="reward +1 (% of responses)", ylim=(0, 100))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=110)


def report(plan: list[Run], output: Path, steps: int = STEPS) -> None:
    """The base model, a table of each set-up and the picture, from what is whole."""
    if (output / "base").exists():
        print(describe_base(output / "base"))
    found = {}
    for run in plan:
        numbers = measure(run.folder(output), steps)
        if numbers:
            found.setdefault(run.setup, {}).setdefault(run.method, {})[run.seed] = numbers
    for setup, methods in found.items():
        print(f"\n{setup}\n\n{replicate.table(methods, COLUMNS)}")
    if found:
        draw(found, output / "openings.png")


def main() -> None:
    if sys.argv[1:2] == ["base"]:
        return make_base(Path(sys.argv[2]))
    if sys.argv[1:2] == ["train"]:
        stapo.METHODS |= {name: counted(stapo.METHODS[name]) for name in METHODS.values()}
        return stapo.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/openings"))
    parser.add_argument("--short", action="store_true", help='one seed of the set-up "condition"')
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    output = args.output.resolve()
    plan = make_plan(args.short)
    try:
        run_all(plan, output, args.jobs)
    finally:
        report(plan, output)


if __name__ == "__main__":
    main()
