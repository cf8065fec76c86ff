"""Steps of `trl`'s own trainers on the weights, rows and prompts that ours work on; `make interop` installs it.

A step is the trainer's `training_step` (for GRPO with its generation, scoring and reference), clipping and AdamW. What a trainer
does around its steps (logging, callbacks) is not counted.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Work
from benchmarks.models import transformers_twin
from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.labels import IGNORED_LABEL
from pipeline.data.prompts import PromptTask
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Dpo, Grpo, Optimizer, Supervised
from pipeline.text.tokenizer import Tokenizer

TOKENIZER = Path("data/tokenizer")
SFT_BATCHES = 400
"""Batches whose rows an `SFTTrainer` gets; it begins again after them."""
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # all that is needed lies in folders made here


def sft_steps(model: CausalLM, rows: SupervisedBatches, settings: Supervised, folder: Path, per_call: int) -> Work:
    """`SFTTrainer` over rows of one batch each, encoded as ours are, padded to the longest of a batch; counts useful tokens."""
    import trl
    from datasets import Dataset

    encoded = []
    for index in range(min(rows.batches_per_epoch, SFT_BATCHES * settings.batch_size)):
        batch = rows.batch(0, index)
        ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
        end = labels[-1] if labels[-1] != IGNORED_LABEL else 0  # the last label's input, which ours does not need
        encoded.append({"input_ids": [*ids, end], "labels": [IGNORED_LABEL, *labels]})
    trainer = trl.SFTTrainer(
        model=_prepared(model, folder),
        args=trl.SFTConfig(
            **_arguments(settings, folder, settings.batch_size), max_length=None, dataset_kwargs={"skip_prepare_dataset": True}
        ),
        train_dataset=Dataset.from_list(encoded),
        processing_class=_tokenizer(),
    )
    return _steps(
        trainer,
        settings,
        per_call,
        count=lambda batch: float(batch["attention_mask"][:, 1:].sum()),
        accumulation=settings.accumulation_steps,
    )


def dpo_steps(model: CausalLM, pairs: PairBatches, tokenizer: Tokenizer, settings: Dpo, folder: Path, per_call: int) -> Work:
    """`DPOTrainer` with its live reference; counts pairs."""
    import trl
    from datasets import Dataset

    rows = [row for index in range(pairs.batches_per_epoch) for row in _text_pairs(pairs, index, tokenizer)]
    trainer = trl.DPOTrainer(
        model=_prepared(model, folder),
        args=trl.DPOConfig(**_arguments(settings, folder, settings.batch_size), beta=settings.beta, max_length=None),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )
    pairs_per_batch = float(settings.batch_size)
    return _steps(trainer, settings, per_call, count=lambda _: pairs_per_batch, accumulation=settings.accumulation_steps)


def grpo_steps(
    model: CausalLM,
    prompts: Sequence[PromptTask],
    tokenizer: Tokenizer,
    settings: Grpo,
    reward: Callable[[Sequence[int]], float],
    folder: Path,
) -> tuple[Work, Callable[[], float]]:
    """`GRPOTrainer` over batches of `settings.batch_size` prompts; counts steps. Also what says its mean completion length."""
    import trl
    from datasets import Dataset

    rows = settings.batch_size * settings.group_size
    lengths: list[float] = []

    def rewards(completions: Any, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        lengths.extend(float(len(ids)) for ids in completion_ids)
        return [reward(ids) for ids in completion_ids]

    trainer = trl.GRPOTrainer(
        model=_prepared(model, folder),
        reward_funcs=rewards,
        args=trl.GRPOConfig(
            **_arguments(settings, folder, rows),
            num_generations=settings.group_size,
            steps_per_generation=1,
            max_completion_length=settings.max_new_tokens,
            temperature=settings.temperature,
            beta=settings.kl_coef,
            loss_type="grpo",
        ),
        train_dataset=Dataset.from_list([{"prompt": tokenizer.decode_all(task.prompt_ids)} for task in prompts]),
        processing_class=_tokenizer(),
    )
    return _steps(trainer, settings, per_call=1, count=lambda batch: 1.0), lambda: sum(lengths) / len(lengths)


def _steps(trainer: Any, settings: Optimizer, per_call: int, *, count: Callable[[Any], float], accumulation: int = 1) -> Work:
    trainer.create_optimizer()
    trainer.model.train()
    batches: Iterator[Any] = cycle(trainer.get_train_dataloader())
    trainer.current_gradient_accumulation_steps = accumulation  # what `train` sets before its first step

    def steps() -> float:
        done = 0.0
        for _ in range(per_call):
            for batch in islice(batches, accumulation):
                done += count(batch)
                trainer.training_step(trainer.model, batch, None)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), settings.max_grad_norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            trainer.state.global_step += 1
        return done

    return steps


def _arguments(settings: Optimizer, folder: Path, rows: int) -> dict[str, Any]:
    plain = {"report_to": [], "bf16": torch.cuda.is_available(), "gradient_checkpointing": False, "disable_tqdm": True}
    optimizer = {"learning_rate": settings.lr, "weight_decay": settings.weight_decay, "max_grad_norm": settings.max_grad_norm}
    return {"output_dir": str(folder), "per_device_train_batch_size": rows, "seed": settings.seed, **plain, **optimizer}


def _prepared(model: CausalLM, folder: Path) -> Any:
    """The model as `transformers` has it, and a copy in `folder`, where the trainer looks for its reference."""
    twin = transformers_twin(model)
    twin.save_pretrained(folder)
    twin.config._name_or_path = str(folder)
    return twin


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER)


def _text_pairs(pairs: PairBatches, index: int, tokenizer: Tokenizer) -> Iterator[dict[str, str]]:
    """The pairs of a batch as text: what both sides begin with, and the answers."""
    batch = pairs.batch(0, index)
    chosen, rejected = ((ids, labels) for ids, labels in zip(batch.input_ids.chunk(2), batch.labels.chunk(2), strict=True))
    for place in range(batch.num_pairs):
        sides = []
        for ids, labels in (chosen, rejected):
            trained = (labels[place] != IGNORED_LABEL).nonzero()[:, 0].tolist()
            row = ids[place].tolist()
            sides.append((row[: trained[0] + 1], [*row[trained[0] + 1 : trained[-1] + 1], int(labels[place, trained[-1]])]))
        prompt = tokenizer.decode_all(sides[0][0])
        yield {"prompt": prompt, "chosen": tokenizer.decode_all(sides[0][1]), "rejected": tokenizer.decode_all(sides[1][1])}
