"""A program's flags: a command line as a dataclass, and the flags of a run that is resumed."""

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import MISSING, asdict, field, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from support.distributed import on_rank_0
from support.errors import InputError


def flag(default: Any, text: str, section: str = "") -> Any:
    """Define a field of a Config with its default and its --help text.

    section: the title of the section of --help that begins with this flag, or "".
    """
    metadata = {"help": text} | ({"section": section} if section else {})
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Parser(HfArgumentParser):
    """A parser that reads @file like a command line, with quotes and comments."""

    group = None  # the section of --help that the newest flag is in

    def add_argument(self, *names: str, section: str = "", **options: Any) -> argparse.Action:
        if section:
            self.group = self.add_argument_group(section)
        is_flag = self.group and names[0].startswith("--")
        return (self.group if is_flag else super()).add_argument(*names, **options)

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
    changeable: frozenset[str] = frozenset(),
    defaults: Callable[[dict], dict] = lambda given: {},
) -> Any:
    """Read a command line, with arguments files in it, into the dataclass `config`.

    With --resume DIR all other flags come from DIR/config.json. Raises InputError if DIR holds no
    run, and if a given flag that is not in `changeable` differs from that file. `defaults` may
    replace defaults, from the flags that are given. Rank 0 reads the flags for all ranks.
    """

    def read() -> Any:
        parser = Parser(config, description=description, fromfile_prefix_chars="@")
        given = parser.given(argv)
        if not given.get("resume"):
            return config(**defaults(given) | given)
        stored = asdict(config(**flags_of_run(config, Path(given["resume"]))))
        for name in sorted(given.keys() - changeable - {"resume"}):
            if given[name] != stored[name]:
                began = f"{given['resume']} began with --{name} {stored[name]}"
                raise InputError(f"--{name} {given[name]}: {began}, and --resume keeps it")
        return config(**stored | given | {"output": str(Path(given["resume"]))})

    return on_rank_0(read)


def flags_of_run(config: type, run: Path) -> dict[str, Any]:
    """Read the flags of a run from its config.json. Raises InputError if there is no run."""
    file = run / "config.json"
    stored = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if "resume" not in stored:  # a model's config.json has no such key
        if run.parent.name == "checkpoints":  # a habit from other trainers
            raise InputError(f"--resume {run}: is a checkpoint; give its run, {run.parent.parent}")
        raise InputError(f"--resume {run}: holds no run (its config.json is missing)")
    return {each.name: stored[each.name] for each in fields(config) if each.name in stored}
