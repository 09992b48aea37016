"""Problems and their right answers, from the Hub or a file, in the layouts of usual data sets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import InputError
from support.progress import say, track

PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model")
READ = f"a problem is text or a chat of user and assistant, in {' or '.join(PROBLEM_COLUMNS)}; "
READ += f"an answer is text, a number below 2^53 or a flat list, in {' or '.join(ANSWER_COLUMNS)}"
# DAPO-Math-17k wraps each problem in its own instruction, which asks for another answer format.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'


def load_problems(
    source: str, split: str = "train", *, whole_rows: bool = False
) -> list[dict[str, Any]]:
    """The distinct problems of a Hub data set or a .jsonl, .json or .parquet file, in their order.

    The problem is the column `problem`, `question` or `prompt`: text or a chat. The answer is
    `answer`, `final_answer` or `reward_model["ground_truth"]`. The first that is not empty counts,
    and of rows with the same problem the first. Returns [{"problem": str, "answer": str}].

    Rows without an answer are left out, and a line says how many. With `whole_rows` none is left
    out, and each problem has its "row" too, a dict of every column. Raises InputError.
    """
    problems: dict[str, dict[str, Any]] = {}  # DAPO-Math-17k holds each problem ~100 times
    without_answer = 0
    for number, row in enumerate(load_rows(source, split), start=1):
        if not isinstance(row, dict):
            raise InputError(f"{source}: row {number} is no JSON object")
        texts = [problem_text(row[name]) for name in PROBLEM_COLUMNS if name in row]
        problem = next(filter(None, texts), "")
        # None: of no kind that is read. "": the row says that there is no answer.
        answers = [answer_text(row[name]) for name in ANSWER_COLUMNS if name in row]
        answer = next(filter(None, answers), "")
        if not problem or (None in answers and not answer and not whole_rows):
            what = f"has no problem or no answer in its columns {', '.join(row)}"
            raise InputError(f"{source}: row {number} {what}; {READ}")
        if answer or whole_rows:
            own = {"row": row} if whole_rows else {}
            problems.setdefault(problem, {"problem": problem, "answer": answer} | own)
        else:
            without_answer += 1
    if not problems:
        raise InputError(f"{source}: holds no problem with an answer; {READ}")
    if without_answer:
        say(f"{source}: rows without an answer (empty, proof, notfound) left out: {without_answer}")
    return list(problems.values())


def load_rows(source: str, split: str) -> Iterator[dict]:
    """Iterate over the rows of a Hub data set or a local file, with a bar. Raises InputError."""
    import datasets  # slow to import, and needed by no other function
    from pyarrow.parquet import ParquetFile  # of datasets

    file = Path(source)
    kind = file.suffix.lower()
    try:
        if kind in (".jsonl", ".json"):
            rows = json_rows(file)
        else:
            if kind == ".parquet":
                batches = (batch.to_pydict() for batch in ParquetFile(file).iter_batches(1000))
            else:
                batches = datasets.load_dataset(source, split=split).iter(1000)
            # A batch is {column: values}.
            rows = (dict(zip(batch, row)) for batch in batches for row in zip(*batch.values()))
        yield from track(rows, f"reading {source}")
    except Exception as error:  # datasets raises a dozen unrelated kinds
        reason = " ".join(str(error).split())
        hint = "give a Hub id, or a .jsonl, .json or .parquet file"
        raise InputError(f"{source}: cannot be read as a dataset ({reason}); {hint}") from error


def json_rows(file: Path) -> Iterator[dict]:
    """Iterate over the rows of a file with a JSON object in each line, or with a list of objects.

    A text in a row stays a text. `datasets` would make a date of "2024-05-01". Raises ValueError.
    """
    with file.open(encoding="utf-8-sig") as lines:
        is_list = lines.read(1) == "["
        lines.seek(0)
        for number, text in enumerate([lines.read()] if is_list else lines, start=1):
            try:
                rows = json.loads(text) if text.strip() else []
            except json.JSONDecodeError as error:
                line = number + error.lineno - 1
                raise ValueError(f"line {line} is not JSON: {error.msg}") from error
            yield from rows if isinstance(rows, list) else [rows]


def problem_text(value: Any) -> str:
    """Text; of a chat the user's last turn, or "" if others than an assistant speak.

    DAPO-Math-17k's wrapper is taken off, also in a copy with plain text. A number is the problem's
    number, so it gives "".
    """
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        last_turns = {turn.get("role") or "user": turn.get("content") for turn in value}
        value = last_turns.get("user") if last_turns.keys() <= {"user", "assistant"} else None
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith(DAPO_BEFORE) and text.endswith(DAPO_AFTER):
        text = text[len(DAPO_BEFORE) : -len(DAPO_AFTER)].strip()
    return text


def answer_text(value: Any) -> str | None:
    """A right answer as text: text, a number, or a flat list of these, joined by commas.

    GSM8K has its work before the answer: `... #### 72` is 72. None is "", and so are NuminaMath's
    `proof` and `notfound`. Of an object its "ground_truth" counts. Anything else gives None. Tables
    can store 72 as 72.0, which gives "72". From 2^53 on floats have lost digits and give None.
    """
    if isinstance(value, dict):
        value = value.get("ground_truth", value)
    texts = []
    for item in value if isinstance(value, list) else [value]:
        if type(item) is float and abs(item) < 2**53:  # neither infinite nor NaN
            texts.append(str(int(item) if item.is_integer() else item))
        elif type(item) in (str, int):
            texts.append(str(item))
        elif value is not None:
            return None
    text = ", ".join(filter(None, texts)).rpartition("####")[2].strip()
    return "" if text.lower() in ("proof", "notfound") else text
