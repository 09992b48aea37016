r"""Decide whether two mathematical answers are equal.

    math_equal(r"2(n-1)", "$2n-2$")   -> True
    math_equal(r"(1, 2]", "(1, 2)")   -> False

1. latex.py writes both answers in one spelling and cuts them into tokens.
2. A recursive-descent parser reads the tokens and computes the value. Rational values are exact
   (int, Fraction). Other values are floats or complex numbers.
3. Each variable gets fixed positive values that depend only on its name. Two answers are equal if
   they have the same value at every such point.
4. An answer that cannot be parsed is compared as text.

Text of the model is never run as code. Length, nesting, tokens and digits are limited.

Right answers that are refused:
- identities that are true for integers only, (-1)^n = cos(pi n), or on one branch of a root only;
- families written with other constants: C_1 for A, pi/6 + 2 pi k for pi/6 + pi k;
- functions of another argument: f(t) = t for f(x) = x;
- fewer digits than the gold answer has: 41 for 41.8;
- another unit: 1 m for 100 cm;
- units that look like variables or numbers: "5 m" outside \text, \mu\mathrm{m}, 5 ft 6 in, 5° 30';
- a power that names a value: AB^2 = 80. x^2 = 80 looks the same and is an equation for x;
- integers with spaced separators, 11, 111, 100, and a number after a factor, 2 3 and x 3;
- unions with other parts, (0, 1] \cup [1, 2) for (0, 2), and x < 0 "and" x > 2 for a union;
- residues that must be computed: 12 \pmod 7 for 5, 17 \bmod 5 for 2, 2^3 \equiv 1 \pmod 7 for 1;
- x = 5 for 5 \pmod 7;
- two ratios that look like times of day, 24:50 for 12:25, and x = 1/20 for 1:20;
- answers that are compared as text: |x|, 0.\overline{3}, 1:2:3, 5 million, r^2_1, 2**3, sums,
  integrals, set builders, piecewise functions, and words with the same meaning;
- irrational numbers above about 10^300, and rational numbers with more than 4,096 bits.
Answers that are accepted although they differ:
- units are dropped, not compared: 15 cm^3 counts for 15 cm^2, 3 \text{ blue} for 3 \text{ red}, and
  \sin 30 for \sin 30^\circ. Only opposites such as 5 \text{ PM} and 5 \text{ AM} differ;
- a base or a modulus may be missing, 5 for 5_7 and 5 \pmod 7, because the question mentions it;
- a row counts for a column;
- 3 \approx 2 counts for 3, and \int_0^1 x dx = 3 counts for 3;
- two irrational numbers are equal within TOLERANCE, or if both are within 1e-12 of 0.
"""

import cmath
import itertools
import math
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction

from support.latex import COMMANDS, FUNCTIONS, NAME, UNREAD, clean, tokenize

MAX_CHARS = 600  # longer answers are compared as text; the longest gold answer has 210
MAX_DEPTH = 40  # nested groups, at most nine of Python's thousand frames each
MAX_STEPS = 2_500  # tokens taken in one reading
MAX_BITS = 4_096  # size of an exact number; 100! / 2^50 and 10^100 fit
MAX_UNORDERED = 32  # longer lists are compared in order
TOLERANCE = 1e-9  # relative: far above rounding, far below 1.5 against 1.50001

# ---- reading: a parser that computes ------------------------------------------------------------

_ANGLE_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc")
_RELATIONS = frozenset("= < > ≤ ≥ ≠ ∈".split())
_STOP = _RELATIONS | {"", *") ] } \\} , ; ∨ ∪ + - ± ∓ rfloor rceil".split()}
_CLOSING = {"(": ")]", "[": ")]", "\\{": ("\\}", "}"), "{": ("}", "\\}")}
_FAILURES = (ArithmeticError, ValueError, TypeError)  # 1 / 0; unreadable text; a set plus one


@dataclass(eq=False)
class _Form:
    """An answer that is not one number.

    kind is "()", "(]", "[)" or "[]" for a point or an interval, "{}" for a set or a list, "∪" for
    a union, "=", "<", "≤" or "≠" for a relation, "_" for a number with a base (digits, base and
    value), and "∞" for infinity (its sign). parts holds the values inside.
    name is the side of a relation that only names a value: x in x = 5 and in x < 5, f(n) in
    f(n) = 2n, AB in AB = 4.
    """

    kind: str
    parts: list
    name: str = ""

    def __rmul__(self, factor):
        if factor == 1:
            return self
        infinite = any(isinstance(part, _Form) and part.kind == "∞" for part in self.parts)
        if isinstance(factor, _Form) or self.kind not in ("()", "∞") or infinite:
            raise ValueError(f"a product with {self.kind}")
        return _Form(self.kind, [_bounded(factor * part) for part in self.parts])

    __mul__ = __rmul__


def _is_number(token: str) -> bool:
    return token[:1].isdecimal() or token[:1] == "."


def _exact(x) -> bool:
    return isinstance(x, (int, Fraction))


def _bounded(x):
    """Return `x`, as a float if its exact form has more than MAX_BITS bits."""
    if _exact(x) and max(x.numerator.bit_length(), x.denominator.bit_length()) > MAX_BITS:
        return float(x)
    return x


def _divide(a, b):
    return _bounded(Fraction(a, b)) if _exact(a) and _exact(b) else a * (1 / b)


def _power(a, b):
    if not _exact(a) or not _exact(b):
        return a**b
    size = max(a.numerator.bit_length(), a.denominator.bit_length())
    if b.denominator == 1 and size * abs(b) <= MAX_BITS:
        return Fraction(a) ** int(b)
    if b == Fraction(1, 2) and a >= 0:
        root = Fraction(math.isqrt(a.numerator), math.isqrt(a.denominator))
        if root * root == a:
            return root
    return float(a) ** float(b)


def _factorial(x):
    small = _exact(x) and x.denominator == 1 and 0 <= x <= 500
    return math.factorial(int(x)) if small else math.gamma(x + 1)


def _floor(x, constant: bool):
    """Return the floor of a constant, or a smooth substitute if `x` depends on variables.

    At most points the floors of m / 50 and (m + 1) / 50 are equal, although the expressions differ.
    The substitute f differs whenever its arguments differ, and f(x + 1) = f(x) + 1 as for a floor.
    """
    if constant:
        return math.floor(x if _exact(x) else x + TOLERANCE)  # log(1000) / log(10) counts as 3
    return x + cmath.cos(2 * math.pi * x)


# Left sides of an equation that only name a value. In these patterns n is a name and 1 a number.
# _NAMED_VALUE names any value: x, f(n), (x, y). _NAMED_NUMBER names a number: AB, f(2), m + n.
_NAMED_VALUE = re.compile(r"n(?:\(n(?:,n)*\))?|\(n(?:,n)+\)")
_FACTOR = r"(?:n(?:\(-?1(?:,-?1)*\)|\{n+\})?|\[n+\]|frac\{n+\}\{n+\})"
_NAMED_NUMBER = re.compile(rf"{_FACTOR}+(?:[-+*/]{_FACTOR}+)*")


def _side_names(sides: list[list[str]], operators: list[str]) -> list[str]:
    """Return the name that each side of a relation is, or "" for a side that is a value."""
    names = [side[0] if len(side) == 1 and NAME.match(side[0]) else "" for side in sides]
    kinds = ["1" if _is_number(token) else token for token in sides[0]]
    kinds = "".join("n" if NAME.match(k) or k in ("e", *_ANGLE_FUNCTIONS) else k for k in kinds)
    a_number = {*operators} == {"="} and not any(map(NAME.match, itertools.chain(*sides[1:])))
    if _NAMED_VALUE.fullmatch(kinds) or a_number and _NAMED_NUMBER.fullmatch(kinds):
        names[0] = "".join(sides[0])
    return names


INFINITY = _Form("∞", [1])
_CONSTANTS = {"pi": math.pi, "infty": INFINITY, "e": math.e, "i": 1j, "emptyset": _Form("{}", [])}


class _Reader:
    """A parser that computes the value of `tokens`. `point` chooses the values of the variables."""

    def __init__(self, tokens: list[str], point: int):
        self.tokens, self.at, self.steps, self.depth = [*tokens, ""], 0, 0, 0
        self.point = point
        self.sign, self.plus_minus = 1, False  # the sign that ± means, and whether one was read

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, expected=None) -> str:
        token = self.tokens[self.at]
        self.at, self.steps = self.at + 1, self.steps + 1
        if not token or self.steps > MAX_STEPS or expected and token not in expected:
            raise ValueError(f"unexpected {token}")
        return token

    def answer(self):
        parts = self.items(expand=True)
        if self.next:
            raise ValueError(f"unexpected {self.next}")
        return parts[0] if len(parts) == 1 else _Form("{}", parts)

    def items(self, expand: bool, separators: str = ",;∨∪") -> list:
        """Read items between commas, "or" or ∪. With `expand`, an item with ± becomes two."""
        parts, used = [], set()
        while not parts or self.next in {*separators}:
            used |= {self.take()} if parts else set()
            start = self.at
            parts.append(self.relation())
            if expand and self.plus_minus:
                self.at, self.sign = start, -1
                parts.append(self.relation())
                self.sign, self.plus_minus = 1, False
        names = {part.name if isinstance(part, _Form) else "" for part in parts}
        conditions = used == {"∨"} and len(names) == 1 and "" not in names
        if used == {"∪"} or conditions and any(part.kind != "=" for part in parts):
            return [_Form("∪", parts)]  # x < 0 or x = 1 is a union
        if "∪" in used:
            raise ValueError("a union within a list")
        return parts

    def relation(self):
        parts, sides, operators = [], [], []
        while len(parts) == len(operators):
            start = self.at
            parts.append(self.sum())
            sides.append(self.tokens[start : self.at])
            if self.next in _RELATIONS:
                operators.append(self.take())
        if not operators:
            return parts[0]
        names = _side_names(sides, operators)
        if operators == ["∈"] and names[0] and isinstance(parts[1], _Form):
            return _Form(parts[1].kind, parts[1].parts, names[0])
        if set(operators) == {"="}:
            return self.equation(parts, names)
        return self.inequality(parts, names, operators)

    def equation(self, parts: list, names: list[str]):
        if len(parts) > 2 and all(names[:-1]):  # x = y = 1 is x = 1, y = 1
            return _Form("{}", [_Form("=", [x, parts[-1]], n) for x, n in zip(parts[:-1], names)])
        if not names[0]:
            parts, names = parts[::-1], names[::-1]
        if not all(_same(part, parts[-1]) for part in parts[1:]):
            raise ValueError("sides of a chain that differ")
        if _same(parts[0], parts[-1]):
            return parts[0]  # 2 + 3 = 5 has the value 5
        return _Form("=", [parts[0], parts[-1]], names[0])

    def inequality(self, parts: list, names: list[str], operators: list[str]):
        if set(operators) <= {">", "≥"}:
            parts, names = parts[::-1], names[::-1]
            operators = ["<" if op == ">" else "≤" for op in operators[::-1]]
        if set(operators) <= {"<", "≤"}:
            if len(parts) == 2 and names[0]:  # x < 2 is (-infinity, 2)
                parts, operators, names = [-1 * INFINITY, *parts], ["<", *operators], ["", *names]
            elif len(parts) == 2 and names[1]:
                parts, operators = [*parts, INFINITY], [*operators, "<"]
            if len(parts) == 3 and names[1]:
                ends = ("[" if operators[0] == "≤" else "(") + ("]" if operators[1] == "≤" else ")")
                return _Form(ends, [parts[0], parts[2]], names[1])
        return _Form("".join(operators), parts)

    def sum(self):
        value = self.product()
        while self.next in ("+", "-", "±", "∓"):
            value = _bounded(value + self.product())
        return value

    def signs(self) -> int:
        sign = 1
        while self.next in ("+", "-", "±", "∓"):
            token = self.take()
            self.plus_minus |= token in "±∓"
            sign *= {"+": 1, "-": -1, "±": self.sign, "∓": -self.sign}[token]
        return sign

    def product(self):
        value = self.signs() * self.power()
        while self.next not in _STOP:
            operator = self.take() if self.next in ("*", "/") else ""
            factor = self.signs() * self.power() if operator else self.neighbour()
            value = _bounded(_divide(value, factor) if operator == "/" else value * factor)
        return value

    def neighbour(self):
        """Read a factor without an operator before it: x and 3^2 in 2 x 3^2. 2 3 is refused."""
        after = [token for token in self.tokens[self.at : self.at + 4] if token not in "{}"]
        if after and _is_number(after[0]) and after[1:2] != ["^"]:
            raise ValueError("a number right beside another factor")
        return self.power()

    def power(self):
        values = [self.primary()]
        while self.next in ("^", "!"):
            if self.take() == "^":
                values.append(self.signs() * self.primary())
            elif self.next == "!" or len(values) > 1:
                raise ValueError("a double factorial, or one that may belong to a power")
            else:
                values[-1] = _factorial(values[-1])
        value = values.pop()
        while values:
            value = _power(values.pop(), value)
        return value

    def primary(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        token = self.take()
        if _is_number(token):
            digits, _, base = token.partition("_")
            value = int(digits) if digits.isdecimal() else Fraction(digits)
            value = _Form("_", [value, int(base), int(digits, int(base) or 1)]) if base else value
        elif token in _CLOSING:
            value = self.group(token)
        elif token in ("lfloor", "lceil"):
            start, sign = self.at, 1 if token == "lfloor" else -1
            argument = self.sum()
            constant = not any(map(NAME.match, self.tokens[start : self.at]))
            value = sign * _floor(sign * argument, constant)
            self.take(("r" + token[1:],))
        elif token == "frac":
            value = _divide(self.primary(), self.primary())
        elif token == "binom":
            n, k = self.primary(), self.primary()
            value = _divide(_factorial(n), _factorial(k) * _factorial(n - k))
        elif token == "sqrt":
            index = self.primary() if self.next == "[" else 2
            value = _power(self.primary(), _divide(1, index))
        elif token in FUNCTIONS:
            value = self.function(token)
        elif token in _CONSTANTS:
            value = _CONSTANTS[token]
        elif NAME.match(token):
            value = self.variable(token)
        else:
            raise ValueError(f"unexpected {token}")
        self.depth -= 1
        return value

    def group(self, opening: str):
        parts = self.items(opening == "\\{", ",;" if opening in "([" else ",;∨∪")
        closing = self.take(_CLOSING[opening])
        if opening == "\\{" or opening == "{" and len(parts) > 1:
            return _Form("{}", parts)
        if len(parts) == 1 and opening + closing in ("()", "[]", "{}"):
            return parts[0]
        return _Form(opening + closing, parts)

    def function(self, name: str):
        base = exponent = None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self.primary()
            else:
                exponent = self.signs() * self.primary()
        if self.next in _CLOSING:
            argument = self.primary()
        else:  # sin 2t, ln x^2: all factors up to an operator or the next function
            argument = self.signs() * self.power()
            while not (self.next in _STOP or self.next in "*/" or self.next in FUNCTIONS):
                argument = _bounded(argument * self.neighbour())
        if exponent == -1 and name in ("sin", "cos", "tan"):
            return FUNCTIONS["arc" + name](argument)
        value = FUNCTIONS[name](argument) / (1 if base is None else cmath.log(base))
        value = value if value.imag else value.real
        return value if exponent is None else _power(value, exponent)

    def variable(self, name: str):
        if self.tokens[self.at : self.at + 3] == ["(", "0", ")"]:  # I(0) is a value, not I * 0
            self.at, name = self.at + 3, name + "(0)"
        return 0.2 + zlib.crc32(f"{name} {self.point}".encode()) / 2**31


# ---- equality ---------------------------------------------------------------------------------


def _close(a, b) -> bool:
    if _exact(a) and _exact(b):
        return a == b
    size = max(abs(a), abs(b))
    slack = TOLERANCE * size if a and b else 1e-12  # \sin \pi is zero except for rounding
    return size < math.inf and abs(a - b) <= slack


def _alone(x) -> list:
    """Return the value that `x` is accepted for, as a list of one: 5 for y = 5, {5} and 5_7."""
    if not isinstance(x, _Form):
        return []
    if x.kind == "{}" and len(x.parts) == 1:
        return x.parts
    if x.kind == "=" and x.name:
        return x.parts[1:]
    return x.parts[:1] if x.kind == "_" else []


def _same(a, b) -> bool:
    """Whether two values are the same answer. Both were computed at the same point."""
    forms = [x for x in (a, b) if isinstance(x, _Form)]
    if not forms:
        return _close(a, b)
    if len(forms) == 1 or a.kind != b.kind:
        return any(_same(x, b) for x in _alone(a)) or any(_same(a, x) for x in _alone(b))
    if len(a.parts) != len(b.parts):
        return False
    if a.kind in ("{}", "∪", "≠", "=") and len(a.parts) <= MAX_UNORDERED:
        rest = list(b.parts)
        for x in a.parts:
            match = next((i for i, y in enumerate(rest) if _same(x, y)), None)
            if match is None:
                return False
            rest.pop(match)
        return True
    return all(map(_same, a.parts, b.parts))


def _agree(a: list[str], b: list[str]) -> bool:
    """Whether two token lists have the same value at every point."""
    named = any(map(NAME.match, a + b))
    points = range(3 if named else 1)
    pairs = [[_Reader(tokens, point).answer() for tokens in (a, b)] for point in points]
    if all(_same(x, y) for x, y in pairs):
        return True
    equations = all(isinstance(x, _Form) and x.kind == "=" for pair in pairs for x in pair)
    if not named or not equations:
        return False
    # Equations may differ by a constant factor: y = 2x and 2x - y = 0.
    gaps = [[equation.parts[0] - equation.parts[1] for equation in pair] for pair in pairs]
    ratios = [_divide(p, q) for p, q in gaps]
    return all(ratio and _close(ratio, ratios[0]) for ratio in ratios)


def _readings(text: str) -> list[list[str]]:
    """Return the token lists that a cleaned answer can mean: 100,200 is one number or two."""
    if UNREAD.search(text):
        return [["?"]]  # the parser refuses "?", so the answer is compared as text
    text = merged = re.sub(r"\\?%", " ", text)
    if not re.search(r"[(\[{][^)\]}]*,", text):
        thousands = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])"
        merged = re.sub(thousands, lambda match: match[0].replace(",", ""), text)
    return [tokenize(x) for x in dict.fromkeys((merged, text))]


def _is_words(text: str) -> bool:
    words = re.findall(r"[A-Za-z]+", text) if re.fullmatch(r"[A-Za-z\s,.'()\-]+", text) else []
    return any(len(w) > 2 and w not in COMMANDS or w.lower() == "no" for w in words)


def _same_text(a: str, b: str) -> bool:
    """Whether two texts are equal except for spaces. A space between two digits counts."""
    a, b = ("".join(re.sub(r"(?<=\d)\s+(?=\d)", "?", x).split()) for x in (a, b))
    return a == b


# Words that are dropped like units, but of which one contradicts another: 20% increase, decrease.
_OPPOSITES = r"[ap]m\b", "even|odd", "increas|decreas", "profit|loss", "gain|loss"
_OPPOSITES += "north|south|east|west", "north|south", "east|west"  # north of east, south of east
_OPPOSITES = [re.compile(rf"(?<![a-z\\])(?:{words})") for words in _OPPOSITES]


def _are_opposites(a: str, b: str) -> bool:
    a, b = (text.lower().replace(".", "") for text in (a, b))
    pairs = [(words.findall(a), words.findall(b)) for words in _OPPOSITES]
    return any(x and y and {*x}.isdisjoint(y) for x, y in pairs)


def math_equal(a: str, b: str) -> bool:
    """Whether two final answers, without their boxes, are equal.

    The order of the two does not matter. It never raises and takes bounded time.
    """
    a, b = a.strip(), b.strip()
    if a == b or max(len(a), len(b)) > MAX_CHARS:
        return _same_text(a, b)
    if _are_opposites(a, b):
        return False
    a, b = clean(a), clean(b)
    if not a or not b:
        return False
    if _is_words(a) or _is_words(b):
        return _same_text(*(re.sub(r"[\s(){}.']|(?<=\w{3})-", "", x.lower()) for x in (a, b)))
    pairs = list(itertools.product(_readings(a), _readings(b)))
    if ("%" in a) != ("%" in b):  # 62.5% counts for 62.5 and for 0.625
        hundredths = [pair if "%" in a else pair[::-1] for pair in pairs]
        pairs += [(["(", *percent, ")", "/", "100"], number) for percent, number in hundredths]
    for x, y in pairs:
        try:
            if _agree(x, y):
                return True
        except _FAILURES:
            pass
    return _same_text(a, b)


_MEASURED = re.compile(
    r"\$?[-+]?(\d*\.?\d*)(?:(?:e|\s*\\(?:times|cdot)\s*10\^)\{?([-+]?\d{1,3})\}?)?\$?", re.I
)


def rounds_to(answer: str, gold: str) -> bool:
    r"""Whether a number with more digits rounds to a gold answer that is a rounded result.

    Minerva's gold answers are rounded results. Only their form shows it: scientific notation
    (4.5e33), or a decimal of three or more significant digits (41.8). The answer may differ by half
    a unit in the last digit of the gold answer, and by 1 % at most: 41.83 counts for 41.8, and 41.9
    does not. Integers, short decimals (1.5) and all other gold answers must be equal.

    There is one exception: the answer itself states the gold decimal after its value, as in
    \sqrt{2.5} \approx 1.6 for 1.6. Then half a unit is the only limit, also for short decimals.
    """
    match = _MEASURED.fullmatch(gold.strip())
    if match is None or len(answer) > MAX_CHARS or len(gold) > 40:
        return False
    digits, exponent = match.groups()
    _, sign, decimal = answer.replace("≈", r"\approx").rpartition(r"\approx")
    stated = sign and math_equal(decimal, gold)
    short = len(digits.replace(".", "").lstrip("0")) < 3 and not stated
    if not exponent and ("." not in digits or short):
        return False
    try:
        target, value = (_Reader(_readings(clean(x))[0], 0).answer() for x in (gold, answer))
        if isinstance(value, _Form) and value.kind == "=" and value.name:
            value = value.parts[1]
        unit = _power(10, int(exponent or 0) - len(digits.partition(".")[2]))
        slack = unit / 2 if stated else min(unit / 2, abs(target) / 100)
        return abs(value - target) <= slack and not value.imag
    except _FAILURES:
        return False
