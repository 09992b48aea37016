"""What the value of an answer can be. The stage "forms" decides when two values are the same.

A docstring has examples, before | those that count because of the rule (see Rule.row).
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from support.grader.rules import Stage

TOLERANCE = 1e-9  # relative: far above rounding, far below 1.5 against 1.50001
# 1 / 0; unreadable text; a set plus one; one without a set; nested too deeply
FAILURES = (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError)
_SAME_LIST = ({"{}", ","}, {"{}", "∨"}, {",", "∨"}, {",", "∧"})  # kinds that can be the same list


@dataclass(eq=False)
class Form:
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
        return Form("()", [factor * part for part in self.parts])


Value = Fraction | float | complex | Form


def close(a, b) -> bool:
    """Whether two numbers are equal. Exact ones must be exactly equal."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    slack = TOLERANCE * max(abs(a), abs(b)) if a and b else 1e-12  # \sin \pi is 0 up to rounding
    return abs(a - b) <= slack < math.inf


FORMS = Stage("forms", "The first rule with a verdict has decided whether two values are the same.")


def same(a: Value, b: Value) -> bool:
    """Whether `a` has the value of `b`, the right answer. Both were computed at the same point.

    A rule returns its verdict, or the two values in another form. It returns None if it has nothing
    to say about them.
    """
    if not isinstance(a, Form) and not isinstance(b, Form):
        return close(a, b)
    for rule in FORMS.rules:
        found = rule.apply(a, b)
        if isinstance(found, bool):
            return found
        a, b = found or (a, b)
    return False


def bare(x: Value) -> Value:
    """Return `x` without names and sets of one: 5 for y = 5, {5} and 5_7."""
    while isinstance(x, Form) and (x.name or x.kind == "{}" and len(x.parts) == 1):
        x = x.parts[-1]
    return x


def _kind(x: Value) -> str:
    return getattr(x, "kind", "")  # "" of a number


def _name(x: Value) -> str:
    return getattr(x, "name", "")


def _in_order(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


@FORMS.rule("names")
def _names(a, b):
    """`x=5, y=x` for `y=x, x=5` | `x=y, z=1` for `y=x, z=1`"""
    if _name(a) and _name(b):
        return a.name == b.name and same(a.parts[-1], b.parts[-1])


@FORMS.rule("lists of equal values")
def _repeated(a, b):
    """`90` for `90,90` | `90` for `90,80`"""
    one, several = (a, b) if _kind(b) == "," else (b, a)
    if _kind(several) == "," and _kind(one) in ("", "="):
        return all(same(bare(one), bare(part)) for part in several.parts) or None


@FORMS.rule("rows of a system")
def _system(a, b):
    r"""`(x=1, y=2)` for `x=1 \text{ and } y=2` | `x=1` for `x=1, z=2`"""
    if _kind(a) and _kind(b) and all(_kind(part) == "=" for part in a.parts + b.parts):
        return tuple(replace(x, kind="∧") if x.kind in ("()", "[)") else x for x in (a, b))


@FORMS.rule("a point for a list")
def _point(a, b):
    """`(1000,10)` for `1000,10` | `1000,10` for `(1000,10)`"""
    if (_kind(a), _kind(b)) == ("()", ","):
        return a, replace(b, kind="()")


@FORMS.rule("vectors of letters")
def _vector(a, b):
    r"""`3i-2j` for `(3,-2)` | `2i` for `(2,0)`"""
    for x, other in ((a, b), (b, a)):
        if hasattr(x, "vector") and not _name(x) and not isinstance(other, Form):
            return close(x.vector, other)


@FORMS.kind("left sides")
def _left_sides(a, b):
    """names, sums, products: `x+y=5` for `5`. In error: `y^n=2x` for `2x` |
    a power that is a number: `AB^2=80` for `80`"""
    kinds = {_kind(a), _kind(b)}
    if len(kinds) == 2 and kinds not in _SAME_LIST:
        return (bare(a) is not a or bare(b) is not b) and same(bare(a), bare(b))


@FORMS.rule("points, intervals")
def _by_position(a, b):
    """`(0.5,1]` for `(1/2,1]` | `(1,2)` for `(2,1)`"""
    if _kind(a) not in ("{}", ",", "∨", "∧", "="):
        return _in_order(a.parts, b.parts)


def _listed(a, b) -> bool:
    return _kind(b) == "," and _kind(a) in (",", "∧")


@FORMS.kind("named values")
def _named_values(a, b):
    """alphabetically or as written: `y=10, x=1000` for `1000,10` |
    `x=10, y=1000` for `1000,10`, `x=3, y=-1` for `(3,-1)`"""
    letters = {n for n in map(_name, a.parts) if re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+", n)}
    if _listed(a, b) and len(letters) == len(a.parts) and not any(map(_name, b.parts)):
        return _in_order(a.parts, b.parts) or _in_order(sorted(a.parts, key=_name), b.parts)


@FORMS.kind("lists in an order (below)")
def _in_asked_order(a, b):
    r"""`T(1)=2, T(2)=4, T(3)=3` for `2,4,3`. In error: `\{2,3,4\}` for `2,4,3` |
    `2,3,4` for `2,4,3`"""
    # 2, 4, 3 are values that a problem asked for in this order. 1, -1, 7, -7 are not.
    names, parts = [*map(_name, a.parts)], b.parts
    if _listed(a, b) and ("" in names or len({*names}) == len(names)):  # not x = 1, x = 3
        if all(isinstance(x, Fraction) for x in parts) and not {-x for x in parts if x} & {*parts}:
            if parts not in (sorted(parts), sorted(parts, reverse=True)):
                return _in_order(a.parts, parts)


@FORMS.kind("lists")
def _in_any_order(a, b):
    """in any order: `7,-5` for `-5,7`. Repeated or not: `90` for `90,90` |
    a tuple in another order: `(10,1000)` for `1000,10`"""
    rest = list(b.parts)
    for x in a.parts:
        found = next((i for i, y in enumerate(rest) if same(x, y)), None)
        if found is None:
            return False
        del rest[found]
    return not rest
