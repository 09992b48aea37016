"""The loss in other hands: the examples of docs/using-the-loss.md, run, and compared."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers import FLAGS, ROOT, TINY, example, in_order, lines, make_family, pad, read_rows
from ranks import launch
from reference import by_loop, drawn

import stapo
from reward import load_reward
from rollout import (
    encode_prompt,
    load_model,
    load_tokenizer,
    sample,
    sampling_gap,
    stop_ids,
)
from stapo import clipped_loss, group_advantages, spurious_mask, stapo_loss
from support import ranks


def test_the_copied_section_needs_torch_alone(tmp_path):
    page = (ROOT / "docs" / "using-the-loss.md").read_text()
    command = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].replace("> ", f"> {tmp_path}/")
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True)
    exec((tmp_path / "stapo_loss.py").read_text(), copied := {})
    logp, old_logp, advantages, entropy, mask = drawn()
    assert copied["stapo_loss"](logp, old_logp, advantages, entropy, mask)[0].isfinite()
    assert copied["group_advantages"](torch.tensor([[1.0, -1.0, -1.0]])).isfinite().all()
    others = mask.long()  # other frameworks have masks of 0 and 1
    assert copied["sampling_gap"](logp, entropy, others) == sampling_gap(logp, entropy, mask)


def mini_batch() -> dict:
    """Six responses of the tiny model after some updates, as the page's examples name them."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 9), (12, 4), (7, 20), (3, 1), (9, 15), (4, 12)]  # of prompts and responses
    rows = [torch.randint(2, 100, (sum(n),), generator=generator) for n in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    is_response = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(lengths):
        is_response[row, prompt : prompt + response] = True
    names = {"model": load_model(str(TINY)), "ids": ids, "is_response": is_response}
    names["rewards"] = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    names["advantages"] = group_advantages(names["rewards"]).flatten()
    exec(example("statistics"), names)
    names["old_logp"] += 0.3 * torch.randn(names["mask"].shape, generator=generator)
    return names


def gradient_of(loop: str, names: dict) -> torch.Tensor:
    exec(loop, names)
    return torch.cat([p.grad.flatten() for p in names["model"].parameters()])


ON_RANKS = {  # what the page says of several ranks
    "entropy, mask)": "entropy, mask, over_ranks=all_cat)",
    "denominator = keep.sum().clamp(min=1)": "dist.all_reduce(denominator := keep.sum())\n"
    "denominator = denominator / dist.get_world_size()",
}


def two_passes_on_ranks(folder) -> None:
    """This rank's rows of the mini-batch; the gradient is averaged as FSDP and DDP average."""
    ranks.start()
    names, rank, world = mini_batch(), ranks.rank(), ranks.world_size()
    for name in ("ids", "is_response", "mask", "old_logp", "advantages"):
        names[name] = names[name][rank::world]
    passes = example("two-passes")
    for old, new in ON_RANKS.items():
        assert passes.count(old) == 1
        passes = passes.replace(old, new)
    gradient = gradient_of(example("silence") + passes, names) / world
    torch.distributed.all_reduce(gradient)
    torch.save(gradient, f"{folder}/gradient.pt")
    torch.distributed.destroy_process_group()


def packed_example() -> torch.Tensor:
    """The mini-batch in two micro-batches of three responses, one after another without padding."""
    names, micro_batches = mini_batch(), []
    for rows in (range(3), range(3, 6)):
        lengths = [int(names["is_response"][row].nonzero().max()) + 1 for row in rows]
        batch = {"lengths": lengths}
        for name, whole in {"ids": names["ids"], "mask": names["is_response"]}.items():
            batch[name] = torch.cat([whole[row, :n] for row, n in zip(rows, lengths)])[None]
        each = names["advantages"][:, None].expand_as(names["mask"])
        for name, whole in {"old_logp": names["old_logp"], "advantages": each}.items():
            batch[name] = torch.cat([whole[row][names["mask"][row]] for row in rows])[:, None]
        micro_batches.append(batch)
    return gradient_of(example("packed"), names | {"micro_batches": micro_batches})


@pytest.mark.parametrize("family", ["qwen3", "lfm2", "mamba", "opt"])
def test_the_check_of_a_packed_row_sees_samples_that_see_each_other(family):
    """In a random model of each kind; the tiny model's update is compared below."""
    names = {"model": make_family(family), "lengths": [14, 16, 27]}
    ids = torch.arange(2, 2 + 57)[None]
    mask = torch.cat([torch.arange(n) >= 5 for n in names["lengths"]])[None]
    names["batch"] = {"ids": ids, "mask": mask, "lengths": names["lengths"]}
    exec(example("packed").partition("\n\n\nlogp, entropy")[0], names)
    check = contextlib.nullcontext()
    if family != "qwen3":
        check = pytest.raises(AssertionError, match="not close")
    with check, torch.no_grad():
        exec(example("packed-alone"), names)


def test_an_update_is_the_same_in_one_call_in_two_passes_packed_and_on_three_ranks(tmp_path):
    whole = gradient_of(example("bare"), names := mini_batch())
    assert 3 < names["counts"]["silenced"] < names["counts"]["candidates"]
    assert launch(two_passes_on_ranks, 3, tmp_path / "log", tmp_path) == [0, 0, 0]
    others = gradient_of(example("two-passes"), mini_batch()), torch.load(tmp_path / "gradient.pt")
    for gradient in (*others, packed_example()):
        torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------- STAPO is a mask: other frameworks


def token_mean(framework: str) -> Callable:
    """A framework's own loss of a micro-batch, by its mask and the tokens of all ranks.

    It is a function of old_logp, logp, advantages and mask, (B, T) each, the number of tokens in
    the masks of the whole optimiser step, and the number of ranks, over which it is averaged.
    """
    if framework == "verl":
        from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
        from verl.workers.config import ActorConfig

        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
        size = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}

        def verls(old_logp, logp, advantages, mask, count, world):
            config = ActorConfig(strategy="fsdp", **size, **clip)
            config.global_batch_info.update(dp_size=world, batch_num_tokens=count)
            tensors = old_logp, logp, advantages, mask
            return compute_policy_loss_vanilla(*tensors, "token-mean", config)[0]

        return verls
    if framework == "openrlhf":
        from openrlhf.models.loss import PolicyLoss

        loss = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28)

        def openrlhfs(old_logp, logp, advantages, mask, count, world):
            counts = {"dp_size": world, "batch_num_tokens": count}
            return loss(logp, old_logp, advantages, action_mask=mask, **counts)[0]

        return openrlhfs

    def formula(old_logp, logp, advantages, mask, count, world):
        rho = (logp - old_logp).exp()
        loss = torch.max(-rho * advantages, -rho.clamp(0.8, 1.28) * advantages)
        return (loss * mask).sum() / count * world

    return formula


def masks_on_ranks(framework: str) -> None:
    """Three micro-batches of two responses on each rank, whose masks are of 0 and 1."""
    ranks.start()
    exec(example("silence"), names := {})
    loss_of, world = token_mean(framework), ranks.world_size()
    whole = [torch.cat(rows) for rows in zip(*(drawn(seed, width=40) for seed in range(world)))]
    mine = slice(6 * ranks.rank(), 6 * ranks.rank() + 6)
    x = whole[0][mine].requires_grad_()
    micro_batches = []
    for i in (0, 2, 4):
        logp, old_logp, A, entropy, mask = (part[mine][i : i + 2] for part in (x, *whole[1:]))
        batch = {"logp": x[i : i + 2], "old_logp": old_logp, "entropy": entropy}
        A = A if i == 0 else A[:, None] if i == 2 else A[:, None] * mask
        micro_batches.append(batch | {"advantages": A, "mask": mask.long()})
    both = names["silence"](
        micro_batches, lambda x: (x["logp"], x["entropy"]), over_ranks=names["all_cat"]
    )
    torch.distributed.all_reduce(count := sum(batch["mask"].sum() for batch in micro_batches))
    for batch in micro_batches:
        assert batch["mask"].dtype == torch.long
        A = batch["advantages"]
        A = (A[:, None] if A.dim() == 1 else A).expand_as(batch["mask"])
        tensors = batch["old_logp"], batch["logp"], A, batch["mask"], count, world
        loss_of(*tensors).backward()
    _, expected, candidates, silenced = by_loop(*whole, tau_p=0.002, q=0.75)
    assert 3 < silenced < candidates
    counts = ranks.all_sum(dict(zip(("candidates", "silenced"), both)))
    assert counts == {"candidates": candidates, "silenced": silenced}
    torch.testing.assert_close(x.grad.double() / world, expected[mine], rtol=1e-5, atol=1e-8)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("framework", ["formula", "verl", "openrlhf"])
def test_a_framework_with_stapos_mask_has_stapos_gradient(tmp_path, framework):
    """The page's function and a framework's own, untouched token mean, on two ranks."""
    if framework != "formula":
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    assert launch(masks_on_ranks, 2, tmp_path / "log", framework) == [0, 0]


def test_a_method_of_ones_own(tmp_path, monkeypatch):
    """The page's file trains. Of the tokens with p < tau_p `below` silences some."""
    monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))
    exec(example("own-mask"), {"__name__": "own_mask"})
    flags = f"""@{TINY}/args --method below --model {TINY} --data {TINY}/train.jsonl --steps 1
        --batch_size 32 --mini_batch_size 16 --output {tmp_path}/run"""
    stapo.main(flags.split())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert 3 < line["silenced"] < line["candidates"] - 3
    assert line["skipped_updates"] == 0 < line["grad_norm"] and line["tau_h"] == 1


def test_a_sampler_of_ones_own(tmp_path, monkeypatch):
    """The page's file, with an engine that has its own copy of the model: stapo.py's run."""
    model, tokenizer = load_model(str(TINY)), load_tokenizer(str(TINY))

    def generate(weights, prompts, stops, max_new_tokens, seeds):
        model.load_state_dict(weights)
        assert stops == stop_ids(model, tokenizer)
        sampled = sample(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seeds)
        return [response.ids for response in in_order(sampled)]

    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "engine", SimpleNamespace(generate=generate))
    monkeypatch.setattr(stapo, "sample", stapo.sample)  # put back at the end
    programs = {"built-in": "import stapo; stapo.main()", "own": example("own-sampler")}
    for name, program in programs.items():
        monkeypatch.setattr(sys, "argv", f"own.py {FLAGS} --output {tmp_path}/{name}".split())
        exec(program, {})
    assert stapo.sample is not sample
    assert lines(tmp_path / "own") == lines(tmp_path / "built-in") != []


def test_a_term_of_ones_own(tmp_path):
    """The page's bonus, a hundred times as large: it keeps the entropy up, and out of `loss`."""
    text, changes = (ROOT / "stapo.py").read_text(), example("bonus").replace("0.01", "1.0")
    for old, new in re.findall(r"^-(.*\n)\+(.*\n)", changes, re.MULTILINE):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "stapo_with_bonus.py").write_text(text)
    spec = importlib.util.spec_from_file_location("bonus", tmp_path / "stapo_with_bonus.py")
    bonus = sys.modules["bonus"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bonus)
    flags = f"""@{TINY}/args --model {TINY} --data {TINY}/train.jsonl --steps 4 --batch_size 16
        --mini_batch_size 16 --lr 1e-3 --warmup_steps 0 --method justrl --output {tmp_path}"""
    found = []
    for program in (stapo, bonus):
        program.main(f"{flags}/{program.__name__}".split())
        found.append(read_rows(tmp_path / program.__name__ / "metrics.jsonl"))
    (first, *_, last), (with_bonus, *_, higher) = found
    assert with_bonus["loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert with_bonus["grad_norm"] != pytest.approx(first["grad_norm"], rel=0.1)
    assert higher["entropy"] > last["entropy"] + 0.1


def test_sampler_example(capsys, tiny_model, tokenizer):
    """It sees logits that are shifted by one token: `statistics` with [:, 1:] for [:, :-1]."""
    prompts = [encode_prompt(tokenizer, f"Q: {i}+7-3=?", "") for i in range(64)]
    responses = in_order(sample(tiny_model, tokenizer, prompts, max_new_tokens=60))
    ids, is_response, _ = pad(responses)
    right = example("statistics")
    wrong = right.replace("logits[:, :-1]", "logits[:, 1:]")
    for code in (right, wrong):
        names = {"model": tiny_model, "ids": ids, "is_response": is_response}
        exec(code + example("sampler"), names)
        here = names["mask"]
        d = -names["old_logp"].double()[here] - names["old_entropy"].double()[here]
        assert float(names["gap"]) == pytest.approx(float(d.mean()))
        assert float(names["z"]) == pytest.approx(float(d.sum() / d.square().sum().sqrt()))
    said = [float(z) for z in re.findall(r"z ([+-][\d.]+)", capsys.readouterr().out)]
    assert abs(said[0]) < 4 and said[1] > 15


def test_dapos_rule_by_hand():
    dapo = load_reward(f"{ROOT}/scripts/rewards.py:dapo")
    row = {"question": "6 + 28?", "reward_model": {"ground_truth": "34"}, "level": 3}
    end = "x" * (100 - len(r"\boxed{34}"))
    for right in (r"so \boxed{34}.", r"\boxed{3} no, \boxed{34}", r"\boxed{34}" + end):
        assert dapo(right, {"row": row}) == 1.0
    wrong = r"\boxed{34.0}", r"\boxed{ 34}", r"\boxed{34}x" + end, r"\boxed{34} \boxed{3", "34}", ""
    assert all(dapo(text, {"row": row}) == -1.0 for text in wrong)
    half = {"reward_model": {"ground_truth": r"\frac{1}{2}"}}
    assert dapo(r"\boxed{\frac{1}{2}}", {"row": half}) == 1.0
    assert dapo(r"\boxed{\frac{1}{2}+1}", {"row": half}) == -1.0


def test_own_reward_example_and_its_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(example("own-reward"))
    for answer, value in ((34, "1.0"), (34.0, "1.0"), ("3", "-1.0")):  # numbers and a text
        row = {"question": "6 + 28?", "answer": answer, "level": 3}
        (tmp_path / "data.jsonl").write_text(json.dumps(row))
        exec(example("try-reward"), {})
        assert capsys.readouterr().out.endswith(f"\n{value} {row}\n")


def test_the_pages_penalty_for_long_responses(tmp_path):
    """DAPO's: none up to 3,072 of 4,096 tokens, 1 at the end."""
    (tmp_path / "own.py").write_text(example("overlong"))
    reward, problem = load_reward(f"{tmp_path}/own.py:reward"), {"row": {"answer": 34}}
    values = {(34, 3072): 1, (34, 3328): 0.75, (34, 4096): 0, (3, 9): -1, (3, 4096): -2}
    for (answer, tokens), value in values.items():
        info = {"tokens": tokens, "truncated": tokens == 4096}
        assert reward(f"\\boxed{{{answer}}}", problem, info) == value


def test_the_pages_lines_begin_a_run_and_continue_it(tmp_path):
    """Also one that was killed before its first checkpoint."""
    text, recipe = example("again"), tmp_path / "recipe"
    recipe.write_text(f"{FLAGS} --threads 1")
    text = text.replace("@recipes/paper-1.7b", f"@{recipe}").replace("RUN", f"{tmp_path}/run")
    text = text.replace("python ", f"{sys.executable} ")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for steps in (2, 3):
        command = ["bash", "-c", text.replace('"$@"', f'"$@" --steps {steps}')]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        assert [line["step"] for line in lines(tmp_path / "run")] == [*range(1, steps + 1)]


def test_the_readmes_block_is_the_loss():
    """All of the method in the README's first block: loss and gradient are stapo_loss's own."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(block, names := {})
    logp, *others = drawn()
    logp.requires_grad_()
    for tau_p in (0.1, 0.05, 0.0):  # six candidates; five, of which one has H = tau_h; none
        losses = (
            names["stapo"](logp, *others, tau_p=tau_p),
            stapo_loss(logp, *others, tau_p=tau_p)[0],
        )
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logp) for loss in losses))


def test_micro_batches_of_one_response_are_another_objective():
    """What the page says of two right responses and a wrong one: tokens silenced, and losses.

    Two errors, each alone and both: a quantile of each response, and the mean of their means. The
    page's check passes what is right, and refuses a quantile of each response.
    """
    p = torch.tensor([[0.5, 0.001, 0.001], [0.5, 0.001, 0.001], [0.5, 0.5, 0.5]])
    entropy = torch.tensor([[1.0, 0.1, 0.2], [1.0, 1.5, 1.6], [1.0, 1.0, 1.0]])
    rho = torch.tensor([[1.0, 1.2, 0.5], [1.0, 1.1, 1.2], [1.0, 0.9, 1.1]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    advantages = group_advantages(torch.tensor([[1.0, 1.0, -1.0]]))[0]
    tensors = (p.log(), p.log() - rho.log(), advantages, entropy, mask)

    whole, sums = stapo_loss(*tensors)
    micro_batches = [[tensor[i : i + 1] for tensor in tensors] for i in range(3)]
    parts = [stapo_loss(*each) for each in micro_batches]
    silenced = [int(sums["silenced"]) for _, sums in parts]
    assert int(sums["silenced"]) == 3 and silenced == [1, 1, 0]
    page = " ".join((ROOT / "docs" / "using-the-loss.md").read_text().split())
    both = sum(loss for loss, _ in parts) / 3
    kept = [3 - 1, 3 - 1, 1 - 0]
    quantiles = sum(loss * count for (loss, _), count in zip(parts, kept)) / sum(kept)
    keep = mask & ~spurious_mask(tensors[0], advantages, entropy, mask)[0]
    rows = [(*each[:3], row) for each, row in zip(micro_batches, keep.split(1))]
    means = sum(clipped_loss(*each) for each in rows) / 3
    said = f"{quantiles:+.3f} (a quantile of each response), {means:+.3f} (a mean of means)"
    assert f"{said} or {both:+.3f} (both) in place of {whole:+.3f}." in page
    given = {"denominator": keep.sum()}
    right = [clipped_loss(*each, **given) for each in rows]
    exec(example("check-whole"), {"tensors": micro_batches, "losses": right})
    wrong = [stapo_loss(*each, **given)[0] for each in micro_batches]
    with pytest.raises(AssertionError, match="not close"):
        exec(example("check-whole"), {"tensors": micro_batches, "losses": wrong})
