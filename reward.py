r"""The reward of Sec. 2.2: +1 if the final answer of a response is right, -1 if it is not.

    is_correct(r"... so it is \boxed{\dfrac{1}{2}}.", "0.5")   -> True
    math_reward(r"\boxed{4} no, \boxed{5}", "4")               -> -1.0

The final answer is the content of the last \boxed{...}. support/grader decides whether two
answers are equal. load_reward loads a reward of your own.
"""

import asyncio
import contextlib
import copy
import importlib.util
import inspect
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import InputError
from support.grader import math_equal, rounds_to
from support.progress import one_line, track

# Of a response's text, its problem, and what else is known of it (OwnReward).
Reward = Callable[[str, dict, dict | None], float]

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
    answer, gold = extract_answer(response), unbox(str(gold))
    return bool(answer) and (math_equal(answer, gold) or rounds_to(answer, gold))


def unbox(gold: str) -> str:
    """Return what is in the box of a right answer, or the right answer if it has none."""
    return extract_answer(gold) or gold


def math_reward(response: str, gold: str) -> float:
    """Return R(x, y) of Sec. 2.2: +1.0 for a right final answer, -1.0 for any other response."""
    return 1.0 if is_correct(response, gold) else -1.0


def load_reward(spec: str = "") -> Reward:
    """Return the reward of training and evaluation: a function of a response's text and a problem.

    spec: the value of --reward. If it is empty, the reward is math_reward with problem["answer"].
    With FILE.py:FUNCTION, it is an OwnReward. FILE.py may import modules from its own folder.
    Raises InputError if there is no such file or function.
    """
    if not spec:
        return lambda text, problem, info=None: math_reward(text, problem["answer"])
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
    return OwnReward(spec, function)


class OwnReward:
    """A reward of your own: FUNCTION(text, row), also an `async def`, returns a number.

    The row is a copy of problem["row"], the problem's row of the data file with all its columns. A
    problem without "row" keeps math_reward. If FUNCTION has a further parameter named info, it gets
    {"tokens": tokens of the response with its stop id, "truncated": bool} there.
    """

    def __init__(self, spec: str, function: Callable):
        self.spec, self.function = spec, function
        self.wants_info = "info" in list(inspect.signature(function).parameters)[2:]
        kinds = function, function.__call__  # a function, or an object
        # One event loop for all calls, because a client of a judge cannot move to another.
        self.runner = asyncio.Runner() if any(map(inspect.iscoroutinefunction, kinds)) else None

    def __call__(self, text: str, problem: dict, info: dict | None = None) -> float:
        """Return the reward. Raises InputError if FUNCTION fails or returns no finite number."""
        if self.runner:
            return self.runner.run(self.later(text, problem, info))
        with self.named(problem):
            return self.number(self.call(text, problem, info), problem)

    async def later(self, text: str, problem: dict, info: dict | None) -> float:
        """Return the reward of an `async def`."""
        with self.named(problem):
            value = self.call(text, problem, info)
            return self.number(await value if inspect.isawaitable(value) else value, problem)

    def call(self, text: str, problem: dict, info: dict | None) -> Any:
        """Call FUNCTION. An `async def` returns an awaitable."""
        if "row" not in problem:
            return math_reward(text, problem["answer"])
        more = {"info": info or {"tokens": 0, "truncated": False}} if self.wants_info else {}
        return self.function(text, copy.deepcopy(problem["row"]), **more)

    def number(self, value: Any, problem: dict) -> float:
        if not isinstance(value, numbers.Real) or not abs(value) < 3.4e38:  # float32; no for NaN
            what = f"returned {value!r}, which is no finite number"
            raise InputError(
                f"--reward {self.spec}: {what}, for row {one_line(repr(problem['row']))}"
            )
        return float(value)

    @contextlib.contextmanager
    def named(self, problem: dict) -> Iterator[None]:
        """In place of an error raise InputError with the reward, the row and the line."""
        try:
            yield
        except (InputError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # exit() and time limits raise no Exception
            cancelled = self.runner and isinstance(error, asyncio.CancelledError)
            if cancelled and asyncio.current_task().cancelling():
                raise  # another call has failed, or Ctrl-C
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"row {one_line(repr(problem['row']))}, {frame.filename}, line {frame.lineno}"
            raise InputError(f"--reward {self.spec}: {error!r} at {where}") from error

    async def all_later(self, calls: list[tuple]) -> list[float]:
        """Return the rewards of many calls, of which 64 wait for their result at a time."""
        places = asyncio.Semaphore(64)

        async def one(call: tuple) -> float:
            async with places:
                value = await self.later(*call)
            bar.update()
            return value

        with track(calls, "rewards") as bar:
            async with asyncio.TaskGroup() as group:  # if one fails, the others are cancelled
                tasks = [group.create_task(one(call)) for call in calls]
        return [task.result() for task in tasks]


def reward_all(
    reward: Reward, texts: list[str], problems: list[dict], infos: list[dict]
) -> list[float]:
    """Reward responses, with a progress bar. problems, infos (see OwnReward): of each response."""
    calls = list(zip(texts, problems, infos, strict=True))
    if not isinstance(reward, OwnReward) or not reward.runner:
        return [reward(*call) for call in track(calls, "rewards")]
    try:
        return reward.runner.run(reward.all_later(calls))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
