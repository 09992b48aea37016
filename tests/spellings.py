r"""Right and wrong spellings of the benchmarks' gold answers, and texts made to cost time.

Every rewriting is a plain edit of the gold string, made without a look at `answers.py`: a right
spelling keeps the value by construction, a wrong one changes it. The environment variable
STAPO_BENCHMARKS names the folder of the six benchmarks: aime24.jsonl, ..., olympiadbench.jsonl.
"""

import gc
import json
import os
import random
import re
import time
from fractions import Fraction
from pathlib import Path

BENCHMARKS = Path(os.environ.get("STAPO_BENCHMARKS") or "no benchmarks")
FILES = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")

# Pieces that are repeated; an opening, how often, and its closing around a 5; whole answers.
PIECES = r"""
9^ 500! 9^{2000} \frac{1}{7^{2000}}+ \frac{1}{7^{800}}+\frac{1}{11^{700}}- \sin9^{2000} n+ x=y=
n^{400}/7^{300}+ (\pm1,\{ 5metres m+ f(x)=x, x<1or |1 1& _\text{ x=( x=\{ =\lim{a ⟦
""".split()
NESTED = [("{", 5_000, "}"), ("(", 280, ")"), (r"x=\{", 90, r"\}"), (r"\sqrt{", 80, "}")]
COSTLY = r"""
9^{9^{9^9}} 2^{10^7} 1e999999999 1000000000! \frac{1}{0} 0^0 NaN __import__('os').system('echo')
""".split()
COSTLY += ["\0" * 580, "7" * 100_000, "5" + " " * 570 + "mod !"]
COSTLY += ["+".join(rf"{n}^-{1_000 - 4 * n}" for n in range(11, 90) if n % 2 and n % 3)]
COSTLY += [r"\boxed{5}" + "{" * 2_000_000, "{" * 2_000_000, "Answer: 5\n" * 200_000]
COSTLY += [r"\boxed{" * 280_000, r"\boxed{}" * 250_000, (r"\boxed" + " " * 60) * 30_000]


def hostile(length: int) -> list[str]:
    texts = [piece * (length // len(piece) - 1) + end for piece in PIECES for end in ("", "5")]
    return texts + [a * n + "5" + b * n for a, n, b in NESTED] + COSTLY


def golds() -> list[tuple[str, str]]:
    """(file, gold answer) of all 1,546 problems, without the box of one of the files."""
    rows = []
    for name in FILES:
        for line in (BENCHMARKS / f"{name}.jsonl").read_text().splitlines():
            rows.append((name, json.loads(line)["answer"].strip()))
    return [(name, g[7:-1] if g.startswith("\\boxed{") else g) for name, g in rows]


def split_top(text: str, separators: str) -> list[str]:
    """`text` cut before each separator that stands outside all brackets and groups."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c in separators and i > start:
            parts.append(text[start:i])
            start = i
    return [*parts, text[start:]]


def fraction(m: re.Match) -> str:
    """The decimal of a match as a fraction."""
    exact = Fraction(m[0])
    return rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"


def mixed(m: re.Match) -> str:
    a, b = int(m[2]), int(m[3])
    return rf"{m[1]}{a // b}\frac{{{a % b}}}{{{b}}}" if a > b and a % b else m[0]


_FRACTION = r"^(-?)\\[dt]?frac\{?(\d+?)\}?\{?(\d+)\}?$"
# Each edit: a pattern and its replacements. Anchored patterns edit a whole answer of that form.
EDITS = [
    (r"\\d?frac(?![a-z])", r"\\dfrac", r"\\cfrac"),
    (r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\\frac {\1} {\2}"),
    (r"\\left(?!\\l)|\\right(?!\\r)", ""),
    (r"(?<![A-Za-z\\ ]) +| +(?![A-Za-z])", ""),
    (r"(?<!e)([-+=])", r" \1 "),
    (r"\\pi(?![a-z])\s*", "π "),
    (r"\\sqrt\{(\w+)\}", r"{\1}^{1/2}", r" sqrt(\1)"),
    (r"\^(\w)", r"^{\1}"),
    (r"\^\{?\\circ\}?", "", r"\\text{ degrees}"),
    (r"\\text\{\(([A-Z])\)\}", r"\1"),
    (r"\\text\{(\w+)\}$", r"\1", r"\\mathrm{\1}"),
    (r"\s*\\?%", "", r" \\%"),
    (r"\\\$([\d.]+)$", r"\1 \\text{ dollars}"),
    (r"(\d)\s*\\(pi|sqrt)", r"\1 \\cdot \\\2"),
    (r"^([^(),\[\]]*)$", r"\\displaystyle \1"),
    (r"^-?\d*\.?\d+$", r"\g<0>\\text{ units}", r"\g<0>\\ \\mathrm{cm}", r"\g<0>\\mbox{ m}^2"),
    (r"^-?\d*\.?\d+$", r"x = \g<0>", r"\g<0>.", r"\g<0> units", r"\g<0>/1", r"\g<0>。"),
    (r"^-?\d*\.\d+$", r"\g<0>0", fraction),
    (r"^(-?)0(\.\d+)$", r"\1\2"),
    (r"^-?\d+$", r"\g<0>.0", r"\\frac{\g<0>}{1}", r"\g<0>^{\\text{th}}", r"-(-\g<0>)"),
    (r"^-?\d+$", r"\g<0>\\pmod{1000}", r"\g<0> \\bmod 7", r"x \\equiv \g<0> (mod 9)"),
    (r"^-?\d{4,}$", lambda m: f"{int(m[0]):,}", lambda m: f"{int(m[0]):,}".replace(",", "{,}")),
    (_FRACTION, r"\1\2/\3", r"\\frac{\1\2}{\3}", r"\1\2\\div \3", r"\1 \2 / \3", mixed),
    (_FRACTION, r"\1\\left(\\frac{\2}{\3}\\right)", r"\1\\frac{\g<2>0}{\g<3>0}"),
    (r"^(\d+\.?\d*)e(-?\d+)$", r"\1*10^\2", r"\1 \\times 10^{\2} \\text{ m}"),
    (r"^([^{}]*?) ?\\pm ?(.*)$", r"\1 - \2, \1 + \2", r"\1+\2 \\text{ and } \1-\2"),
    (r"^(?:[a-z] ?\\in ?)?\[([^,]+), ?([^,]+)\]$", r"\1 \\le x \\le \2"),
]


def right_spellings(gold: str, rng: random.Random) -> list[str]:
    """Distinct strings with the value of `gold`, as a model may write them."""
    bare = gold.strip().strip("$").strip() if gold.count("$") == 2 else gold.strip()
    words = "\\text" in bare or re.search(r"[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+", "", bare))
    is_mixed = re.match(r"\d+ ?\\frac\{\d+\}\{\d+\}$", bare)
    out = [gold, bare, f"${bare}$" if "$" not in bare else bare, rf"\({bare}\)", f" {bare} "]
    out += [re.sub(pattern, new, bare) for pattern, *news in EDITS for new in news]
    if not is_mixed:
        out.append(re.sub(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}", r"((\1)/(\2))", bare))
    if re.match(r"[\d\\]*[\df]", bare):
        out.append(re.sub(r"\s*\\(?:text|mbox)\s*\{[^{}]*\}(\^\d)?$", "", bare))
    items = [x.strip(", ") for x in split_top(bare, ",")]
    if len(items) > 1 and "$" not in bare and not re.search(r"\d(?:\{,\}|,\\!)", bare):
        shuffled = rng.sample(items, len(items))
        out += [", ".join(shuffled), " and ".join(items), r"\text{ or }".join(shuffled)]
        out += ["; ".join(items), r"\{" + ", ".join(items) + r"\}", "$" + "$, $".join(items) + "$"]
    sides = split_top(bare, "=")
    if len(sides) == 2 and len(items) == 1:
        left, right = sides[0].strip(), sides[1].lstrip("= ")
        out += [f"{right} = {left}", f"{left} - ({right}) = 0", f"{left}={right}"]
        out += [right] if re.fullmatch(r"[A-Za-z](_\S+)?(\([a-z]\))?", left) else []
    no_scalar = r",|\\in|\\cup|matrix|\\pm|\\ge|\d_|\de-?\d|%|circ|\$|[\[\]]"
    if not words and not is_mixed and len(sides) == 1 and not re.search(no_scalar, bare):
        out += [rf"\frac{{2({bare})}}{{2}}", rf"\left({bare}\right) \cdot 1", f"x = {bare}"]
        out += [rf"{bare} \text{{ cm}}"]
        terms = split_top(bare, "+-")
        if len(terms) > 1 and all(t.strip(" +-") for t in terms):
            rest = [t if t.strip()[0] in "+-" else f"+{t}" for t in terms]
            out.append("".join(rng.sample(rest, len(rest))).lstrip("+"))
    if re.fullmatch(r"[A-Za-z]{4,}", bare):
        out += [bare.lower(), bare.capitalize()]
    return list(dict.fromkeys(x for x in out if x.strip()))


def simple_value(text: str):
    """Exact value of an integer, decimal, percentage or plain fraction; else the bare string."""
    text = re.sub(r"[\s$]|\\left|\\right|\\[!,]", "", text).rstrip(".%\\")
    if m := re.fullmatch(r"(-?)\\[dt]?frac\{?(\d+?)\}?\{?(\d+)\}?|(-?)(\d+)/(\d+)", text):
        sign, p, q = m.groups()[:3] if m[3] else m.groups()[3:]
        return Fraction(int(sign + p), int(q))
    text = text.split("=")[-1].replace("\\$", "")
    return Fraction(text) if re.fullmatch(r"[-+]?\d*\.?\d+(e-?\d+)?", text) else text


def wrong_spellings(gold: str, others: list[str], rng: random.Random) -> list[str]:
    """Strings whose value differs from `gold`: near misses, and other problems' answers."""
    bare = gold.strip().strip("$").strip() if gold.count("$") == 2 else gold.strip()
    out, value = [], simple_value(bare)
    if isinstance(value, Fraction):
        if re.fullmatch(r"[-+]?\d+", bare):
            n = int(bare)
            out += [str(n + d) for d in (-2, -1, 1, 2, 10)] + [f"{n}5", f"{n}.5", f"{n}0", f"7{n}"]
            out += [str(n)[:-1], str(n)[1:], str(n)[::-1], rf"\frac{{{n}}}{{2}}", f"|x| = {n}"]
            out += [rf"{n + 1} \pmod{{1000}}", rf"2x \equiv {n} \pmod 7", f"x + y = {n}"]
        if value:
            out += [f"-({bare})", rf"2({bare})", rf"{bare} \cdot 10", f"{bare}:30"]
        if value not in (0, 1, -1):
            out += [rf"\frac{{{value.denominator}}}{{{value.numerator}}}", rf"\sqrt{{{bare}}}"]
        if m := re.fullmatch(r"(-?\d*\.?\d*)(\d)((?:e-?\d+)?)", bare):  # the last digit
            out += [f"{m[1]}{d}{m[3]}" for d in (int(m[2]) - 1, int(m[2]) + 1) if 0 <= d <= 9]
        out = [x for x in out if simple_value(x) != value and x.strip("-")]
    else:
        integers = list(re.finditer(r"(?<![\d.])\d+(?![\d.])", bare))
        if integers:
            m = rng.choice(integers)
            out += [bare[: m.start()] + str(int(m[0]) + d) + bare[m.end() :] for d in (1, 2)]
        out.append(re.sub(r"^\\[dt]?frac\{(\w+)\}\{(\w+)\}$", r"\\frac{\2}{\1}", bare))
        out.append(re.sub(r"\\sqrt\{(\d+)\}", r"\1", bare))
        out.append(re.sub(r"^\(([^,]+), ?([^,]+)\)$", r"[\1, \2]", bare))
        out.append(re.sub(r"^\(([^,]+), ?([^,]+)\)$", r"(\2, \1)", bare))
        items = [x.strip(", ") for x in split_top(bare, ",")]
        if len(items) > 1:
            out += [", ".join(x) for x in (items[:-1], [*items, "12345"], [*items[:-1], "12345"])]
        if m := re.fullmatch(r"([^=,]*?)([-+])([^=,+-]*)", bare):
            out.append(f"{m[1]}{'+' if m[2] == '-' else '-'}{m[3]}")
    out += [o for o in rng.sample(others, 6) if simple_value(o) != value]
    return list(dict.fromkeys(x for x in out if x.strip() and x != bare))


def boxed(answer: str) -> str:
    return rf"Adding both sides we find that it is $\boxed{{{answer}}}$."


def cases(seed: int = 0) -> tuple[list[tuple], list[tuple]]:
    """(file, gold, spelling) of the right and of the wrong spellings of all gold answers."""
    rng, rows = random.Random(seed), golds()
    others = [gold for _, gold in rows]
    right = [(f, g, s) for f, g in rows for s in right_spellings(g, rng)]
    wrong = [(f, g, s) for f, g in rows for s in wrong_spellings(g, others, rng)]
    return right, wrong


def seconds(function, *arguments) -> float:
    """CPU time of one call: what else the machine does, and garbage of others, is left out."""
    gc.disable()
    start = time.process_time()
    function(*arguments)
    taken = time.process_time() - start
    gc.enable()
    return taken
