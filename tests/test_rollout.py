"""Prompts, sampling and scoring: against float64, autograd, and the model's own softmax."""

import gc
import json
import math
import weakref

import pytest
import torch
from datasets import Dataset
from helpers import STOPS, TINY, in_order, make_family, random_prompts, write_rows
from reference import logit_stats, plain_head
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, GenerationConfig

import rollout
from reward import unbox
from rollout import encode_prompt, sample, stop_ids
from support import InputError, decoding, head, models
from support.data import load_problems
from support.head import HeadStats

# --------------------------------------------------------------------------------------- scoring

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_A_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])


class Operations(TorchDispatchMode):
    """The names of all operations within `with`."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("tokens, chunk", [(50, 7), (50, None), (0, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_chunks_is_the_head(tokens, chunk, dtype, device, monkeypatch):
    """Values and gradients; None: the sizes that suit the device."""
    if chunk:
        monkeypatch.setitem(head.HEAD_CHUNK, device, chunk)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 24, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(311, 24, generator=g).to(device, dtype).requires_grad_()
    targets = torch.randint(0, 311, (tokens,), generator=g).to(device)
    scale = torch.randn(tokens, generator=g).to(device)

    def gradients(values):
        return torch.autograd.grad((values * scale).sum(), (hidden, weight))

    stats = HeadStats.apply(hidden, weight, targets, False)
    expected = plain_head(hidden, weight, targets)
    assert all(s.dtype == torch.float32 and s.shape == (tokens,) for s in stats)
    for a, b in zip(stats, expected):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    for of in (lambda s: s[0], lambda s: s[1], lambda s: s[0] - 3 * s[1]):
        ours = gradients(of(HeadStats.apply(hidden, weight, targets, False)))
        theirs = gradients(of(plain_head(hidden, weight, targets)))
        torch.testing.assert_close(ours, theirs, **close)
    with Operations() as both:
        HeadStats.apply(hidden, weight, targets, False)
    with Operations() as alone:
        logp, entropy = HeadStats.apply(hidden, weight, targets, True)
    # ln p alone needs logsumexp, and no exp beside it.
    assert entropy is None and "exp" not in alone.names and ("exp" in both.names) == (tokens > 0)
    found = logp, *gradients(logp)
    same = zip(found, (stats[0], *gradients(stats[0])), strict=True)
    assert all(a.equal(b) for a, b in same)  # to the bit
    with Operations() as frozen:
        logp, _ = HeadStats.apply(hidden, weight.detach(), targets, True)
        assert torch.autograd.grad((logp * scale).sum(), hidden)[0].equal(found[1])
    assert not frozen.names & {"addmm_", "addmm"}  # no product for a frozen head


@pytest.mark.parametrize("tied", [True, False])
def test_the_policy_against_float64(random_model, tied):
    """Values and every parameter's gradient, with garbage as padding, and a prompt of no tokens."""
    policy = rollout.Policy(random_model(tied=tied, spread=0.4))
    g = torch.Generator().manual_seed(0)
    rows = [(3, 9), (7, 2), (1, 14), (5, 1), (0, 6)]  # prompt and response lengths
    ids = torch.randint(0, 104, (5, max(map(sum, rows)) + 3), generator=g)
    mask = torch.zeros(ids.shape).bool()
    for i, (prompt, length) in enumerate(rows):
        mask[i, prompt : prompt + length] = True
    stats = policy(ids, mask)
    mask[4, 0] = False  # nothing comes before the first token of a row
    assert all((s[~mask] == 0).all() and s.dtype == torch.float32 for s in stats)
    stats.logp.sum().backward()
    ours = {name: p.grad for name, p in policy.model.named_parameters()}
    model = policy.model.double()
    model.zero_grad()
    total = 0.0
    for i, (prompt, length) in enumerate(rows):  # one unpadded row at a time
        row, first = ids[i, : prompt + length], max(prompt, 1)
        expected = logit_stats(model(row[None]).logits[0, first - 1 : -1], row[first:])
        for s, e in zip(stats, expected):
            torch.testing.assert_close(s[i][mask[i]].double(), e, atol=2e-5, rtol=1e-4)
        total = total + expected[0].sum()
    total.backward()
    for name, parameter in model.named_parameters():
        close = {"atol": 1e-4 * float(parameter.grad.abs().max()), "rtol": 1e-3}
        torch.testing.assert_close(ours[name].double(), parameter.grad, **close)


def test_the_logits_of_a_bfloat16_model_are_a_float32_product(tmp_path):
    """With a model's bias. The product in bfloat16 would be off by a part in 500."""
    model, ids = make_family("phi"), torch.arange(5, 25)[None]
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    model = models.load_model(str(tmp_path), torch.bfloat16)
    hidden, head = model.base_model(ids).last_hidden_state, model.lm_head
    expected = hidden.float() @ head.weight.float().T + head.bias
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------- sampling

WITH_SLOTS = ["qwen3", "doge", "falcon"]  # each an attention or a mask of its own
WITHOUT_SLOTS = ["mistral, windows", "qwen2, a window", "opt", "falcon, alibi", "lfm2", "mamba"]
BOTH_PATHS = pytest.mark.parametrize("family", [WITH_SLOTS[0], WITHOUT_SLOTS[0]])


def chi_square(tokens, expected):
    """z-score of Pearson's statistic, over the tokens that are expected at least five times."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    often = expected >= 5
    observed, wanted = (torch.cat([x[often], x[~often].sum()[None]]) for x in (counts, expected))
    freedom, squares = len(observed) - 1, (observed - wanted) ** 2 / wanted.clamp(min=1e-9)
    return float((squares.sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9)])
def test_rollouts_follow_the_softmax(random_model, tokenizer, temperature, top_p):
    """8,000 tokens, and the nucleus by hand: the likeliest tokens until top_p is reached."""
    model = random_model(spread=0.3)
    model.generation_config = own = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.3
    )
    prompt, n = [5, 9, 11, 40], 8000
    settings = {"max_new_tokens": 1, "batch_size": 4000, "seed": 1}
    settings |= {"temperature": temperature, "top_p": top_p}
    responses = in_order(sample(model, tokenizer, [prompt] * n, **settings))
    assert model.generation_config is own  # put back
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    ordered, order = p.sort(descending=True)
    before = ordered.cumsum(-1) - ordered  # (V,): the share of what is likelier
    p = torch.zeros_like(p).scatter(0, order, ordered.where(before < top_p, 0.0))
    assert (5 < (p > 0).sum() < 80) == (top_p < 1)
    tokens = torch.tensor([r.ids[0] for r in responses])
    assert abs(chi_square(tokens, n * p / p.sum())) < 5


def test_next_token_inverts_the_cumulative_distribution():
    """A uniform number amid a token's interval draws that token, be it one of 150,000."""
    scores = 3 * torch.randn(150_000, generator=torch.Generator().manual_seed(0))
    scores[0] = -math.inf
    p = scores.double().softmax(-1)
    wanted = torch.tensor([1, *range(999, 150_000, 6000), 149_999])
    numbers = p.cumsum(0)[wanted] - p[wanted] / 2
    numbers[0] = 0.0  # the first token that has a probability, not the first of all
    tokens = decoding.next_token(scores.expand(len(wanted), -1), numbers[:, None])
    assert torch.equal(tokens.squeeze(1), wanted)


def test_a_response_depends_on_its_own_seed_alone(tiny, tokenizer):
    """The same under other batch sizes, other company and another order."""
    texts = [f"Q: {i // 4}+7-3=?" for i in range(8, 20)]  # four responses to each prompt
    prompts, seeds = [encode_prompt(tokenizer, text, "") for text in texts], list(range(70, 82))
    runs = []
    for order, batch_size in ((range(12), 12), (range(12), 5), (range(11, -1, -1), 3), ([4], 1)):
        options = {"batch_size": batch_size, "seed": [seeds[i] for i in order]}
        drawn = sample(tiny, tokenizer, [prompts[i] for i in order], max_new_tokens=40, **options)
        runs.append({i: r.ids for i, r in zip(order, in_order(drawn))})
    assert runs[0] == runs[1] == runs[2] and runs[3][4] == runs[0][4]
    assert len({tuple(ids) for ids in runs[0].values()}) > 8
    options = {"max_new_tokens": 9}
    again = [in_order(sample(tiny, tokenizer, prompts, seed=s, **options)) for s in (3, 3, 4)]
    assert again[0] == again[1] != again[2]
    assert in_order(sample(tiny, tokenizer, [], **options)) == []  # a rank without prompts


def test_the_cache_is_freed_when_the_sampling_ends(tokenizer, tiny_model, monkeypatch):
    """Without the garbage collector: on a GPU gradients need this memory next."""
    caches = []

    class Watched(decoding.SlotCache):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append(weakref.ref(self))

    monkeypatch.setattr(decoding, "SlotCache", Watched)
    gc.disable()
    list(sample(tiny_model, tokenizer, [[20], [21]], max_new_tokens=9))
    gc.enable()
    assert [cache() for cache in caches] == [None]


def test_each_batch_of_plain_generate_has_a_seed_of_its_own(tokenizer):
    model, options = make_family("mistral, windows"), {"max_new_tokens": 9, "batch_size": 2}
    drawn, again = (in_order(sample(model, tokenizer, [[20]] * 4, **options)) for _ in "ab")
    assert drawn == again and drawn[:2] != drawn[2:]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("family", [*WITH_SLOTS, *WITHOUT_SLOTS])
def test_greedy_responses_are_those_of_plain_generate(family, tokenizer, monkeypatch):
    """In 5 slots or in one for each prompt, prefilled by parts, in a cache that grows.

    A forward that saw what earlier rows left in a slot would choose other tokens. Each prompt comes
    twice: the second response has copied keys and values, in 5 slots some from a running row.
    """
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 500)
    model, prompts = make_family(family), random_prompts(12, 250)
    assert decoding.has_full_attention(model) == (family in WITH_SLOTS)
    config = GenerationConfig(max_new_tokens=37, eos_token_id=STOPS, pad_token_id=1)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        ids = ids[0, len(prompt) :].tolist()
        expected += 2 * [(ids, ids[-1] not in STOPS)]
    assert len({len(ids) for ids, _ in expected}) > 4
    for batch_size in (5, 24):
        settings = {"max_new_tokens": 37, "temperature": 0.0, "batch_size": batch_size}
        twice = [prompt for prompt in prompts for _ in "ab"]
        responses = in_order(sample(model, tokenizer, twice, **settings))
        assert [(r.ids, r.truncated) for r in responses] == expected


@pytest.mark.parametrize("slots", [96, 6])
def test_slots_are_refilled_and_a_group_shares_its_prefill(random_model, monkeypatch, slots):
    """12 groups of 8, all at once and six rows at a time: at most twice the prompts' tokens.

    A slot is idle for less than CHECK_EVERY steps. A stop id ends its row and belongs to it, also
    the id that pads. A forward over prompts stays within its number of tokens.
    """
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 60)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(14)
    model, prefills, steps = random_model(spread=0.3), [], []
    model.generation_config.eos_token_id = STOPS

    def count(_module, _args, given):
        assert not torch.is_grad_enabled()  # nothing is kept for a backward
        (prefills if given["attention_mask"] is None else steps).append(given["input_ids"])

    model.register_forward_pre_hook(count, with_kwargs=True)
    prompts = random_prompts(12, 50)
    rows = [prompt for prompt in prompts for _ in range(8)]
    responses = in_order(sample(model, tokenizer, rows, max_new_tokens=50, batch_size=slots))
    stops = {*STOPS, tokenizer.eos_token_id}
    for r in responses:
        assert not {*r.ids[:-1]} & stops and r.truncated == (r.ids[-1] not in stops)
        assert r.text == tokenizer.decode(r.ids, skip_special_tokens=True)
    assert tokenizer.pad_token_id == 14 in [r.ids[-1] for r in responses]
    assert [r.prompt_ids for r in responses] == rows
    assert max(ids.numel() for ids in prefills) <= 60 and max(map(len, steps)) == slots
    distinct = sum(len(prompt) - 1 for prompt in prompts)  # the first decoding step has the last
    prefilled = sum(int((ids != 14).sum()) for ids in prefills)  # 14 is padding
    assert distinct <= prefilled <= (1 if slots == 96 else 2) * distinct
    # each response costs a slot its length, rounded up to the next look at the tokens
    lengths = [len(r.ids) for r in responses]
    assert len(steps) <= (sum(lengths) + 7 * 96) / slots + max(lengths) + 8


@BOTH_PATHS
def test_a_model_in_training_mode_is_not_sampled_from(family, tokenizer):
    """Gradient checkpointing would turn the cache off; dropout would draw from another policy."""
    with pytest.raises(RuntimeError, match=r"training mode.* call model\.eval\(\)"):
        next(sample(make_family(family).train(), tokenizer, [[5, 6]], max_new_tokens=2))


# ---------------------------------------------------------------------------- prompts and problems

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def test_stop_ids_are_the_union(random_model, tokenizer):
    chat, model, end = chat_tokenizer(), random_model(), tokenizer.eos_token_id
    model.generation_config.eos_token_id = [90, 91]
    assert stop_ids(model, tokenizer) == sorted({90, 91, end})
    turn_end = chat.convert_tokens_to_ids("<|im_end|>")
    assert stop_ids(model, chat) == sorted({90, 91, end, turn_end})
    model.generation_config.eos_token_id = None
    for template in (
        "<|im_start|>{{ messages[0].content }}",  # leaves the answer out
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",  # ends it with a text
    ):
        chat.chat_template = template
        assert stop_ids(model, chat) == [end]


def test_prompts_with_and_without_a_chat_template(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "Q: 1+2=?", "")) == "Q: 1+2=?\n"
    assert tokenizer.decode(encode_prompt(tokenizer, "1+2", "So")) == "1+2\nSo\n"
    chat = chat_tokenizer()
    text = chat.decode(encode_prompt(chat, "1+2", "So"))
    assert "1+2\nSo<|im_end|>" in text and text.count("<|im_start|>") == 2
    special = ("<|endoftext|>", tokenizer.eos_token_id)
    for tokens in ("<|endoftext|> $A", "$A <|endoftext|>"):  # as Llama's tokenizer; add_eos_token
        adding = TemplateProcessing(single=tokens, special_tokens=[special])
        chat.backend_tokenizer.post_processor = adding
        assert special[1] in chat("1+2").input_ids
        assert chat.decode(encode_prompt(chat, "1+2", "So")) == text  # the template has all
    chat.chat_template = None
    assert encode_prompt(chat, "1+2") == encode_prompt(tokenizer, "1+2")  # the prompt goes on


def test_the_chat_template_may_be_another_or_none(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "other.jinja"
    # An editor on Windows can put a mark (U+FEFF) at the start, which is no part of the text.
    file.write_text(r"No $\ne$, no '\n'. {{ messages[0].content }} Answer:", "utf-8-sig")
    prompts = []
    template = file.read_text("utf-8-sig")
    several = [{"name": "tools", "template": "?"}, {"name": "default", "template": template}]
    stored = [{"chat_template": template, "a": 1}, {"chat_template": several}]
    files = [tmp_path / "one.json", tmp_path / "several.json"]
    for path, value in zip(files, stored):
        path.write_text(json.dumps(value))
    for text in ("", "none", str(file), *map(str, files)):
        tokenizer = rollout.load_tokenizer(str(tmp_path), text)
        prompts.append(tokenizer.decode(encode_prompt(tokenizer, "1+2", "")))
    assert "assistant" in prompts[0] and prompts[1] == "1+2\n"
    assert prompts[2:] == [r"No $\ne$, no '\n'. 1+2 Answer:"] * 3


def test_a_template_that_writes_the_date_is_named(tmp_path, capsys):
    """As Llama 3.2's. A template with the date written in is silent."""
    file, prompts = tmp_path / "dated.jinja", []
    start = "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}"
    start += "{% set day = '26 Jul 2024' %}{% endif %}\n"
    for text in (start, "{% set day = '26 Jul 2024' %}\n"):
        file.write_text(text + "Today is {{ day }}. {{ messages[0].content }}")
        prompts.append(rollout.load_tokenizer(str(TINY), str(file)))
    said = capsys.readouterr().err
    assert said.startswith(f"{file}: the chat template writes today's date")
    assert said.count("\n") == 1
    fixed = prompts[1].decode(encode_prompt(prompts[1], "1+2", ""))
    assert fixed == "Today is 26 Jul 2024. 1+2"


def test_tokenizer_without_a_pad_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = None
    for eos, pad in (("{", tokenizer.convert_tokens_to_ids("{")), (None, 0)):
        tokenizer.eos_token = eos
        tokenizer.save_pretrained(tmp_path)
        assert rollout.load_tokenizer(str(tmp_path)).pad_token_id == pad


WRAPPED = (  # as DAPO-Math-17k does
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '1+1\n\nRemember to put your answer on its own line after "Answer:".'
)
USER = {"role": "user", "content": "1+1"}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "?", "problem": " 1+1 ", "final_answer": "3", "answer": 2}, "2"),
        ({"prompt": "?", "question": "1+1", "problem": 7, "answer": " ", "final_answer": 4}, "4"),
        ({"prompt": [{"content": WRAPPED}], "reward_model": {"ground_truth": "2"}}, "2"),
        ({"prompt": "1+1", "reward_model": {"ground_truth": ' ["7"]'}}, "7"),  # Skywork-OR1
        ({"prompt": "1+1", "answer": r'["\\frac{1}{2}"]'}, r"\frac{1}{2}"),
        ({"prompt": "1+1", "answer": [], "final_answer": ["2", "", "3"]}, "2, 3"),
        ({"prompt": "1+1", "answer": "x^2 + 1", "final_answer": "B"}, "x^2 + 1"),
        ({"prompt": "1+1", "answer": "1 + 1 = 2,\nso it is 2.", "final_answer": "2"}, "2"),
        ({"prompt": [USER | {"content": "0+1"}, {"role": "assistant", "content": "0"}, USER],
          "answer": "2"}, "2"),
    ],
)  # fmt: skip
def test_column_layouts(tmp_path, capsys, row, answer):
    """The first column that is not empty, but no solution beside its final answer.

    A row that repeats what is read counts once.
    """
    file = write_rows(tmp_path / "rows.jsonl", row, row | {"source": "a copy"})
    assert load_problems(file) == [{"problem": "1+1", "answer": answer}]
    assert f"{file}: rows that repeat an earlier row left out: 1\n" in capsys.readouterr().out


def test_rows_are_the_same_if_all_that_is_read_is(tmp_path, capsys):
    """The answer too, and with a reward of your own each column, but no number of the row."""
    tags = [("2", 1, "a"), ("2", 1, "a"), ("3", 1, "a"), ("2", 4, "a"), ("2", 1, "b")]
    rows = [
        {"problem": "1+1", "answer": answer, "tests": tests, "idiom": idiom}
        | {"id": number, "extra_info": {"index": str(number), "split": "train"}}
        | {"uuid": f"u{number}", "__index_level_0__": number}
        for number, (answer, tests, idiom) in enumerate(tags)
    ]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    assert [problem["answer"] for problem in load_problems(file)] == ["2", "3"]
    own = load_problems(file, whole_rows=True)
    assert [problem["row"] for problem in own] == [rows[0], *rows[2:]]
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line[-3:] for line in said] == [": 3", ": 1"]


def test_what_was_read_is_shown(tmp_path, capsys):
    """Columns beside the question, a gold as the grader reads it, and golds that are too long."""
    solution = "First one computes. " * 31
    gold = r"\boxed{7\text{ m}}"
    rows = [
        {"question": "1 +\n1?" + " Say." * 40, "passage": "p", "answer": gold},
        {"question": "2?", "answer": solution},
        {"question": "3?", "answer": solution + gold, "images": []},
    ]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    load_problems(file, unbox=unbox)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{file}: read from question, answer; not read: passage, images; ")
    assert 'problem: "1 + 1? Say. Say.' in first and len(first) < 400
    assert first.endswith('its answer, as the grader reads it: "7"')
    assert second.startswith(f"{file}: answers of more than 600 char") and second.endswith(": 1")
    load_problems(file, whole_rows=True, unbox=unbox)
    (first,) = capsys.readouterr().out.splitlines()
    assert "; for the reward alone: passage, images; " in first


def test_answers_have_the_type_of_their_column(tmp_path):
    """float32's 0.1 is 0.1, also in a list; a class is its name; a row of a reward has the same."""
    from datasets import ClassLabel, Features, List, Value

    letters = ClassLabel(names=["A", "B"])
    columns = {
        "float32": (Value("float32"), [0.1, 72.0], ["0.1", "72"]),
        "float16": (List(Value("float16")), [[0.1, 2.0], []], ["0.1, 2"]),
        "class": (letters, [1, -1], ["B"]),
        "classes": ({"ground_truth": List(letters)}, [{"ground_truth": [1, 0]}] * 2, ["B, A"] * 2),
        "float64": (Value("float64"), [0.10000000149011612, 0.5], ["0.10000000149011612", "0.5"]),
    }
    for name, (kind, values, golds) in columns.items():
        column = "reward_model" if name == "classes" else "answer"
        features = Features({"problem": Value("string"), column: kind})
        rows = Dataset.from_dict({"problem": ["p", "q"], column: values}, features=features)
        rows.to_parquet(tmp_path / name / "train.parquet")
        for source in (tmp_path / name / "train.parquet", tmp_path / name):  # and as on the Hub
            assert [problem["answer"] for problem in load_problems(str(source))] == golds
    (own, _) = load_problems(f"{tmp_path}/float32", whole_rows=True)
    assert own["row"] == {"problem": "p", "answer": 0.1}
    lossy = {"problem": ["p"], "answer": [2.0**24]}  # 16777217 has become 16777216
    features = Features({"problem": Value("string"), "answer": Value("float32")})
    Dataset.from_dict(lossy, features=features).to_parquet(tmp_path / "lossy.parquet")
    with pytest.raises(InputError, match="row 1 has no problem .*answer is LostDigits"):
        load_problems(f"{tmp_path}/lossy.parquet")
    (own,) = load_problems(f"{tmp_path}/lossy.parquet", whole_rows=True)
    assert json.dumps(own["row"]) == '{"problem": "p", "answer": 16777216.0}'


def test_a_text_stays_a_text(tmp_path):
    """Not a date, not the number 3.1, not a list of two answers. A file can begin with a mark."""
    answers = ["2024-05-01", "12:30", "3.10", "[2, 5]", "a\u2028b", 7, ["1", "2"]]
    rows = [{"problem": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "v[2].jsonl").write_text("\ufeff\n" + lines + "\n", "utf-8")
    (tmp_path / "list.JSON").write_text("\n  " + json.dumps(rows, indent=1))
    for name in ("v[2].jsonl", "list.JSON"):
        found = load_problems(str(tmp_path / name))
        assert [problem["answer"] for problem in found] == [*answers[:5], "7", "1, 2"]
    Dataset.from_list(rows[:3]).to_parquet(tmp_path / "v[2].parquet")
    found = load_problems(str(tmp_path / "v[2].parquet"))
    assert [problem["answer"] for problem in found] == answers[:3]


def test_whole_numbers_beside_decimals_and_nulls_stay_whole(tmp_path):
    """A table stores floats for them all; from 2^53 on those have lost digits."""
    answers = [72, 0.5, -3, None, 2**53 - 1]
    rows = {"problem": [f"p{i}" for i in range(5)], "answer": [x and float(x) for x in answers]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    found = [p["answer"] for p in load_problems(str(tmp_path / "rows.parquet"))]
    assert found == ["72", "0.5", "-3", str(2**53 - 1)]
    file = write_rows(tmp_path / "large.jsonl", {"problem": "p", "answer": 2.0**53})
    with pytest.raises(InputError, match="large.jsonl: row 1 has no problem or no answer"):
        load_problems(file)


def test_right_answers_are_found_in_what_data_sets_put_around_them(tmp_path, capsys):
    """Rows without one are left out, and counted in one line; a reward of one's own gets them."""
    answers = ("She has 3 + 4 = 7.\n#### 72", "[2, 5)", "Proof", "notfound", " ", None)
    rows = [{"problem": f"p{i}", "answer": text} for i, text in enumerate(answers)]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    assert [problem["answer"] for problem in load_problems(file)] == ["72", "[2, 5)"]
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(said) == 1 and said[0].startswith(file) and said[0].endswith(": 4")
    assert len(load_problems(file, whole_rows=True)) == 6
    assert "left out" not in capsys.readouterr().out
    with pytest.raises(InputError, match="no problem with an answer; a problem is text"):
        load_problems(write_rows(tmp_path / "none.jsonl", *rows[2:]))
