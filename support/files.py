"""Files and folders of results: lines of JSON, tables, names, and what they were made from."""

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import InputError


def read_jsonl(file: Path) -> list[dict]:
    """Return the lines of a .jsonl file, without torn ones. The file may be missing."""
    lines = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def append_jsonl(file: Path, lines: list[dict[str, Any]]) -> None:
    """Add lines to a .jsonl file."""
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_jsonl(file: Path, lines: list[dict[str, Any]]) -> None:
    """Write a .jsonl file."""
    write_whole(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def write_whole(file: Path, text: str) -> None:
    """Write a file. A crash leaves either the old text or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(file)


def fingerprint(value: Any) -> str:
    """Hash a value: 16 hexadecimal digits of the SHA-256 of its JSON."""
    text = json.dumps(value, sort_keys=True, default=str)  # str: for dates and bytes
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def must_be_empty(folder: Path, hint: str) -> None:
    """Make a folder. Raises InputError if it has files: no program writes over them."""
    folder.mkdir(parents=True, exist_ok=True)
    if files := sorted(path.name for path in folder.iterdir() if path.name[0] != "."):
        raise InputError(f"--output {folder}: holds {files[0]}; {hint} an empty directory")


def read_flags(folder: Path) -> dict[str, Any]:
    """Return flags.json of a folder of results, or {} if the folder is empty.

    Raises InputError if it has files and no flags.json.
    """
    if (folder / "flags.json").exists():
        return json.loads((folder / "flags.json").read_text("utf-8"))
    must_be_empty(folder, "name")
    return {}


def check_same(folder: Path, before: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """Raise InputError if `now` differs from `before`, of which `what` in the folder was made."""
    for name, value in now.items():
        if name not in before or before[name] != value:
            hint = "with another one; name another --output"
            raise InputError(f"{name}: {folder} holds {what} {hint}")


def folder_name(model: str) -> str:
    """Return the name of a model, a Hub id or a path, as a part of a folder's name."""
    return re.sub(r"[^\w.]+", "-", model).strip("-")


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table of rows of cells, the headings first."""
    lines = [f"| {' | '.join(map(str, row))} |\n" for row in rows]
    return "".join([lines[0], f"|{'---|' * len(rows[0])}\n", *lines[1:]])
