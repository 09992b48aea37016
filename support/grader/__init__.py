r"""Decide whether two mathematical answers are equal.

    math_equal(r"2(n-1)", "$2n-2$")   -> True
    math_equal(r"(1, 2]", "(1, 2)")   -> False
    rounds_to("41.83", "41.8")        -> True

An answer passes all STAGES. Let the answer be $5\frac12 \text{ cm}$, and the right one 5.5:

    choices      (B) 7 counts for B: no letter here             compare.py
    signs        5\frac12 \text{ cm}                            latex.py
    words        5\frac12                                       words.py
    notations    (5+1/2)                                        latex.py
    tokens       ( 5 + 1 / 2 )                                  values.py
    readings     one: only 100,200 and bound names have two     compare.py
    grammar      11/2: a parser computes it                     values.py
    forms        11/2 = 5.5; lists, points, named values        forms.py
    expressions  the same value at three points                 compare.py
    answers      equal as expressions, or as texts              compare.py
    rounding     5.5 has too few digits for a rounded result    compare.py

The points are values of the variables. A variable's name decides its three values.

To add a rule, see where its examples still differ: `python -m support.grader ANSWER` prints what
the rules of signs, words and notations do. Copy an entry: a name, a row of examples, a function.
A later rule can take what an earlier one has written: see there, too. Then run
tests/test_reward.py, and if the rule is a kind, put the table that `python -m support.grader`
prints into docs/reference.md.

Text of the model is never run as code. MAX_CHARS and Python's limit of recursion bound the time.
"""

from support.grader import compare, forms, latex, values, words
from support.grader.compare import math_equal, rounds_to

__all__ = ["STAGES", "math_equal", "rounds_to"]

STAGES = [compare.CHOICES, latex.SIGNS, words.WORDS, latex.NOTATIONS, values.TOKENS]
STAGES += [compare.READINGS, values.GRAMMAR, forms.FORMS, compare.EXPRESSIONS, compare.ANSWERS]
STAGES += [compare.ROUNDING]
