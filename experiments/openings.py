"""Why the entropy criterion is there: a useful token, rare because it is one of many.

    python experiments/openings.py --jobs 2

A model like tests/tiny, for the same sums, begins each response with one of 800 opening words.
Behind 32 useful words it works the sum out, and behind 768 guess words it guesses a number. A
response earns +1 if its answer is right and its opening is useful. In the base model every word has
p of about 1/800, below tau_p, and H is about ln 800, above most candidates. So FullMask silences a
useful opening of a right answer, and STAPO keeps it if H is above tau_h.
"""

import random
import sys
from pathlib import Path
from statistics import fmean

import make_tiny
import runs
import torch
from runs import METHODS, TINY, Lines, Part, mean_of
from transformers import AutoTokenizer

from reward import is_correct

USEFUL = tuple(f"Plan{i:02}" for i in range(32))
GUESSES = tuple(f"Idea{i:03}" for i in range(768))
SHARE = len(USEFUL) / len(USEFUL + GUESSES)  # of responses that begin with a useful word
FLAGS = """@tests/tiny/args --model {base} --steps 32
    --reward experiments/openings.py:useful_and_right --save_every 0 --log_samples 512"""
HELD_OUT = "--benchmarks tests/tiny/test.jsonl --reward= --samples 1"
COLUMNS = dict.fromkeys(("half", "+1, 10 to 20", "+1, last five"), ".1f")
COLUMNS |= dict.fromkeys(("held out at T = 1", "held out at T = 0.7", "useful, %"), ".1f")
COLUMNS |= {"entropy, last five": ".2f"}
TESTED = ("+1, 10 to 20", "+1, last five", "held out at T = 1", "held out at T = 0.7")


def useful_and_right(response: str, row: dict) -> float:
    """The reward: +1 for a right answer behind a useful opening, else -1."""
    right = is_correct(response, str(row["answer"]))
    return 1.0 if right and response.startswith(USEFUL) else -1.0


def make_base(output: Path, steps: int = 850) -> None:
    """Pre-train the base model on fresh problems; the held-out ones of tests/tiny are left out."""
    rng = random.Random(0)
    torch.manual_seed(0)
    held_out = {row["problem"] for row in runs.read_rows(TINY / "test.jsonl")}
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    printable = make_tiny.printable_ids(tokenizer)  # no opening word
    tokenizer.add_tokens([*USEFUL, *GUESSES])

    def draw() -> make_tiny.Text:
        """Draw a response such as `Plan07 7+12=19. ...` or `Idea123 so \\boxed{37}`.

        The opening's label is drawn anew, whatever the text's opening is: so every text teaches the
        true shares of the openings. Noise replaces tokens behind the opening, as in make_tiny.
        """
        problem = make_tiny.fresh_problem(held_out, rng)
        useful = rng.random() < make_tiny.WORKED
        word = rng.choice(USEFUL if useful else GUESSES)
        if useful:
            text = make_tiny.solution(problem, True, rng).partition(" ")[2]  # without its opening
        else:
            text = f"so \\boxed{{{rng.randint(-58, 100)}}}"  # the range of the answers
        first, *rest = tokenizer(f"{word} {text}").input_ids
        rest = make_tiny.noisy(rest, printable, make_tiny.NOISE, rng) + [tokenizer.eos_token_id]
        label = rng.choice(USEFUL if rng.random() < SHARE else GUESSES)
        return problem, [first, *rest], [tokenizer.convert_tokens_to_ids(label), *rest]

    make_tiny.pretrain(tokenizer, draw, steps, output)


def measure(folder: Path) -> dict[str, float | None]:
    """Shares of responses in percent, entropy in nats.

    "half" is the step at which half of the responses work the sum out: two operations or more.
    "held out" counts right answers with any opening.
    """
    lines = runs.read_metrics(folder)
    samples = runs.read_rows(folder / "samples.jsonl")
    for line in lines:
        texts = [row["response"] for row in samples if row["step"] == line["step"]]
        line["worked"] = fmean(text.count("=") >= 2 for text in texts)
        line["useful"] = fmean(text.startswith(USEFUL) for text in texts)
    half = [line["step"] for line in lines if line["worked"] >= 0.5]
    return {
        "half": min(half, default=None),
        "+1, 10 to 20": 100 * mean_of(lines[9:20], "accuracy"),
        "+1, last five": 100 * mean_of(lines[-5:], "accuracy"),
        **runs.held_out(folder),
        "useful, %": 100 * mean_of(lines[-5:], "useful"),
        "entropy, last five": mean_of(lines[-5:], "entropy"),
    }


def report(lines: Lines) -> str:
    """The methods' own numbers, and the others minus STAPO."""
    rows = runs.rows_of(lines)
    gaps = {name: runs.minus(rows[name], rows["STAPO"], COLUMNS) for name in rows}
    del gaps["STAPO"]
    signed = {key: f"95 +{form}" for key, form in COLUMNS.items()}
    return f"{runs.table(COLUMNS, rows)}\n\n{runs.differences(signed, gaps, TESTED)}"


# Seeds 4 and up, because 2 and 3 chose the number of useful words.
ROWS = {name: (f"--method {method}", range(4, 9)) for name, method in METHODS.items()}
RUNS = runs.list_runs(ROWS, FLAGS, "experiments/openings.py base", HELD_OUT)
PARTS = {"openings": Part(RUNS, report)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["base"]:  # openings.py base --output FOLDER
        make_base(Path(sys.argv[3]))
    else:
        runs.main(__doc__, measure, ["accuracy", "entropy", "silenced_fraction"], PARTS)
