r"""Decide whether two mathematical answers are equal.

    math_equal(r"2(n-1)", "$2n-2$")   -> True
    math_equal(r"(1, 2]", "(1, 2)")   -> False
    rounds_to("41.83", "41.8")        -> True

The stages in order, with the answer $5\frac12 \text{ cm}$ to a problem whose right answer is 5.5:

1. One spelling, (5+1/2): units and layout are removed (support/latex.py).
2. Tokens, ( 5 + 1 / 2 ): numbers, names, commands and signs (support/latex.py).
3. Values, 11/2: a recursive-descent parser computes them. A variable's name decides its value.
4. Equality, 11/2 = 5.5: two answers are equal if they have the same value at three points.
   Equations may differ by a factor, and arbitrary constants may have other names.
5. Text: an answer that cannot be parsed is compared token by token.
6. Rounded answers: a number can count for a measured result with fewer digits.

Text of the model is never run as code. MAX_CHARS and Python's limit of recursion bound the time.
docs/reference.md, "Limits", lists what is refused and accepted in error.
"""

import cmath
import contextlib
import functools
import itertools
import math
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction

from support.latex import FUNCTIONS, NAME, clean, tokenize

MAX_CHARS = 600  # the longest gold answer has 210
MAX_BITS = 4_096  # longer powers are floats; 10^1000 is exact
TOLERANCE = 1e-9  # relative: far above rounding, far below 1.5 against 1.50001

# ---- 3. values: a parser that computes ----------------------------------------------------------
_RELATIONS = frozenset("= < > ≤ ≥ ≠ ∈".split())
_STOP = _RELATIONS | {"", *") ] } \\} \\rfloor \\rceil , ; ∨ ∧ ∪ ∖ + -".split()}
_CLOSING = {"(": ")]", "[": ")]", "{": ["}"], "\\{": ["\\}"]}
_CLOSING |= {"\\lfloor": ["\\rfloor"], "\\lceil": ["\\rceil"]}
_LISTS = ({"{}", ","}, {"{}", "∨"}, {",", "∨"}, {",", "∧"})  # kinds that can be the same list
_number = re.compile(r"[\d.]").match
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j, "zero": Fraction(0)}
# 1 / 0; unreadable text; a set plus one; one without a set; nested too deeply
_FAILURES = (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError)

# Left sides of an equation that only name a value. In these patterns n is a name and 1 a number.
# _NAMED_VALUE names any value: x, f(n), (x, y), V_o(s)/V_i(s). _NAMED_NUMBER names a number: AB,
# f(2), m + n. _NAMED_FORMULA names what is no number: y^s.
_NAMED_VALUE = r"{*n}*(?:\(n(?:,n)*\))?|\(n(?:,n)+\)|frac{(?:nn|n\(n\))}{(?:nn|n\(n\))}"
_NAMED_VALUE = re.compile(_NAMED_VALUE)
_NAMED_NUMBER = re.compile(r"(?!-)(?:frac|[-+*/n{}[\]]|(?<=n)\(-?1(?:,-?1)*\))+")
_NAMED_FORMULA = re.compile(r"n\^n(?:\(n\))?")


@dataclass(eq=False)
class _Form:
    """An answer that is not one number.

    kind: "()", "(]", "[)" or "[]" for a point or an interval, "{}" for a set, "∨" for a union or a
    list with "or", "∧" for a list with "and", "," for a list that can be either, "=" for an
    equation or a named value, "<", "≤", "≠" or "∈" for other relations.
    name: x in x = 5 and x < 5, f(n) in f(n) = 2n, b_7 in the number 5_7. The named value is the
    last part: 5, and the interval (-∞, 5). vector: the number 3i - 2j of a point (3, -2).
    """

    kind: str
    parts: list
    name: str = ""

    def __rmul__(self, factor):
        if self.kind != "()":
            raise TypeError(f"a product with {self.kind}")
        return _Form("()", [factor * part for part in self.parts])


def _bits(x) -> int:
    """Return the length of an exact number, 0 for a float."""
    exact = isinstance(x, Fraction)
    return max(x.numerator.bit_length(), x.denominator.bit_length()) if exact else 0


def _capped(x):
    """Return `x` as a float if its exact value would soon cost seconds."""
    return x if _bits(x) <= 4 * MAX_BITS else float(x)


def _power(a, b):
    return (float(a) if _bits(b) and _bits(a) * abs(b) > MAX_BITS else a) ** b


def _factorial(x):
    small = isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 500
    return Fraction(math.factorial(int(x))) if small else math.gamma(x + 1)


def _name(side: list[str], right: list[str] = ()) -> str:
    """Return the name that a side of a relation is, or "". right: an equation's last side."""
    if len(side) > 40:  # names are short, and a long text must not be read again at each relation
        return ""
    name, derivative = "".join(side).strip("{}"), any(t.endswith("'") for t in side)
    number = right and not any(map(NAME.match, right)) and not (derivative and {*side} & {*"+-"})
    more = ("e", "i", "sin", "cos", "tan") if number else ()  # \sin A = 1/2 names a number
    kinds = "".join("n" if NAME.match(t) or t in more else "1" if _number(t) else t for t in side)
    named = _NAMED_VALUE.fullmatch(kinds)
    if number:
        named = named or _NAMED_NUMBER.fullmatch(kinds)
    elif not all(map(NAME.match, right)):  # MRS = 2C/S, but not MR = MC
        capitals = len(side) > 2 and all(NAME.match(t) and t[0].isupper() for t in side)
        named = named or capitals or _NAMED_FORMULA.fullmatch(kinds)
    # y' names 6x and -x/y. In y' = 2y it is a part of a differential equation.
    y = name.rstrip("'")
    equation = derivative and y in right and ("x" not in right or y == "x")
    return name if named and not equation else ""


class _Reader:
    """A parser that computes the value of `tokens` at one of three points.

    fixed: only derivatives differ between the points.
    """

    def __init__(self, tokens: list[str], point: int, fixed: bool):
        self.tokens, self.at = [*tokens, ""], 0
        self.point, self.fixed = point, fixed
        self.degree = math.pi / 180 if FUNCTIONS.keys() & tokens else 1  # 30° counts for 30

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, *expected: str) -> str:
        """Take the next token if it is one of the expected ones. Otherwise return ""."""
        token = self.next if self.next in expected else ""
        self.at += token != ""
        return token

    def answer(self):
        value = self.items(",;∨∧∪")
        if self.next:
            raise ValueError(f"unexpected {self.next}")
        return value

    def items(self, separators: str):
        """Read a value or a list. A set of names or a range makes "and" differ from "or"."""
        parts, marks = [self.relation()], []
        while mark := self.take(*separators):
            marks.append("∨" if mark == "∪" else mark)
            parts.append(self.relation())
        if not marks:
            return parts[0]
        forms = [part for part in parts if isinstance(part, _Form)]
        names = {form.name for form in forms} - {""}
        if len(names) < 2 and not any(form.kind[0] in "∨<>≤≥≠∈" for form in forms):
            return _Form("∨" if "∨" in marks else ",", parts)  # 1, 2 and 3
        if "∨" in marks and ("∧" in marks or len(names) > 1 and {*marks} != {"∨"}):
            return _Form("".join(marks), parts)  # groups, in order: x = 1, y = 2 or x = 3, y = 4
        return _Form("∨" if "∨" in marks else "∧" if "∧" in marks else ",", parts)

    def relation(self):
        parts, sides, operators = [], [], []
        while len(parts) == len(operators):
            start = self.at
            parts.append(self.items("∪") if operators[-1:] == ["∈"] else self.sum())
            sides.append(self.tokens[start : self.at])
            operators += filter(None, [self.take(*_RELATIONS)])
        if not operators:
            return parts[0]
        if {*operators} != {"="}:
            return self.inequality(parts, [*map(_name, sides)], operators)
        names = [*(_name(side, sides[-1]) for side in sides[:-1]), _name(sides[-1])]
        if sides[0][0] in ("sin", "cos") and not {*"+-"} & {*sides[0]} and abs(parts[-1]) > 1:
            names[0] = ""  # \sin x = 27
        if not names[0]:  # 5 = x is x = 5
            parts, names = parts[::-1], names[::-1]
        *left, right = parts
        if not all(name or _same(part, right) for part, name in zip(left[1:], names[1:])):
            raise ValueError("sides of a chain that differ")
        if _same(left[0], right):
            return right  # 2 + 3 = 5 has the value 5
        return _Form("=", [left[0], right], names[0])

    def inequality(self, parts: list, names: list[str], operators: list[str]):
        if {*operators} <= {">", "≥"}:  # 2 > x is x < 2
            parts, names = parts[::-1], names[::-1]
            operators = ["<" if operator == ">" else "≤" for operator in operators[::-1]]
        if operators == ["∈"] and names[0] and isinstance(parts[1], _Form):
            whole = parts[1].parts if parts[1].kind in ("{}", "∨") else parts[1:]
            named = [_Form("∈", [parts[0], part], names[0]) for part in whole]
            return _Form("∨", named) if named[1:] else named[0]
        at = 0 if names[0] and len(parts) == 2 else 1  # the name's place
        if {*operators} <= {"<", "≤"} and names[at] and len(parts) < 4:
            ends = [-self.variable("\\infty"), *parts, self.variable("\\infty")]
            kind = ("[" if "≤" in operators[:at] else "(") + ("]" if "≤" in operators[at:] else ")")
            return _Form("∈", [parts[at], _Form(kind, ends[at : at + 3 : 2])], names[at])
        return _Form("".join(operators), parts)

    def sum(self):
        value = self.product()
        while self.next in ("+", "-"):
            value = _capped(value + self.product())  # which reads the sign
        if self.take("∖") and value.kind == "()":  # (-∞, 3) ∪ (3, ∞)
            ends = [value.parts[0], *sorted(self.product().parts), value.parts[1]]
            return _Form("∨", [_Form("()", list(pair)) for pair in itertools.pairwise(ends)])
        return value

    def product(self):
        value = self.signed()
        while self.next not in _STOP:
            operator = self.take("*", "/")
            factor = self.signed() if operator else self.neighbour()
            value = _capped(value / factor if operator == "/" else value * factor)
        return value

    def neighbour(self):
        """Read a factor without an operator: x, 3^2 and 3! in 2x 3^2 3!. 2 3 is refused."""
        after = [token for token in self.tokens[self.at : self.at + 4] if token not in "{}"]
        if after and _number(after[0]) and after[1:2] not in (["^"], ["!"]):
            raise ValueError("a number right beside another factor")
        return self.power()

    def signed(self):
        if self.take("-"):
            return -1 * self.signed()
        return self.signed() if self.take("+") else self.power()

    def power(self):
        value = self.primary()
        value = self.degree * value if self.take("°") else value
        value = _factorial(value) if self.take("!") else value
        return _power(value, self.signed()) if self.take("^") else value

    def primary(self):
        token, self.at = self.next, self.at + 1
        if _number(token):
            # So many decimals are those of a float that was printed: 0.235294117647059 is 4/17.
            return float(token) if re.search(r"\.\d{12}", token) else Fraction(token)
        if token in _CLOSING:
            return self.group(token)
        if token == "frac":
            return self.primary() / self.primary()
        if token == "binom":
            n, k = self.primary(), self.primary()
            return _factorial(n) / (_factorial(k) * _factorial(n - k))
        if token == "sqrt":
            index = self.primary() if self.next == "[" else Fraction(2)
            return _power(self.primary(), 1 / index)
        if token in FUNCTIONS:
            return self.function(token)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if NAME.match(token):
            return self.variable(token)
        raise ValueError(f"unexpected {token}")

    def group(self, opening: str):
        value = self.items(",;" if opening in "([" else ",;∨∧∪")
        if not (closing := self.take(*_CLOSING[opening])):
            raise ValueError(f"an open {opening}")
        if opening.startswith("\\l"):  # a floor is an unknown function of its content
            return self.variable(f"{opening}{complex(value) + 0:.9g}")  # + 0: no -0
        parts = value.parts if getattr(value, "kind", "") in ("∨", "∧", ",") else [value]
        kind = "{}" if opening in ("{", "\\{") else opening + closing
        if len(parts) == 1 and opening != "\\{" and kind in ("()", "[]", "{}"):
            return parts[0]
        form = _Form(kind, parts)
        if kind == "()" and len(parts) < 4 and sum(map(bool, parts)) > 1:  # (3, -2) is 3i - 2j
            with contextlib.suppress(*_FAILURES):
                axes = 1j, self.variable("j"), self.variable("k")
                form.vector = sum(part * axis for part, axis in zip(parts, axes))
        return form

    def function(self, name: str):
        base = self.primary() if self.take("_") else math.e
        exponent = self.signed() if self.take("^") else 1
        if self.next in _CLOSING:
            argument = self.primary()
        else:  # sin 2t, ln x^2: all factors up to an operator or the next function
            argument = self.signed()
            while not (self.next in _STOP or self.next in "*/" or self.next in FUNCTIONS):
                argument = argument * self.neighbour()
        if exponent == -1 and "arc" + name in FUNCTIONS:
            name, exponent = "arc" + name, 1
        return _power(FUNCTIONS[name](argument) / cmath.log(base), exponent)

    def variable(self, name: str):
        # Near 1, so that high powers stay within the range of floats.
        point = 0 if self.fixed and not name.endswith("'") else self.point
        return Fraction(80_000 + zlib.crc32(f"{name} {point}".encode()) % 40_000, 100_000)


# ---- 4. equality --------------------------------------------------------------------------------
def _close(a, b) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    slack = TOLERANCE * max(abs(a), abs(b)) if a and b else 1e-12  # \sin \pi is 0 up to rounding
    return abs(a - b) <= slack < math.inf


def _bare(x, forms=2):
    """Return `x` without names and lists of one: 5 for y = 5, {5} and 5_7."""
    while isinstance(x, _Form) and (x.name or x.kind == "{}" and len(x.parts) == 1):
        x = x.parts[-1]
    return getattr(x, "vector", x) if forms == 1 else x  # a number can be a vector: 3i - 2j


def _same(a, b) -> bool:
    """Whether `a` has the value of `b`, the right answer. Both were computed at the same point."""
    forms = isinstance(a, _Form) + isinstance(b, _Form)
    if not forms:
        return _close(a, b)
    if forms == 2 and a.name and b.name:
        return a.name == b.name and _same(a.parts[-1], b.parts[-1])
    kinds = [getattr(x, "kind", "") for x in (a, b)]
    if "," in kinds and {*kinds} & {"", "="}:  # 90 and 90, 90
        one, several = (a, b) if kinds[1] == "," else (b, a)
        if all(_same(_bare(one), _bare(part)) for part in several.parts):
            return True
    if forms == 2 and all(getattr(part, "kind", "") == "=" for part in a.parts + b.parts):
        kinds = ["∧" if kind in ("()", "[)") else kind for kind in kinds]  # the rows of a system
    if kinds == ["()", ","]:
        kinds[1] = "()"  # (1000, 10) for 1000, 10
    if forms == 1 or kinds[0] != kinds[1] and {*kinds} not in _LISTS:
        bare_a, bare_b = _bare(a, forms), _bare(b, forms)
        return (bare_a is not a or bare_b is not b) and _same(bare_a, bare_b)
    if len(a.parts) != len(b.parts):
        return False
    if kinds[0] not in ("{}", ",", "∨", "∧", "="):
        return all(map(_same, a.parts, b.parts))
    if kinds in ([",", ","], ["∧", ","]) and (orders := _orders(a.parts, b.parts)):
        return any(all(map(_same, order, b.parts)) for order in orders)
    rest = list(b.parts)  # in any order
    for x in a.parts:
        found = next((i for i, y in enumerate(rest) if _same(x, y)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _orders(a: list, b: list) -> list[list]:
    """Return the orders in which the list `a` may stand for the list `b`, or [] for any."""
    names = [getattr(part, "name", "") for part in a]
    letters = {name for name in names if re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+", name)}
    if len(letters) == len(a) and not any(getattr(part, "name", "") for part in b):
        return [a, sorted(a, key=lambda part: part.name)]  # x = 1000, y = 10 for 1000, 10
    if "" not in names and len({*names}) < len(a):  # x = 1, x = 3
        return []
    # 2, 4, 3 are values that a problem asked for in this order. 1, -1, 7, -7 are not.
    if all(isinstance(x, Fraction) for x in b) and not {-x for x in b if x} & {*b}:
        return [] if b in (sorted(b), sorted(b, reverse=True)) else [a]
    return []


def _proportional(a: list, b: list) -> bool:
    """Whether two equations differ by a factor that is constant: y = 2x and 2x - y = 0."""
    # The change of the gap between the sides is compared, because a large constant hides none.
    equations = all(isinstance(x, _Form) and x.kind == "=" for x in a + b)
    if not equations or a[0].name == b[0].name != "":  # two values of the same name were compared
        return False
    p, q = ([x.parts[0] - x.parts[1] for x in values] for values in (a, b))
    changes = [(x - p[0], y - q[0]) for x, y in zip(p[1:], q[1:])]
    return all(dp and _close(dp * q[0], dq * p[0]) for dp, dq in changes)


def _token_lists(text: str) -> list[tuple[str, ...]]:
    """Return the tokens of a cleaned answer, for each way to read the answer."""
    texts = [text]
    if not re.search(r"[(\[{][^)\]}]*,", text):  # 100,200 is one number or two
        texts.insert(0, re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    lists = [tokenize(text) for text in dict.fromkeys(texts)]
    # The name of a function's argument, or of any whole number: f(z) = z, x = 1 + \pi k.
    bound = r"\b[A-Za-z] \( ([a-z]) \) =|[+=](?: 2)? (?:pi ([k-n])|([k-n]) pi)(?= ,|\Z)"
    bound = {*itertools.chain(*re.findall(bound, " ".join(lists[-1])))} - {""}
    if len(bound) == 1:
        lists.append(["bound" if token in bound else token for token in lists[-1]])
    return [tuple(tokens) for tokens in lists]


@functools.lru_cache(maxsize=16)
def _values(tokens: tuple[str, ...], fixed: bool = False) -> list:
    """Return the value of an answer at three points. fixed: only derivatives differ there."""
    if len(tokens) > MAX_CHARS:
        raise ValueError("signs that stand for several tokens")
    return [_Reader(tokens, point, fixed).answer() for point in range(3)]


def _families(tokens: tuple[str, ...]) -> list[_Form]:
    """Return an answer, at three points, with all, with one and with none of its constants c, C_1.

    C_1 e^t + C_2 t + 1 gives {C e^t + Ct + 1, C e^t + 1, Ct + 1, 1}. Without such constants, or
    with more than six, the list is empty.
    """
    constants = {token for token in tokens if re.fullmatch(r"[cC](_[1-9]\d*)?", token)}
    if not 0 < len(constants) < 7:
        return []
    families = []
    for kept in [set(), constants, *({name} for name in constants)]:
        new = {name: "constant" if name in kept else "zero" for name in constants}
        families.append(_values(tuple(new.get(token, token) for token in tokens)))
    return [_Form("{}", list(values)) for values in zip(*families)]


def _equal(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether the tokens of an answer have the value of those of the right answer."""
    with contextlib.suppress(*_FAILURES):
        # A differential equation may have a factor without derivatives: only derivatives differ.
        fixed = any(token.endswith("'") for token in a + b)
        values = _values(a, fixed), _values(b, fixed)
        if all(map(_same, *values)) or _proportional(*values):
            return True
        families = list(zip(_families(a), _families(b)))
        return families != [] and all(_same(x, y) for x, y in families)
    return False


# ---- 5. text ------------------------------------------------------------------------------------
# \textbf{(B)} 7, B. 7 and Option B. The text must not mention another letter: (B) or (C).
_OPTION = re.compile(
    r"(?s)\A[\s$]*(?:\\(?:text|math)[a-z]*\s*\{\s*)?(?!.*\b[A-Z]\b.*\b[A-Z]\b)"
    r"(?:(?:[Oo]ption|[Cc]hoice)\s*\(?|\((?=[A-Z]\))|(?=[A-Z][.．):]))([A-Z])\b"
)


def math_equal(answer: str, gold: str) -> bool:
    """Whether a final answer equals the right one. Both are without boxes. It never raises."""
    a, b = answer.strip(), gold.strip()
    if a == b or max(len(a), len(b)) > MAX_CHARS:
        return a.split() == b.split()
    for text, letter in ((a, b), (b, a)):
        option = _OPTION.match(text)
        if option and option[1] == clean(letter).strip("()"):
            return True
    a, b = clean(a), clean(b)
    spellings = [(a, b)]
    if ("%" in a) != ("%" in b):  # 62.5% counts for 62.5 and for 0.625
        spellings.append((f"({a})/100", b) if "%" in a else (a, f"({b})/100"))
    for x, y in spellings:
        if any(itertools.starmap(_equal, itertools.product(_token_lists(x), _token_lists(y)))):
            return True
    return a != "" and tokenize(a) == tokenize(b)


# ---- 6. rounded answers -------------------------------------------------------------------------
def rounds_to(answer: str, gold: str) -> bool:
    r"""Whether a number with more digits rounds to a gold answer that is a rounded result.

    Only the form shows it: scientific notation (4.5e33), or a decimal of three or more significant
    digits (41.8). The answer may differ by half a unit in the last digit, and by 1 % at most.
    """
    gold = gold.strip(" $")
    number = re.fullmatch(r"[-+]?(?=[\d.])(\d*)(?:\.(\d+))?(?:e([-+]?\d{1,3}))?", gold)
    if not number or max(len(answer), len(gold)) > MAX_CHARS:
        return False
    whole, decimals, exponent = number.groups("")
    if not exponent and (not decimals or len((whole + decimals).lstrip("0")) < 3):
        return False
    target, unit = Fraction(gold), Fraction(10) ** (int(exponent or 0) - len(decimals))
    slack = min(unit / 2, abs(target) / 100)
    for tokens in _token_lists(clean(answer)):
        with contextlib.suppress(*_FAILURES):
            values = map(_bare, _values(tokens))  # a variable differs from point to point
            if all(abs(x - target) <= slack and not x.imag for x in values):
                return True
    return False
