"""Evaluate a model as in the paper's results table: six benchmarks, two decodings, mean@N.

    python eval.py --model Qwen/Qwen3-1.7B-Base          # the paper's setup, without its verifier
    python eval.py --model M --benchmarks math500 --limit 50 --samples 1 --decoding training
    torchrun --nproc-per-node 8 eval.py --model M --verifier opencompass/CompassVerifier-3B

An evaluation has five parts, in the order of this file:

1. Load the problems of every benchmark.
2. Sample responses. Each response is written to samples.jsonl when it ends (support/journal.py).
3. Grade all responses with the grader as it is now, even those that were sampled earlier.
4. With --verifier, a second model judges the responses that the rule refused.
5. Write scores.json and table.md.

A stored response has the fingerprint of what it was made from: problem, right answer, prompt,
weights and decoding. A verdict has one of the judge's prompt and the verifier's weights. A row with
another fingerprint is not used. After a stop (Ctrl-C, SIGTERM or SIGHUP, exit status 130) or a
crash the same command continues, on any number of ranks.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

import rollout
from reward import Reward, extract_answer, load_reward, reward_all
from rollout import Model, Response, Tokenizer, encode_prompt
from support import distributed, progress
from support.distributed import rank, world_size
from support.errors import InputError
from support.files import fingerprint, write_whole
from support.flags import flag, parse_flags
from support.journal import Journal, Key
from support.models import check_length, weights_of
from support.problems import load_problems
from support.run_folder import claim
from support.seeds import mix_seed
from support.stop import Stopped, stop


class Benchmark(NamedTuple):
    """A benchmark, and where it is."""

    key: str
    title: str
    hub: str  # dataset id on the Hugging Face Hub
    split: str
    samples: int  # responses to each problem


BENCHMARKS = (
    Benchmark("aime24", "AIME24", "HuggingFaceH4/aime_2024", "train", 32),
    Benchmark("aime25", "AIME25", "math-ai/aime25", "test", 32),
    Benchmark("amc23", "AMC23", "math-ai/amc23", "test", 32),
    Benchmark("math500", "MATH500", "HuggingFaceH4/MATH-500", "test", 4),
    Benchmark("minerva", "Minerva", "math-ai/minervamath", "test", 4),
    Benchmark("olympiadbench", "OlympiadBench", "math-ai/olympiadbench", "test", 4),
)
FILES = (".jsonl", ".json", ".parquet")
Suite = dict[Benchmark, list[dict]]  # the problems of each, as load_problems gives them
Decodings = dict[str, tuple[float, float]]  # temperature and top-p of each
DECODINGS: Decodings = {"training": (1.0, 1.0), "justrl": (0.7, 0.9)}


@dataclass
class EvalConfig:
    """All flags of eval.py. The defaults are the paper's setup (appendix), without its verifier."""

    model: str = field(metadata={"help": "Hub id or local folder of a causal LM"})
    benchmarks: list[str] = flag(
        [b.key for b in BENCHMARKS], "names (from the Hub), or files; DIR/aime24.jsonl is AIME24"
    )
    decoding: list[str] = flag(
        list(DECODINGS), "training (1.0,1.0), justrl (0.7,0.9), or temperature,top-p; 0,1: greedy"
    )
    samples: int = flag(0, "responses to each problem (0: the benchmark's own; greedy takes 1)")
    limit: int = flag(0, "number of problems of each benchmark, its first (0: all)")
    max_new_tokens: int = flag(20480, "longest response, in tokens")
    rollout_batch_size: int = flag(256, "most responses decoded at a time on each rank")
    seed: int = flag(0, "seed of the sampling")
    instruction: str = flag(rollout.INSTRUCTION, "text after every problem; may be empty")
    chat_template: str = flag(
        "", "file with a chat template; none: no template; empty: the tokenizer's own"
    )
    reward: str = flag("", "FILE.py:FUNCTION grades all but the six benchmarks: above 0 is right")
    verifier: str = flag("", "judges what the rule refused (paper: opencompass/CompassVerifier-3B)")
    output: str = flag("", "directory of the results (empty: runs/eval-<model>)")


def load_benchmarks(
    names: list[str], samples: int = 0, limit: int = 0, whole_rows: bool = False
) -> Suite:
    """Load benchmarks by name or from files: {benchmark: problems}. Raises InputError.

    A file with the name of one of the six, such as aime24.jsonl, is that benchmark. With
    `whole_rows` each problem of any other file also has its "row", for a reward of your own.
    """
    known = {benchmark.key: benchmark for benchmark in BENCHMARKS}
    suite: Suite = {}
    for name in names:
        is_file = Path(name).suffix in FILES
        key = Path(name).stem if is_file else name
        if not is_file and key not in known:
            kinds = f"a {', '.join(FILES)} file"
            raise InputError(f"benchmark {name}: neither {kinds} nor one of {', '.join(known)}")
        if key in [benchmark.key for benchmark in suite]:
            raise InputError(f"benchmark {name}: there is a {key} before it")
        benchmark = known.get(key, Benchmark(key, key, "", "train", 4))
        own_rows = whole_rows and key not in known
        source = name if is_file else benchmark.hub
        problems = load_problems(source, benchmark.split, whole_rows=own_rows)
        suite[benchmark._replace(samples=samples or benchmark.samples)] = problems[: limit or None]
    return suite


def parse_decodings(texts: list[str]) -> Decodings:
    """Read the values of --decoding: {value: (temperature, top-p)}. Raises InputError."""
    decodings = {}
    for text in texts:
        match = re.fullmatch(r"(\d*\.?\d+),(\d*\.?\d+)", text)
        pair = tuple(map(float, match.groups())) if match else DECODINGS.get(text)
        if pair is None or not 0 < pair[1] <= 1:
            choices = f"{', '.join(DECODINGS)} or temperature,top-p such as 0.6,0.95"
            raise InputError(f"--decoding {text}: must be {choices}")
        decodings[text] = pair
    return decodings


# ----------------------------------------------------------------------------- sampling and grading


def problems_by_key(
    suite: Suite, decodings: Decodings, tokenizer: Tokenizer, cfg: Any, weights: str = ""
) -> dict[Key, dict]:
    """Return {key: problem} for every response of an evaluation, in the order of the tables.

    cfg: the flags of eval.py or of stapo.py. weights: text that identifies the model's weights.
    During training the name of the journal's file does that.
    """
    problems = {}
    for decoding, pair in decodings.items():
        flags = [*pair, cfg.max_new_tokens, cfg.seed, cfg.instruction]
        for benchmark, rows in suite.items():
            samples = benchmark.samples if pair[0] else 1  # greedy responses are all alike
            for number, row in enumerate(rows):
                # The template and no ids: some templates write the date into the prompt.
                made_from = [row["problem"], row["answer"], tokenizer.chat_template, weights, flags]
                name = benchmark.key, decoding, number
                mark = fingerprint(made_from)
                problems |= {Key(*name, sample, mark): row for sample in range(samples)}
    return problems


def respond(
    model: Model,
    tokenizer: Tokenizer,
    prompts: dict[Key, list[int]],
    *,
    seed: int = 0,
    length_flag: str = "--max_new_tokens",
    **options: Any,
) -> Iterator[tuple[Key, Response]]:
    """Sample a response to each of this rank's prompts, and yield (key, response) when it ends.

    options: those of rollout.sample. A response depends only on its key and the flags, not on the
    number of ranks or an interruption, unless `sample` leaves its model to plain `generate`. Every
    rank must run this to its end. On every rank it raises Stopped if a stop was asked for, and
    InputError, which mentions length_flag, if a response can outgrow the model.
    """
    longest = distributed.all_max(max(map(len, prompts.values()), default=0))
    check_length(model.config, longest, options["max_new_tokens"], length_flag)
    keys, seeds = list(prompts), [mix_seed(seed, *key[:4]) for key in prompts]
    drawn = rollout.sample(model, tokenizer, list(prompts.values()), seed=seeds, **options)
    for ended in stop.together(drawn):
        for index, response in ended:
            yield keys[index], response


def sample_suite(
    model: Model,
    tokenizer: Tokenizer,
    problems: dict[Key, dict],
    decodings: Decodings,
    journal: Journal,
    cfg: Any,
) -> None:
    """Sample the responses that the journal does not hold yet; problems: {key: problem}.

    Raises Stopped on every rank if a stop was asked for.
    """
    for decoding, (temperature, top_p) in decodings.items():
        share = journal.share([key for key in problems if key.decoding == decoding])
        prompts = {
            key: encode_prompt(tokenizer, problems[key]["problem"], cfg.instruction)
            for key in share
        }
        for key, response in respond(
            model,
            tokenizer,
            prompts,
            temperature=temperature,
            top_p=top_p,
            seed=cfg.seed,
            max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.rollout_batch_size,
            progress=f"{decoding} decoding",
        ):
            row = {
                "gold": problems[key]["answer"],
                "answer": extract_answer(response.text),
                "correct": None,  # not graded yet
                "length": len(response.ids),  # tokens, the stop id included
                "truncated": response.truncated,
                "response": response.text,
            }
            journal.add(key, row)
        journal.merge()


def grade(journal: Journal, problems: dict[Key, dict], reward: Reward) -> dict[Key, dict]:
    """Grade all responses, and return {key: row}; problems: {key: problem}.

    Every rank grades a share. Raises RewardError and Stopped, each on every rank.
    """
    share = sorted(problems)[rank() :: world_size()]
    texts = [journal.rows[key]["response"] for key in share]
    rewards = reward_all(reward, texts, [problems[key] for key in share])
    for key, value in zip(share, rewards, strict=True):
        journal.add(key, {"correct": value > 0})
    journal.merge()
    return {key: journal.rows[key] for key in problems}


def evaluate(
    model: Model, tokenizer: Tokenizer, suite: Suite, path: Path, cfg: Any, reward: Reward
) -> dict[str, dict]:
    """Evaluate a model during training, under the training decoding: {benchmark: scores}.

    path: the journal's file. Every rank gets the scores. Raises RewardError and Stopped on each.
    """
    decodings = {"training": DECODINGS["training"]}
    problems = problems_by_key(suite, decodings, tokenizer, cfg)
    journal = Journal(path)
    sample_suite(model, tokenizer, problems, decodings, journal, cfg)
    return summarize(grade(journal, problems, reward))["training"]


# ------------------------------------------------------------------------------------- the verifier

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


def judge(
    model: Model,
    tokenizer: Tokenizer,
    problems: dict[Key, dict],
    samples: dict[Key, dict],
    verdicts: Journal,
    weights: str,
    batch_size: int,
) -> dict[Key, dict]:
    """Judge what the rule refused with the verifier, and return {key: its row}.

    problems: {key: problem}; samples: {key: graded row}; weights: identifies the verifier's. A
    verdict in the journal is used again if it was made from the same prompt by the same weights.
    Raises Stopped on every rank if a stop was asked for.
    """
    tokens = tokenizer.added_tokens_decoder.values()
    special = "|".join(re.escape(token.content) for token in tokens if token.special) or "(?!)"
    names, prompts = {}, {}
    for key in [key for key, row in samples.items() if not row["correct"]]:
        # A response can spell a special token such as <|im_end|>, which must end no turn.
        tail = samples[key]["response"].strip()[-TAIL:]
        tail = re.sub(special, lambda match: f"{match[0][0]} {match[0][1:]}", tail)
        problem, gold = problems[key]["problem"], problems[key]["answer"]
        text = JUDGE.format(problem=problem, gold=gold, tail=tail)
        names[key] = key._replace(fingerprint=fingerprint([text, weights]))
        # A verifier that thinks would spend its few tokens on that. Other templates ignore it.
        prompts[names[key]] = encode_prompt(tokenizer, text, "", enable_thinking=False)
    for name, reply in respond(
        model,
        tokenizer,
        {name: prompts[name] for name in verdicts.share(list(prompts))},
        temperature=0,
        max_new_tokens=16,
        batch_size=batch_size,
        length_flag=f"--verifier {model.name_or_path}, max_new_tokens",
        progress="verdicts",
    ):
        verdict = parse_verdict(reply.text)
        row = {"verdict": verdict, "correct": verdict == "CORRECT", "reply": reply.text}
        verdicts.add(name, row)
    verdicts.merge()
    rows = {key: verdicts.rows[name] for key, name in names.items()}
    unreadable = [row["reply"] for row in rows.values() if row["verdict"] == "UNREADABLE"]
    if len(unreadable) > len(rows) / 10:
        what = f"{len(unreadable)} of {len(rows)} verdicts are unreadable and count as wrong"
        progress.log(f"--verifier {model.name_or_path}: {what}; the first is {unreadable[0]!r}")
    return rows


# ------------------------------------------------------------------------------------------ scores


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance in percent that of k samples at least one is right.

    The k samples are drawn from n samples, of which `right` are right. The chance is
    1 - C(n - right, k) / C(n, k). It is rounded once: with k = 1 it equals 100 * right / n.
    """
    subsets = math.comb(n, k)
    return 100 * (subsets - math.comb(n - right, k)) / subsets


def accuracy(rows: list[dict]) -> dict:
    """Compute mean@N, its standard error over problems, and pass@k, all in percent.

    rows: N for each problem of one benchmark and decoding, problem by problem. With a single
    problem the standard error is None.
    """
    problems = [list(group) for _, group in itertools.groupby(rows, lambda row: row["problem"])]
    n = len(problems[0])
    counts = [sum(row["correct"] for row in group) for group in problems]
    rates = [100 * count / n for count in counts]
    ks = sorted({2**i for i in range(n.bit_length())} | {n})  # 1, 2, 4, ... and N
    return {
        "mean": fmean(rates),
        "standard_error": stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else None,
        "pass_at_k": {k: fmean(pass_at_k(n, count, k) for count in counts) for k in ks},
    }


Scores = dict[str, dict[str, dict]]  # {decoding: {benchmark: summary}}


def summarize(samples: dict[Key, dict], verdicts: dict[Key, dict] | None = None) -> Scores:
    """Summarize every benchmark: accuracies in percent, lengths in tokens, fractions 0 to 1."""
    scores: Scores = {}
    for (name, decoding), group in itertools.groupby(samples.items(), lambda item: item[0][:2]):
        keys, rows = zip(*group)
        summary = accuracy(rows) | {
            "problems": len({key.problem for key in keys}),
            "samples": len({key.sample for key in keys}),
            "response_length": fmean(row["length"] for row in rows),
            "truncated_fraction": fmean(row["truncated"] for row in rows),
            "no_box_fraction": fmean(row["answer"] is None for row in rows),
        }
        if verdicts is not None:
            final = [row | verdicts.get(key, {}) for key, row in zip(keys, rows)]
            counts = Counter(row["verdict"] for row in final if "verdict" in row)
            summary["verified"] = accuracy(final) | {word: counts[word] for word in VERDICTS}
        scores.setdefault(decoding, {})[name] = summary
    return scores


# ------------------------------------------------------------------------------------------ tables


def results_table(model: str, suite: Suite, scores: Scores, graders: list[str]) -> str:
    """Write the paper's table in Markdown: mean@N in percent, later decodings in brackets.

    graders: a line's name each. The second line has the means after the verifier's verdicts.
    """

    def cell(values: list[str]) -> str:
        return values[0] + (f" ({', '.join(values[1:])})" if values[1:] else "")

    rows = [["model", "decoding", "graded by", *(b.title for b in suite), "mean"]]
    for number, grader in enumerate(graders):
        lines = []  # for each decoding: the mean of each benchmark, and the mean of these
        for by_benchmark in scores.values():
            summaries = [by_benchmark[benchmark.key] for benchmark in suite]
            means = [(s["verified"] if number == 1 else s)["mean"] for s in summaries]
            lines.append([f"{mean:.2f}" for mean in [*means, fmean(means)]])
        cells = [cell(list(column)) for column in zip(*lines, strict=True)]
        rows.append([model, cell(list(scores)), grader, *cells])
    return markdown(rows)


def details_table(suite: Suite, scores: Scores) -> str:
    """Write the details in Markdown: a row for each benchmark and decoding."""
    summaries = [(b, name, scores[name][b.key]) for name in scores for b in suite]
    rows = []
    for benchmark, decoding, summary in summaries:
        row = {
            "benchmark": benchmark.title,
            "decoding": decoding,
            "problems x samples": f"{summary['problems']} x {summary['samples']}",
            "mean@N": progress.with_error(summary, digits=2),
            "pass@N": f"{summary['pass_at_k'][summary['samples']]:.2f}",
            "tokens": f"{summary['response_length']:.1f}",
            "truncated": f"{summary['truncated_fraction']:.1%}",
            "no box": f"{summary['no_box_fraction']:.1%}",
        }
        if "verified" in summary:
            verified = summary["verified"]
            row["mean@N with verifier"] = progress.with_error(verified, digits=2)
            row["CORRECT (changed)"] = str(verified["CORRECT"])
            row |= {verdict: str(verified[verdict]) for verdict in VERDICTS[1:]}
        rows.append(row)
    return markdown([list(rows[0]), *(list(row.values()) for row in rows)])


def markdown(rows: list[list[str]]) -> str:
    """Write rows of cells, the header first, as a Markdown table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# -------------------------------------------------------------------------------------------- main


def load(name: str, chat_template: str = "") -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer: in bfloat16 on this rank's GPU, in float32 on a CPU."""
    device = distributed.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return rollout.load_model(name, dtype, device), rollout.load_tokenizer(name, chat_template)


def defaults_of_run(given: dict[str, Any]) -> dict[str, Any]:
    """Return the instruction, the reward and the length of the run that a checkpoint is from."""
    file = Path(given["model"], "..", "..", "config.json")
    stored = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    names = {"instruction", "reward", "max_new_tokens"} & stored.keys() - given.keys()
    if taken := {name: stored[name] for name in sorted(names)}:
        words = " ".join(f"--{name}={value!r}" for name, value in taken.items())
        progress.log(f"eval.py: {words}, as in its run; give a base model the same flags")
    return taken


def check_flags(cfg: EvalConfig) -> None:
    """Refuse flags that cannot work. Raises InputError naming the flag."""
    least = {"samples": 0, "limit": 0, "max_new_tokens": 1, "rollout_batch_size": 1}
    for name, value in least.items():
        if getattr(cfg, name) < value:
            raise InputError(f"--{name} {getattr(cfg, name)}: must be at least {value}")
    if cfg.verifier:  # a wrong name fails here, not after hours
        rollout.load_tokenizer(cfg.verifier)


def run(cfg: EvalConfig) -> None:
    """Sample, grade, judge and print. Raises InputError, or Stopped if a stop was asked for."""
    with distributed.raised_on_all():
        check_flags(cfg)
        decodings, reward = parse_decodings(cfg.decoding), load_reward(cfg.reward)
        suite = load_benchmarks(cfg.benchmarks, cfg.samples, cfg.limit, bool(cfg.reward))
    name = re.sub(r"[^\w.]+", "-", cfg.model).strip("-")
    folder = Path(cfg.output or f"runs/eval-{name}")
    if distributed.on_rank_0((folder / "config.json").exists):
        raise InputError(f"--output {folder}: holds a run or a model; name another directory")
    claim(folder)
    model, tokenizer = load(cfg.model, cfg.chat_template)
    weights = distributed.on_rank_0(lambda: weights_of(cfg.model))
    problems = problems_by_key(suite, decodings, tokenizer, cfg, weights)
    journal = Journal(folder / "samples.jsonl")
    stop.listen()
    sample_suite(model, tokenizer, problems, decodings, journal, cfg)
    del model  # its memory is the verifier's
    samples = grade(journal, problems, reward)
    graders, verdicts = [f"{cfg.reward} (the six: rule)" if cfg.reward else "rule"], None
    if cfg.verifier:
        graders += [f"{graders[0]}, then {cfg.verifier}"]
        model, tokenizer = load(cfg.verifier)
        stored, batch_size = Journal(folder / "verdicts.jsonl"), cfg.rollout_batch_size
        weights = distributed.on_rank_0(lambda: weights_of(cfg.verifier))
        verdicts = judge(model, tokenizer, problems, samples, stored, weights, batch_size)
    scores = summarize(samples, verdicts)
    if rank() == 0:
        text = results_table(cfg.model, suite, scores, graders)
        text += "\n" + details_table(suite, scores)
        write_whole(folder / "table.md", text)
        document = {"flags": asdict(cfg), "scores": scores}
        write_whole(folder / "scores.json", json.dumps(document, indent=2) + "\n")
        progress.say(f"\n{text}\nresults in {folder}")


def main(argv: list[str] | None = None) -> None:
    with distributed.session("eval.py"):
        cfg = parse_flags(EvalConfig, __doc__.split("\n")[0], argv, defaults=defaults_of_run)
        progress.quiet_libraries()
        progress.report_environment()
        try:
            run(cfg)
        except Stopped:
            progress.log("eval.py: stopped; the same command continues where it was")
            raise


if __name__ == "__main__":
    main()
