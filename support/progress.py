"""What a program says while it works: lines, bars on a terminal, and numbers for trackers.

A log file gets no bars, because it would keep every refresh of a bar. Only rank 0 prints.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from tqdm import tqdm

from support import installed, ranks
from support.metrics import right
from support.ranks import rank

# For characters that a terminal does not have. A notebook's stdout has no such method.
if getattr(sys.stdout, "errors", "") in ("strict", "surrogateescape"):
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def track(items: Iterable, name: str | None, total: int | None = None) -> tqdm:
    """Iterate over items with a bar, which is removed at its end. Without a name it is silent."""
    silent = name is None or rank() > 0 or not sys.stderr.isatty()
    return tqdm(items, total=total, desc=name, leave=False, disable=silent)


class Tracker:
    """Sends numbers to TensorBoard, wandb or trackio, from rank 0. An empty kind sends nothing.

    name: of the run, by which wandb and trackio go on with it. step: the last whole step.
    """

    def __init__(self, kind: str, folder: Path, name: str, step: int, flags: dict) -> None:
        self.kind = kind if rank() == 0 else ""
        if self.kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.run = SummaryWriter(folder / "tensorboard", purge_step=step + 1)
        elif self.kind:
            options = {"project": "stapo", "name": name, "resume": "allow"}
            options |= {"id": name} if kind == "wandb" else {}
            variables = {"project": "PROJECT", "name": "NAME", "resume": "RESUME", "id": "RUN_ID"}
            for option in options:  # WANDB_PROJECT wins, although wandb prefers its arguments
                own = os.environ.get(f"{kind.upper()}_{variables[option]}")
                options[option] = own or options[option]
            self.run = importlib.import_module(kind).init(config=flags, **options)

    def send(self, step: int, numbers: dict[str, Any]) -> None:
        numbers = {name: value for name, value in numbers.items() if value is not None}
        if self.kind == "tensorboard":
            for name, value in numbers.items():
                self.run.add_scalar(name, value, step)
            self.run.flush()
        elif self.kind:
            self.run.log(numbers, step=step)

    def finish(self) -> None:
        if self.kind in ("wandb", "trackio"):
            self.run.finish()


def report_environment() -> None:
    """Print the number of ranks and their device, and the versions of Python and the packages."""
    device = f"CPU (threads: {torch.get_num_threads()})"
    if ranks.device().type == "cuda":
        device = torch.cuda.get_device_name()
    versions = ", ".join(f"{name} {number}" for name, number in installed().items())
    log(f"{ranks.world_size()} x {device}; {versions}")


def report_step(line: dict, sample: dict, total: int) -> None:
    """Print a few metrics of a step and the time left, and in some steps a response.

    line: of stapo.step_metrics; sample: a row of samples.jsonl; total: the steps of the run. The
    time left is that of steps like this one, without checkpoints and evaluations.
    """
    step, seconds = line["step"], line["rollout_seconds"] + line["update_seconds"]
    text = f"accuracy {line['accuracy']:.1%}, length {line['response_length']:.1f}, "
    text += f"entropy {line['entropy']:.3f}, silenced {line['silenced_fraction']:.3%}"
    left = tqdm.format_interval(seconds * (total - step))
    log(f"step {step} of {total}: {text}, {seconds:.1f} s, about {left} left")
    # Steps 1, 2, 4, 8, ... and the last: a model changes most at the start of a run.
    if step & (step - 1) == 0 or step == total:
        say(response_in_words(sample, step))
    check_sampler(line)
    if line["skipped_updates"]:
        log(f"step {step}: {line['skipped_updates']} updates were not finite, and were skipped")


def report_run(lines: list[dict], total: int, folder: str, stopped: bool) -> None:
    """Print what a run did and what to do next; lines: metrics.jsonl."""
    lines = [line for line in lines if "accuracy" in line]  # of steps, not of evaluations
    if lines:
        first, last = lines[0], lines[-1]
        text = f"accuracy {first['accuracy']:.1%} -> {last['accuracy']:.1%}, response length "
        text += f"{first['response_length']:.1f} -> {last['response_length']:.1f} tokens "
        say(f"{text}(steps {first['step']} and {last['step']})")
    if stopped:
        again = f"continue with: python stapo.py --resume {folder}"
        say(f"stopped after step {len(lines)} of {total}; {again}")
    say(f"the run is in {folder}; its curves: python scripts/figures.py {folder}")
    say(f"its right answers, token by token: python scripts/tokens.py {folder}")


def check_sampler(line: dict) -> None:
    """Warn if a step's metrics say that the sampler draws from another policy."""
    gap, z = line["sampling_gap"], line["sampling_z"]
    if abs(z) > 6 and abs(gap) > 0.005:
        log(
            f"step {line['step']}: the sampler does not draw from the policy that is trained: "
            f"-ln p of the tokens is {gap:+.4f} nats from the entropy on average (z = {z:+.1f}). "
            "Look for a temperature, top-p, top-k, stale weights or another precision."
        )


def with_error(score: dict, digits: int = 1) -> str:
    """Write a benchmark's mean in percent, with its standard error if it has one."""
    error = score["standard_error"]
    return f"{score['mean']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def scores_in_words(step: int, scores: dict[str, dict]) -> str:
    """Write an evaluation in one line, with the number of problems, which can change in a run."""
    parts = (f"{name} {with_error(s)} ({s['problems']} problems)" for name, s in scores.items())
    return f"evaluation after step {step}, in percent ± standard error: {', '.join(parts)}"


def one_line(text: str, longest: int = 100) -> str:
    """Return a text on one line, cut to a number of characters."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def response_in_words(sample: dict, step: int) -> str:
    """Write a row of samples.jsonl as text: the problem, right or wrong, the response."""
    text = sample["response"].strip()
    text = text if len(text) <= 600 else f"{text[:300]} [...] {text[-300:]}"
    verdict = "right" if right(sample["reward"]) else "wrong"
    verdict += f" (the answer is {sample['gold']})" if sample["gold"] else ""
    return f"--- step {step}, {verdict}: {sample['problem']}\n{text}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print above any bar, on rank 0 only. A lost terminal ends no run before it is saved."""
    if rank() == 0:
        with contextlib.suppress(OSError):
            tqdm.write(text, file=stream)
            (stream or sys.stdout).flush()


def log(text: str) -> None:
    """Print on stderr."""
    say(text, sys.stderr)


def quiet_libraries() -> None:
    """Turn off the bars of libraries that load and download, if stderr is a log file."""
    if rank() > 0 or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # and those of huggingface_hub
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
