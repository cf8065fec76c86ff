"""What only a CUDA device can show of the supervised step; sampling has its own such tests in test_static_decode.py."""

import pytest
import torch
from tiny_runs import OPTIMIZER, chats, make_model, make_set, tokenizer_fixture

from pipeline.data.batches import SupervisedBatches
from pipeline.params.schema import Pretrain
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.device import Device
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, train_window
from pipeline.training.updater import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
tokenizer = tokenizer_fixture


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> SupervisedBatches:
    folder = tmp_path_factory.mktemp("sets")
    make_set(folder, "full_sft", chats(40), tokenizer)
    return SupervisedBatches(folder / "encoded/full_sft/train.arrow", batch_size=4, seed=1, tokenizer=tokenizer)


def on_gpu(dtype: torch.dtype | None, *, compiled: bool = False) -> Device:
    return Device(torch.device("cuda"), dtype, gradient_checkpointing=False, compile=compiled)


def test_a_micro_batch_waits_for_nothing(tokenizer: Tokenizer, batches: SupervisedBatches) -> None:
    """Upload, forward and backward pass are queued; PyTorch raises where the host would wait."""
    device = on_gpu(torch.bfloat16)
    objective = LanguageModelling(device.prepare(make_model(tokenizer)), device)
    objective.training_mode()
    objective(batches.batch(0, 0)).loss.backward()  # libraries and memory are set up
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = [objective(batches.batch(0, index)) for index in range(1, 4)]
        for part in parts:
            (part.loss / 7).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(part.loss) for part in parts)


@pytest.mark.parametrize(
    ("dtype", "compiled", "tolerance"), [(None, False, 1e-4), (None, True, 1e-4), (torch.bfloat16, False, 2e-2)]
)
def test_steps_are_those_of_the_cpu(
    tokenizer: Tokenizer, batches: SupervisedBatches, dtype: torch.dtype | None, compiled: bool, tolerance: float
) -> None:
    settings = Pretrain.model_validate(
        OPTIMIZER | {"init_from": None, "max_seq_len": 400, "accumulation_steps": 2, "val_every": 100}, strict=False
    )
    losses = []
    for device in (Device(torch.device("cpu"), None, gradient_checkpointing=False), on_gpu(dtype, compiled=compiled)):
        model = device.prepare(make_model(tokenizer))
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=5)})
        task = SupervisedTask(state, LanguageModelling(model, device), batches, batches, "train", list)
        losses.append([train_window(task, settings, device, step)["train/loss"] for step in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
