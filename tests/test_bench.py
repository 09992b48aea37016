"""The benchmark's twins do the same work as the code they time, and its sums are the tensors'."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import bench
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from support import decoding

SIZES = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
}  # published parameters


def total_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.fixture(autouse=True)
def bench_on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench, "CUDA", False)
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))


@pytest.fixture
def model():
    return bench.random_model(quick=True)


def updated(model) -> torch.optim.AdamW:
    """The optimiser after one step on an ordinary loss: gradients and both moments exist."""
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(2, 1024, (2, 9), device=model.device)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", bench.QWEN3)
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_shapes_are_those_of_the_model(name, tied):
    shape = bench.QWEN3[name] | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    layer, root = bench.parameter_shapes(shape)
    counted = layer * shape["num_hidden_layers"] + root
    assert sorted(counted) == sorted(tuple(p.shape) for p in model.parameters())
    if tied == bench.QWEN3[name]["tie_word_embeddings"]:
        assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def test_states_are_counted_to_the_byte(model):
    states = updated(model).state.values()
    held = bench.bytes_per_gpu(model.config.to_dict(), gpus=1)
    assert held["weights"] == total_bytes(model.parameters())
    assert held["gradients"] == total_bytes(p.grad for p in model.parameters())
    assert held["adamw"] == total_bytes(t for state in states for t in state.values())
    assert held["gathered"] == total_bytes(p.bfloat16() for p in model.parameters())


def test_shards_are_counted_to_the_byte(model):
    """FSDP2 cuts along the first dimension and rank 0 holds the larger part."""
    for gpus in (3, 8, 64):
        held = bench.bytes_per_gpu(model.config.to_dict(), gpus)
        assert held["weights"] == total_bytes(p.chunk(gpus)[0] for p in model.parameters())


def test_cache_is_counted_to_the_byte(model):
    ids = torch.randint(2, 1024, (3, 17), device=model.device)
    cache = model.bfloat16()(ids, use_cache=True).past_key_values
    found = total_bytes(t for layer in cache.layers for t in (layer.keys, layer.values))
    held = bench.bytes_per_gpu(model.config.to_dict(), 1, response_tokens=17)
    assert found == 3 * held["cache"]


def test_what_a_layer_saves_is_counted_to_the_byte():
    """Autograd's saved tensors of one bfloat16 layer, each storage once, weights not counted."""
    model = bench.random_model(quick=True).bfloat16().cpu().train()
    layer, tokens = model.model.layers[0], 64
    inputs = torch.randn(1, tokens, model.config.hidden_size).bfloat16().requires_grad_()
    positions = model.model.rotary_emb(inputs, torch.arange(tokens)[None])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(inputs, position_embeddings=positions)
    found = sum(s.nbytes() for pointer, s in saved.items() if pointer not in weights)
    held = bench.bytes_per_gpu(model.config.to_dict(), 1, micro_tokens=tokens)
    assert found == held["layer"]
    assert held["inputs"] == model.config.num_hidden_layers * output.nbytes


def test_memory_falls_with_gpus_and_the_table_has_every_row():
    for shape in bench.QWEN3.values():
        held = [bench.bytes_per_gpu(shape, gpus) for gpus in (1, 8, 16, 64)]
        for key in ("update", "rollout"):
            assert [h[key] for h in held] == sorted((h[key] for h in held), reverse=True)
    lines = bench.memory_table().splitlines()
    assert len(lines) == 2 + len(bench.CARDS) and len({line.count("|") for line in lines}) == 1


def test_plain_head_is_the_twin_of_head_stats():
    inputs = bench.head_inputs(tokens=37, words=301, width=16)
    ours, plain = bench.run_head("ours", inputs), bench.run_head("plain", inputs)
    for a, b in zip(ours, plain, strict=True):
        assert bench.error(a, b) < 1e-5


def test_plain_update_is_the_twin_of_update():
    found = {line["what"]: line["value"] for line in bench.update(quick=True)}
    difference = next(value for what, value in found.items() if "gradient" in what)
    assert 0 <= difference < 1e-5


def test_both_rollouts_obey_the_schedule_and_sample_the_words(model):
    lengths = [3, 1, 40, 33, 7, 40]
    prompts = torch.randint(2, 1024, (6, 16)).tolist()
    bench.schedule(model, lengths, prompt_width=16)
    tokenizer = bench.word_tokenizer(1024)
    ours = [r.ids for r in rollout.sample(model, tokenizer, prompts, max_new_tokens=40)]
    for rows in (ours, bench.plain_sample(model, prompts, 40, 6)):
        assert [len(ids) for ids in rows] == lengths
        assert all(ids[-1] == bench.EOS and bench.EOS not in ids[:-1] for ids in rows)
        for place, ids in enumerate(rows):
            assert {i % 6 for i in ids[:-1]} <= {place}
        assert len(set(rows[2])) > 20  # words are sampled, not repeated
    scored = model(torch.tensor([[5, 6]], device=model.device)).logits
    assert scored.isfinite().all()  # scoring sees the model as it is


def test_lengths_are_log_normal():
    lengths = sorted(bench.log_normal_lengths(96, 79, 256))
    assert (lengths[47] + lengths[48]) / 2 == pytest.approx(79, abs=1) and lengths[-1] == 256
    assert lengths[15] == pytest.approx(79 / 1.65, rel=0.05)  # one sigma (0.5) below


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
def test_step_does_the_same_work_as_trl():
    assert bench.step(quick=True)[0]["value"] > 0


def test_counts_hold_their_bars():
    """Bytes and launches of a decoding step at full size; steps of a refill schedule, smaller.

    counts raises where a rollout takes other steps than its own count of them.
    """
    table = bench.counts(quick=True)
    assert sum(line["bar"] != "" for line in table) == 5
    assert all(line["holds"] is not False for line in table)
    found = {line["what"]: line["value"] for line in table}
    ideal = bench.ideal_step_bytes(bench.QWEN3["1.7B"], 64, 2000)
    assert ideal == 2 * SIZES["1.7B"] + 64 * 2000 * 28 * 2 * 8 * 128 * 2
    # transformers' cache is read and written anew: twice the cache more than in place
    plain = found["the same with transformers' cache"] * 1e9
    ours = next(value for what, value in found.items() if what.startswith("decoding step")) * 1e9
    assert ideal < ours < plain and plain - ours == pytest.approx(29.4e9, rel=0.01)


def test_count_knows_what_a_kernel_moves():
    with torch.device("meta"):
        a, b = torch.empty(4, 8), torch.empty(8, 16)
        rows = torch.zeros(2, dtype=torch.long)
    product = bench.counted(lambda: (a @ b).view(2, 32))
    assert (product.launches, product.bytes) == (1, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    assert bench.counted(lambda: a[rows]).bytes == 4 * 2 * (2 * 8)

    def write():
        a[rows] = b[:2, :8]

    assert bench.counted(write).bytes == 4 * 2 * (2 * 8)
    shared = bench.counted(lambda: a + b[:1, :8].expand(4, 8))
    assert shared.bytes == 4 * (4 * 8 + 8 + 4 * 8)


def test_steps_by_hand(monkeypatch):
    monkeypatch.setattr(decoding, "CHECK_EVERY", 2)
    # slot 1: 5 tokens (seen at 6), then 2 (8); slot 2: 1 (2), then 3 (6), then 1 (8)
    assert bench.steps_in_slots([5, 1, 3, 2, 1], slots=2, longest=10) == 8
    assert bench.steps_in_slots([5, 5], slots=2, longest=5) == 5  # all that was allowed
    assert bench.steps_in_batches([5, 1, 3, 2, 1], slots=2) == 5 + 3 + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none is here")
def test_cuda_benchmarks():
    """Every pair at full size, and the table: `pytest -s -k cuda` runs all that needs a GPU."""
    command = [sys.executable, str(Path(bench.__file__))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    print(f"\n{done.stdout}")
    assert done.returncode == 0 and "**no**" not in done.stdout
    assert "memory, 1.7B on one GPU" in done.stdout and "decoding step, 1.7B" in done.stdout
