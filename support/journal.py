"""The responses of an evaluation, in a file that survives an interruption at any moment."""

import json
from pathlib import Path
from typing import NamedTuple

from support import distributed
from support.distributed import rank, world_size
from support.files import append_rows, read_lines, write_whole


class Key(NamedTuple):
    """The name of one response. Problems and samples are numbered from 0.

    fingerprint: a hash of what the response was made from. Rows with another one are other rows.
    """

    benchmark: str
    decoding: str
    problem: int
    sample: int
    fingerprint: str


class Journal:
    """Rows by key. Each row is also a line of a .jsonl file, and is written when it is known.

    Rank 0 writes to samples.jsonl, and rank 3 to samples.rank3.jsonl beside it. A crash loses at
    most the line that is being written. `rows` has the rows of all ranks at the last merge.
    """

    def __init__(self, path: Path):
        self.path = path
        self.merge()

    def add(self, key: Key, row: dict) -> None:
        """Write columns of a row. The next merge puts them into `rows`, beside older columns."""
        file = self.path.with_suffix(f".rank{rank()}.jsonl") if rank() else self.path
        append_rows(file, [key._asdict() | row])

    def share(self, keys: list[Key]) -> list[Key]:
        """Return this rank's part of the keys that have no row yet."""
        return [key for key in keys if key not in self.rows][rank() :: world_size()]

    def merge(self) -> None:
        """Merge the files of all ranks into one and read it. Every rank must call this."""
        distributed.barrier()  # every rank has written its rows
        self.rows = distributed.on_rank_0(self.merged)

    def merged(self) -> dict[Key, dict]:
        """Write the rows of all files to one file, sorted and without torn lines; return them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A copy of yours, such as samples.rank1.old.jsonl, is none of them.
        others = list(self.path.parent.glob(f"{self.path.stem}.rank*[0-9].jsonl"))
        rows: dict[Key, dict] = {}
        for file in [self.path, *others]:
            for _, row in read_lines(file):
                key = Key(*(row[name] for name in Key._fields))
                rows.setdefault(key, {}).update(row)
        lines = [json.dumps(rows[key], ensure_ascii=False) + "\n" for key in sorted(rows)]
        write_whole(self.path, "".join(lines))
        for file in others:
            file.unlink()
        return rows
