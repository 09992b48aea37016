"""responses.html: any text stays text, and nothing comes from elsewhere."""

import random
import re

from helpers import Page
from responses import page

HOSTILE = ["<b>", "</script><script>x()</script>", '"', '" onfocus="x()', "'", "&amp;", "<!--"]
HOSTILE += ["</div></article>", "\\frac{1}{2}", "$x^2$", "{style}", "%s", " 所以", "�", "مرحبا"]
HOSTILE += ["\u202e", "\u200b", "\ud800", "\x00", "\r\n", "\n\n", ".\n", "\n x", "\t", "    ", ""]


def make_response() -> dict:
    """A response of hostile texts whose tokens are in all quadrants."""
    draw = random.Random(0)
    p = [10 ** draw.uniform(-6, 0) for _ in HOSTILE]
    entropy = [draw.uniform(0, 1) for _ in HOSTILE]
    fields = {"problem": "".join(HOSTILE), "gold": "</h2><script>", "advantage": 1.62, "start": 0}
    fields |= {"token": HOSTILE, "length": len(HOSTILE), "p": p, "entropy": entropy, "marked": 3}
    fields |= {"low_p": [x < 0.002 for x in p], "low_h": [h < 0.4 for h in entropy]}
    fields["silenced"] = [low_p and low_h for low_p, low_h in zip(fields["low_p"], fields["low_h"])]
    fields["likeliest"] = [[[draw.choice(HOSTILE), 0.5 / k] for k in range(1, 6)] for _ in HOSTILE]
    return fields | {"threshold": [0.4] * len(HOSTILE)}


def test_hostile_text_stays_text_and_nothing_comes_from_elsewhere():
    response = make_response()
    text = page("runs/<b>", "p < τ_p <script>", [response], 0.002)
    text.encode("utf-8")  # what is not a character of its own is spelt out
    found = Page(text)
    (tokens,) = [tokens for tokens in found.responses if tokens]  # without the legend
    shown = [*HOSTILE]
    for character in ("\u202e", "\u200b", "\ud800", "\x00", "\r"):
        shown = [word.replace(character, ascii(character)[1:-1]) for word in shown]
    shown = [word.replace("\n", "↵").replace("\t", "⇥") or "∅" for word in shown]
    assert [token["text"] for token in tokens] == shown
    for t, token in enumerate(tokens):
        words = [line.split(maxsplit=1)[1] for line in token["data-about"].split("\n")[-5:]]
        expected = [shown[HOSTILE.index(word)] for word, _ in response["likeliest"][t]]
        assert words == [word.replace(" ", "␣") for word in expected]
    own = {"html", "meta", "title", "style", "h1", "h2", "p", "dl", "dt", "dd", "aside"}
    assert set(found.tags) == own | {"article", "div", "span", "del", "i", "b"}
    assert set(found.attributes) == {*"lang charset name content class tabindex data-about".split()}
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
