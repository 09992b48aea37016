"""The stage "tokens" cuts a cleaned text into tokens. A parser, "grammar", computes their value.

The tokens of (5+1/2) are ( 5 + 1 / 2 ), and their value is 11/2.
"""

import cmath
import contextlib
import itertools
import math
import re
import zlib
from fractions import Fraction

from support.grader.forms import FAILURES, Form, Value, same
from support.grader.latex import NAMES
from support.grader.rules import Rule, Stage, kind

MAX_BITS = 4_096  # longer powers are floats; 10^1000 is exact

FUNCTIONS = {f: getattr(cmath, f) for f in "sin cos tan sinh cosh tanh exp log".split()}
for _f, _g in zip("sin cos tan sinh cosh tanh".split(), "csc sec cot csch sech coth".split()):
    FUNCTIONS["arc" + _f] = FUNCTIONS["ar" + _f] = getattr(cmath, "a" + _f)
    FUNCTIONS[_g] = lambda x, f=FUNCTIONS[_f]: 1 / f(x)
    FUNCTIONS["arc" + _g] = lambda x, f=FUNCTIONS["arc" + _f]: f(1 / x)
FUNCTIONS |= {"ln": cmath.log, "lg": cmath.log10, "arccot": lambda x: cmath.pi / 2 - cmath.atan(x)}

# ---- tokens
_COMMANDS = {*FUNCTIONS, *"frac binom sqrt pi".split()}
# The tokens that can name a quantity. Other commands can be relations or negations: \to, \not.
NAME = re.compile(
    rf"(?!(?:[ei]|{'|'.join(_COMMANDS)})\Z)[^\W\d_]"
    rf"|\\(?i:(?:var)?(?:{'|'.join(NAMES)}))(?![A-Za-z])"
)
_is_number = re.compile(r"[\d.]").match
_TOKEN = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
    rf"|\\?(?:{'|'.join(FUNCTIONS)}|sqrt|pi)(?![A-Za-z])|sqrt(?=\d)"
    r"|(?:\\[A-Za-z]+|[A-Za-z])'*(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*(?:\([0t]\))?"
    r"|\\.|\S"
)


# fmt: off
TOKENS = Stage("tokens", "A name has its index and its primes, and no argument.", [
    Rule("initial values", "`I_0` for `I(0)` | `I` for `I(0)`",
         lambda name: name.replace("(0)", "_0")),
    Rule("functions of time", "`x'+x=0` for `x'(t)+x(t)=0` | `f(t)=t` for `f(x)=x`",
         lambda name: name.replace("(t)", "")),
    Rule("indices before primes", "`x'_0` for `x_0'` | `x_0` for `x_0'`",
         lambda name: re.sub(r"('+)(_\w+)", r"\2\1", name)),
])
# fmt: on


def tokenize(text: str) -> list[str]:
    """Cut a cleaned text into tokens: numbers, names with their indices, commands and signs."""
    tokens = [re.sub(r"[\s{}]", "", t) if "_" in t else t for t in _TOKEN.findall(text)]
    for rule in TOKENS.rules:
        tokens = [rule.apply(token) if len(token) > 1 else token for token in tokens]
    return [t[1:] if t[1:] in _COMMANDS else t for t in tokens if t != "%"]


# ---- names: the left sides that only name a value
# A side is written with n for a name and 1 for a number: f(2) is n(1).
_ANY_VALUE = re.compile(  # x; f(n) and f(x,y); (x, y); dy/dx and V_o(s)/V_i(s)
    r"{*n}*(?:\(n(?:,n)*\))?|\(n(?:,n)+\)|frac{(?:nn|n\(n\))}{(?:nn|n\(n\))}"
)
_NUMBER = re.compile(r"(?!-)(?:frac|[-+*/n{}[\]]|(?<=n)\(-?1(?:,-?1)*\))+")  # AB, f(2), m + n
_FORMULA = re.compile(r"n\^n(?:\(n\))?")  # y^s, which is no number


def _name(side: list[str], right: list[str] = ()) -> str:
    """Return the name that a side of a relation is, or "". right: an equation's last side."""
    if len(side) > 40:  # names are short, and a long text must not be read again at each relation
        return ""
    name, derivative = "".join(side).strip("{}"), any(t.endswith("'") for t in side)
    number = right and not any(map(NAME.match, right)) and not (derivative and {*side} & {*"+-"})
    more = ("e", "i", "sin", "cos", "tan") if number else ()  # \sin A = 1/2 names a number
    kinds = "".join(
        "n" if NAME.match(t) or t in more else "1" if _is_number(t) else t for t in side
    )
    named = _ANY_VALUE.fullmatch(kinds)
    if number:
        named = named or _NUMBER.fullmatch(kinds)
    elif not all(map(NAME.match, right)):  # MRS = 2C/S, but not MR = MC
        capitals = len(side) > 2 and all(NAME.match(t) and t[0].isupper() for t in side)
        named = named or capitals or _FORMULA.fullmatch(kinds)
    # y' names 6x and -x/y. In y' = 2y it is a part of a differential equation.
    y = name.rstrip("'")
    equation = derivative and y in right and ("x" not in right or y == "x")
    return name if named and not equation else ""


# ---- numbers: exact as long as they are short
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


# ---- the parser
_RELATIONS = frozenset("= < > ≤ ≥ ≠ ∈".split())
_STOP = _RELATIONS | {"", *") ] } \\} \\rfloor \\rceil , ; ∨ ∧ ∪ ∖ + -".split()}
_CLOSING = {"(": ")]", "[": ")]", "{": ["}"], "\\{": ["\\}"]}
_CLOSING |= {"\\lfloor": ["\\rfloor"], "\\lceil": ["\\rceil"]}
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j, "zero": Fraction(0)}
# fmt: off
# What the parser does by itself, so these rules have no functions.
GRAMMAR = Stage("grammar", "An answer is a number, or a form that has parts.", [
    kind("decimals", r"`0.5` for `\frac12`. With 12 places, or if irrational, within one part in "
         r"10^9: `0.235294117647` for `\frac{4}{17}` | "
         r"`0.3333` for `\frac13`, `3.14159` for `\pi`"),
    kind("roots, powers", r"in error: `\sqrt{x^2}` for `x` | "
         r"`\sqrt[3]{-8}` for `-2`, over 4,096 bits: `4^{2500}` for `2^{5000}`"),
    kind("intervals, inequalities",
         r"`x<2` for `(-\infty,2)`. "
         r'A comma can be "or": `x>-1, x<1` for `x>-1 \text{ or } x<1` | '
         r"`x>1 \text{ and } x<3` for `(1,3)`, `(0,1]\cup[1,2)` for `(0,2)`"),
    kind("limits, sums, integrals, other notations", "only as spelt in the right answer | "
         r"`\sum_{k=1}^3k` for `6`, `\lfloor5.5\rfloor` for `5`, `0.\overline{3}` for `\frac13`"),
])
# fmt: on


class Reader:
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

    def answer(self) -> Value:
        value = self.items(",;∨∧∪")
        if self.next:
            raise ValueError(f"unexpected {self.next}")
        return value

    def items(self, separators: str) -> Value:
        """Read a value or a list. A set of names or a range makes "and" differ from "or"."""
        parts, marks = [self.relation()], []
        while mark := self.take(*separators):
            marks.append("∨" if mark == "∪" else mark)
            parts.append(self.relation())
        if not marks:
            return parts[0]
        forms = [part for part in parts if isinstance(part, Form)]
        names = {form.name for form in forms} - {""}
        if len(names) < 2 and not any(form.kind[0] in "∨<>≤≥≠∈" for form in forms):
            return Form("∨" if "∨" in marks else ",", parts)  # 1, 2 and 3
        if "∨" in marks and ("∧" in marks or len(names) > 1 and {*marks} != {"∨"}):
            return Form("".join(marks), parts)  # groups, in order: x = 1, y = 2 or x = 3, y = 4
        return Form("∨" if "∨" in marks else "∧" if "∧" in marks else ",", parts)

    def relation(self) -> Value:
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
        if not all(name or same(part, right) for part, name in zip(left[1:], names[1:])):
            raise ValueError("sides of a chain that differ")
        if same(left[0], right):
            return right  # 2 + 3 = 5 has the value 5
        return Form("=", [left[0], right], names[0])

    def inequality(self, parts: list, names: list[str], operators: list[str]) -> Value:
        if {*operators} <= {">", "≥"}:  # 2 > x is x < 2
            parts, names = parts[::-1], names[::-1]
            operators = ["<" if operator == ">" else "≤" for operator in operators[::-1]]
        if operators == ["∈"] and names[0] and isinstance(parts[1], Form):
            whole = parts[1].parts if parts[1].kind in ("{}", "∨") else parts[1:]
            named = [Form("∈", [parts[0], part], names[0]) for part in whole]
            return Form("∨", named) if named[1:] else named[0]
        at = 0 if names[0] and len(parts) == 2 else 1  # the name's place
        if {*operators} <= {"<", "≤"} and names[at] and len(parts) < 4:
            ends = [-self.variable("\\infty"), *parts, self.variable("\\infty")]
            kind = ("[" if "≤" in operators[:at] else "(") + ("]" if "≤" in operators[at:] else ")")
            return Form("∈", [parts[at], Form(kind, ends[at : at + 3 : 2])], names[at])
        return Form("".join(operators), parts)

    def sum(self) -> Value:
        value = self.product()
        while self.next in ("+", "-"):
            value = _capped(value + self.product())  # which reads the sign
        if self.take("∖") and value.kind == "()":  # (-∞, 3) ∪ (3, ∞)
            ends = [value.parts[0], *sorted(self.product().parts), value.parts[1]]
            return Form("∨", [Form("()", list(pair)) for pair in itertools.pairwise(ends)])
        return value

    def product(self) -> Value:
        value = self.signed()
        while self.next not in _STOP:
            operator = self.take("*", "/")
            factor = self.signed() if operator else self.neighbour()
            value = _capped(value / factor if operator == "/" else value * factor)
        return value

    def neighbour(self) -> Value:
        """Read a factor without an operator: x, 3^2 and 3! in 2x 3^2 3!. 2 3 is refused."""
        after = [token for token in self.tokens[self.at : self.at + 4] if token not in "{}"]
        if after and _is_number(after[0]) and after[1:2] not in (["^"], ["!"]):
            raise ValueError("a number right beside another factor")
        return self.power()

    def signed(self) -> Value:
        if self.take("-"):
            return -1 * self.signed()
        return self.signed() if self.take("+") else self.power()

    def power(self) -> Value:
        value = self.primary()
        value = self.degree * value if self.take("°") else value
        value = _factorial(value) if self.take("!") else value
        return _power(value, self.signed()) if self.take("^") else value

    def primary(self) -> Value:
        token, self.at = self.next, self.at + 1
        if _is_number(token):
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

    def group(self, opening: str) -> Value:
        value = self.items(",;" if opening in "([" else ",;∨∧∪")
        if not (closing := self.take(*_CLOSING[opening])):
            raise ValueError(f"an open {opening}")
        if opening.startswith("\\l"):  # a floor is an unknown function of its content
            return self.variable(f"{opening}{complex(value) + 0:.9g}")  # + 0: no -0
        parts = value.parts if getattr(value, "kind", "") in ("∨", "∧", ",") else [value]
        kind = "{}" if opening in ("{", "\\{") else opening + closing
        if len(parts) == 1 and opening != "\\{" and kind in ("()", "[]", "{}"):
            return parts[0]
        form = Form(kind, parts)
        if kind == "()" and len(parts) < 4 and sum(map(bool, parts)) > 1:  # (3, -2) is 3i - 2j
            with contextlib.suppress(*FAILURES):
                axes = 1j, self.variable("j"), self.variable("k")
                form.vector = sum(part * axis for part, axis in zip(parts, axes))
        return form

    def function(self, name: str) -> Value:
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

    def variable(self, name: str) -> Value:
        # Near 1, so that high powers stay within the range of floats.
        point = 0 if self.fixed and not name.endswith("'") else self.point
        return Fraction(80_000 + zlib.crc32(f"{name} {point}".encode()) % 40_000, 100_000)
