"""What a run keeps and checks: flags, its directory, metrics, samples, dumps, checkpoints, stops.

Nothing here decides what is learnt; Algorithm 1 is in stapo.py. Read from top to bottom: flags,
the run directory and its records, metrics, checkpoints, the wish to stop.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from tqdm import tqdm
from transformers.utils import logging

from rollout import (
    Episode,
    Model,
    Response,
    Tokenizer,
    encode_prompt,
    load_problems,
    to_text,
)
from support import distributed
from support.distributed import (
    Parser,
    all_max,
    all_sum,
    barrier,
    broadcast,
    rank,
    world_size,
)
from support.dumps import DumpedResponse, make_dump
from support.errors import InputError, RewardError

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# ------------------------------------------------------------------------------------------ flags


# What a resumed run may change: how long, how often and with how much memory, not what it computes.
RESUMABLE = set(
    "output resume steps save_every save_minutes keep_last dump_every eval_every eval_benchmarks "
    "log_samples rollout_batch_size tokens_per_micro_batch gradient_checkpointing threads".split()
)


def parse_flags(config: type, description: str, argv: list[str] | None) -> Any:
    """A command line, with arguments files in it, as an instance of the dataclass `config`.

    With --resume every flag that is not given comes from the run's config.json. Raises InputError
    where a given flag contradicts it, or where there is no run.
    """
    parser = Parser(config, description=description, fromfile_prefix_chars="@")
    cfg = config(**vars(parser.parse_args(argv)))
    if not cfg.resume:
        return cfg
    if not cfg.output:
        raise InputError("--resume: name the run to continue with --output")
    absent = object()  # what is there before parsing is not overwritten by a default
    given = argparse.Namespace(**dict.fromkeys(asdict(cfg), absent))
    given = vars(parser.parse_args(argv, given))
    given = {name: value for name, value in given.items() if value is not absent}
    try:
        held = json.loads((Path(cfg.output) / "config.json").read_text())
        held = asdict(config(**{name: held[name] for name in asdict(cfg) if name in held}))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--resume: --output {cfg.output} holds no run to continue") from error
    for name in sorted(given.keys() - RESUMABLE):
        if held[name] != given[name]:
            began = f"began with --{name} {held[name]}"
            raise InputError(f"--{name} {given[name]}: {cfg.output} {began}, and --resume keeps it")
    return config(**held | given)


def check_flags(cfg: Any) -> None:
    """Refuse flags that cannot work; raises InputError naming the flag."""

    def need(name: str, holds: bool, why: str) -> None:
        if not holds:
            raise InputError(f"--{name} {getattr(cfg, name)}: {why}")

    need("q", 0 <= cfg.q <= 1, "a quantile is between 0 and 1")
    need("tau_p", 0 <= cfg.tau_p <= 1, "a probability is between 0 and 1")
    need("group_size", cfg.group_size >= 2, "an advantage needs at least 2")
    v1 = cfg.quantile_over == "all"
    need("quantile_over", cfg.method == "stapo" or not v1, "a definition of --method stapo alone")
    default_beta = cfg.beta == type(cfg).beta
    need("beta", cfg.method == "grpo" or default_beta, "only --method grpo has a KL term")
    sizes = "steps batch_size mini_batch_size max_new_tokens rollout_batch_size keep_last"
    for name in (*sizes.split(), "tokens_per_micro_batch"):
        need(name, getattr(cfg, name) >= 1, "has to be at least 1")
    rates = "lr warmup_steps weight_decay eps_low eps_high beta save_every save_minutes eval_every"
    for name in (*rates.split(), "dump_every", "log_samples", "threads"):
        need(name, 0 <= getattr(cfg, name) < math.inf, "has to be at least 0")
    need("grad_clip", cfg.grad_clip > 0, "has to be above 0")
    whole = cfg.batch_size % cfg.mini_batch_size == 0
    need("batch_size", whole, f"not a multiple of --mini_batch_size {cfg.mini_batch_size}")
    whole = cfg.mini_batch_size % world_size() == 0
    need("mini_batch_size", whole, f"not a multiple of {world_size()} ranks")


# ----------------------------------------------------------------------- what a run begins with


def training_problems(cfg: Any, tokenizer: Tokenizer) -> list[dict]:
    """[{"problem", "answer", "prompt_ids"}] with the prompts that are too long dropped aloud."""
    progress = f"reading {cfg.data}" if rank() == 0 else None
    problems = load_problems(cfg.data, whole_rows=bool(cfg.reward), progress=progress)
    for problem in distributed.progress(problems, "encoding prompts"):
        problem["prompt_ids"] = encode_prompt(tokenizer, problem["problem"], cfg.instruction)
    kept = [p for p in problems if 0 < len(p["prompt_ids"]) <= cfg.max_prompt_tokens]
    if not kept:
        raise InputError(f"--max_prompt_tokens {cfg.max_prompt_tokens}: every prompt is longer")
    if rank() == 0:
        dropped = len(problems) - len(kept)
        print(f"{cfg.data}: {len(kept)} problems, {dropped} over --max_prompt_tokens dropped")
    return kept


def load_policies(
    cfg: Any, checkpoint: Path | None
) -> tuple[Model, Model | None, Optimizer | None]:
    """The policy, the reference of GRPO's KL, and AdamW; of a checkpoint where there is one."""
    model = distributed.load_policy(str(checkpoint or cfg.model))
    with_kl = cfg.method == "grpo" and cfg.beta > 0
    reference = distributed.load_policy(cfg.model) if with_kl else None
    logging.disable_progress_bar()  # the bars of loading are welcome, those of saving are not
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cfg.lr == 0:  # measures the model and leaves it as it is
        return model, reference, None
    options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": model.device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    if checkpoint:
        load_optimizer(checkpoint, model, optimizer)
    return model, reference, optimizer


# --------------------------------------------------------------------- a run and its directory


class Run:
    """A run directory, and what belongs to a run beside its model: step, records, times, saving.

    `checkpoint` is the one to continue from, or None. Raises InputError where the directory
    cannot be written or holds a run that was not asked for.
    """

    def __init__(self, cfg: Any):
        output = cfg.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.method}"
        stop.listen()
        self.cfg = cfg
        self.folder, self.checkpoint = open_folder(output, cfg.resume, asdict(cfg))
        self.step = self.finished = self.saved = step_of(self.checkpoint)
        self.saved_at = time.time()
        self.memory: list[torch.Tensor] = []  # what is trained, after step `finished` (remember)
        self.metrics: dict[str, Any] = {}  # of the current step
        self.failures = 0  # updates in a row that were not finite
        self.counted = Counter()  # tokens, and silenced ones, since the start of this process
        self.warned = False

    def steps(self) -> Iterator[int]:
        """The steps that are left, until one is the last or a stop was asked for."""
        total, name = self.cfg.steps, self.cfg.method
        self.bar = tqdm(total=total, initial=self.step, desc=name, disable=rank() > 0)
        while self.step < total and not stop.asked_of_any():
            self.step += 1
            self.metrics, self.started = {"step": self.step}, time.time()
            yield self.step

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps (0: never) happens in this one."""
        return every > 0 and self.step % every == 0

    def write(self, *records: dict[str, Any]) -> None:
        """Add to the metrics line of this step."""
        for record in records:
            self.metrics |= record

    def stopwatch(self, name: str) -> None:
        """Add the seconds since the step began or the stopwatch was last read."""
        now = time.time()
        self.metrics[name] = now - self.started
        self.started = now

    def check_finite(self, finite: bool) -> None:
        self.failures = 0 if finite else self.failures + 1
        if self.failures == 3:
            raise InputError(f"step {self.step}: three updates in a row were not finite")

    def dump(self, episodes: list[Episode]) -> None:
        """Write dumps/step_N.json for figures.py; form_mask has set `keep` and `tau_h`."""
        dump = make_dump(
            [dumped(e, self.cfg.tau_p) for e in episodes if e.advantage > 0],
            step=self.step,
            method=self.cfg.method,
            tau_p=self.cfg.tau_p,
            all_tokens=sum(len(e.response.ids) for e in episodes),
            seed=self.cfg.seed,
            decode=functools.partial(to_text, self.tokenizer),
            likeliest=self.model.likeliest,
        )
        distributed.reshard(self.model)
        if rank() == 0:
            (self.folder / "dumps").mkdir(exist_ok=True)
            write_whole(self.folder / "dumps" / f"step_{self.step:06d}.json", json.dumps(dump))

    def end_step(self, episodes: list[Episode]) -> None:
        """Append this step to metrics.jsonl and samples.jsonl, move the bar, show a sample."""
        line = self.metrics
        seconds = line["rollout_seconds"] + line["update_seconds"]
        line["tokens_per_second"] = line["tokens"] / seconds
        line["silenced_fraction"] = line["silenced"] / line["tokens"]
        line["peak_memory_gb"] = peak_memory_gb()
        self.counted.update({key: line[key] for key in ("tokens", "silenced")})
        self.finished = self.step
        if rank() > 0:
            return
        samples = [sample_row(e, self.step) for e in episodes[: self.cfg.log_samples]]
        for name, rows in (("samples.jsonl", samples), ("metrics.jsonl", [nan_to_null(line)])):
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.bar.update()
        keys = ("accuracy", "entropy", "silenced_fraction")
        self.bar.set_postfix({key.split("_")[0]: f"{line[key]:.2g}" for key in keys})
        if self.step % 10 == 1:
            print_sample(episodes[0], self.step)
        if abs(line["sampling_z"]) > 6 and abs(line["sampling_gap"]) > 0.005 and not self.warned:
            tqdm.write(SAMPLING_WARNING.format(**line), file=sys.stderr)
            self.warned = True

    @contextlib.contextmanager
    def holding(
        self, model: Model, optimizer: Optimizer | None, tokenizer: Tokenizer
    ) -> Iterator[None]:
        """Around the loop over steps(): saves at its end, after a stop and after a failing reward.

        A stop can come amid the updates of a step; these are undone.
        """
        self.model, self.optimizer, self.tokenizer = model, optimizer, tokenizer
        try:
            yield
        except Interrupted:
            self.go_back()
        except RewardError:
            self.save()  # no weight has changed since: rewards come before updates
            raise
        self.save()
        self.close()

    def save_if_due(self) -> None:
        """Save every so many steps, and after so many minutes, whichever comes first."""
        minutes = (time.time() - self.saved_at) / 60
        late = 0 < self.cfg.save_minutes <= minutes
        if self.is_due(self.cfg.save_every) or all_max(int(late)):
            self.save()
        elif self.optimizer:
            self.remember()

    def save(self) -> None:
        """A checkpoint of the last finished step, unless it exists or nothing is trained."""
        if self.optimizer and self.finished > self.saved:
            held = self.model, self.optimizer, self.tokenizer
            save_checkpoint(self.folder, self.finished, *held, self.cfg.keep_last)
            self.saved, self.saved_at = self.finished, time.time()

    def trained(self) -> list[torch.Tensor]:
        """Weights and AdamW's moments; under FSDP2 this rank's shards of them."""
        tensors = list(self.model.parameters())
        for state in self.optimizer.state.values():
            tensors += state.values()
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy what is trained to host memory: the next step may be stopped amid its updates."""
        tensors = self.trained()
        if len(self.memory) != len(tensors):  # AdamW has no moments before its first step
            self.memory = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        for copy, tensor in zip(self.memory, tensors, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def go_back(self) -> None:
        """Undo the updates of a step that was stopped; without a step to save, nothing needs it."""
        if self.optimizer and self.finished > self.saved:
            distributed.reshard(self.model)
            self.model.zero_grad()
            if len(self.memory) < len(self.trained()):  # there were no moments then
                self.optimizer.state.clear()
            for copy, tensor in zip(self.memory, self.trained(), strict=True):
                tensor.copy_(copy)

    def close(self) -> None:
        """Say how to continue the run or what it measured."""
        self.bar.close()
        if rank() > 0:
            return
        if self.finished < self.cfg.steps and self.saved == self.finished:
            again = f"continue with --resume --output {self.folder}"
            print(f"stopped after step {self.finished}; {again}")
        if self.finished == self.cfg.steps:
            print(f"{self.finished} steps done, in {self.folder}")
        if self.cfg.lr == 0 and self.counted:
            silenced, tokens = self.counted["silenced"], self.counted["tokens"]
            print(f"{silenced} of {tokens} tokens are spurious: {100 * silenced / tokens:.4f} %")


def open_folder(output: str, resume: bool, config: dict) -> tuple[Path, Path | None]:
    """The run directory and the checkpoint to continue from, if any; raises InputError.

    Writes config.json, and cuts metrics.jsonl and samples.jsonl back to the checkpoint: the steps
    after it are done again. Where that would leave nothing, it refuses.
    """
    run = Path(broadcast(output))
    saved = checkpoints(run)
    log = run / "metrics.jsonl"
    begun = log.exists() and log.stat().st_size > 0
    if not resume and (saved or begun):
        raise InputError(f"--output {run} holds a run: add --resume or name another directory")
    if resume and begun and not saved:
        raise InputError(f"--resume: {run} holds no checkpoint; start anew in another --output")
    barrier()
    checkpoint = saved[-1] if saved else None
    if rank() == 0:
        try:
            run.mkdir(parents=True, exist_ok=True)
            write_whole(run / "config.json", json.dumps(config, indent=2) + "\n")
            for name in ("metrics.jsonl", "samples.jsonl"):
                cut_back(run / name, step_of(checkpoint))
        except OSError as error:
            raise InputError(f"--output {run}: cannot be written ({error.strerror})") from error
        if resume:
            print(f"resuming {run} from step {step_of(checkpoint)}")
    return run, checkpoint


def cut_back(file: Path, step: int) -> None:
    """Leave the rows of a .jsonl file up to a step; a line that a crash tore goes too."""
    kept = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        try:
            kept += [line.decode() + "\n"] if json.loads(line)["step"] <= step else []
        except ValueError:
            continue
    write_whole(file, "".join(kept))


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a crash or a full disk leaves the old one or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(file)


SAMPLING_WARNING = (
    "step {step}: the sampler does not draw from the policy that is trained: -ln p of the sampled "
    "tokens is {sampling_gap:+.4f} nats from the entropy on average (z = {sampling_z:+.1f}). "
    "Look for a temperature, top-p, top-k, stale weights or another precision."
)


def dumped(e: Episode, tau_p: float) -> DumpedResponse:
    """Silenced are low-probability tokens alone, also for methods that drop others."""
    p = e.logp.exp()
    silenced = (p < tau_p) & ~e.keep
    texts, ids = (
        (e.problem["problem"], e.problem["answer"]),
        (e.response.prompt_ids, e.response.ids),
    )
    return DumpedResponse(*texts, *ids, e.advantage, silenced, p, e.entropy, e.collision, e.tau_h)


def sample_row(e: Episode, step: int) -> dict[str, Any]:
    """A line of samples.jsonl."""
    row = {"step": step, "problem": e.problem["problem"], "gold": e.problem["answer"]}
    return row | {"response": e.response.text, "reward": e.reward, "advantage": e.advantage}


def print_sample(episode: Episode, step: int) -> None:
    """A response for the reader's eye, with its problem and its verdict."""
    verdict = "right" if episode.reward > 0 else "wrong"
    text = episode.response.text.strip()
    text = text if len(text) <= 600 else f"{text[:300]} [...] {text[-300:]}"
    problem, answer = episode.problem["problem"], episode.problem["answer"]
    verdict += f" (the answer is {answer})" if answer else ""
    tqdm.write(f"--- step {step}, {verdict}: {problem}\n{text}")


# ---------------------------------------------------------------------------------------- metrics


def grade(
    reward: Callable[[str, dict], float], responses: list[Response], problems: list[dict]
) -> list[float]:
    """The reward of each response; an error on any rank is raised on all of them."""
    rewards, failure = [], None
    try:
        rewards = [reward(r.text, p) for r, p in zip(responses, problems, strict=True)]
    except RewardError as error:
        failure = str(error)
    failures = [failure for failure in distributed.gather(failure) if failure]
    if failures:
        raise RewardError(failures[0])
    return rewards


def rollout_metrics(episodes: list[Episode], cfg: Any) -> dict[str, float | None]:
    """Under pi_old, over every response of every rank; the README defines each key."""
    right = [e for e in episodes if e.reward > 0]
    low_prob = sum(int((e.old_logp.exp() < cfg.tau_p).sum()) for e in right)
    sums = {"responses": len(episodes), "right": len(right), "low_prob": low_prob}
    sums["tokens"] = sum(len(e.response.ids) for e in episodes)
    sums["right_tokens"] = sum(len(e.response.ids) for e in right)
    sums["truncated"] = sum(e.response.truncated for e in episodes)
    sums["reward"] = sum(e.reward for e in episodes)
    sums["zero_advantage"] = sum(e.advantage == 0 for e in episodes)
    total = all_sum(sums)
    count, right_tokens = total["responses"], total["right_tokens"]
    return {
        "reward": total["reward"] / count,
        "accuracy": total["right"] / count,
        "zero_advantage_fraction": total["zero_advantage"] / count,
        "low_prob_fraction": total["low_prob"] / right_tokens if right_tokens else None,
        "tokens": int(total["tokens"]),
        "response_length": total["tokens"] / count,
        "truncated_fraction": total["truncated"] / count,
    }


def update_metrics(totals: list[dict]) -> dict[str, float | None]:
    """The sums of a step's mini-batches -> their share of the metrics line."""
    total = {key: sum(t[key] for t in totals) for key in totals[0]}
    forwarded = total.get("tokens", 0)

    def per_token(key: str) -> float | None:
        return total[key] / forwarded if forwarded else None

    def mean(key: str) -> float | None:
        return total[key] / len(totals) if key in total else None

    return {
        "candidates": int(total["candidates"]),
        "silenced": int(total["silenced"]),
        "clip_low": per_token("clip_low"),
        "clip_high": per_token("clip_high"),
        "ratio_mean": per_token("ratio_sum"),
        "loss": mean("loss"),
        "grad_norm": mean("grad_norm"),
        "skipped_updates": len(totals) - total["finite"],
    }


def peak_memory_gb() -> float:
    """The GPU's peak since the start, or that of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak / 1e6  # bytes there, KiB on Linux


def nan_to_null(metrics: dict) -> dict:
    """JSON knows no NaN or infinity: they become null."""
    unusable = [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]
    return metrics | dict.fromkeys(unusable)


# ------------------------------------------------------------------------------------ checkpoints


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run directory, oldest first."""
    return sorted(path for path in run.glob("checkpoints/step_*") if path.suffix != ".partial")


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.removeprefix("step_")) if checkpoint else 0


def save_checkpoint(
    run: Path,
    step: int,
    model: Model,
    optimizer: Optimizer | None,
    tokenizer: Tokenizer,
    keep_last: int,
) -> None:
    """Write checkpoints/step_N: weights and tokenizer in HF format, `trainer/` for the optimiser.

    It is written under another name and renamed when whole, so that a crash leaves no half of
    one; the oldest are deleted after that. Any number of ranks can continue from it: data order,
    sampling and noise are functions of the seed and the step, so there is no other state.
    """
    folder = run / "checkpoints" / f"step_{step:06d}"
    partial = folder.with_suffix(".partial")
    try:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)  # a collective; rank 0 gets them
        if rank() == 0:
            head = model.get_output_embeddings()
            if head.weight is model.get_input_embeddings().weight:  # tied: one tensor, saved once
                weights.pop(next(n for n, m in model.named_modules() if m is head) + ".weight")
            model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
        moments = get_optimizer_state_dict(model, optimizer)
        dcp.save(moments, checkpoint_id=partial / "trainer", no_dist=not dist.is_initialized())
        barrier()
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in checkpoints(run)[:-keep_last]:
                shutil.rmtree(old)
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{folder} cannot be written: {reason}") from error
    barrier()


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Read the optimiser's moments, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.load(moments, checkpoint_id=folder / "trainer", no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, moments)


# --------------------------------------------------------------------------------- the wish to stop


class Interrupted(BaseException):
    """A stop was asked for. A BaseException: no `except Exception` on the way catches it."""


class StopSignal:
    """Ctrl-C and SIGTERM ask for a stop: the run goes back to its last whole step and saves it.

    Launchers and schedulers repeat SIGTERM, torchrun repeats Ctrl-C within moments: the same wish.
    A second Ctrl-C later than that stops at once.
    """

    def __init__(self) -> None:
        self.asked, self.asked_at, self.inside = False, math.inf, False

    def listen(self) -> None:
        """Begin to answer both signals, with no stop asked for yet."""
        self.__init__()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and time.time() - self.asked_at > 2:
            raise KeyboardInterrupt
        if not self.asked and rank() == 0:
            # Not print: a signal can come amid another write to the same stream.
            os.write(2, b"\nstopping; the last whole step is saved (Ctrl-C again: at once)\n")
        if not self.asked:
            self.asked, self.asked_at = True, time.time()
        if self.inside:
            self.inside = False
            raise Interrupted

    def asked_of_any(self) -> bool:
        """Whether a stop was asked of any rank: the same on all of them."""
        return all_max(int(self.asked)) > 0

    def leave_if_asked(self) -> None:
        """Raise Interrupted on every rank, if a stop was asked of any."""
        if self.asked_of_any():
            raise Interrupted

    def interruptible(self, function: Callable) -> Callable:
        """`function`, which a stop ends at once, with None. It must hold no collective."""

        def call(*args: Any, **options: Any) -> Any:
            try:
                self.inside = True
                result = None if self.asked else function(*args, **options)
                self.inside = False
                return result
            except Interrupted:
                return None
            finally:
                self.inside = False

        return call


stop = StopSignal()  # one for the process, as signals are
