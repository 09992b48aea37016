"""scripts/trl_stapo.py: STAPO inside TRL, for any number of micro-batches and ranks.

The responses are canned, random ids of several lengths, so that many tokens of right ones are
candidates, and not equally many in each micro-batch.
"""

import importlib.util
import json

import pytest
import torch
from conftest import ROOT, TINY, example, make_random_model
from ranks import launch
from reference import candidates_and_silenced, plain_head

import stapo
from rollout import Response, TokenStats, encode_prompt, load_model, load_tokenizer

pytest.importorskip("trl")

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_stapo import FIXED, STAPOTrainer, main, make_trainer

PROMPTS, GROUP = 8, 4
