"""A program's flags: a command line as a dataclass, and the flags of a run that is resumed."""

import argparse
import json
import re
import shlex
from dataclasses import MISSING, asdict, field, fields
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from support.distributed import wait_for_rank_0
from support.errors import InputError

# What quotes or a backslash protect (group 1), or a comment. As in a shell, "#" within a word
# begins no comment. shlex would cut a name such as runs/a#2 there, and drop the flags after it.
COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<!\S)#.*""")


def flag(default: Any, text: str) -> Any:
    """Define a field of a Config with its default and its --help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """A parser that reads @file like a command line, with quotes and comments.

    Under torchrun only rank 0 prints an error.
    """

    def __init__(self, config: type, description: str):
        super().__init__(config, description=description, fromfile_prefix_chars="@")
        self.names = [each.name for each in fields(config)]

    def given(self, argv: list[str] | None = None) -> dict[str, Any]:
        """Return the flags that a command line gives, without the defaults of other flags."""
        # A flag that is not given keeps the value that the namespace has before parsing.
        blank = argparse.Namespace(**dict.fromkeys(self.names, MISSING))
        parsed = vars(self.parse_args(argv, blank))
        return {name: parsed[name] for name in self.names if parsed[name] is not MISSING}

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(COMMENT.sub(r"\1", arg_line))

    def error(self, message: str) -> NoReturn:
        wait_for_rank_0()
        super().error(message)


def parse_flags(
    config: type,
    description: str,
    argv: list[str] | None = None,
    changeable: frozenset[str] = frozenset(),
) -> Any:
    """Read a command line, with arguments files in it, into the dataclass `config`.

    With --resume DIR all other flags come from DIR/config.json. Raises InputError if DIR holds no
    run or a run with flags of its own, and if a given flag that is not in `changeable` differs from
    that file.
    """
    given = Parser(config, description).given(argv)
    resume = given.get("resume")
    if not resume:
        return config(**given)
    stored = asdict(config(**known_flags(config, Path(resume), "--resume")))
    for name in sorted(given.keys() - changeable - {"resume"}):
        old, new = stored[name], given[name]
        if name == "reward":  # FILE.py may have moved; RunFolder compares what is in it
            old, new = old.rpartition(":")[2], new.rpartition(":")[2]
        if new != old:
            began = f"{resume} began with --{name} {stored[name]}"
            raise InputError(f"--{name} {given[name]}: {began}, and --resume keeps it")
    return config(**stored | given | {"output": resume})


def known_flags(config: type, run: Path, flag: str) -> dict[str, Any]:
    """Read the flags of a run, without hashes. Raises InputError if `config` lacks one of them.

    A script that extends stapo.py can have flags of its own. Without them the run is another one.
    """
    stored = read_flags(run, flag)
    stored = {name: stored[name] for name in stored if not name.endswith("_fingerprint")}
    for name in sorted(stored.keys() - {each.name for each in fields(config)}):
        what = f"its run has --{name} {stored[name]}, which this program does not know"
        raise InputError(f"{flag} {run}: {what}; use the program that began it")
    return stored


def read_flags(run: Path, flag: str) -> dict[str, Any]:
    """Read the flags of a run from its config.json. `flag` is for the message of an InputError."""
    try:
        stored = json.loads((run / "config.json").read_text("utf-8"))
        stored["resume"]  # a model's config.json has none
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = "holds no run (config.json is missing or another program's)"
        raise InputError(f"{flag} {run}: {what}") from error
    return stored
