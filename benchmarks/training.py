"""What supervised training and dpo are measured on: the sets of this repository's lineage, or JSONL files of one's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import with_trl
from benchmarks.machine import head_product, layer_products, product_rate, product_seconds, training_products
from benchmarks.measure import Work, interleaved
from benchmarks.mfu import flops_per_token
from benchmarks.models import config_of, make_model, profile, transformers_twin
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting, needs
from benchmarks.supervised import Padded, our_pair_steps, our_steps, positions, transformers_steps
from pipeline.checkpoint.files import load_model
from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.corpus import corpus_texts
from pipeline.data.encode import encode_set
from pipeline.data.prepare import prepare
from pipeline.params import load_params
from pipeline.params.schema import Supervised
from pipeline.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pipeline.training.preference_objective import cached_reference, live_reference

MICRO_BATCHES, MICRO_BATCH_ROWS = 2, 8
"""A step of the 64M model has the 16 rows of MiniMind's full_sft, in parts that suit two cores."""
STEPS_AT_ONCE = {"pretrain": 2, "full_sft": 6}
"""Of the 64M model: about as many tokens of documents as of chats."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A set's ids and what made them."""

    path: Path
    tokenizer: Tokenizer
    max_seq_len: int


def of_lineage(name: str, max_seq_len: int) -> Encoded:
    """The training rows of pretrain or full_sft in this repository."""
    path = needs(f"data/encoded/{name}/train.arrow", f"encode@{name}")
    return Encoded(path, load_tokenizer(needs("data/tokenizer", "tokenizer")), max_seq_len)


def of_file(name: str, source: Path, folder: Path, max_seq_len: int) -> Encoded:
    """The rows of a JSONL file in MiniMind's format, with a tokenizer trained on them, in `folder`."""
    params = profile("minimind")
    prepared, encoded, texts = (folder / part / name for part in ("prepared", "encoded", "tokenizer"))
    prepare(name, source, prepared, params.data)
    train_tokenizer(
        corpus_texts(prepared, params.tokenizer.max_rows_per_set),
        texts,
        vocab_size=params.tokenizer.vocab_size,
        split_digits=params.tokenizer.split_digits,
    )
    tokenizer = load_tokenizer(texts)
    encode_set(name, prepared, encoded, tokenizer, max_seq_len=max_seq_len, max_dropped_frac=1.0)
    return Encoded(encoded / "train.arrow", tokenizer, max_seq_len)


def supervised(
    setting: Setting, title: str, size: str, data: Encoded, settings: Supervised, *, per_call: int, padded_per_call: int
) -> Report:
    """A stage's steps with its own batches, with two other paddings, with `transformers` and with trl.

    Batches differ in length, so that a rate is one of `per_call` steps; padded to `max_seq_len` they do not.
    """
    config = config_of(size, vocabulary=data.tokenizer.vocab_size)
    common: dict[str, Any] = {"batch_size": settings.batch_size, "seed": settings.seed, "tokenizer": data.tokenizer}
    ours = SupervisedBatches(data.path, **common)
    to_longest, to_limit = Padded(data.path, **common), Padded(data.path, **common, width=data.max_seq_len)
    twin = transformers_twin(make_model(config, setting.torch_device))
    step = partial(our_steps, settings=settings, device=setting.device)
    ways: Mapping[str, Work] = {
        "ours": step(make_model(config, setting.torch_device), ours, per_call=per_call),
        "padded to the longest of the batch": step(make_model(config, setting.torch_device), to_longest, per_call=per_call),
        "padded to max_seq_len": step(make_model(config, setting.torch_device), to_limit, per_call=padded_per_call),
        "transformers, padded to the longest": transformers_steps(twin, to_longest, settings, setting.device, per_call),
        "trl's SFTTrainer, padded to the longest": with_trl.sft_steps(
            make_model(config, setting.torch_device),
            SupervisedBatches(data.path, **common | {"batch_size": 1}),
            settings,
            setting.scratch / f"trl-{size}",
            per_call,
        ),
    }
    rates = interleaved(ways, repeats=setting.repeats, device=setting.torch_device)
    sizes = {"ours": positions(ours), "longest": positions(to_longest), "limit": positions(to_limit)}
    names = dict(zip(ways, ("ours", "longest", "limit", "longest", "longest"), strict=True))
    filled = {name: sizes[key].useful for name, key in names.items()}
    own = rates["ours"].median
    share = flops_per_token(config, round(sizes["ours"].tokens_per_batch / settings.batch_size)) / product_rate(
        setting.torch_device, setting.dtype
    )
    rows = [
        (
            name,
            f"{rate.median:,.0f}",
            f"{rate.spread:.0%}",
            f"{filled[name]:.1%}",
            f"{own / rate.median:.2f}",
            f"{rate.median * share:.0%}",
        )
        for name, rate in rates.items()
    ]
    longest, limit = (rates[f"padded to {name}"].median for name in ("the longest of the batch", "max_seq_len"))
    possible = sizes["ours"].useful / sizes["longest"].useful
    tokens = round(sizes["ours"].tokens_per_batch)
    products = training_products([*layer_products(config, tokens), head_product(config, tokens)])
    ceiling = tokens / product_seconds(products, setting.torch_device, setting.dtype)
    bars = [
        Bar(f"{title}: useful tokens", filled["ours"], 0.95),
        Bar(f"{title}: against padded to max_seq_len", own / limit, 1.8),
        Bar(f"{title}: share of what less padding can give against the longest of the batch", own / longest / possible, 0.9),
        Bar(f"{title}: share of the products' rate", own / ceiling, 0.7 if size == "minimind" else None),
    ]
    workload = (
        f"{config.hidden_size} x {config.num_hidden_layers}, {settings.accumulation_steps} x {settings.batch_size} rows a step, "
        f"of at most {data.max_seq_len} tokens; the products of layers and head alone, forwards and backwards, allow "
        f"{ceiling:,.0f} tokens/s."
    )
    columns = ("", "useful tokens/s", "spread", "useful", "ours is x times as fast", "share of a large matrix product")
    return Report(title, workload, columns, rows, bars)


def pretrain(setting: Setting) -> Report:
    """The embedded world at micro size."""
    settings = load_params().pretrain
    data = of_lineage("pretrain", settings.max_seq_len)
    return supervised(setting, "pretrain, micro, world", "micro", data, settings, per_call=40, padded_per_call=40)


def full_sft(setting: Setting) -> Report:
    """The embedded world at micro size."""
    settings = load_params().full_sft
    data = of_lineage("full_sft", settings.max_seq_len)
    return supervised(setting, "full_sft, micro, world", "micro", data, settings, per_call=40, padded_per_call=40)


def supervised_64m(setting: Setting, name: str, data: Encoded, text: str) -> Report:
    """MiniMind's size, with batches that two cores can hold."""
    rows = {"batch_size": MICRO_BATCH_ROWS, "accumulation_steps": MICRO_BATCHES}
    settings = getattr(profile("minimind"), name).model_copy(update=rows)
    return supervised(
        setting, f"{name}, 64M, {text}", "minimind", data, settings, per_call=STEPS_AT_ONCE[name], padded_per_call=1
    )


def dpo(setting: Setting) -> Report:
    """Stage dpo at micro size with its cached reference and with a live one, and trl's trainer with a live one."""
    params = load_params()
    settings = params.dpo
    tokenizer = load_tokenizer(needs("data/tokenizer", "tokenizer"))
    folder, start = needs("data/encoded/dpo", "encode@dpo"), needs("checkpoints/full_sft.pth", "full_sft")
    open_pairs = partial(PairBatches, batch_size=settings.batch_size, seed=settings.seed, tokenizer=tokenizer)
    train, held_out = (open_pairs(folder / f"{split}.arrow") for split in ("train", "held_out"))
    model, live, cached, reference = (
        setting.device.prepare(load_model(start, tokenizer_digest=tokenizer.digest)) for _ in range(4)
    )
    table = cached_reference(reference, train, held_out, setting.device, setting.scratch / "reference", "benchmark", epochs=1)
    ways = {
        "ours, cached reference": our_pair_steps(cached, table, train, settings, setting.device, 4),
        "ours, live reference": our_pair_steps(
            live, live_reference(reference, setting.device), train, settings, setting.device, 4
        ),
        "trl, live reference": with_trl.dpo_steps(model, train, tokenizer, settings, setting.scratch / "trl", 4),
    }
    rates = interleaved(ways, repeats=setting.repeats, device=setting.torch_device)
    theirs = rates["trl, live reference"].median
    rows = [(name, f"{rate.median:.1f}", f"{rate.spread:.0%}", f"{rate.median / theirs:.2f}") for name, rate in rates.items()]
    bars = [
        Bar("DPO pairs/s, as the stage is set, against trl's DPOTrainer", rates["ours, cached reference"].median / theirs, 2.0),
        Bar("DPO pairs/s, live reference as well", rates["ours, live reference"].median / theirs),
    ]
    workload = f"{settings.batch_size} pairs of stage dpo a step, as stored; the table of the cached reference is made before."
    return Report("dpo, micro", workload, ("", "pairs/s", "spread", "times trl"), rows, bars)
