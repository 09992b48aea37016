"""Make responses.html, a page that shows right responses token by token. tokens.py calls this.

1. The colour of a token shows its quadrant of (p, H). Silenced tokens are marked and inverted.
2. A panel describes the token under the pointer or in keyboard focus. Its text is the token's
   data-about attribute.
3. The page is one file without scripts and without links. It has at most about 6 MB.
"""

import html

QUADRANTS = {  # (p is low, H is low) -> the class of the token
    (True, True): "spurious",
    (True, False): "exploring",
    (False, False): "choosing",
    (False, True): "sure",
}

STYLE = """
*, ::before, ::after { box-sizing: border-box; }
html { scroll-padding: 5rem 0 6rem; }
body {
  margin: 0 auto; padding: 2.5rem 24rem 6rem 1.25rem; max-width: 68rem;
  background: #fdfcfa; color: #2b2a28; font: 1rem/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; font-weight: 650; margin: 0 0 .3rem; }
p, dd { margin: 0; }
.soft, dd { color: #6b6862; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .5rem 1rem; margin: 1.5rem 0; }
article { border-top: 1px solid #e6e2db; padding: 1.4rem 0 1.6rem; }
h2 { font-size: 1rem; font-weight: 600; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.facts, .hint { font-size: .875rem; }
.tokens, .sample, .tokens > ::after { font-family: ui-monospace, Menlo, Consolas, monospace; }
.tokens { margin-top: .8rem; line-height: 2; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens > *, .sample { border-radius: .2em; padding: .12em 0; cursor: default; }
/* A token that is written from right to left leaves its neighbours in their order. */
.tokens > * { unicode-bidi: isolate; }
.sample { padding: .12em .45em; font-size: .875rem; white-space: nowrap; }
.spurious { background: #fbdcc8; border-bottom: 2px solid #b03c06; }
.exploring { background: #cbe5f7; border-bottom: 2px dotted #0b6aa8; }
.choosing { background: #f1eddb; }
.tokens > del, del.sample {
  display: inline-block; background: #b03c06; color: #fff; font-weight: 700;
  border: 0; padding: 0 .3em; margin: 0 .15em; line-height: 1.4; white-space: break-spaces;
  text-decoration: none; print-color-adjust: exact;
}
del::before { content: "⊘"; font-weight: 400; margin-right: .25em; }
.tokens > :hover, .tokens > :focus { outline: 2px solid #2b2a28; outline-offset: 1px; }
/* Whitespace keeps its character, under a faint sign. */
.tokens i { font-style: normal; position: relative; }
.tokens i::before {
  content: "␣"; position: absolute; left: 0; top: 0; line-height: normal; opacity: .35;
}
.tokens i.line::before { content: "↵"; position: static; }
.tokens i.tab::before { content: "⇥"; }
.tokens i.none::before { content: "∅"; position: static; }
.tokens del i::before { opacity: 1; }
code { font-size: .85em; opacity: .7; }
/* One place for what is known of the token under the pointer or in focus. */
.hint, .tokens > :hover::after, .tokens > :focus::after {
  position: fixed; right: max(1.25rem, 50vw - 32.75rem); top: 2.5rem;
  width: 21rem; min-height: 17.5rem; padding: 1.1rem 1.4rem;
  background: #fff; border: 1px solid #e6e2db; border-radius: .6rem;
}
.tokens > :hover::after, .tokens > :focus::after {
  content: attr(data-about); z-index: 1; color: #2b2a28;
  font-size: .8125rem; font-weight: 400; line-height: 1.65; text-align: left; direction: ltr;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.tokens > :hover::after { z-index: 2; }
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
<p class="soft">Tokens of responses with A &gt; 0. All numbers are those of the policy that
sampled. p is the token's probability. It is low below {tau_p:g}. H is the entropy of the model's
distribution at the token's place. It is low below τ_h of the mini-batch, or below the
0.8-quantile of H if the mini-batch has no τ_h. Responses with silenced tokens come first.</p>
<dl>
<dt><del class="sample">silenced</del></dt>
<dd>Left out of the loss: no gradient. STAPO silences low p with low H.</dd>
<dt><span class="sample spurious">low p, low H</span></dt>
<dd>Unlikely where the model was sure of another word. STAPO keeps no such token.</dd>
<dt><span class="sample exploring">low p, high H</span></dt>
<dd>Unlikely where the model was undecided.</dd>
<dt><span class="sample choosing">high p, high H</span></dt>
<dd>A common choice where it was undecided.</dd>
<dt><span class="sample sure">high p, low H</span></dt>
<dd>The word that the model was sure of: most tokens.</dd>
</dl>
<aside class="hint soft">Point at a token or tap it.
Tab goes to the next low-probability token.</aside>
{articles}
</html>
"""


def visible(text: str, font: dict | None = None) -> str:
    """Return a text with signs for whitespace and Python's escapes for unprintable characters.

    Unprintable are controls, lone surrogates, marks that change the direction of writing, and, with
    `font`, characters that the font does not have.
    """
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    odd = {c for c in text if not c.isprintable() or (font and ord(c) not in font)}
    return "".join(signs.get(c) or (ascii(c)[1:-1] if c in odd else c) for c in text)


def markup(text: str) -> str:
    """Return a text as HTML. The style sheet makes its whitespace visible."""
    kinds = {" ": "<i> </i>", "\n": '<i class="line"></i>\n', "\t": '<i class="tab">\t</i>'}
    parts = []
    for character in text:
        if character in kinds:
            parts.append(kinds[character])
        elif character.isprintable():
            parts.append(html.escape(character))
        else:
            parts.append(f"<code>{visible(character)}</code>")
    return "".join(parts) or '<i class="none"></i>'


def about(response: dict, t: int, tau_p: float) -> str:
    """Return the text of the panel for token t."""
    p, entropy, threshold = (response[name][t] for name in ("p", "entropy", "threshold"))
    fate = "silenced" if response["silenced"][t] else "kept"
    low_p = "below" if p < tau_p else "not below"
    low_h = "below" if entropy < threshold else "not below"
    lines = [
        f"{visible(response['token'][t]) or '∅'} · {fate}",
        "",
        f"p  {p:<8.3g} {low_p} {tau_p:g}",
        f"H  {entropy:<8.3g} {low_h} {threshold:.3g}",
        f"A  {response['advantage']:+.2f}",
        "",
        "The likeliest words here:",
    ]
    lines += [f"{share:<10.3g} {visible(word) or '∅'}" for word, share in response["likeliest"][t]]
    return "\n".join(lines)


def token(response: dict, t: int, tau_p: float) -> str:
    """Return token t as HTML. The Tab key stops at tokens of low probability only."""
    low_p, low_h = response["p"][t] < tau_p, response["entropy"][t] < response["threshold"][t]
    tag = "del" if response["silenced"][t] else "span"
    text, known = markup(response["token"][t]), html.escape(about(response, t, tau_p))
    end = "\n" if text.endswith("\n") else ""  # inside, it would colour the next line
    return (
        f'<{tag} class="{QUADRANTS[low_p, low_h]}" tabindex="{0 if low_p else -1}" '
        f'data-about="{known}">{text.removesuffix(end)}</{tag}>{end}'
    )


def article(response: dict, tau_p: float) -> str:
    """Return a response as HTML: its problem, a line of facts, and its tokens."""
    shown, length, start = len(response["token"]), response["length"], response["start"]
    facts = [
        f"answer {markup(response['answer'])}" if response["answer"] else "",
        f"A = {response['advantage']:+.2f}",
        f"{length:,} tokens",
        f"{response['silenced_count']} silenced",
        f"only tokens {start + 1:,} to {start + shown:,} are shown" if shown < length else "",
    ]
    tokens = "".join(token(response, t, tau_p) for t in range(shown))
    return (
        f"<article>\n<h2>{markup(response['problem'])}</h2>\n"
        f'<p class="facts soft">{" · ".join(filter(None, facts))}</p>\n'
        f'<div class="tokens">{tokens}</div>\n</article>'
    )


def page(name: str, responses: list[dict], tau_p: float) -> str:
    """Return the page. `name` is its title, `responses` come from `describe` in tokens.py."""
    return PAGE.format(
        title=html.escape(f"{name}: right answers, token by token"),
        style=STYLE,
        tau_p=tau_p,
        articles="\n".join(article(response, tau_p) for response in responses),
    )
