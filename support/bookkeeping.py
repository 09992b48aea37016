"""What a run keeps: its flags, its directory, its checkpoints, and the wish to stop.

Nothing here knows what is learnt: a run directory is handed lines, names and a model to save.
Read from top to bottom: flags, the run directory, checkpoints, the wish to stop.
"""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

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
from torch.optim import Optimizer
from transformers import HfArgumentParser
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from support.distributed import all_max, barrier, broadcast, rank, wait_for_rank_0
from support.errors import InputError, first_line
from support.progress import warn

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# ------------------------------------------------------------------------------------------ flags

# What a resumed run may change: how long, how often and with how much memory, not what it computes.
CHANGEABLE = set(
    "steps save_every save_minutes keep_last eval_every eval_benchmarks eval_limit eval_samples "
    "log_samples rollout_batch_size tokens_per_micro_batch gradient_checkpointing threads".split()
)


def flag(default: Any, text: str) -> Any:
    """A field of a Config with its help; a list is copied, as dataclasses demand."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """Reads @file as a command line: many flags to a line, quotes, comments. Errors come once."""

    def __init__(self, config: type, description: str):
        super().__init__(config, description=description, fromfile_prefix_chars="@")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        wait_for_rank_0()
        super().error(message)


def parse_flags(config: type, description: str, argv: list[str] | None = None) -> Any:
    """A command line, with arguments files in it, as an instance of the dataclass `config`.

    With --resume DIR every flag that is not given is the one in DIR/config.json. Raises InputError
    where a given flag contradicts that file, or where there is no run.
    """
    parser = Parser(config, description)
    cfg = config(**vars(parser.parse_args(argv)))
    if not cfg.resume:
        return cfg
    try:
        held = json.loads((Path(cfg.resume) / "config.json").read_text())
        held = asdict(config(**{name: held[name] for name in asdict(cfg) if name in held}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"--resume {cfg.resume}: holds no run to continue") from error
    # What the namespace holds before parsing is the default of a flag that is not given.
    flags = vars(parser.parse_args(argv, argparse.Namespace(**held | {"output": None})))
    if flags["output"] is not None:
        raise InputError(f"--output {flags['output']}: --resume {cfg.resume} names the directory")
    for name in sorted(held.keys() - CHANGEABLE - {"output", "resume"}):
        if flags[name] != held[name]:
            began = f"{cfg.resume} began with --{name} {held[name]}"
            raise InputError(f"--{name} {flags[name]}: {began}, and --resume keeps it")
    return config(**flags | {"output": cfg.resume})


# ------------------------------------------------------------------------------- a run's directory

lock_file: TextIO | None = None  # of the directory that this process works in


def claim(folder: Path) -> None:
    """Make a directory, and keep other processes out of it until this one ends, however it ends.

    Every rank calls it. Raises InputError where the directory cannot be written, where another
    process works in it, and where a rank finds another directory under its name than rank 0.
    """
    global lock_file
    file, now = folder / ".lock", datetime.datetime.now().isoformat(" ", "seconds")
    mark = broadcast(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    if rank() == 0:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if lock_file:
                lock_file.close()  # the directory of an earlier run
            lock_file = file.open("a", encoding="utf-8")
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = f"{file.read_text('utf-8')} works there"
                raise InputError(f"--output {folder}: {held}; wait for its end") from None
            except OSError as error:
                hint = "start no second process in this directory"
                warn(f"{folder}: its file system has no locks ({error.strerror}); {hint}")
            file.write_text(mark, "utf-8")
    barrier()
    if not file.exists() or file.read_text("utf-8") != mark:
        hint = "put it on a file system that all hosts share"
        raise InputError(f"--output {folder}: is another directory than rank 0's; {hint}")


class RunFolder:
    """The directory of a run: config.json, metrics.jsonl, samples.jsonl, checkpoints and more.

    `step` is the last whole step, and `checkpoint` the folder to continue from or None. config.json
    keeps `flags`, all of the program's; `resume` and those about steps, saving and evaluating are
    read here. It keeps `fingerprints` too, which has an entry for each flag that names a file, and
    changes when the file does. Raises InputError where the directory cannot be written or holds a
    run that was not asked for, and where a resumed run would go on with other files than it began
    with.
    """

    def __init__(self, output: str, flags: dict[str, Any], fingerprints: dict[str, str]):
        self.path = Path(broadcast(output))  # a default name holds the time: rank 0's counts
        self.flags = flags
        claim(self.path)
        if rank() == 0:
            self.refuse(fingerprints)
        saved = broadcast(checkpoints(self.path))  # another host's listing can be a minute old
        self.checkpoint = saved[-1] if saved else None
        self.step = self.saved = step_of(self.checkpoint)
        if flags["steps"] < self.step:
            raise InputError(f"--steps {flags['steps']}: {self.path} is at step {self.step}")
        self.saved_at = time.monotonic()
        if rank() == 0:
            self.prepare(flags | {f"{k}_fingerprint": v for k, v in fingerprints.items()})
        evaluated = [line["step"] for line in self.lines() if line.get("eval")]
        self.evaluated_step = broadcast(max(evaluated, default=-1))

    def refuse(self, fingerprints: dict[str, str]) -> None:
        """Raise InputError where this run is not the one that the directory holds."""
        resume = bool(self.flags["resume"])
        steps = [row["step"] for _, row in whole_rows(self.path / "metrics.jsonl")]
        saved = checkpoints(self.path)
        if not resume and (saved or steps or (self.path / "evaluations").exists()):
            hint = f"continue it with --resume {self.path} or name another directory"
            raise InputError(f"--output {self.path} holds a run: {hint}")
        if resume and any(steps) and not saved:  # step 0 is the evaluation before the first
            hint = "start anew in another --output"
            raise InputError(f"--resume {self.path}: holds no checkpoint; {hint}")
        held = json.loads((self.path / "config.json").read_text()) if resume else {}
        for name, own in fingerprints.items():
            began = held.get(f"{name}_fingerprint", own)
            if own != began:
                other = f"is not what {self.path} began with ({own}, not {began})"
                raise InputError(
                    f"--{name} {self.flags[name]}: {other}; start anew in another --output"
                )

    def prepare(self, config: dict[str, Any]) -> None:
        """Write config.json, and cut the records back to the checkpoint: later steps come again."""
        with writing(self.path):
            write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")
            for name in ("metrics.jsonl", "samples.jsonl"):
                cut_back(self.path / name, self.step)
            for file in self.path.glob("evaluations/step_*"):
                if int(file.name[5:11]) > self.step:
                    file.unlink()
            for half in self.path.glob("checkpoints/step_*.partial"):  # a save that was cut off
                shutil.rmtree(half)

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add lines to a .jsonl file."""
        if rank() == 0:
            append_rows(self.path / name, rows)

    def end_step(self, line: dict[str, Any], samples: list[dict]) -> None:
        """Append a whole step to metrics.jsonl and its first responses to samples.jsonl."""
        self.step = line["step"]
        self.append("samples.jsonl", [{"step": self.step} | sample for sample in samples])
        self.append("metrics.jsonl", [nan_to_null(line)])

    def evaluation_is_due(self) -> bool:
        """Whether the last whole step (0: none yet) is to be evaluated and has not been."""
        return is_due(self.step, self.flags["eval_every"]) and self.step > self.evaluated_step

    def evaluation_file(self) -> Path:
        """Where the responses of the evaluation after the last whole step go."""
        return self.path / "evaluations" / f"step_{self.step:06d}.jsonl"

    def end_evaluation(self, scores: dict[str, dict]) -> None:
        """Append the scores after the last whole step to metrics.jsonl."""
        self.evaluated_step = self.step
        self.append("metrics.jsonl", [{"step": self.step, "eval": scores}])

    def lines(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl so far; rank 0 has them, other hosts may not have the file."""
        return [row for _, row in whole_rows(self.path / "metrics.jsonl")] if rank() == 0 else []

    def save_is_due(self) -> bool:
        """Whether it is time for a checkpoint, by steps or by minutes.

        There is one before every evaluation: what that leaves belongs to these weights.
        """
        late = 0 < self.flags["save_minutes"] <= (time.monotonic() - self.saved_at) / 60
        late = all_max(int(late)) > 0  # the same on all ranks
        return late or any(is_due(self.step, self.flags[x]) for x in ("save_every", "eval_every"))

    def save(self, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
        """A checkpoint of the last whole step, unless it exists; the newest --keep_last stay."""
        if self.step > self.saved:
            keep_last = self.flags["keep_last"]
            save_checkpoint(self.path, self.step, model, optimizer, tokenizer, keep_last)
            self.saved, self.saved_at = self.step, time.monotonic()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens in this one."""
    return every > 0 and step % every == 0


def cut_back(file: Path, step: int) -> None:
    """Leave the rows of a .jsonl file up to a step; a line that a crash tore goes too."""
    kept = [line.decode() + "\n" for line, row in whole_rows(file) if row["step"] <= step]
    write_whole(file, "".join(kept))


def whole_rows(file: Path) -> Iterator[tuple[bytes, dict]]:
    """The lines of a .jsonl file that may not exist, and what they hold; not one that is torn."""
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            yield line, json.loads(line)


def append_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to a .jsonl file."""
    with writing(file), file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a crash or a full disk leaves the old one or the new one."""
    partial = file.with_suffix(".partial")
    with writing(file):
        partial.write_text(text, "utf-8")
        partial.replace(file)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes the program's own files: a full disk, say, is the user's error."""
    try:
        yield
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        raise InputError(f"--output: {path} cannot be written: {first_line(error)}") from error


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits that tell a value from others: of the SHA-256 of its JSON."""

    def as_text(other: Any) -> str:  # of what JSON cannot hold
        if isinstance(other, (bytes, datetime.date, datetime.time)):
            return str(other)
        return type(other).__name__  # its own text could name an address in memory

    text = json.dumps(value, sort_keys=True, default=as_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_fingerprint(file: Path) -> str:
    """The same for a large file, by its size and 4 KiB at each of a thousand places.

    Training moves nearly every weight, and merging an adapter whole matrices.
    """
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for place in range(1000):
            content.seek(place * size // 1000)
            found.update(content.read(4096))
    return found.hexdigest()[:16]


def nan_to_null(metrics: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN or infinity: they become null."""
    unusable = [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]
    return metrics | dict.fromkeys(unusable)


def peak_memory_gb() -> float:
    """The GPU's peak since the start, or that of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak / 1e6  # bytes there, KiB on Linux


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
    optimizer: Optimizer,
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
    with writing(folder):
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
            logging.disable_progress_bar()  # transformers': one for each checkpoint would stay
            model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
        barrier()  # the others wait here, however long rank 0 writes
        moments = get_optimizer_state_dict(model, optimizer)
        dcp.save(moments, checkpoint_id=partial / "trainer", no_dist=not dist.is_initialized())
        barrier()
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in checkpoints(run)[:-keep_last]:
                shutil.rmtree(old)
    barrier()


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer) -> None:
    """Read the optimiser's moments, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.load(moments, checkpoint_id=folder / "trainer", no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, moments)


# --------------------------------------------------------------------------------- the wish to stop


class Stopped(BaseException):
    """A stop was asked for. A BaseException: no `except Exception` on the way catches it."""


class StopSignal:
    """Ctrl-C and SIGTERM set a flag; the program looks at it where it can leave with nothing lost.

    Launchers and schedulers repeat SIGTERM, torchrun repeats Ctrl-C within moments: the same wish.
    A Ctrl-C more than two seconds after the first signal stops at once.
    """

    asked, asked_at = False, math.inf  # whether, and the time of the first signal

    def listen(self) -> None:
        """Begin to answer both signals, with no stop asked for yet."""
        self.asked, self.asked_at = False, math.inf
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and time.monotonic() - self.asked_at > 2:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self.asked_at = True, time.monotonic()
            if rank() == 0:
                # Not print: a signal can come amid another write to the same stream.
                os.write(2, b"\nstopping: what is whole is kept (Ctrl-C again: at once)\n")

    def leave_if_asked(self) -> None:
        """Raise Stopped on every rank, if a stop was asked of any. Every rank has to call it."""
        if all_max(int(self.asked)) > 0:
            raise Stopped

    def together(self, work: Iterator) -> Iterator:
        """The items of work without collectives, until a stop is asked for; work is closed then.

        At the end Stopped is raised on every rank, if a stop was asked of any. So every rank has to
        run it to its end: who breaks out of the loop leaves the others waiting.
        """
        with contextlib.closing(work):
            for item in work:
                yield item
                if self.asked:
                    break
        self.leave_if_asked()


stop = StopSignal()  # one for the process, as signals are
