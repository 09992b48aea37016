"""Problems and their right answers, from the Hub or a file, in the layouts of usual data sets."""

import re
from pathlib import Path
from typing import Any

from support.errors import InputError
from support.progress import say

PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model")
READ = f"the problem is read from {' or '.join(PROBLEM_COLUMNS)}"
READ += f", the answer from {' or '.join(ANSWER_COLUMNS)}"
# DAPO-Math-17k wraps each problem in its own instruction, which asks for another answer format.
DAPO_WRAPPER = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response should be "
    r"of the form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\."
    r"\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.\s*",
    re.DOTALL,
)


def load_problems(
    source: str, split: str = "train", *, whole_rows: bool = False
) -> list[dict[str, Any]]:
    """The distinct problems of a Hub data set or a .jsonl, .json or .parquet file, in their order.

    The problem is the column `problem`, `question` or `prompt`: text or a chat. The answer is
    `answer`, `final_answer` or `reward_model["ground_truth"]`. Of rows with the same problem the
    first is taken.

    Returns [{"problem": str, "answer": str}]. Rows without an answer are left out, and a line says
    how many. With `whole_rows` none is left out, and each problem has its "row" too, a dict of
    every column. Raises InputError, naming the source or its row.
    """
    rows = load_rows(source, split)
    columns = f"its columns are {', '.join(rows.column_names)}; {READ}"
    if not whole_rows:
        known = {*PROBLEM_COLUMNS, *ANSWER_COLUMNS} & {*rows.column_names}
        rows = rows.select_columns(sorted(known))
    refuse_mixed_types(source, rows)
    problems: dict[str, dict[str, Any]] = {}  # DAPO-Math-17k holds each problem ~100 times
    without_answer = 0
    for number, row in enumerate(rows, start=1):
        problem, answer = read_row(row)
        what = "" if problem else "problem that is text, or a chat of user and assistant alone"
        if answer is None and not whole_rows:
            what = what or "answer that is text, a number below 2^53 or a flat list of these"
        if what:
            raise InputError(f"{source}: row {number} has no {what}; {columns}")
        if answer or whole_rows:
            own = {"row": row} if whole_rows else {}
            problems.setdefault(problem, {"problem": problem, "answer": answer or ""} | own)
        else:
            without_answer += 1
    if not problems:
        raise InputError(f"{source}: holds no problem with an answer; {columns}")
    if without_answer:
        what = "rows without an answer (empty, proof, notfound) that are left out"
        say(f"{source}: {what}: {without_answer}")
    return list(problems.values())


def load_rows(source: str, split: str) -> Any:
    """The datasets.Dataset of a Hub id, or of a local file as it is now; raises InputError."""
    import datasets  # slow to import, and needed by no other function

    file = Path(source)
    builder = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(file.suffix)
    if builder and not file.is_file():
        raise InputError(f"{source}: no such file")
    try:
        if not builder:
            return datasets.load_dataset(source, split=split)
        # The cache of `datasets` knows a file by its path and its time of change. A changed file
        # may keep both, so the cache also gets its size and the time that a user cannot set.
        version = f"{file.stat().st_size}-{file.stat().st_ctime_ns}"
        return datasets.load_dataset(builder, version, data_files=source, split="train")
    except Exception as error:  # datasets raises a dozen unrelated kinds
        # Only the cause says where a file cannot be parsed.
        cause = error.__cause__ if builder and error.__cause__ else error
        reason = " ".join(str(cause).split())
        hint = "give a Hub id, or a .jsonl, .json or .parquet file"
        raise InputError(f"{source}: cannot be read as a dataset ({reason}); {hint}") from error


def refuse_mixed_types(source: str, rows: Any) -> None:
    """Raise InputError if a column of a JSON file has texts beside numbers or lists.

    `datasets` then reads the text "3.10" as the number 3.1, and "[2, 5]" as a list.
    """
    for name, feature in rows.features.items():
        if type(feature).__name__ == "Json":
            kinds = {type(value) for value in rows[name]} - {dict, list, type(None)}
            if kinds:
                what = f"column {name} has values of several types; write all of them as text"
                raise InputError(f"{source}: {what}")


def read_row(row: dict) -> tuple[str, str | None]:
    """The (problem, answer) of a row: in each case the first column that has one, or "".

    The answer is None if there is none, and a column has something that is no answer.
    """
    model = row.get("reward_model")
    cells = [row.get("answer"), row.get("final_answer")]
    cells += [model.get("ground_truth")] if isinstance(model, dict) else []
    problems = [problem_text(row.get(name)) for name in PROBLEM_COLUMNS]
    answers = [answer_text(cell) for cell in cells]
    return next(filter(None, problems), ""), next(
        filter(None, answers), None if None in answers else ""
    )


def problem_text(value: Any) -> str:
    """Text; of a chat the user's last turn, or "" if others than an assistant speak.

    DAPO-Math-17k's wrapper is taken off, also in a copy with plain text. A number is the problem's
    number, so it gives "".
    """
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        last_turns = {turn.get("role") or "user": turn.get("content") for turn in value}
        value = last_turns.get("user") if last_turns.keys() <= {"user", "assistant"} else None
    text = value.strip() if isinstance(value, str) else ""
    wrapped = DAPO_WRAPPER.fullmatch(text)
    return wrapped[1].strip() if wrapped else text


def answer_text(value: Any) -> str | None:
    """A right answer as text: text, a number, or a flat list of these, joined by commas.

    GSM8K has its work before the answer: `... #### 72` is 72. None is "", and so are NuminaMath's
    `proof` and `notfound`. Anything else gives None. Beside decimals or nulls, the whole numbers
    of a column are stored as floats: 72.0 becomes "72". From 2^53 on floats lose digits, and such a
    number gives None.
    """
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
