"""The benchmark's twins do the same work as the code they time; what costs.py estimates."""

import importlib.util
import math

import bench
import costs
import pytest
import torch
from helpers import ROOT

import rollout
import stapo


def total_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.fixture(autouse=True)
def bench_on_the_cpu(monkeypatch, request):
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(bench, "CUDA", False)
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))


@pytest.fixture
def model():
    return bench.random_model(bench.small_shape(quick=True))


# ---------------------------------------- twins


def test_plain_head_is_the_twin_of_head_stats():
    inputs = bench.head_inputs(tokens=37, words=301, width=16)
    ours, plain = (bench.run_head(each, inputs) for each in (bench.our_head, bench.plain_head))
    for a, b in zip(ours, plain, strict=True):
        assert 0 < bench.error(a, b) < 1e-5  # two computations: they round differently


def test_the_heads_memory_and_time_are_ratios(monkeypatch):
    """A third of the plain head's memory, and a quarter of its time."""
    monkeypatch.setattr(bench, "in_turn", lambda ours, twin, repeats: 4.0)
    memory = {"plain": 6, "ours": 2}
    monkeypatch.setattr(bench, "fresh_head_memory", lambda name, shape: memory[name])
    assert [value for _, value in bench.head(quick=True)] == [3.0, 0.25]


def test_plain_update_is_the_twin_of_update(monkeypatch):
    compare, differences = bench.error, []
    monkeypatch.setattr(bench, "error", lambda *pair: differences.append(compare(*pair)) or 0.0)
    assert len(list(bench.update(quick=True))) == 2
    assert 0 < differences[-1] < 1e-5
    monkeypatch.setattr(bench, "error", compare)
    # With this loss responses with A = 0 have a gradient, too. The twin alone forwards them.
    monkeypatch.setattr(stapo, "objective", lambda *args: (args[2].sum(), {}))
    with pytest.raises(RuntimeError, match="not have the same gradient"):
        next(bench.update(quick=True))


def test_rollouts_obey_the_schedule(model):
    lengths = bench.log_normal_lengths(32, 20, 56)
    prompts = torch.randint(3, 1024, (32, 16))
    prompts[:, -1] = torch.arange(32, 64)  # the classes 0 to 31
    tokenizer, options = bench.word_tokenizer(1024), {"max_new_tokens": 56, "batch_size": 8}
    with bench.schedule(lengths, prompt_width=16):
        drawn = rollout.sample(model, tokenizer, prompts.tolist(), **options)
        ours = [r.ids for r in rollout.in_order(drawn)]
        plain = bench.plain_sample(model, prompts.tolist(), 56, 8)
        prompts[:, -1] = bench.SEPARATOR  # by place: all of them at a time
        placed = bench.plain_sample(model, prompts.tolist(), 56, 32)
        scored = model(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    assert scored.logits.isfinite().all()  # without a cache nothing is forbidden
    for rows in (ours, plain, placed):
        assert [len(ids) for ids in rows] == lengths
        assert all(ids[-1] == bench.EOS and bench.EOS not in ids[:-1] for ids in rows)
        for place, ids in enumerate(rows):
            assert {i % 32 for i in ids[:-1]} <= {place}
        assert max(len(set(ids)) for ids in rows) > 20  # words are sampled, not repeated


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
def test_step_does_the_same_work_as_trl():
    assert next(bench.step(quick=True))[1] > 0


# ---------------------------------------- memory


def test_states_are_counted_to_the_byte(model):
    """Cut over four GPUs; the step count of 4 bytes for each tensor is left out."""
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(2, 1024, (3, 17))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    weights = total_bytes(model.parameters())
    gradients = total_bytes(p.grad for p in model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    held = costs.bytes_per_gpu(model, gpus=4, micro_tokens=64)
    assert 4 * held["states"] == weights + gradients + total_bytes(moments)
    gathered = total_bytes(model.bfloat16().parameters())
    assert held["rollout"] == held["states"] - gradients / 4 + gathered


# ---------------------------------------- costs


def test_the_page_has_the_hours_of_the_whole_table():
    """Of eval.py: 17,968 responses of up to 20,480 tokens on one H100."""
    model = costs.empty_model("1.7B")
    rows = costs.rows_that_fit(model.config, 1024 + 20480, 80e9 - 2 * costs.parameters(model))
    seconds = costs.sampling_seconds(model, 3.35e12, 17968, 20480, rows)
    low, high = (round(s / 3600) for s in seconds)
    page = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert f"17,968 responses, and {low} to {high} hours for 1.7B on one H100" in page


def test_the_pages_sentences_have_the_tables_hours():
    """The night, and the days of the paper's run on eight H100."""
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/training.md"))
    night = costs.cost("--model Qwen/Qwen3-1.7B-Base", 1, "H100")["hours"].partition(": ")[2]
    assert f"{night} hours on an H100 (estimated)" in readme
    assert f"{night} hours on an H100 (estimated)" in page
    hours = costs.cost("@recipes/paper-1.7b", 8, "H100")["hours"].partition(": ")[2]
    days = [round(float(each.replace(",", "")) / 24) for each in hours.split(" to ")]
    assert f"{days[0]} to {days[1]} days on eight H100 (estimated)" in readme


@pytest.mark.parametrize("file", costs.written_texts(), ids=lambda file: file.name)
def test_pages_and_recipes_have_what_the_script_estimates(file):
    """Whatever stood between the lines that mark it."""
    text, content = costs.written_texts()[file], file.read_text()
    other = content.replace(text, "other numbers\n")
    assert other != content == costs.written(other, text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none is here")
@pytest.mark.parametrize("name", bench.BENCHES)
def test_benchmark_on_a_gpu(name, monkeypatch):
    """Every pair at full size: `pytest -s -m gpu` prints each number as soon as it is there."""
    reasons, values = [], []
    monkeypatch.setattr(bench, "left_out", lambda what, why: reasons.append(f"{what}: {why}"))
    bench.distributed.start()
    try:
        for what, value in bench.measure(name, quick=False):
            print(f"\n{what}: {value:.3g}", end="", flush=True)
            values.append(value)
    finally:
        bench.distributed.finish()
    print(*("", *reasons), sep="\n")
    if not values:
        pytest.skip("; ".join(reasons))
    assert all(map(math.isfinite, values))
