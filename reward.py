r"""The reward of Sec. 2.2: +1 if the final answer of a response is right, -1 if it is not.

    is_correct(r"... so it is \boxed{\dfrac{1}{2}}.", "0.5")   -> True
    math_reward(r"\boxed{4} no, \boxed{5}", "4")               -> -1.0

The final answer is the content of the last \boxed{...}. support/grader decides whether two
answers are equal. load_reward loads a reward of your own.
"""

import importlib.util
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from support import InputError
from support.grader import math_equal, rounds_to
from support.progress import track

Reward = Callable[[str, dict], float]  # of a response's text and its problem

# extract_answer searches this many characters after the start of the last box, and half as many
# before it: an earlier box counts if the last one is not closed. It is more than 20,480 tokens are.
WINDOW = 120_000

_ESCAPED = re.compile(r"\\[{}\\]")
# A box without braces is a number at the end of a formula: $\boxed 5$.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(-?[\d.]*\d)(?=\.?\s?(?:\$|\\[)\]]|\n|\Z)))")

# What may stand around the "and" between two boxes of one answer.
_LAYOUT = re.compile(r"\\[()\[\]]|\$|\\q?quad|\\text|[{}\s]")


def extract_answer(response: str) -> str | None:
    r"""Return the content of the last complete \boxed{} or \fbox{} that has one, or None.

    Boxes of one answer at the end are joined: "\boxed{-5} and \boxed{7}." gives "-5, 7".
    """
    if not isinstance(response, str):
        return None
    last = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    text = response[max(0, last - WINDOW // 2) : last + WINDOW]
    stop, answers = len(text), []
    for box in reversed(list(_BOX.finditer(text))):
        rest = _ESCAPED.sub("  ", text[box.end() : stop])  # \{ and \} do not nest
        depth, start, end = 1, 0, rest.find("}")
        while end >= 0 and depth and not box[1]:
            depth += rest.count("{", start, end) - 1
            start, end = end + 1, rest.find("}", end + 1)
        content = box[1] or depth == 0 and text[box.end() : box.end() + start - 1].strip()
        behind = text[box.end() + start : stop]
        if answers and not (content and _LAYOUT.sub("", behind) in ("and", ",", ",and")):
            break
        if content:
            answers.insert(0, content)
        if len(answers) == 1 and re.search(r"(?:[.!?]\s|\n)\s*\w", behind):  # another sentence
            break
        # All text after an unfinished box belongs to that box. An earlier box must end before it.
        stop = box.start()
    return ", ".join(answers if len({*answers}) > 1 else answers[:1]) or None


def is_correct(response: str, gold: str) -> bool:
    r"""Whether the final answer of `response` equals `gold`, which may be in \boxed{} or $...$.

    It never raises, never runs text as code, and takes bounded time.
    """
    answer = extract_answer(response)
    gold = str(gold)
    gold = extract_answer(gold) or gold
    return bool(answer) and (math_equal(answer, gold) or rounds_to(answer, gold))


def math_reward(response: str, gold: str) -> float:
    """Return R(x, y) of Sec. 2.2: +1.0 for a right final answer, -1.0 for any other response."""
    return 1.0 if is_correct(response, gold) else -1.0


def load_reward(spec: str = "") -> Reward:
    """Return the reward of training and evaluation: a function of a response's text and a problem.

    spec: the value of --reward. If it is empty, the reward is math_reward with problem["answer"].
    With FILE.py:FUNCTION, the reward is your own FUNCTION(text, row), which returns a number. The
    row is problem["row"], the problem's row of the data file with all its columns. A problem
    without "row" keeps math_reward. FILE.py may import modules from its own folder.

    Raises InputError if there is no such file or function. The returned function raises it if your
    function fails or returns no number that float32 can hold.
    """
    if not spec:
        return lambda text, problem: math_reward(text, problem["answer"])
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file() or not file.endswith(".py"):
        raise InputError(f"--reward {spec}: {file or spec} is no Python file (FILE.py:FUNCTION)")
    # At the end of the path, because a file in that folder must not replace eval.py or a package.
    path = Path(file).resolve()
    sys.path.append(str(path.parent))
    # Worker processes of your reward find the module by the file's name, unless that is taken.
    taken = sys.modules.get(path.stem)
    free = taken is None or getattr(taken, "__file__", "") == str(path)
    module_spec = importlib.util.spec_from_file_location(path.stem if free else "own_reward", path)
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward {spec}: {file} has no function {name}")

    def reward(text: str, problem: dict) -> float:
        if "row" not in problem:
            return math_reward(text, problem["answer"])
        try:
            value = function(text, dict(problem["row"]))  # others need the row, too
        except (Exception, SystemExit) as error:  # also exit() in code that the function runs
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}, line {frame.lineno}"
            raise InputError(f"--reward {spec}: {error!r} at {where}") from error
        if not isinstance(value, numbers.Real) or not abs(value) < 3.4e38:  # float32; no for NaN
            raise InputError(f"--reward {spec}: returned {value!r}, which is no finite number")
        return float(value)

    return reward


def reward_all(reward: Reward, texts: Iterable[str], problems: list[dict]) -> list[float]:
    """Reward responses, with a progress bar. problems: the problem of each response."""
    pairs = zip(texts, track(problems, "rewards"), strict=True)
    return [reward(text, problem) for text, problem in pairs]
