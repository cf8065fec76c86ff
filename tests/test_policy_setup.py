"""How many rows a stage that samples decodes together: a parameter, and what memory is given to their keys and values."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from test_group_loop import make_settings
from test_kv_cache import CONFIG
from tiny_runs import CPU, SAMPLING

from pipeline.errors import ParamsError
from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.transformer import CausalLM
from pipeline.training import policy_setup
from pipeline.training.policy_setup import open_rollout, rows_in_memory


def test_bytes_are_those_that_a_block_allocates() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        block = KVBlock.allocate(InferenceModel(CausalLM(CONFIG), dtype), 3, 10)
        assert block.states.nbytes == 3 * 11 * KVBlock.bytes_per_position(CONFIG, dtype)


def test_rows_are_bounded_by_number_and_by_memory() -> None:
    # 2 layers x (keys, values) x 2 heads x 8 = 64 numbers a position; 106 positions and a spare one
    row_gib = 64 * 4 * 107 / 2**30
    assert SAMPLING["max_prompt_len"] + SAMPLING["max_new_tokens"] == 106
    for max_rows, cache_gib, dtype, expected in (
        (64, 1.0, None, 64),
        (64, 5.5 * row_gib, None, 5),
        (3, 5.5 * row_gib, None, 3),
        (64, 5.5 * row_gib, torch.bfloat16, 11),
    ):
        environment: Any = mock.Mock(device=replace(CPU, autocast_dtype=dtype))
        with mock.patch.object(policy_setup, "ChatEncoder"), mock.patch.object(policy_setup, "open_engine") as opened:
            open_rollout(CausalLM(CONFIG), make_settings(max_rows=max_rows, cache_gib=cache_gib), environment)
        assert opened.call_args.kwargs == {"max_rows": expected}


def test_memory_for_no_row_is_refused_with_what_one_takes() -> None:
    settings = make_settings(cache_gib=1e-5)
    with pytest.raises(ParamsError, match=r"^group.cache_gib=1e-05: must be >= 2.55e-05, .* one row of 106 positions take$"):
        rows_in_memory(CONFIG, settings, torch.float32, 106)
