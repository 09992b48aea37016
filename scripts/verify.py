"""The paper's verifier: a second model judges the responses that the rule of eval.py refused.

    python scripts/verify.py --folder runs/eval-M
    torchrun --nproc-per-node 8 scripts/verify.py --folder runs/eval-M

It reads samples.jsonl of the folder, and adds `verdict` and `reply` to the rows that the rule
refused. verified.md has the results after the verdicts, and how many there are of each kind. The
rule's own results stay in table.md. The prompt is this project's: the paper gives none.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eval as evaluation  # noqa: E402
import rollout  # noqa: E402
from eval import Rows  # noqa: E402
from support import InputError, progress, ranks  # noqa: E402
from support.files import markdown, write_jsonl, write_whole  # noqa: E402
from support.flags import flag, parse_flags  # noqa: E402
from support.ranks import rank, world_size  # noqa: E402

JUDGE = """You are given a mathematics problem, its reference answer and the end of a solution \
that somebody wrote. Judge only whether the final answer of that solution says the same as the \
reference answer; do not solve the problem yourself and do not judge the reasoning. Notation, \
units that go without saying and rounding beyond the reference's precision do not matter. Where \
the reference has several parts, all of them have to agree.

<problem>
{problem}
</problem>
<reference_answer>
{gold}
</reference_answer>
<end_of_solution>
{tail}
</end_of_solution>

A: CORRECT - the final answer agrees with the reference answer.
B: INCORRECT - there is a final answer and it disagrees.
C: INVALID - there is no final answer: the solution breaks off, repeats itself or is no solution.
Reply with one letter, A, B or C, and nothing else."""
TAIL = 2000  # characters of a response that the verifier reads
OPTIONS = {"A": "CORRECT", "B": "INCORRECT", "C": "INVALID"}
VERDICTS = (*OPTIONS.values(), "UNREADABLE")


@dataclass
class VerifyConfig:
    """The flags of verify.py."""

    folder: str = field(metadata={"help": "results of eval.py (its --output)"})
    verifier: str = flag("opencompass/CompassVerifier-3B", "Hub id or local folder (the paper's)")


def parse_verdict(reply: str) -> str:
    r"""Read the verdict at the start of a reply's first line. Returns one of VERDICTS.

    A verdict is a letter, a word or both: `A`, `Correct`, `\boxed{A}`, `A: CORRECT`. After both,
    an explanation may follow that mentions no other verdict. Everything else is UNREADABLE.
    """
    reply = re.sub(r"<think>\s*</think>", "", reply)  # of a verifier whose thinking is switched off
    line = reply.strip().split("\n")[0]
    said = re.sub(r"^\W*(boxed\W+)?|\W+$", "", line)
    for letter, word in OPTIONS.items():
        match = re.fullmatch(rf"{letter}|(?i:{word})|{letter}\W+(?i:{word})\b(.*)", said)
        others = r"\b([ABC]|(?i:correct|incorrect|invalid|not))\b"
        if match and not re.search(others, match[1] or ""):
            return word
    return "UNREADABLE"


def judge(rows: Rows, cfg: VerifyConfig) -> Rows:
    """Judge what the rule refused: {key: {"verdict", "reply"}}. Every rank judges a share."""
    model, tokenizer = evaluation.load(cfg.verifier)
    tokens = tokenizer.added_tokens_decoder.values()
    special = "|".join(re.escape(token.content) for token in tokens if token.special) or "(?!)"
    keys = [key for key, row in rows.items() if not row["correct"]][rank() :: world_size()]
    prompts = []
    for key in keys:
        # A response can spell a special token such as <|im_end|>, which must end no turn.
        tail = rows[key]["response"].strip()[-TAIL:]
        tail = re.sub(special, lambda match: f"{match[0][0]} {match[0][1:]}", tail)
        text = JUDGE.format(problem=rows[key]["question"], gold=rows[key]["gold"], tail=tail)
        # A verifier that thinks would spend its few tokens on that. Other templates ignore it.
        prompts.append(rollout.encode_prompt(tokenizer, text, "", enable_thinking=False))
    verdicts = {}
    sampled = rollout.sample(
        model, tokenizer, prompts, max_new_tokens=16, temperature=0, progress="verdicts"
    )
    for index, reply in sampled:
        verdicts[keys[index]] = {"verdict": parse_verdict(reply.text), "reply": reply.text}
    return evaluation.all_rows(verdicts)


def verdict_table(rows: Rows) -> str:
    """How many verdicts of each kind a benchmark and decoding has, in Markdown."""
    counts: dict[tuple[str, str], Counter] = {}
    for key, row in rows.items():
        counts.setdefault((key.benchmark, key.decoding), Counter())[row.get("verdict")] += 1
    table = [[*name, *(str(count[word]) for word in VERDICTS)] for name, count in counts.items()]
    header = ["benchmark", "decoding", "CORRECT (changed)", *VERDICTS[1:]]
    return markdown([header, *table])


def run(cfg: VerifyConfig) -> None:
    """Judge, write and print. Raises InputError."""
    folder = Path(cfg.folder)
    if not (folder / "scores.json").is_file():
        raise InputError(f"--folder {folder}: holds no results of eval.py (no scores.json)")
    flags = json.loads((folder / "scores.json").read_text("utf-8"))["flags"]
    rows = evaluation.read_responses(folder / "samples.jsonl")
    verdicts = judge(rows, cfg)
    rows = {key: row | verdicts.get(key, {}) for key, row in rows.items()}
    if rank() == 0:
        final = {}
        for key, row in rows.items():
            final[key] = row | {"correct": row["correct"] or row["verdict"] == "CORRECT"}
        known = {benchmark.key: benchmark for benchmark in evaluation.BENCHMARKS}
        names = dict.fromkeys(key.benchmark for key in rows)
        benchmarks = [known.get(n, evaluation.Benchmark(n, n, "", "", 0)) for n in names]
        grader = f"{flags['reward'] or 'rule'}, then {cfg.verifier}"
        scores = evaluation.summarize(final)
        text = evaluation.results_table(flags["model"], grader, benchmarks, scores)
        text += f"\n{evaluation.details_table(benchmarks, scores)}\n{verdict_table(rows)}"
        write_jsonl(folder / "samples.jsonl", [key._asdict() | row for key, row in rows.items()])
        write_whole(folder / "verified.md", text)
        progress.say(f"\n{text}\nresults in {folder}/verified.md")


def main(argv: list[str] | None = None) -> None:
    with ranks.session("verify.py"):
        cfg = parse_flags(VerifyConfig, __doc__.split("\n")[0], argv)
        progress.quiet_libraries()
        progress.report_environment()
        run(cfg)


if __name__ == "__main__":
    main()
