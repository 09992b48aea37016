"""The directory of a run: its lock, its records and its checkpoints."""

import datetime
import fcntl
import fnmatch
import json
import math
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from torch.optim import Optimizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from support.checkpoints import (
    checkpoints,
    newest_checkpoint,
    remove_partials,
    save_checkpoint,
    step_of,
)
from support.distributed import all_max, broadcast, raised_on_all, rank
from support.errors import InputError
from support.files import append_rows, read_lines, sync, write_whole, writing
from support.flags import read_flags
from support.progress import log

lock_file: TextIO | None = None  # of the directory that this process works in


def claim(folder: Path, files: tuple[str, ...] = ()) -> str:
    """Make a directory and lock it until this process ends, however it ends. Every rank calls it.

    files: what refuse_strangers takes; without them other files in the directory are no error.
    Returns what .process says from now on. Raises InputError on every rank if the directory has
    such files or cannot be written, if another process works in it, and if a rank sees another
    directory than rank 0.
    """
    now = datetime.datetime.now().isoformat(" ", "seconds")
    mark = broadcast(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    # On some network file systems nobody can read a locked file, so the lock has its own file.
    file = folder / ".process"
    with raised_on_all(), writing(folder):
        if rank() == 0:
            if files:
                refuse_strangers(folder, files)
            folder.mkdir(parents=True, exist_ok=True)
            lock(folder, file)
            file.write_text(mark, "utf-8")
    with raised_on_all():
        if not file.exists() or file.read_text("utf-8") != mark:
            hint = "put it on a file system that all hosts share"
            raise InputError(f"--output {folder}: ranks see different directories; {hint}")
    return mark


def lock(folder: Path, file: Path) -> None:
    """Lock a directory. If another process has it, raise InputError with what `file` says."""
    global lock_file
    lock_file = (folder / ".lock").open("a", encoding="utf-8")  # closes an earlier one
    try:
        # A process that is forked from this one and outlives it does not keep this lock.
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read_text("utf-8")
        raise InputError(f"--output {folder}: {owner} works there; wait for its end") from None
    except OSError as error:
        hint = "start no second process in this directory"
        log(f"{folder}: its file system has no locks ({error.strerror}); {hint}")


def refuse_strangers(folder: Path, files: tuple[str, ...]) -> None:
    """Raise InputError if a folder holds files that this program did not write.

    files: patterns of the program's names. The first is the file that it writes before all others.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    # Hidden files, and half a file that a crash has left, are nobody's work.
    names = [name for name in names if name[0] != "." and not name.endswith(".partial")]
    strangers = [x for x in names if not any(fnmatch.fnmatch(x, pattern) for pattern in files)]
    strangers += names if files[0] not in names else []
    if strangers:
        hint = "which this program did not write; move it away or name an empty directory"
        raise InputError(f"--output {folder}: holds {strangers[0]}, {hint}")


class RunFolder:
    """The directory of a run: config.json, metrics.jsonl, samples.jsonl, checkpoints and more.

    `step` is the last whole step. `checkpoint` is the folder to continue from, or None. `flags`
    are all flags of the program, for config.json; this class reads `resume` and those about steps,
    saving and evaluating. Before `begin` only the lock is written. Raises InputError if the
    directory cannot be written, or holds another run or other files.
    """

    FILES = "config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "evaluations", "figures"

    def __init__(self, output: str, flags: dict[str, Any]):
        self.path = Path(broadcast(output))  # A default name holds the time: rank 0's counts.
        self.flags = flags
        with raised_on_all():
            # Rank 0 alone looks: a network file system remembers a missing name for a minute.
            if rank() == 0 and not flags["resume"] and (self.path / "config.json").exists():
                read_flags(self.path, "--output")  # It must not be a model's.
        self.mark = claim(self.path, () if flags["resume"] else self.FILES)
        with raised_on_all():
            if rank() == 0:
                if flags["resume"]:  # of any other run that is here they may be growing
                    remove_partials(self.path)
                self.check_records()
        self.checkpoint = newest_checkpoint(self.path)
        self.step = self.saved = step_of(self.checkpoint)
        if flags["steps"] < self.step:
            raise InputError(f"--steps {flags['steps']}: {self.path} is at step {self.step}")
        self.saved_at = time.monotonic()

    def check_records(self) -> None:
        """Raise InputError if a new run finds another run, or a resumed one no own checkpoint.

        The metrics of a step are on the disk before its checkpoint.
        """
        steps, saved = [line["step"] for line in self.lines()], checkpoints(self.path)
        if not self.flags["resume"] and (saved or steps or (self.path / "evaluations").exists()):
            hint = f"continue it with --resume {self.path} or name another directory"
            raise InputError(f"--output {self.path} holds a run: {hint}")
        if any(steps) and not saved:  # Step 0 is the evaluation before the first.
            hint = "start anew in another --output"
            raise InputError(f"--resume {self.path}: holds no checkpoint; {hint}")
        if any(steps) and step_of(saved[-1]) not in steps:
            what = f"{saved[-1]} is of a step that metrics.jsonl lacks"
            hint = "move it away if it is another run's, or copy the whole run again"
            raise InputError(f"--resume {self.path}: {what}; {hint}")

    def begin(self, fingerprints: dict[str, str]) -> None:
        """Write config.json, and remove records of steps after the checkpoint: they come again.

        fingerprints: {flag: text} for each flag that names contents outside the run, such as
        --data. The text changes when the contents change. config.json keeps the first texts. Raises
        InputError if a resumed run would go on with other contents.
        """
        with raised_on_all():
            if rank() == 0:
                config = self.flags | self.compare(fingerprints)
                write_whole(self.path / ".owner", self.mark)
                write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")
                cut_back(self.path / "metrics.jsonl", self.step)
                cut_back(self.path / "samples.jsonl", self.step)
                self.delete_later_evaluations()
        evaluated = [line["step"] for line in self.lines() if line.get("eval")]
        self.evaluated_step = broadcast(max(evaluated, default=-1))

    def compare(self, fingerprints: dict[str, str]) -> dict[str, str]:
        """Compare fingerprints with those in config.json, and return what it keeps from now on."""
        stored = read_flags(self.path, "--resume") if self.flags["resume"] else {}
        first = {key: value for key, value in stored.items() if key.endswith("_fingerprint")}
        for name, text in fingerprints.items():
            began = first.setdefault(f"{name}_fingerprint", text)
            if text != began:
                what = f"is not what {self.path} began with ({text}, not {began})"
                hint = "bring that back, or start anew in another --output"
                raise InputError(f"--{name} {self.flags[name]}: {what}; {hint}")
        for name in (key.removesuffix("_fingerprint") for key in first):
            if name not in fingerprints and self.flags[name] != stored[name]:
                hint = f"{self.path} has it in its checkpoint; leave the flag out"
                raise InputError(f"--{name} {self.flags[name]}: {hint}")
        return first

    def delete_later_evaluations(self) -> None:
        """Delete the files of evaluations after the checkpoint; a copy of one is not touched."""
        for file in self.path.glob("evaluations/step_*"):
            match = re.fullmatch(r"step_(\d{6,})(\.rank\d+)?\.jsonl", file.name)
            if match and int(match[1]) > self.step:
                file.unlink()

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add lines to a .jsonl file, on the disk. A full disk is an error on every rank.

        After a power cut a checkpoint must not be without the metrics of its steps.
        """
        with raised_on_all(), writing(self.path / name):
            if rank() == 0:
                self.check_owner()
                append_rows(self.path / name, rows)
                sync(self.path / name)

    def check_owner(self) -> None:
        """Raise InputError if another process has begun to write here since.

        On some network file systems a lock holds on its own host only. A process that is refused
        before `begin` does not write .owner: the other run goes on.
        """
        file = self.path / ".owner"
        owner = file.read_text("utf-8") if file.exists() else self.mark
        if owner != self.mark:
            raise InputError(f"--output {self.path}: {owner} works there, too; this process ends")

    def end_step(self, line: dict[str, Any], samples: list[dict]) -> None:
        """Append a whole step to metrics.jsonl and its first responses to samples.jsonl."""
        self.step = line["step"]
        self.append("samples.jsonl", [{"step": self.step} | sample for sample in samples])
        # JSON has no NaN and no infinity: they become null.
        unusable = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        self.append("metrics.jsonl", [line | dict.fromkeys(unusable)])

    def evaluation_is_due(self) -> bool:
        """Whether the last whole step (0: none yet) must be evaluated and has not been."""
        return is_due(self.step, self.flags["eval_every"]) and self.step > self.evaluated_step

    def evaluation_file(self) -> Path:
        """The file for the responses of the evaluation after the last whole step."""
        return self.path / "evaluations" / f"step_{self.step:06d}.jsonl"

    def end_evaluation(self, scores: dict[str, dict]) -> None:
        """Append the scores after the last whole step to metrics.jsonl."""
        self.evaluated_step = self.step
        self.append("metrics.jsonl", [{"step": self.step, "eval": scores}])

    def lines(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl on rank 0. Other ranks get an empty list."""
        return [row for _, row in read_lines(self.path / "metrics.jsonl")] if rank() == 0 else []

    def save_is_due(self) -> bool:
        """Whether it is time for a checkpoint, by steps or by minutes. The same on every rank.

        Every evaluation after step 0 needs a checkpoint before it, of the weights that it uses.
        """
        late = 0 < self.flags["save_minutes"] <= (time.monotonic() - self.saved_at) / 60
        late = all_max(int(late)) > 0
        return late or any(is_due(self.step, self.flags[x]) for x in ("save_every", "eval_every"))

    def save(self, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
        """Save the last whole step unless that is done. The newest --keep_last checkpoints stay."""
        if self.step > self.saved:
            folder = self.path / "checkpoints" / f"step_{self.step:06d}"
            save_checkpoint(folder, model, optimizer, tokenizer, self.flags["keep_last"])
            self.saved, self.saved_at = self.step, time.monotonic()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


def cut_back(file: Path, step: int) -> None:
    """Keep the rows of a .jsonl file up to a step. A line that a crash tore is removed, too."""
    kept = [line.decode() + "\n" for line, row in read_lines(file) if row["step"] <= step]
    write_whole(file, "".join(kept))
