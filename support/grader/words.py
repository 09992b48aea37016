r"""The stage "words" removes words and units beside a value, unless a word changes the value.

\text{ cm} is written ⟦ cm⟧ as long as its meaning is not known. So are words without \text. What
words mean is decided before units are removed, and units before other texts lose their brackets.
"""

import re

from support.grader.latex import INSIDE
from support.grader.rules import Rule, Stage, kind, sub
from support.grader.values import FUNCTIONS

# A text behind a value is a unit if it has a unit word, such as a plural, and no value word.
_UNIT_WORDS = r"[A-Za-z-]+[^\Wsui]s|[fpnumcdhkMGT]?(?:[msgLlJNWVACFTKH]|Hz|Pa|eV|mol|rad|min)|Å|"
_UNIT_WORDS += r"in(?! )|ft|yd|mi|lb|oz|hr?|d|yr|mph|sq|cu|sec|deg|erg|st|nd|rd|th|foot|feet|inch|"
_UNIT_WORDS += r"[a-z]*(?:met|lit)(?:er|re)|[a-z]*gram|mile|yard|pound|ounce|unit|second|minute|"
_UNIT_WORDS += r"hour|day|week|year|month|dollar|cent|USD|degree|people|person|\w*men|children|gm|"
_UNIT_WORDS += r"increase|[\u4e00-\u9fff]+"
_VALUE_WORDS = r"least|most|more|less|fewer|over|under|above|below|up|not?|n?or|plus|minus|p\.?m|"
_VALUE_WORDS += r"times \w+|loss|south|west|multiples?|factorials?|tens|halves|extraneous|rejected|"
_VALUE_WORDS += r"(?:half|third|quarter|pair|couple|trio|twin|dozen|score|hundred|thousand|"
_VALUE_WORDS += r"\w+illion|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|"
_VALUE_WORDS += r"\w+(?:teen|tie|red|sand|illion))th)s?"

# Building blocks of patterns, each with a text that it matches.
_TEXT = rf"(?:\\(?:text[a-z]*|mathrm|.box|rm|oper[a-z]*)\s*\{{|(?<![c}}_^])\{{\s*\\rm~){INSIDE}\}}"
_EXPONENT = r"\^\s*(?:\{\s*-?\d\s*\}|-?\d)"  # ^{-2}
_POWER = rf"(?:\s*{_EXPONENT})?"
# at least⟧, K people⟧, 半⟧: the rest of a text that changes the value
_VALUE = rf"[^⟧]*(?:\b(?i:{_VALUE_WORDS})\b|\b[kKMB] [a-z]{{3}}|[=约至不负半十百万亿对双打])"
_END = rf"(?=[^⟧]*(?<![A-Za-z])(?:{_UNIT_WORDS})(?![A-Za-z]))[^⟧]*⟧{_POWER}"  # square cm⟧^2
_UNIT = rf"⟦(?!{_VALUE}|(?:[^⟧]*\s)?[-+]?\.?\d){_END}"  # ⟦ cm⟧, but not ⟦5 cm⟧
_UNITS = rf"\s*{_UNIT}(?:[\s/*]*{_UNIT})*"  # ⟦kg⟧ * ⟦m⟧ / ⟦s⟧^2
_AFTER_VALUE = r"(?<=[^\W_]|[.)}\]!%°])"
_NO_FACTOR = r"(?!\s*(?:[\w.({^]|\\[^}]))"  # no factor follows: in 5 ft 6 in one does
# Units without \text, at the end: miles per hour, sq. cm, kg/m^2. One letter is a variable.
_FUNCTION_NAMES = "|".join(sorted({*FUNCTIONS, "sqrt", "pi", "e", "i"} - {"sec"}))  # sec: seconds
_PLAIN_WORDS = rf"\s+(?!(?:mod|{_FUNCTION_NAMES})\b)(?:(?:sq|cu)\.?\s+[A-Za-z]+|[A-Za-z]{{3,}})\b"
_PLAIN_WORDS += rf"(?:[A-Za-z\s/*]|{_EXPONENT})*"
_PLAIN_UNIT = r"\s*(?:[ckm]m|[km]g|m[lLs]|ft|lb|oz|hr|Hz|k?Pa|k[JN]|[kM]?eV|Å|m(?=/s)|g(?=/cm))\b"
_PLAIN_UNIT += rf"(?:/[A-Za-z]+)?{_POWER}"
_PLAIN = rf"(?<=[\d.)}}%])({_PLAIN_WORDS}|{_PLAIN_UNIT}|[\u4e00-\u9fff]+)\s*\Z"
_ORDINAL = (
    rf"\^\s*\{{?\s*⟦\s*(?:st|nd|rd|th)\s*⟧\s*\}}?(?:\s*⟦(?!{_VALUE})[^⟧]*⟧)?"  # ^{⟦th⟧} ⟦day⟧
)
# The whole answer, 12th grade, because the letters of 2nd + 1 are variables.
_PLAIN_ORDINAL = r"\A(\d*1(?=st)|\d*2(?=nd)|\d*3(?=rd)|\d+(?=th))"
_PLAIN_ORDINAL += rf"[a-z]{{2}}\b(?!{_VALUE})[A-Za-z\s⟦⟧]*\Z"
# Behind the one value of an answer: for all x, where s > -a. Not in: x for x > 1, 0 otherwise.
_CONDITION = r"\A([^⟦]*[^⟦\s,(])[\s,(]*(?:(?:⟦[\s,(]*)?\b(?:for|where)\b|\\forall~)"
_CONDITION += r"(?!.*\b(?:and|or|each|every|otherwise|else)\b)"
_CONDITION += r"(?:[A-Za-z\s⟧]*|(?:[^,;=⟦(]|\([^()]*\))*[<>≤≥≠∈](?:[^,;=⟦(]|\([^()]*\))*)\Z"
_OPENING = r"(?i:(?:(?:the )?(?:final )?(?:answer|value|result)|there|it) (?:is|are)\b:?|yes,|"
_OPENING += r"(?:final )?answer:|all integers(?=[\s⟧]*[a-z]\s*[<>≤≥]))|(?:USD?|EUR|GBP)(?=[\s⟧]*\d)"
_NO_WORDS = rf"(?:{_FUNCTION_NAMES}|[A-Za-z]{{1,2}}(?<![Nn]o))"  # sin(x) is none
_ONLY_WORDS = rf"\A(?!(?>{_NO_WORDS}\b|[\s(),.'-])+\Z)[A-Za-z\s,.'()⟦⟧-]+\Z"  # A cat

# fmt: off
WORDS = Stage("words", "What is left has a value, or is one text ⟦...⟧ as a whole.", [
    Rule("percent in words", r"`35 percent` for `35\%` | `35 percent` for `3.5\%`",
         sub(r"\bp(?:er\s?cent(?:age)?|ct)\b", "%")),
    kind("words beside a number",
         r"`4 \text{ losses}` for `4`, `12^{\text{th}} \text{ grade}` for `12`, "
         r"`\text{Yes, } n=4` for `4` | number words, unknown singulars, other words before it: "
         r"`4 \text{K people}` for `4000`, `1 \text{ apple}` for `1`, `\text{about } 4` for `4`",
         sub(_TEXT, r"⟦\1⟧")),
    Rule("openings", r"`\text{The answer is } 4` for `4` | `\text{about } 4` for `4`",
         sub(rf"\A(⟦?)\s*(?:{_OPENING})", r"\1")),
    Rule("numbers inside a text", r"`\text{9 cm}` for `9` | `\text{9 dozen}` for `9`",
         sub(r"(\A|=)\s*⟦\s*(-?\d[\d.,]*)(?=\s*[A-Za-z][^⟧]*⟧[\s\d^{}]*\Z)", r"\1\2⟦")),
    Rule(r"words without \text", "`120 miles per hour` for `120` | `120 dozen miles` for `120`",
         sub(_PLAIN, r"⟦\1⟧")),
    Rule("ordinals", r"`12^{\text{th}}` for `12`, `12th grade` for `12` | `2^{nd}` for `2`",
         sub(_ORDINAL, "", _PLAIN_ORDINAL, r"\1")),
    kind('conditions behind "for", "where"',
         r"are dropped. In error: `x \text{ for } x<0` for `x \text{ for } x>0` | "
         r"behind a comma: `2k, k>0` for `2k`",
         sub(_CONDITION, r"\1")),
    Rule("or, and", "`1 or 2` for `2, 1` | `x<0 or x>1` for `x<0 and x>1`",
         sub(r",? ?(?:⟦[ ,]*(?:or|and) *⟧|\b(?:or|and)\b)", lambda found: "∨∧"["a" in found[0]])),
    kind("degrees", r"`30` for `30^\circ` | radians: `60^\circ` for `\frac{\pi}{3}`",
         sub(r"(?:\{ *\} *)?\^ *(?:\{ *\\circ *\}|\\circ)|⟦ *degrees? *⟧", "°")),
    Rule("units in a fraction",
         r"`3\,\frac{\text{m}}{\text{s}}` for `3` | `3\,\frac{\text{m}}{2}` for `3`",
         sub(rf"\\frac\s*\{{({_UNITS})[\s}}]*\{{({_UNITS})\s*\}}", r"\1/\2")),
    kind("units",
         r"are dropped: `5 \text{ cm}` for `5`. In error: `5 \text{ m}` for `5 \text{ cm}` | "
         r"conversions: `1 \text{ m}` for `100 \text{ cm}`. "
         r"Some units without \text: `5 m` for `5`",
         sub(rf"{_AFTER_VALUE}{_UNITS}{_NO_FACTOR}", " ")),
    kind("other words",
         r"in error, as products of letters: `2 \text{ east}` for `2 \text{ seat}` | "
         r"synonyms: `\text{correct}` for `\text{true}`",
         sub(rf"⟦(?!{_VALUE})([^⟧]*)⟧", r" \1 ")),
    # A product of letters would make east equal to seat.
    Rule("words alone", "`a CAT` for `A cat` | `east` for `seat`",
         sub(_ONLY_WORDS, lambda found: f"⟦{re.sub('[^a-z,-]', '', found[0].lower())}⟧")),
])
# fmt: on
