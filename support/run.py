"""A run: its flags, its directory, its checkpoints, and the signals that stop it."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
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

from support import InputError, installed, ranks
from support.progress import log
from support.ranks import all_list, on_rank_0, rank

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# ------------------------------------------------------------------------------------------ files


def read_lines(file: Path) -> Iterator[dict]:
    """Iterate over the rows of a .jsonl file, without torn lines. The file may be missing."""
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def append_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to a .jsonl file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a .jsonl file."""
    write_whole(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_whole(file: Path, text: str) -> None:
    """Write a file. A crash leaves either the old text or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(file)


def fingerprint(value: Any) -> str:
    """Hash a value: 16 hexadecimal digits of the SHA-256 of its JSON."""
    text = json.dumps(value, sort_keys=True, default=str)  # str: for dates and bytes
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------ flags


def flag(default: Any, text: str) -> Any:
    """Define a field of a Config with its default and its --help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """A parser that reads @file like a command line, with quotes and comments."""

    def given(self, argv: list[str] | None = None) -> dict[str, Any]:
        """Return the flags that a command line gives, without the defaults of other flags."""
        names = [each.name for each in fields(self.dataclass_types[0])]
        # A flag that is not given keeps the value that the namespace has before parsing.
        parsed = vars(self.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, MISSING))))
        return {name: parsed[name] for name in names if parsed[name] is not MISSING}

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def parse_flags(
    config: type,
    description: str,
    argv: list[str] | None = None,
    defaults: Callable[[dict], dict] = lambda given: {},
) -> Any:
    """Read a command line, with arguments files in it, into the dataclass `config`.

    With --resume DIR the other flags come from DIR/config.json, and flags that are given win.
    `defaults` may replace defaults, from the flags that are given. Rank 0 reads the flags for all
    ranks. Raises InputError if DIR holds no run.
    """

    def read() -> Any:
        parser = Parser(config, description=description, fromfile_prefix_chars="@")
        given = parser.given(argv)
        if not given.get("resume"):
            return config(**defaults(given) | given)
        if "output" in given:
            raise InputError("--output: a resumed run stays in its directory; leave this flag out")
        stored = flags_of_run(config, Path(given["resume"]))
        return config(**stored | given | {"output": given["resume"]})

    return on_rank_0(read)


def flags_of_run(config: type, run: Path) -> dict[str, Any]:
    """Read the flags of a run from its config.json. Raises InputError if there is no run."""
    file = run / "config.json"
    stored = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if "resume" not in stored:  # a model's config.json has no such key
        raise InputError(f"{run}: holds no run; give the --output of a run")
    return {each.name: stored[each.name] for each in fields(config) if each.name in stored}


# ----------------------------------------------------------------------------------- the directory


class RunFlags(Protocol):
    """Flags of a run that RunFolder reads; it writes all of them into config.json."""

    resume: str
    eval_every: int
    save_every: int
    keep_last: int


class RunFolder:
    """The directory of a run: config.json, metrics.jsonl, samples.jsonl, checkpoints and more.

    `step` is the last whole step. `checkpoint` is the folder to continue from, or None. Call
    `begin` when the data is loaded. Raises InputError.
    """

    def __init__(self, output: str, cfg: RunFlags):
        self.path, self.cfg = Path(output).resolve(), cfg  # a reward may change the directory
        self.checkpoint = on_rank_0(self.find_checkpoint)
        self.step = int(self.checkpoint.name.removeprefix("step_")) if self.checkpoint else 0
        self.saved = self.step
        self.id, self.evaluated_step = "", -1  # `begin` sets them. id: the run's name for trackers

    def find_checkpoint(self) -> Path | None:
        """Return the newest checkpoint.

        Raises InputError if a new run finds files, or a resumed run finds steps and no checkpoint.
        """
        if not self.cfg.resume:
            must_be_empty(self.path, f"continue a run with --resume {self.path}, or name")
        newest = max(checkpoints(self.path), default=None)
        if newest is None and any(line["step"] > 0 for line in self.lines()):
            what = "holds no checkpoint; start anew in another --output"
            raise InputError(f"--resume {self.path}: {what}")
        return newest

    def begin(self, data_fingerprint: str) -> None:
        """Write config.json, and cut records back to the checkpoint: later steps come again.

        data_fingerprint: of the problems. Raises InputError if a resumed run would go on with other
        problems, another template, or from another place in the data.
        """
        self.id = on_rank_0(lambda: self.write_config(data_fingerprint))
        self.evaluated_step = on_rank_0(self.cut_back)

    def write_config(self, data_fingerprint: str) -> str:
        """Write config.json, and return the run's id.

        A resumed run can have other flags than before. They are printed, and `changes` in
        config.json has them with the last step before them.
        """
        file = self.path / "config.json"
        now = asdict(self.cfg) | {"data_fingerprint": data_fingerprint}
        stored = json.loads(file.read_text("utf-8")) if file.exists() else {}
        changed = {
            name: [stored[name], value]
            for name, value in now.items()
            if name not in ("output", "resume") and stored.get(name, value) != value
        }
        words = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        # The place in the data is the number of steps times batch_size.
        if changed.keys() & {"data_fingerprint", "chat_template", "batch_size"}:
            what = "a run keeps its problems, its chat template and its batch_size"
            raise InputError(f"--resume {self.path}: {what} ({words})")
        changes = stored.get("changes", [])
        if changed:
            log(f"changed after step {self.step}: {words}")
            changes.append({"step": self.step} | changed)
        own = stored.get("id") or f"{self.path.name}-{os.urandom(4).hex()}"
        config = now | {"versions": installed(), "changes": changes, "id": own}
        write_whole(file, json.dumps(config, indent=2) + "\n")
        return own

    def cut_back(self) -> int:
        """Remove what is newer than the checkpoint. Return the last evaluated step, or -1."""
        for half in self.path.glob("checkpoints/step_*.partial"):
            shutil.rmtree(half)
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = read_lines(self.path / name)
            write_rows(self.path / name, [row for row in rows if row["step"] <= self.step])
        return max((line["step"] for line in self.lines() if "eval" in line), default=-1)

    def end_step(self, line: dict[str, Any], samples: list[dict]) -> None:
        """Append a whole step to metrics.jsonl and its first responses to samples.jsonl."""
        self.step = line["step"]
        if rank() == 0:
            rows = [{"step": self.step} | sample for sample in samples]
            append_rows(self.path / "samples.jsonl", rows)
            # JSON has no NaN and no infinity: they become null.
            unusable = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
            append_rows(self.path / "metrics.jsonl", [line | dict.fromkeys(unusable)])

    def evaluation_is_due(self) -> bool:
        """Whether the last whole step (0: none yet) must be evaluated, and was not yet."""
        every = self.cfg.eval_every  # 0: never
        return every > 0 and self.step % every == 0 and self.step > self.evaluated_step

    def end_evaluation(self, scores: dict[str, dict], rows: list[dict]) -> None:
        """Write the responses of an evaluation after the last whole step, and its scores."""
        self.evaluated_step = self.step
        if rank() == 0:
            (self.path / "evaluations").mkdir(exist_ok=True)
            write_rows(self.path / "evaluations" / f"step_{self.step:06d}.jsonl", rows)
            append_rows(self.path / "metrics.jsonl", [{"step": self.step, "eval": scores}])

    def lines(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl."""
        return list(read_lines(self.path / "metrics.jsonl"))

    def save_is_due(self) -> bool:
        """Whether the last whole step needs a checkpoint. An evaluation has one before it."""
        every = self.cfg.save_every  # 0: never
        return self.evaluation_is_due() or (every > 0 and self.step % every == 0)

    def save(self, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
        """Save the last whole step unless that is done. The newest --keep_last checkpoints stay."""
        if self.step > self.saved:
            folder = self.path / "checkpoints" / f"step_{self.step:06d}"
            save_checkpoint(folder, model, optimizer, tokenizer)
            self.saved = self.step
            if rank() == 0:
                for old in checkpoints(self.path)[: -self.cfg.keep_last]:
                    shutil.rmtree(old, ignore_errors=True)


def must_be_empty(folder: Path, hint: str) -> None:
    """Make a folder. Raises InputError if it has files: no program writes over them."""
    folder.mkdir(parents=True, exist_ok=True)
    if files := sorted(path.name for path in folder.iterdir() if path.name[0] != "."):
        raise InputError(f"--output {folder}: holds {files[0]}; {hint} an empty directory")


def checkpoints(run: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first. step_000020_copy is none of them."""
    return sorted(run.glob("checkpoints/step_" + "[0-9]" * 6))


# ------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(folder: Path, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
    """Write checkpoints/step_N: weights and tokenizer in HF format, `trainer/` for the optimiser.

    The folder gets its name when it is whole, so a crash leaves no half of a checkpoint. Any number
    of ranks can continue from it: all else is a function of seed and step.
    """
    partial = folder.with_suffix(".partial")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # a collective; rank 0 gets them

    def write_model() -> None:
        partial.mkdir(parents=True)
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:  # tied: one tensor, saved once
            weights.pop(next(n for n, m in model.named_modules() if m is head) + ".weight")
        model.save_pretrained(partial, state_dict=weights)
        add_old_rope(partial / "config.json")
        tokenizer.save_pretrained(partial)

    on_rank_0(write_model)  # the others wait here, however long rank 0 writes
    moments = get_optimizer_state_dict(model, optimizer)
    # In the patient group a rank waits for the others' disks, however long these take.
    dcp.save(moments, checkpoint_id=partial / "trainer", process_group=ranks.patient)
    on_rank_0(lambda: partial.rename(folder))


def add_old_rope(file: Path) -> None:
    """Write rotary positions into a model's config.json as transformers 4 reads them, too.

    Version 4 would read a base of 10,000 without a word. Version 5 reads `rope_parameters`.
    """
    config = json.loads(file.read_text("utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    if theta := rope.pop("rope_theta", None):
        config["rope_theta"] = theta
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope
        file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer) -> None:
    """Load the optimiser's moments from a checkpoint, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.load(moments, checkpoint_id=folder / "trainer", process_group=ranks.patient)
    set_optimizer_state_dict(model, optimizer, moments)


# ---------------------------------------------------------------------------------------- the stop


class StopSignals:
    """Within `with`, Ctrl-C, SIGTERM and SIGHUP (a lost terminal) set a flag, and do nothing else.

    The program looks at the flag after each step. Launchers repeat signals, so a second one means
    the same. SIGQUIT (Ctrl and a backslash) ends the program at once.
    """

    def __enter__(self) -> "StopSignals":
        self.flag, self.before = False, {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                self.before[number] = signal.signal(number, self.set_flag)
        return self

    def __exit__(self, *_error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def set_flag(self, _number: int, _frame: Any) -> None:
        if not self.flag and rank() == 0:
            # print fails if the signal arrives during another write to the same stream.
            with contextlib.suppress(OSError):  # the terminal is lost
                os.write(2, b"\nstopping after this step; Ctrl-\\ ends at once\n")
        self.flag = True

    def asked(self) -> bool:
        """Whether any rank was asked to stop. Every rank must call this."""
        return any(all_list(self.flag))


# SIGTERM ends a process that a reward has forked: time limits rely on it.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
