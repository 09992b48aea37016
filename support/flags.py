"""Flags: fields of a dataclass, read from command lines, arguments files and runs, and checked."""

import argparse
import json
import os
import shlex
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from support import InputError
from support.progress import log
from support.ranks import on_rank_0

# Flags that can name a file or a folder.
PATHS = set("model data chat_template reward output resume benchmarks eval_benchmarks".split())
PATHS |= {"answered", "folder", "verifier"}  # of scripts/


def check_least(cfg: Any, **least: int) -> None:
    """Raise InputError, naming the flag, if a flag is below its least value."""
    for name, value in least.items():
        if getattr(cfg, name) < value:
            raise InputError(f"--{name} {getattr(cfg, name)}: must be at least {value}")


def flag(default: Any, text: str) -> Any:
    """Define a field of a Config with its default and its --help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def expanded(value: Any) -> Any:
    """Return a path, or each of a list, with ~ and $VAR expanded: no shell does in --output=~/x."""
    if isinstance(value, list):
        return [expanded(item) for item in value]
    return os.path.expanduser(os.path.expandvars(value))


class Parser(HfArgumentParser):
    """A parser that reads @file like a command line, with quotes and comments.

    A # begins a comment at the start of a line and after a blank, as in a shell.
    """

    def given(self, argv: list[str] | None = None) -> dict[str, Any]:
        """Return the flags that a command line gives, without the defaults of other flags."""
        names = [each.name for each in fields(self.dataclass_types[0])]
        # A flag that is not given keeps the value that the namespace has before parsing.
        parsed = vars(self.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, MISSING))))
        given = {name: parsed[name] for name in names if parsed[name] is not MISSING}
        return {name: expanded(x) if name in PATHS else x for name, x in given.items()}

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        words = shlex.shlex(arg_line, posix=True)
        words.whitespace_split, words.commenters, arguments = True, "", []
        while (rest := arg_line[words.instream.tell() :].lstrip()) and rest[0] != "#":
            arguments.append(words.get_token())
        return arguments


def parse_flags(
    config: type,
    description: str,
    argv: list[str] | None = None,
    program: str = "stapo.py",
) -> Any:
    """Read a command line, with arguments files in it, into the dataclass `config`.

    With --resume DIR the other flags come from DIR/config.json, and flags that are given win. If
    --model is a checkpoint, some flags come from its run (flags_of_model). Rank 0 reads the flags
    for all ranks. Raises InputError if DIR holds no run.
    """

    def read() -> Any:
        parser = Parser(config, description=description, fromfile_prefix_chars="@")
        given = parser.given(argv)
        if not given.get("resume"):
            return config(**flags_of_model(given, program) | given)
        if "output" in given:
            raise InputError("--output: a resumed run stays in its directory; leave this flag out")
        stored = flags_of_run(config, Path(given["resume"]))
        return config(**stored | given | {"output": given["resume"]})

    return on_rank_0(read)


def flags_of_model(given: dict[str, Any], program: str) -> dict[str, Any]:
    """Return the instruction, the reward and the length of the run that a checkpoint is from.

    The checkpoint is --model RUN/checkpoints/step_N. Its run's flags are in RUN/config.json. Flags
    that are given are left out. A line names the others.
    """
    folder = Path(given.get("model", "")).resolve().parent
    file = folder.parent / "config.json"
    of_run = folder.name == "checkpoints" and file.is_file()
    stored = json.loads(file.read_text("utf-8")) if of_run else {}
    names = {"instruction", "reward", "max_new_tokens"} & (stored.keys() - given.keys())
    if taken := {name: stored[name] for name in sorted(names)}:
        words = " ".join(f"--{name}={value!r}" for name, value in taken.items())
        hint = "a base model needs the same, and its template"
        log(f"{program}: {words}, as in its run ({file}); {hint}")
    return taken


def flags_of_run(config: type, run: Path) -> dict[str, Any]:
    """Read the flags of a run from its config.json. Raises InputError if there is no run."""
    file = run / "config.json"
    stored = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if "resume" not in stored:  # a model's config.json has no such key
        raise InputError(f"{run}: holds no run; give the --output of a run")
    return {each.name: stored[each.name] for each in fields(config) if each.name in stored}
