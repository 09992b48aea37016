"""The directory of a run: its lock, its records and its checkpoints."""

import fcntl
import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from support import distributed
from support.distributed import barrier, on_rank_0, rank
from support.errors import InputError
from support.files import append_rows, read_lines, sync, write_whole
from support.progress import log

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

lock_file: TextIO | None = None  # of the directory that this process works in


def claim(folder: Path) -> None:
    """Make a directory and lock it until this process ends, however it ends. Every rank calls it.

    Raises InputError on every rank if another process works in the directory. All ranks must share
    its file system: each writes its part of a checkpoint.
    """

    def lock() -> None:
        global lock_file
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = (folder / ".lock").open("a")  # closes an earlier one
        try:  # lockf: a process that is forked from this one and outlives it does not keep the lock
            fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process works in this directory; wait for its end"
            raise InputError(f"--output {folder}: {what}") from None
        except OSError as error:
            log(f"{folder}: no locks here ({error}); start no second process in this directory")

    on_rank_0(lock)


class RunFolder:
    """The directory of a run: config.json, metrics.jsonl, samples.jsonl, checkpoints and more.

    `step` is the last whole step. `checkpoint` is the folder to continue from, or None. `flags`
    are all flags of the program. Before `begin` only the lock is written. Raises InputError if a
    new run finds files in the directory, or a resumed one finds steps and no checkpoint.
    """

    def __init__(self, output: str, flags: dict[str, Any]):
        self.path, self.flags = Path(output), flags
        claim(self.path)
        self.checkpoint = on_rank_0(self.find_checkpoint)
        self.step = self.saved = step_of(self.checkpoint) if self.checkpoint else 0

    def find_checkpoint(self) -> Path | None:
        """Return the newest checkpoint of a resumed run. Rank 0 looks for all ranks."""
        if not self.flags["resume"]:
            files = sorted(path.name for path in self.path.iterdir() if path.name[0] != ".")
            if files:
                hint = f"continue a run with --resume {self.path}, or name an empty directory"
                raise InputError(f"--output {self.path}: holds {files[0]}; {hint}")
            return None
        newest = next(reversed(checkpoints(self.path)), None)
        # Step 0 is the evaluation before the first step.
        if newest is None and any(line["step"] for line in self.lines()):
            what = "holds no checkpoint; start anew in another --output"
            raise InputError(f"--resume {self.path}: {what}")
        return newest

    def begin(self, more: dict[str, Any]) -> None:
        """Write config.json, and remove records of steps after the checkpoint: they come again.

        more: what config.json has beside the flags. Raises InputError if a resumed run would go on
        with other data: another `data_fingerprint`.
        """
        file = self.path / "config.json"

        def write() -> int:
            stored = json.loads(file.read_text("utf-8")) if file.exists() else {}
            began, now = stored.get("data_fingerprint"), more["data_fingerprint"]
            if began and now != began:
                what = f"is not the data that {self.path} began with ({now}, not {began})"
                raise InputError(f"--data {self.flags['data']}: {what}")
            for half in self.path.glob("checkpoints/step_*.partial"):
                shutil.rmtree(half)
            write_whole(file, json.dumps(self.flags | more, indent=2) + "\n")
            cut_back(self.path / "metrics.jsonl", self.step)
            cut_back(self.path / "samples.jsonl", self.step)
            for file_of_step in self.path.glob("evaluations/step_*"):
                match = re.fullmatch(r"step_(\d{6,})(\.rank\d+)?\.jsonl", file_of_step.name)
                if match and int(match[1]) > self.step:
                    file_of_step.unlink()
            return max((line["step"] for line in self.lines() if "eval" in line), default=-1)

        self.evaluated_step = on_rank_0(write)

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add lines to a .jsonl file of the run."""
        if rank() == 0:
            append_rows(self.path / name, rows)

    def end_step(self, line: dict[str, Any], samples: list[dict]) -> None:
        """Append a whole step to metrics.jsonl and its first responses to samples.jsonl."""
        self.step = line["step"]
        self.append("samples.jsonl", [{"step": self.step} | sample for sample in samples])
        # JSON has no NaN and no infinity: they become null.
        unusable = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        self.append("metrics.jsonl", [line | dict.fromkeys(unusable)])

    def due_evaluation(self) -> Path | None:
        """The file for the responses if the last whole step (0: none yet) must be evaluated."""
        due = is_due(self.step, self.flags["eval_every"]) and self.step > self.evaluated_step
        return self.path / "evaluations" / f"step_{self.step:06d}.jsonl" if due else None

    def end_evaluation(self, scores: dict[str, dict]) -> None:
        """Append the scores after the last whole step to metrics.jsonl."""
        self.evaluated_step = self.step
        self.append("metrics.jsonl", [{"step": self.step, "eval": scores}])

    def lines(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl on rank 0. Other ranks get an empty list."""
        return [row for _, row in read_lines(self.path / "metrics.jsonl")] if rank() == 0 else []

    def save_is_due(self) -> bool:
        """Whether the last whole step needs a checkpoint.

        Every evaluation after step 0 needs a checkpoint before it, of the weights that it uses.
        """
        return any(is_due(self.step, self.flags[name]) for name in ("save_every", "eval_every"))

    def save(self, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
        """Save the last whole step unless that is done. The newest --keep_last checkpoints stay."""
        if self.step > self.saved:
            folder = self.path / "checkpoints" / f"step_{self.step:06d}"
            save_checkpoint(folder, model, optimizer, tokenizer)
            self.saved = self.step
            if rank() == 0:
                for old in checkpoints(self.path)[: -self.flags["keep_last"]]:
                    shutil.rmtree(old, ignore_errors=True)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0  # 0: never


def cut_back(file: Path, step: int) -> None:
    """Keep the rows of a .jsonl file up to a step. A line that a crash tore is removed, too."""
    kept = [line.decode() + "\n" for line, row in read_lines(file) if row["step"] <= step]
    write_whole(file, "".join(kept))


def checkpoints(run: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first. step_000020_copy is none of them."""
    return sorted(run.glob("checkpoints/step_" + "[0-9]" * 6))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def save_checkpoint(folder: Path, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
    """Write checkpoints/step_N: weights and tokenizer in HF format, `trainer/` for the optimiser.

    The folder gets its name when all its files are on the disk, so a crash leaves no half of a
    checkpoint. Any number of ranks can continue from it: all else is a function of seed and step.
    """
    partial = folder.with_suffix(".partial")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # a collective; rank 0 gets them
    if rank() == 0:
        partial.mkdir(parents=True)
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:  # tied: one tensor, saved once
            weights.pop(next(n for n, m in model.named_modules() if m is head) + ".weight")
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
    barrier()  # the folder exists; the others wait here, however long rank 0 writes
    moments = get_optimizer_state_dict(model, optimizer)
    # In the patient group a rank waits for the others' disks, however long these take.
    group, alone = distributed.patient, not dist.is_initialized()
    dcp.save(moments, checkpoint_id=partial / "trainer", process_group=group, no_dist=alone)
    if rank() == 0:
        for file in filter(Path.is_file, partial.rglob("*")):
            sync(file)
        partial.rename(folder)
    barrier()


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer) -> None:
    """Load the optimiser's moments from a checkpoint, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    group, alone = distributed.patient, not dist.is_initialized()
    dcp.load(moments, checkpoint_id=folder / "trainer", process_group=group, no_dist=alone)
    set_optimizer_state_dict(model, optimizer, moments)
