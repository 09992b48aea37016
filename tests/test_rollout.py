"""Prompts, sampling and scoring: against float64, autograd, and the model's own softmax."""

import functools
import json
import math

import pytest
import torch
from conftest import BENCHMARKS, TINY
from reference import plain_head
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import rollout
from rollout import Response, encode_prompt, head_stats, load_problems, sample, stop_ids

# --------------------------------------------------------------------------------------- scoring


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_chunks_is_the_head(chunk, dtype, device):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 24, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(311, 24, generator=g).to(device, dtype).requires_grad_()
    targets = torch.randint(0, 311, (50,), generator=g).to(device)
    scale = torch.randn(50, generator=g).to(device)
    stats = head_stats(hidden, weight, targets, chunk=chunk)
    assert all(s.dtype == torch.float32 and s.shape == (50,) for s in stats)
    assert [s.requires_grad for s in stats] == [True, False, False]
    (stats[0] * scale).sum().backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = plain_head(hidden, weight, targets)
    (expected[0] * scale).sum().backward()
    for a, b in zip(stats, expected):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    for a, b in zip(ours, (hidden.grad, weight.grad)):
        torch.testing.assert_close(a, b, **close)


def test_head_of_no_tokens():
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    logp, entropy, collision = head_stats(hidden, weight, torch.zeros(0, dtype=torch.long))
    logp.sum().backward()
    assert len(logp) == len(entropy) == len(collision) == 0 and weight.grad.abs().sum() == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_token_stats_against_float64(random_model, tied, side):
    """Values and every parameter's gradient, with garbage as padding on either side."""
    model = random_model(tied=tied, spread=0.4)
    g = torch.Generator().manual_seed(0)
    rows = [(3, 9), (7, 2), (1, 14), (5, 1)]  # prompt and response lengths
    width = max(map(sum, rows)) + 3
    ids = torch.randint(0, 104, (4, width), generator=g)
    attention, mask = torch.zeros(4, width).bool(), torch.zeros(4, width).bool()
    for i, (prompt, length) in enumerate(rows):
        start = 0 if side == "right" else width - prompt - length
        attention[i, start : start + prompt + length] = True
        mask[i, start + prompt : start + prompt + length] = True
    stats = rollout.token_stats(model, ids, attention, mask, chunk=8)
    assert all((s[~mask] == 0).all() and s.dtype == torch.float32 for s in stats)
    stats[0].sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.double().zero_grad()
    total = 0.0
    for i, (prompt, _) in enumerate(rows):  # one unpadded row at a time
        row = ids[i][attention[i]]
        logp = model(row[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        chosen = logp.gather(1, row[prompt:, None]).squeeze(1)
        expected = chosen, -(logp.exp() * logp).sum(-1), (2 * logp).exp().sum(-1)
        for s, e in zip(stats, expected):
            torch.testing.assert_close(s[i][mask[i]].double(), e, atol=2e-5, rtol=1e-4)
        total = total + chosen.sum()
    total.backward()
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            ours[name].double(), parameter.grad, atol=1e-4 * scale, rtol=1e-3
        )


# -------------------------------------------------------------------------------------- sampling


def chi_square(tokens, expected):
    """z-score of Pearson's statistic, over the tokens that are expected at least five times."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
    freedom = len(observed) - 1
    return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


def small_cache(model):
    """Continuous batching takes all the memory that is free; a test needs a few blocks of it."""
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)
    model.generate_batch = functools.partial(model.generate_batch, continuous_batching_config=small)
    return model


@pytest.mark.parametrize("engine", ["generate", "paged"])
def test_rollouts_follow_the_full_softmax(random_model, tokenizer, engine):
    """8,000 first and second tokens; the same draws behind a top-k of 50 are far outside."""
    model = small_cache(random_model(spread=0.3))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.3
    )
    own, prompt, n = model.generation_config, [5, 9, 11, 40], 8000
    settings = {"max_new_tokens": 2, "batch_size": 4000, "engine": engine, "seed": 1}
    responses = sample(model, tokenizer, [prompt] * n, **settings)
    assert model.generation_config is own  # put back
    with torch.no_grad():
        p = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        after = torch.tensor([[*prompt, first] for first in range(104)])
        second = model(after).logits[:, -1].double().softmax(-1)
    first = torch.tensor([r.ids[0] for r in responses])
    assert abs(chi_square(first, n * p)) < 5
    stops = stop_ids(model, tokenizer)
    went_on = [r.ids for r in responses if len(r.ids) == 2]
    assert all(len(r.ids) == 2 or r.ids[0] in stops for r in responses)
    starts = torch.bincount(torch.tensor([ids[0] for ids in went_on]), minlength=104).double()
    tokens = torch.tensor([ids[1] for ids in went_on])
    assert abs(chi_square(tokens, starts @ second)) < 5
    top = p * (p >= p.topk(50).values[-1])
    leaked = torch.multinomial(top, n, replacement=True, generator=torch.Generator().manual_seed(0))
    assert chi_square(leaked, n * p) > 20


@pytest.mark.parametrize("engine", ["generate", "paged"])
def test_temperature_and_top_p_shape_the_softmax(random_model, tokenizer, engine):
    """The nucleus by hand: the likeliest tokens until 0.9 of the sharpened softmax is reached."""
    model, prompt, n = small_cache(random_model(spread=0.3)), [5, 9, 11, 40], 8000
    settings = {"max_new_tokens": 1, "engine": engine, "temperature": 0.7, "top_p": 0.9}
    responses = sample(model, tokenizer, [prompt] * n, batch_size=4000, **settings)
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1].double() / 0.7).softmax(-1)
    order, total = p.argsort(descending=True).tolist(), 0.0
    nucleus = torch.zeros_like(p)
    for token in order:
        if total < 0.9:
            nucleus[token] = p[token]
        total += float(p[token])
    assert 5 < (nucleus > 0).sum() < 80
    first = torch.tensor([r.ids[0] for r in responses])
    assert abs(chi_square(first, n * nucleus / nucleus.sum())) < 5


def test_draw_inverts_the_cumulative_distribution(monkeypatch):
    """A uniform number amid a token's interval draws that token, be it one of 150,000."""
    scores = 3 * torch.randn(150_000, generator=torch.Generator().manual_seed(0))
    scores[0] = -math.inf
    p = scores.double().softmax(-1)
    wanted = torch.tensor([1, *range(999, 150_000, 6000), 149_999])
    uniform = p.cumsum(0)[wanted] - p[wanted] / 2
    uniform[0] = 0.0  # the first token that has a probability, not the first of all
    monkeypatch.setattr(torch, "rand_like", lambda like: uniform[:, None].to(like))
    assert torch.equal(rollout.draw(scores.expand(len(wanted), -1)), wanted)


def test_a_leaking_processor_is_refused(random_model, tokenizer, monkeypatch):
    real = rollout.GenerationConfig
    monkeypatch.setattr(rollout, "GenerationConfig", lambda **k: real(**{**k, "top_k": 50}))
    with pytest.raises(RuntimeError, match="TopK"):
        sample(random_model(), tokenizer, [[5]], max_new_tokens=2)


@pytest.mark.parametrize(
    "engine, every", [*(("generate", n) for n in (1, 2, 7, 16, 1000)), ("paged", 8)]
)
def test_engines_equal_one_plain_generate(tiny, tokenizer, monkeypatch, engine, every):
    """Greedy, prompts of several lengths, rows that end at different times."""
    texts = [f"Q: {'+'.join(str(3 * j + i) for j in range(1 + i % 4))}-1=?" for i in range(9)]
    prompts = [encode_prompt(tokenizer, text, "") for text in texts]
    settings = {"max_new_tokens": 29, "temperature": 0.0, "engine": engine}
    monkeypatch.setattr(rollout, "DROP_EVERY", every)
    small_cache(tiny)
    responses = sample(tiny, tokenizer, prompts, **settings)
    assert len({len(r.ids) for r in responses}) > 2 and any(r.truncated for r in responses)
    for prompt, r in zip(prompts, responses):
        out = tiny.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=29,
            eos_token_id=stop_ids(tiny, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
        assert out[0, len(prompt) :].tolist() == r.ids
        assert r.truncated == (len(r.ids) == 29 and r.ids[-1] != tokenizer.eos_token_id)
        assert r.text == tokenizer.decode(r.ids, skip_special_tokens=True)


def test_lengths_come_from_the_sampler(random_model, tokenizer, monkeypatch):
    """Several stop ids, one of which is the pad id: each ends its row and belongs to it."""
    monkeypatch.setattr(rollout, "stop_ids", lambda *_: [tokenizer.pad_token_id, 7, 30])
    model = random_model()
    responses = sample(model, tokenizer, [[5, 6]] * 400, max_new_tokens=40)
    ends = {tokenizer.pad_token_id, 7, 30}
    seen = set()
    for r in responses:
        assert not ends & set(r.ids[:-1]) and 1 <= len(r.ids) <= 40
        assert r.truncated == (r.ids[-1] not in ends)
        assert len(r.ids) == 40 or not r.truncated
        seen.add(r.ids[-1])
    assert ends < seen  # and some were truncated
    # an id that no stop id is may be sampled like any other, even where it pads
    monkeypatch.setattr(rollout, "stop_ids", lambda *_: [7])
    ids = [i for r in sample(model, tokenizer, [[5]] * 200, max_new_tokens=20) for i in r.ids]
    assert tokenizer.pad_token_id in ids


def test_at_most_batch_size_sequences_at_a_time(random_model, tokenizer, monkeypatch):
    model, rows = random_model(), []
    generate = model.generate
    model.generate = lambda ids, **k: (rows.append(len(ids)), generate(ids, **k))[1]
    responses = sample(model, tokenizer, [[5 + i % 3] for i in range(10)], max_new_tokens=3,
                       batch_size=4)  # fmt: skip
    assert len(responses) == 10 and max(rows) == 4
    assert [r.prompt_ids for r in responses] == [[5 + i % 3] for i in range(10)]


def test_sampling_repeats_from_its_seed_and_leaves_training_mode(random_model, tokenizer):
    model = random_model().train()
    draws = [sample(model, tokenizer, [[5]] * 6, max_new_tokens=9, seed=s) for s in (3, 3, 4)]
    ids = [[r.ids for r in responses] for responses in draws]
    assert ids[0] == ids[1] != ids[2] and model.training


def test_ids_beyond_the_vocabulary_have_no_text(random_model, tokenizer):
    model = random_model(vocab_size=len(tokenizer) + 500)
    responses = sample(model, tokenizer, [[5]] * 8, max_new_tokens=10)
    assert max(i for r in responses for i in r.ids) >= len(tokenizer)
    assert all(isinstance(r.text, str) for r in responses)


# ---------------------------------------------------------------------------- prompts and problems

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_stop_ids_are_the_union(random_model):
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), random_model()
    model.generation_config.eos_token_id = [90, 91]
    assert stop_ids(model, tokenizer) == sorted({90, 91, tokenizer.eos_token_id})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_ids(model, tokenizer)
    model.generation_config.eos_token_id = None
    assert len(stop_ids(model, tokenizer)) == 2
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}"  # leaves the answer out
    assert stop_ids(model, tokenizer) == [tokenizer.eos_token_id]


def test_prompts_with_and_without_a_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.decode(encode_prompt(tokenizer, "Q: 1+2=?", "")) == "Q: 1+2=?\n"
    assert tokenizer.decode(encode_prompt(tokenizer, "1+2", "So")) == "1+2\nSo\n"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    text = tokenizer.decode(encode_prompt(tokenizer, "1+2", "So"))
    assert "1+2\nSo<|im_end|>" in text and text.count("<|im_start|>") == 2


def test_tokenizer_without_a_pad_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert rollout.load_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id


def test_a_head_that_does_more_is_refused(random_model):
    model = random_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(rollout.InputError, match="softcapping"):
        rollout.check_head(model)
    model = random_model()
    model.lm_head = torch.nn.Linear(8, 104)
    with pytest.raises(rollout.InputError, match="a bias"):
        rollout.check_head(model)


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="STAPO_BENCHMARKS names no folder")
def test_dapo_rows_are_unwrapped_and_distinct():
    import datasets

    file = str(BENCHMARKS / "dapo_format_aime24.parquet")
    rows = datasets.load_dataset("parquet", data_files=file, split="train")
    raw = {row["extra_info"]["raw_problem"].strip() for row in rows}
    answers = {row["reward_model"]["ground_truth"] for row in rows}
    problems = load_problems(file)
    assert len(rows) == 960 and len(problems) == 30
    assert {p["problem"] for p in problems} == raw
    assert {p["answer"] for p in problems} == answers


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": " 1+1 ", "answer": "2"}, "2"),
        ({"question": "1+1", "answer": 2}, "2"),
        ({"question": "1+1", "final_answer": ["2", "3"]}, "2, 3"),
        ({"prompt": [{"content": "1+1"}], "reward_model": {"ground_truth": "2"}}, "2"),
        ({"problem": "1+1", "answer": 0}, "0"),
        ({"problem": "1+1", "final_answer": [2, 3]}, "2, 3"),
    ],
)  # fmt: skip
def test_column_layouts(tmp_path, row, answer):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    assert load_problems(str(file)) == [{"problem": "1+1", "answer": answer}]


def test_pad_batch_lays_out_prompt_and_response():
    rows = [Response([4, 5], [6, 1], False, ""), Response([7], [8], True, "")]
    ids, attention, mask = rollout.pad_batch(rows)
    assert ids.tolist() == [[4, 5, 6, 1], [7, 8, 0, 0]]
    assert attention.tolist() == [[True] * 4, [True, True, False, False]]
    assert mask.tolist() == [[False, False, True, True], [False, True, False, False]]
