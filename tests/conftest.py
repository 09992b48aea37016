"""What pytest gives to the tests: one thread, the CPU, the tiny model, random models."""

import copy

import pytest
import torch
from helpers import TINY, make_random_model

from rollout import load_model, load_tokenizer
from support import ranks

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Without the marker `gpu` a test runs on the CPU, also where there is a GPU: same numbers."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(ranks, "device", lambda: torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(str(TINY))


@pytest.fixture(scope="session")
def tiny_model():
    return load_model(str(TINY))


@pytest.fixture
def tiny(tiny_model):
    """A copy that the test may change."""
    return copy.deepcopy(tiny_model)


@pytest.fixture
def random_model():
    return make_random_model
