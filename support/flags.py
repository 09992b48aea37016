"""Flags: fields of a dataclass, read from command lines, arguments files and runs, and checked."""

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from support import InputError
from support.ranks import on_rank_0


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
