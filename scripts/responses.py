"""Make a page that shows right responses token by token. tokens.py calls this.

1. The colour of a token shows its quadrant of (p, H). Tokens of low p and low H are silenced.
2. A panel describes the token under the pointer or in keyboard focus. Its text is the token's
   data-about attribute. The Tab key stops at tokens of low p only.
3. The page is one file without scripts and without links. It has at most about 6 MB.
"""

import html

TAGS = {  # (p is low, H is low) -> how the token's element begins
    (True, True): 'del tabindex="0"',
    (True, False): 'b tabindex="0"',
    (False, False): 'i tabindex="-1"',
    (False, True): 'span tabindex="-1"',
}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
*, ::before, ::after {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 2.5rem 24rem 20rem 1.25rem; max-width: 68rem; overflow-wrap: anywhere;
  background: #fdfcfa; color: #2b2a28; font: 1rem/1.55 system-ui, sans-serif;
}}
h1, h2 {{ font-size: 1.1rem; font-weight: 600; }}
h1, h2, p, dd {{ margin: 0; }}
.rule {{ white-space: pre-wrap; margin-top: 1rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1.5rem 0; }}
article {{ border-top: 1px solid #e6e2db; padding: 1.4rem 0 1.6rem; line-height: 2; }}
.soft, dd {{ color: #6b6862; }}
.facts {{ font-size: .875rem; }}
.tokens, .tokens > ::after {{ font-family: ui-monospace, Menlo, Consolas, monospace; }}
.tokens {{ white-space: pre-wrap; }}
.tokens > * {{ border-radius: .2em; padding: .12em 0; cursor: default; unicode-bidi: isolate; }}
.tokens > b {{ background: #cbe5f7; border-bottom: 2px dotted #0b6aa8; font-weight: 400; }}
.tokens > i {{ background: #f1eddb; font-style: normal; }}
.tokens > del {{
  display: inline-block; background: #b03c06; color: #fff; font-weight: 700; padding: 0 .3em;
  margin: 0 .15em; line-height: 1.4; text-decoration: none; print-color-adjust: exact;
}}
del::before {{ content: "⊘"; font-weight: 400; margin-right: .25em; }}
/* One place for what is known of the token under the pointer or in focus. */
.hint, article .tokens > :hover::after, article .tokens > :focus::after {{
  position: fixed; right: max(1.25rem, 50vw - 32.75rem); top: 2.5rem;
  width: 21rem; min-height: 17.5rem; padding: 1.1rem 1.4rem;
  background: #fff; border: 1px solid #e6e2db; border-radius: .6rem;
}}
article .tokens > :hover, article .tokens > :focus {{ outline: 2px solid #2b2a28; }}
article .tokens > :hover::after, article .tokens > :focus::after {{
  content: attr(data-about); z-index: 1; color: #2b2a28; white-space: pre-wrap;
  font-size: .8125rem; font-weight: 400; line-height: 1.65; direction: ltr;
}}
@media (max-width: 56rem) {{ /* no room beside the text: the panel is at the bottom */
  body {{ padding: 1.5rem 1rem 20rem; }}
  .hint, article .tokens > :hover::after, article .tokens > :focus::after {{
    inset: auto 0 0; width: auto; min-height: 0; }}
}}
</style>
<h1>{title}</h1>
<p class="soft">Tokens of responses with A &gt; 0. p is the token's probability under the policy
that sampled. H is the entropy of the policy's distribution at the token's place.</p>
<p class="soft rule">{rule}</p>
<dl>
<dt class="tokens"><del>silenced</del></dt><dd>p &lt; τ_p and H &lt; τ_h: left out of the loss</dd>
<dt class="tokens"><b>low p, high H</b></dt><dd>p &lt; τ_p, but H ≥ τ_h</dd>
<dt class="tokens"><i>high p, high H</i></dt><dd>p ≥ τ_p and H ≥ τ_h</dd>
<dt class="tokens"><span>high p, low H</span></dt><dd>p ≥ τ_p and H &lt; τ_h: most tokens</dd>
</dl>
<aside class="hint soft">Point at a token, or press Tab for the next token of low p.</aside>
{articles}
</html>
"""


def visible(text: str, space: str = " ") -> str:
    """Return a text with signs for whitespace, and Python's escapes for unprintable characters.

    Unprintable are controls, lone surrogates, and marks that change the direction of writing.
    """
    signs = {" ": space, "\n": "↵", "\t": "⇥"}
    shown = (signs.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)
    return "".join(shown) or "∅"


def about(response: dict, t: int, tau_p: float) -> str:
    """Return the text of the panel for token t."""
    p, entropy, tau_h = (response[name][t] for name in ("p", "entropy", "threshold"))
    fate = "silenced" if response["silenced"][t] else "kept"
    lines = [
        f"{visible(response['token'][t], '␣')} · {fate}\n",
        f"p  {p:<8.3g} {'<' if p < tau_p else '≥'} τ_p = {tau_p:g}",
        f"H  {entropy:<8.3g} {'<' if entropy < tau_h else '≥'} τ_h = {tau_h:.3g} nats",
        f"A  {response['advantage']:+.2f}\n",
    ]
    if response["likeliest"][t]:
        lines.append("The likeliest words here:")
    lines += [f"{share:<10.3g} {visible(word, '␣')}" for word, share in response["likeliest"][t]]
    return "\n".join(lines)


def token(response: dict, t: int, tau_p: float) -> str:
    """Return token t as HTML. Its line breaks follow the element: within, they have its colour."""
    tag = TAGS[response["low_p"][t], response["low_h"][t]]
    text, known = visible(response["token"][t]), about(response, t, tau_p)
    element = f'<{tag} data-about="{html.escape(known)}">{html.escape(text)}</{tag.split()[0]}>'
    return element + "\n" * response["token"][t].count("\n")


def article(response: dict, tau_p: float) -> str:
    """Return a response as HTML: its problem, a line of facts, and its tokens."""
    shown, length, start = len(response["token"]), response["length"], response["start"]
    facts = [
        f"answer {visible(response['gold'])}" if response["gold"] else "",
        f"A = {response['advantage']:+.2f}",
        f"{length:,} tokens",
        f"{response['marked']} silenced",
        f"only tokens {start + 1:,} to {start + shown:,} are shown" if shown < length else "",
    ]
    facts = html.escape(" · ".join(filter(None, facts)))
    tokens = "".join(token(response, t, tau_p) for t in range(shown))
    return (
        f"<article>\n<h2>{html.escape(visible(response['problem']))}</h2>\n"
        f'<p class="facts soft">{facts}</p>\n<div class="tokens">{tokens}</div>\n</article>'
    )


def page(title: str, rule: str, responses: list[dict], tau_p: float) -> str:
    """Return the page. `rule` says what is silenced, `responses` come from tokens.describe."""
    articles = "\n".join(article(response, tau_p) for response in responses)
    return PAGE.format(title=html.escape(title), rule=html.escape(rule), articles=articles)
