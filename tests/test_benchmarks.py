"""The benchmarks do the work they say: equal logits, equal tokens, and a slower run is named."""

from pathlib import Path

import pytest
import torch
from test_rollout import KEYS, PROMPTS, assert_same, play_turns
from test_rollout import make_model as make_small_model
from tiny_runs import CPU, chats, make_model, make_set, tokenizer_fixture

from benchmarks.episodes import OneAtATime, by_engine, by_plain_loop, by_transformers
from benchmarks.measure import interleaved
from benchmarks.mfu import FullRows, flops_per_token
from benchmarks.models import config_of, transformers_twin
from benchmarks.report import Bar, Report, keep
from benchmarks.sampling import (
    draw_workload,
    left_padded,
    open_ours,
    plain_forward,
    sample_ours,
    sample_plainly,
    sample_transformers,
)
from benchmarks.setting import needs
from benchmarks.supervised import Padded, our_steps, positions, transformers_steps, useful
from pipeline.data.batches import SupervisedBatches
from pipeline.errors import DataError
from pipeline.params import load_params
from pipeline.params.sizes import num_parameters
from pipeline.rollout.records import StopReason
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.text.tokenizer import Tokenizer

tokenizer = tokenizer_fixture
DEVICE = torch.device("cpu")


def test_the_plain_loop_computes_our_model(tokenizer: Tokenizer) -> None:
    """Left padding and concatenated keys give the hidden states of each prompt alone, at the prefill and one step later."""
    model = make_model(tokenizer, sharpness=4.0)
    work = draw_workload(5, 1, prompt_lengths=(1, 12), new_tokens=(1, 4), vocabulary=tokenizer.vocab_size)
    ids, mask = left_padded(work.prompts, DEVICE)
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    caches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(model.model.layers)
    with torch.inference_mode():
        first = plain_forward(model, ids, places, mask, caches)[:, -1]
        next_ids = torch.full((5, 1), 7)
        mask = torch.cat((mask, mask.new_ones(5, 1)), dim=1)
        second = plain_forward(model, next_ids, places[:, -1:] + 1, mask, caches)[:, -1]
        for row, prompt in enumerate(work.prompts):
            alone = model.hidden(torch.tensor([[*prompt, 7]]))[0]
            torch.testing.assert_close(first[row], alone[-2], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(second[row], alone[-1], atol=1e-5, rtol=1e-5)


def test_every_way_to_sample_makes_the_same_number_of_ids(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    work = draw_workload(3, 2, prompt_lengths=(2, 9), new_tokens=(1, 5), vocabulary=tokenizer.vocab_size)
    assert work.prompts[0] == work.prompts[1] != work.prompts[2]
    counts = [
        sample_ours(open_ours(model, 4), work),
        sample_transformers(transformers_twin(model), work),
        sample_plainly(model, work, CPU),
    ]
    assert counts == [work.num_tokens] * 3


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_set(folder, "full_sft", chats(60), tokenizer)
    return folder / "encoded" / "full_sft" / "train.arrow"


def test_padding_changes_neither_rows_nor_loss(tokenizer: Tokenizer, encoded: Path) -> None:
    """An epoch of each kind of batch holds the same real tokens, and a padded step the loss of the unpadded one."""
    common = {"batch_size": 5, "seed": 3, "tokenizer": tokenizer}
    ways = [SupervisedBatches(encoded, **common), Padded(encoded, **common), Padded(encoded, **common, width=100)]
    totals = [sum(useful(way.batch(0, index)) for index in range(way.batches_per_epoch)) for way in ways]
    assert len({way.batches_per_epoch for way in ways}) == 1 and len(set(totals)) == 1
    assert positions(ways[0]).useful > positions(ways[1]).useful > positions(ways[2]).useful
    settings = load_params().full_sft
    models = [make_model(tokenizer) for _ in range(2)]
    counts = [our_steps(model, way, settings, CPU, 2)() for model, way in zip(models, ways[1:], strict=True)]
    for name, weight in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], weight, atol=1e-5, rtol=1e-3)
    counts.append(transformers_steps(transformers_twin(models[0]), ways[1], settings, CPU, 2)())
    assert len(set(counts)) == 1


def test_flops_are_those_of_the_weights_and_of_attention() -> None:
    config = config_of("minimind")
    assert num_parameters(config, config.vocab_size) == 63_912_192  # what the profile says
    attention = 6 * 8 * 768 * 340
    assert flops_per_token(config, 340) == 6 * 63_912_192 + attention
    assert FullRows(2, 5, 9).batch(0, 0).num_trained == 10


def test_ways_take_turns() -> None:
    seen: list[str] = []

    def way(name: str) -> float:
        seen.append(name)
        return 1.0

    rates = interleaved({"a": lambda: way("a"), "b": lambda: way("b")}, repeats=2, device=DEVICE)
    assert seen == ["a", "b", "a", "b", "a", "b"]  # the first round warms up
    assert [len(rate.values) for rate in rates.values()] == [2, 2]


def test_a_loss_of_more_than_five_per_cent_is_named(tmp_path: Path) -> None:
    def report(value: float, title: str = "sampling") -> Report:
        return Report(title, "Some work.", ("", "tokens/s"), [("ours", "1")], [Bar(f"{title} bar", value, 2.5)])

    assert keep([report(3.0), report(1.0, "other")], "# machine\n", tmp_path, "machine") == []
    assert keep([report(2.86)], "# machine\n", tmp_path, "machine") == []
    assert keep([report(2.4)], "# machine\n", tmp_path, "machine") == ["sampling bar: 2.40, was 2.86 (-16%)"]
    text = (tmp_path / "machine.md").read_text()
    assert "| sampling bar | 2.40 | 2.5 | MISSED |" in text and "other bar" in text  # what was not measured again stays


def test_what_is_missing_is_said_with_the_command_that_makes_it() -> None:
    with pytest.raises(DataError, match=r"nowhere/x: no such file; `dvc repro full_sft` makes it"):
        needs("nowhere/x", "full_sft")


def test_one_at_a_time_takes_the_turns_that_our_engine_takes() -> None:
    model, stop, pad, greedy = make_small_model(), 9, 0, [False] * len(PROMPTS)
    engine = TorchRolloutEngine(model, stop_ids=[stop], pad_id=pad, max_rows=4)
    expected = play_turns(engine, PROMPTS, KEYS, greedy)
    for complete in (by_plain_loop(model, stop), by_engine(engine)):
        for done, ours in zip(play_turns(OneAtATime(complete), PROMPTS, KEYS, greedy), expected, strict=True):
            assert_same(ours, done)
    twin = transformers_twin(model)
    said = play_turns(OneAtATime(by_transformers(twin, stop, pad)), PROMPTS, KEYS, greedy)
    for turn, done in enumerate(said):
        for key, completion in zip(KEYS, done, strict=True):
            assert completion is not None
            assert (completion.stop is StopReason.EOS) == (completion.ids[-1] == stop) and stop not in completion.ids[:-1]
            assert len(completion.ids) == 2 + (key + 3 * turn) % 9 or completion.stop is StopReason.EOS
