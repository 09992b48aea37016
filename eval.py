"""Evaluate a model as in the paper's results table: six benchmarks, two decodings, mean@N.

    python eval.py --model Qwen/Qwen3-1.7B-Base          # the paper's setup, without its verifier
    python eval.py --model M --benchmarks math500 --limit 50 --samples 1 --decoding training
    torchrun --nproc-per-node 8 eval.py --model M --verifier opencompass/CompassVerifier-3B

An evaluation has five parts, in the order of this file:

1. Load the problems of every benchmark.
2. Sample responses. Each response is written to samples.jsonl when it ends (support/journal.py).
3. Grade all responses with the grader as it is now, even those that were sampled earlier.
4. With --verifier, a second model judges the responses that the rule refused. A stored verdict is
   used again only if the problem, its answer, the response and the judge's prompt are the same.
5. Write scores.json and table.md. With --verifier, write copies that have its name.

After the model is loaded, Ctrl-C, SIGTERM or SIGHUP ends the program within a few tokens, with exit
status 130. After a stop or a crash the same command continues, on any number of ranks.
"""

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

import torch

import rollout
from reward import Reward, extract_answer, is_correct, load_reward, reward_fingerprint
from rollout import Model, Response, Tokenizer, encode_prompt
from support import distributed, progress
from support.distributed import rank, world_size
from support.errors import InputError, RewardError
from support.files import fingerprint, write_whole
from support.flags import flag, parse_flags
from support.journal import Journal, Key, key_of
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
# Temperature and top-p. stapo.py samples with "training", and its checkpoints name that.
DECODINGS = {"training": (1.0, 1.0), "justrl": (0.7, 0.9)}
FILES = (".jsonl", ".json", ".parquet")
Suite = dict[Benchmark, list[dict]]  # the problems of each, as load_problems gives them


@dataclass
class Config:
    """All flags of eval.py. The defaults are the paper's setup (appendix), except the verifier.

    The paper's verifier is `--verifier opencompass/CompassVerifier-3B`. The default is none.
    """

    model: str = field(metadata={"help": "Hub id or local folder of a causal LM"})
    benchmarks: list[str] = flag([b.key for b in BENCHMARKS], "names, or data files")
    decoding: list[str] = flag(
        list(DECODINGS),
        "training (1.0,1.0), justrl (0.7,0.9), or temperature,top-p; 0,1 is greedy",
    )
    data_dir: str = flag("", "read DIR/<name>.jsonl, .json or .parquet (empty: from the Hub)")
    samples: int = flag(0, "responses to each problem (0: the benchmark's own; greedy takes 1)")
    limit: int = flag(0, "number of problems of each benchmark, its first (0: all)")
    max_new_tokens: int = flag(20480, "longest response, in tokens")
    rollout_batch_size: int = flag(256, "most responses decoded at a time on each rank")
    seed: int = flag(0, "seed of the sampling")
    instruction: str = flag(rollout.INSTRUCTION, "text after every problem; may be empty")
    chat_template: str = flag(
        "", "file with a chat template; none: no template; empty: the tokenizer's own"
    )
    reward: str = flag("", "FILE.py:FUNCTION grades benchmarks that are files: above 0 is right")
    verifier: str = flag("", "causal LM that judges what the rule refused (empty: none)")
    output: str = flag("", "directory of the results (empty: runs/eval-<model>)")


def load_benchmarks(
    names: list[str], data_dir: str = "", samples: int = 0, limit: int = 0, whole_rows: bool = False
) -> Suite:
    """Load benchmarks by name or from local files: {benchmark: problems}. Raises InputError.

    With `whole_rows` each problem of a file also has its "row", for a reward of your own.
    """
    known = {benchmark.key: benchmark for benchmark in BENCHMARKS}
    suite: Suite = {}
    for name in names:
        is_file = Path(name).suffix in FILES
        key = Path(name).stem if is_file else name
        if not is_file and key not in known:
            raise InputError(f"benchmark {name}: neither a file nor one of {', '.join(known)}")
        if key in [benchmark.key for benchmark in suite]:
            raise InputError(f"benchmark {name}: there is a {key} before it")
        benchmark = known.get(key, Benchmark(key, key, "", "train", 4))
        source = name if is_file else benchmark.hub
        if data_dir and not is_file:
            paths = [Path(data_dir, key + suffix) for suffix in FILES]
            files = [str(path) for path in paths if path.is_file()]
            if not files:
                raise InputError(f"--data_dir {data_dir}: holds no {key} ({', '.join(FILES)})")
            source = files[0]
        problems = load_problems(source, benchmark.split, whole_rows=whole_rows and is_file)
        suite[benchmark._replace(samples=samples or benchmark.samples)] = problems[: limit or None]
    return suite


def parse_decodings(texts: list[str]) -> dict[str, tuple[float, float]]:
    """Read the values of --decoding: {name: (temperature, top-p)}. Raises InputError.

    A pair that has a name in DECODINGS gets this name.
    """
    names = {pair: name for name, pair in DECODINGS.items()}
    decodings = {}
    for text in texts:
        match = re.fullmatch(r"(\d*\.?\d+),(\d*\.?\d+)", text)
        pair = tuple(map(float, match.groups())) if match else DECODINGS.get(text)
        if pair is None or not 0 < pair[1] <= 1:
            choices = f"{', '.join(DECODINGS)} or temperature,top-p such as 0.6,0.95"
            raise InputError(f"--decoding {text}: must be {choices}")
        decodings[names.get(pair, f"{pair[0]:g},{pair[1]:g}")] = pair
    return decodings


# ----------------------------------------------------------------------------- sampling and grading


class Settings(Protocol):
    """The flags that training and evaluation share: a Config of either has them."""

    instruction: str
    max_new_tokens: int
    rollout_batch_size: int
    seed: int


def problems_by_key(suite: Suite, decodings: dict[str, tuple[float, float]]) -> dict[Key, dict]:
    """Return {key: problem} for every response of an evaluation, in the order of the tables."""
    return {
        Key(benchmark.key, decoding, number, sample): problem
        for decoding, (temperature, _) in decodings.items()
        for benchmark, problems in suite.items()
        for number, problem in enumerate(problems)
        for sample in range(benchmark.samples if temperature else 1)  # greedy ones are all alike
    }


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

    options: those of rollout.sample. A response depends only on its key and the flags, so it does
    not change with the number of ranks or after an interruption. Responses of models that `sample`
    leaves to plain `generate` do change. Every rank must run this to its end. Raises Stopped on
    every rank if a stop was asked for. Raises InputError, which mentions length_flag, on every rank
    if a response can outgrow the model, and InputError if logits are NaN.
    """
    longest = max(distributed.all_list(max(prompts.values(), key=len, default=[])), key=len)
    check_length(model.config, [longest], options["max_new_tokens"], length_flag)
    keys, seeds = list(prompts), [mix_seed(seed, *key) for key in prompts]
    drawn = rollout.sample(model, tokenizer, list(prompts.values()), seed=seeds, **options)
    for ended in stop.together(drawn):
        for index, response in ended:
            key = keys[index]
            yield key, response


def sample_suite(
    model: Model,
    tokenizer: Tokenizer,
    problems: dict[Key, dict],
    decodings: dict[str, tuple[float, float]],
    journal: Journal,
    settings: Settings,
) -> None:
    """Sample the responses that the journal does not hold yet; problems: {key: problem}.

    Raises InputError if the journal holds responses to other problems. Raises Stopped on every rank
    if a stop was asked for.
    """
    sources = {
        key: fingerprint({"problem": problem["problem"], "answer": problem["answer"]})
        for key, problem in problems.items()
    }
    for key in sources.keys() & journal.rows.keys():
        if journal.rows[key].get("fingerprint") != sources[key]:
            what = f"{journal.path}: holds responses to another {key.benchmark}"
            raise InputError(f"{what}; delete it, or name another --output")
    for decoding, (temperature, top_p) in decodings.items():
        share = journal.share({key: sources[key] for key in sources if key.decoding == decoding})
        prompts = {
            key: encode_prompt(tokenizer, problems[key]["problem"], settings.instruction)
            for key in share
        }
        for key, response in respond(
            model,
            tokenizer,
            prompts,
            temperature=temperature,
            top_p=top_p,
            seed=settings.seed,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.rollout_batch_size,
            progress=f"{decoding} decoding",
        ):
            text, gold = response.text, problems[key]["answer"]
            row = {
                "fingerprint": sources[key],
                "gold": gold,
                "answer": extract_answer(text),
                # A reward can fail, so `grade` calls it: there all ranks learn of a failure.
                "correct": None if "row" in problems[key] else is_correct(text, gold),
                "length": len(response.ids),  # tokens, the stop id included
                "truncated": response.truncated,
                "response": text,
            }
            journal.add(key, row)
        journal.merge()


def grade(journal: Journal, problems: dict[Key, dict], reward: Reward) -> dict[Key, dict]:
    """Grade all responses, and return {key: row}; problems: {key: problem}.

    The reward grades problems that have their whole row. Every rank grades a share. Raises
    RewardError and Stopped, each on every rank.
    """
    with contextlib.closing(progress.bar(len(problems), "grades")) as bar:
        for part in journal.parts():
            with distributed.raised_on_all():
                for row in part[rank() :: world_size()]:
                    text, problem = row["response"], problems.get(key_of(row))
                    if not problem or stop.asked:
                        continue
                    if "row" in problem:
                        right = reward(text, problem) > 0
                    else:
                        right = is_correct(text, problem["answer"])
                    graded = row | {"answer": extract_answer(text), "correct": right}
                    if graded != row:
                        journal.add(key_of(row), graded)
            bar.update(len(part))
            stop.leave_if_asked()
    journal.merge()
    return {key: journal.rows[key] for key in problems}


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    suite: Suite,
    path: Path,
    settings: Settings,
    reward: Reward,
) -> dict[str, dict]:
    """Evaluate a model in memory under the training decoding: {benchmark: scores}.

    stapo.py calls it during training. path: the journal's file. Responses that it holds are not
    sampled again. Every rank calls this and gets the scores. Raises RewardError and Stopped, each
    on every rank.
    """
    decodings = {"training": DECODINGS["training"]}
    journal, problems = Journal(path), problems_by_key(suite, decodings)
    sample_suite(model, tokenizer, problems, decodings, journal, settings)
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
# Letter, word and explanation of each: ("A", "CORRECT", "the final answer agrees ...").
OPTIONS = re.findall(r"^([ABC]): (\w+) - (.*)$", JUDGE, re.MULTILINE)
VERDICTS = (*(word for _, word, _ in OPTIONS), "UNREADABLE")


def parse_verdict(reply: str) -> str:
    r"""Read the verdict at the start of a reply's first line. Returns one of VERDICTS.

    A verdict is a letter, a word or both: `A`, `Correct`, `\boxed{A}`, `A: CORRECT`. The
    explanation in JUDGE may follow, also cut off. After both letter and word, any explanation may
    follow that mentions no other verdict. Everything else is UNREADABLE.
    """
    reply = re.sub(r"<think>\s*</think>", "", reply)  # of a verifier whose thinking is switched off
    line = reply.strip().split("\n")[0]
    verdict = r"\W*(?:boxed\W*)?([ABC]\b)?\W*((?i:CORRECT|INCORRECT|INVALID)\b)?\W*"
    match = re.match(verdict, line)
    said = {part.upper() for part in match.groups() if part}
    rest = re.sub(r"\W+$", "", line[match.end() :])
    others = re.search(r"\b([ABC]|(?i:correct|incorrect|invalid|not))\b", rest)
    for letter, word, explanation in OPTIONS:
        explained = explanation.lower().startswith(rest.lower()) or len(said) == 2 and not others
        if said and said <= {letter, word} and explained:
            return word
    return "UNREADABLE"


def judge_texts(
    tokenizer: Tokenizer, problems: dict[Key, dict], samples: dict[Key, dict]
) -> dict[Key, str]:
    """Write the judge's prompt for each response that the rule refused.

    tokenizer: the verifier's; problems: {key: problem}; samples: {key: row}, graded.
    """
    tokens = tokenizer.added_tokens_decoder.values()
    special = "|".join(re.escape(token.content) for token in tokens if token.special) or "(?!)"
    texts = {}
    for key, row in samples.items():
        if not row["correct"]:
            # A response can spell a special token such as <|im_end|>, which must end no turn.
            tail = re.sub(special, lambda match: f"{match[0][0]} {match[0][1:]}", row["response"])
            problem, gold = problems[key]["problem"], problems[key]["answer"]
            texts[key] = JUDGE.format(problem=problem, gold=gold, tail=tail)
    return texts


def verify(
    model: Model, tokenizer: Tokenizer, texts: dict[Key, str], verdicts: Journal, batch_size: int
) -> dict[Key, dict]:
    """Judge the responses of judge_texts with the verifier, and return {key: row of verdicts}.

    A verdict in the journal is used again if it was made from the same text: from this problem, its
    right answer and this response. Raises Stopped on every rank if a stop was asked for.
    """
    sources = {key: fingerprint(text) for key, text in texts.items()}
    prompts = {
        # A verifier that thinks would spend its few tokens on that. Other templates ignore it.
        key: encode_prompt(tokenizer, texts[key], "", enable_thinking=False)
        for key in verdicts.share(sources)
    }
    for key, reply in respond(
        model,
        tokenizer,
        prompts,
        temperature=0,
        max_new_tokens=16,
        batch_size=batch_size,
        length_flag=f"--verifier {model.name_or_path}, max_new_tokens",
        progress="verdicts",
    ):
        row = {"fingerprint": sources[key], **verdict_of(reply.text), "reply": reply.text}
        verdicts.add(key, row)
    verdicts.merge()
    rows = {key: verdicts.rows[key] for key in texts}
    rows = {key: row | verdict_of(row["reply"]) for key, row in rows.items()}
    unreadable = [row["reply"] for row in rows.values() if row["verdict"] == "UNREADABLE"]
    if len(unreadable) > len(rows) / 10:
        what = f"{len(unreadable)} of {len(rows)} verdicts are unreadable and count as wrong"
        progress.log(f"--verifier {model.name_or_path}: {what}; the first is {unreadable[0]!r}")
    return rows


def verdict_of(reply: str) -> dict:
    """Return the verdict of a verifier's reply, as stored."""
    verdict = parse_verdict(reply)
    return {"verdict": verdict, "correct": verdict == "CORRECT"}


def judge(
    problems: dict[Key, dict], samples: dict[Key, dict], folder: Path, cfg: Config
) -> dict[Key, dict]:
    """Load the verifier, judge what the rule refused, and return {key: row of verdicts}.

    The file of the verdicts is named by the verifier and a hash of its weights.
    """
    with distributed.raised_on_all():
        weights = weights_of(cfg.verifier) if rank() == 0 else ""
    weights = distributed.broadcast(weights)
    name = f"verdicts-{file_name(cfg.verifier)}-{fingerprint(weights)[:8]}.jsonl"
    model, tokenizer = load(cfg.verifier)
    texts = judge_texts(tokenizer, problems, samples)
    return verify(model, tokenizer, texts, Journal(folder / name), cfg.rollout_batch_size)


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
        sources = {row["problem"]: row["fingerprint"] for row in rows}
        summary = accuracy(rows) | {
            "problems": len(sources),
            "problems_fingerprint": fingerprint(sources),
            "samples": len({row["sample"] for row in rows}),
            "response_length": fmean(row["length"] for row in rows),
            "truncated_fraction": fmean(row["truncated"] for row in rows),
            "no_box_fraction": fmean(row["answer"] is None for row in rows),
        }
        if verdicts is not None:
            final = [row if row["correct"] else verdicts[key] for key, row in zip(keys, rows)]
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
    ks = sorted({k for *_, summary in summaries for k in summary["pass_at_k"]})
    rows = []
    for benchmark, decoding, summary in summaries:
        chances = {k: f"{chance:.2f}" for k, chance in summary["pass_at_k"].items()}
        row = {
            "benchmark": benchmark.title,
            "decoding": decoding,
            "problems x samples": f"{summary['problems']} x {summary['samples']}",
            "mean@N": progress.with_error(summary, digits=2),
            **{f"pass@{k}": chances.get(k, "") for k in ks},
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
    names = list(dict.fromkeys(name for row in rows for name in row))  # a row may lack some
    return markdown([names, *([row.get(name, "") for name in names] for row in rows)])


def markdown(rows: list[list[str]]) -> str:
    """Write rows of cells, the header first, as a Markdown table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# -------------------------------------------------------------------------------------------- main


def file_name(model: str) -> str:
    """Turn a model's name into a file name."""
    return re.sub(r"[^\w.]+", "-", model).strip("-")


# The names in an output directory. The settings are written before the others.
WRITTEN = "settings.json", "samples*.jsonl", "verdicts-*.jsonl", "scores*.json", "table*.md"


# Flags that change no response. All others must be those of the stored samples.
HARMLESS = {"model", "benchmarks", "decoding", "data_dir", "samples", "limit"}
HARMLESS |= {"rollout_batch_size", "reward", "verifier", "output"}


def check_samples(folder: Path, cfg: Config) -> None:
    """Raise InputError if the directory holds samples of other flags or other weights."""
    flags = {name: value for name, value in asdict(cfg).items() if name not in HARMLESS}
    flags["weights"] = weights_of(cfg.model)
    if cfg.chat_template not in ("", "none"):
        flags["chat_template"] = fingerprint(Path(cfg.chat_template).read_text("utf-8-sig"))
    path = folder / "settings.json"
    if not any(file.stat().st_size > 0 for file in folder.glob("*.jsonl")):
        write_whole(path, json.dumps(flags, indent=2) + "\n")
    try:
        # A flag that is newer than the directory had its default.
        stored = asdict(type(cfg)(cfg.model)) | json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--output {folder}: {error}; name another directory") from error
    # A script that extends this one can have stored a flag of its own.
    for name in [*flags, *sorted(stored.keys() - asdict(cfg).keys() - {"weights"})]:
        if stored.get(name) != flags.get(name):
            was = f"drawn with --{name} {stored.get(name)!r}, not {flags.get(name)!r}"
            was = f"of other weights than --model {cfg.model}" if name == "weights" else was
            raise InputError(f"--output {folder}: holds samples {was}; name another directory")


def load(name: str, chat_template: str = "") -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer: in bfloat16 on this rank's GPU, in float32 on a CPU.

    The ranks of a host take turns. A float32 checkpoint becomes bfloat16 in host memory, which may
    have no room for one copy for each rank.
    """
    device = distributed.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    local_rank, local_ranks = distributed.place_on_host()
    for turn in range(local_ranks):
        if turn == local_rank:
            model = rollout.load_model(name, dtype, device)
        distributed.barrier()
    return model, rollout.load_tokenizer(name, chat_template)


def check_flags(cfg: Config) -> None:
    """Refuse flags that cannot work. Raises InputError naming the flag."""
    least = {"samples": 0, "limit": 0, "max_new_tokens": 1, "rollout_batch_size": 1}
    for name, value in least.items():
        if getattr(cfg, name) < value:
            raise InputError(f"--{name} {getattr(cfg, name)}: must be at least {value}")
    if cfg.reward and not any(Path(name).suffix in FILES for name in cfg.benchmarks):
        raise InputError(f"--reward {cfg.reward}: name a file in --benchmarks, which it grades")
    if cfg.reward and cfg.verifier:
        raise InputError(f"--verifier {cfg.verifier}: judges mathematics, not a --reward")
    rollout.load_tokenizer(cfg.model, cfg.chat_template)  # a wrong name fails here, not after hours
    if cfg.verifier:
        rollout.load_tokenizer(cfg.verifier)


def refuse_other_programs(folder: Path) -> None:
    """Raise InputError if the directory has a settings.json that eval.py did not write."""
    settings = folder / "settings.json"
    if settings.exists() and '"weights"' not in settings.read_text("utf-8"):
        what = "settings.json is another program's; name another directory"
        raise InputError(f"--output {folder}: holds no evaluation: {what}")


def grader_names(cfg: Config) -> list[str]:
    """Say what grades the responses: a name for each line of the results table."""
    names = ["reward" if cfg.reward else "rule"]
    if cfg.reward and any(Path(name).suffix not in FILES for name in cfg.benchmarks):
        names = ["reward (files), rule (others)"]
    return [*names, f"rule, then {cfg.verifier}"] if cfg.verifier else names


def run(cfg: Config) -> None:
    """Sample, grade, judge and print. Raises InputError, or Stopped if a stop was asked for."""
    folder = Path(cfg.output or f"runs/eval-{file_name(cfg.model)}")
    with distributed.raised_on_all():
        check_flags(cfg)
        decodings, reward = parse_decodings(cfg.decoding), load_reward(cfg.reward)
        own_reward = {"reward_fingerprint": reward_fingerprint(cfg.reward)} if cfg.reward else {}
        options = {"whole_rows": bool(cfg.reward)}
        suite = load_benchmarks(cfg.benchmarks, cfg.data_dir, cfg.samples, cfg.limit, **options)
        if rank() == 0:  # alone: a network file system remembers a missing name for a minute
            refuse_other_programs(folder)
    claim(folder)
    with distributed.raised_on_all():
        if rank() == 0:
            check_samples(folder, cfg)
    journal, problems = Journal(folder / "samples.jsonl"), problems_by_key(suite, decodings)
    model, tokenizer = load(cfg.model, cfg.chat_template)
    if not tokenizer.chat_template:
        progress.say(f"{cfg.model} has no chat template: problems go in as plain text")
    stop.listen()
    sample_suite(model, tokenizer, problems, decodings, journal, cfg)
    del model  # its memory is the verifier's
    try:
        samples = grade(journal, problems, reward)
    except RewardError:
        if stop.asked:  # SIGTERM also ends a reward's processes
            raise Stopped from None
        raise
    verdicts = judge(problems, samples, folder, cfg) if cfg.verifier else None
    scores = summarize(samples, verdicts)
    if rank() == 0:
        text = results_table(cfg.model, suite, scores, grader_names(cfg))
        text += "\n" + details_table(suite, scores)
        document = {"flags": asdict(cfg), "scores": scores} | own_reward
        document = json.dumps(document, indent=2) + "\n"
        # The next command replaces table.md. Each verifier's own table stays.
        for name in {"", cfg.verifier and f"-{file_name(cfg.verifier)}"}:
            write_whole(folder / f"table{name}.md", text)
            write_whole(folder / f"scores{name}.json", document)
        print(f"\n{text}")


def main(argv: list[str] | None = None) -> None:
    with distributed.session("eval.py"):
        cfg = distributed.broadcast(parse_flags(Config, __doc__.split("\n")[0], argv))
        progress.quiet_libraries()
        progress.report_environment(weights="bfloat16")
        try:
            run(cfg)
        except Stopped:
            progress.log("eval.py: stopped; the same command continues where it was")
            raise


if __name__ == "__main__":
    main()
