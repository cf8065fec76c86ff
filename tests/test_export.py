"""Exports: what transformers writes from one is what is sampled here, stops and padding included."""

import errno
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from tiny_runs import CPU, WORDS, make_model, make_tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import __main__ as command_line
from pipeline.checkpoint.files import model_meta, save_model
from pipeline.checkpoint.lora import lora_meta
from pipeline.commands.models import open_model
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import RopeScaling
from pipeline.rollout.records import StopReason
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.policy_setup import open_engine

WINDOW = 96
YARN = RopeScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.1, attention_factor=1.1)
# Conversations of different length, and what the models are trained to answer.
CHATS: list[tuple[list[dict[str, str]], str]] = [
    ([{"role": "user", "content": "red"}], "dog"),
    ([{"role": "system", "content": "green stone wind"}, {"role": "user", "content": "blue house river bird?"}], "bird cat"),
    (
        [
            {"role": "user", "content": "12\n3"},
            {"role": "assistant", "content": "wind"},
            {"role": "user", "content": "cat: cat cat cat cat cat"},
        ],
        "red red blue",
    ),
]
MODELS: dict[str, dict[str, Any]] = {
    "full_sft": {},
    "grpo": {"use_moe": True, "num_experts_per_tok": 2},
    "dpo": {"rope_scaling": YARN},
}


def taught(model: CausalLM, tokenizer: Tokenizer) -> CausalLM:
    """The model when it knows CHATS by heart: it answers and ends its turn."""
    encoder = ChatEncoder(tokenizer)
    rows = [encoder.encode([*messages, {"role": "assistant", "content": answer}]) for messages, answer in CHATS]
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    trained = pad_sequence([torch.tensor(row.trained) for row in rows], batch_first=True)
    labels = ids.where(trained, -100)[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    model.train()
    loss = torch.tensor(torch.inf)
    while loss > 0.05:
        loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A folder as the stages leave it: a dense model, one with experts, one with YaRN, adapters; its files are read-only."""
    folder = tmp_path_factory.mktemp("lineage")
    tokenizer = make_tokenizer(folder / "data/tokenizer")
    for name, changes in MODELS.items():
        model = taught(make_model(tokenizer, max_position_embeddings=WINDOW, **changes), tokenizer)
        save_model(
            folder / f"checkpoints/{name}.pth", model.state_dict(), model_meta("causal_lm", model.config, tokenizer.digest)
        )
        if name == "full_sft":
            base = model
    given: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]}
    add_lora(base, **given, seed=1)
    with torch.no_grad():
        for parameter in lora_state_dict(base).values():
            parameter += 0.01
    save_model(folder / "checkpoints/lora.pth", lora_state_dict(base), lora_meta(base.config, tokenizer.digest, **given))
    for path in (folder / "data/tokenizer").iterdir():
        path.chmod(0o444)  # as DVC leaves what it has linked
    return folder, tokenizer


@pytest.fixture
def run_export(lineage: tuple[Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(lineage[0])

    def run(name: str, folder: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["pipeline", "export", name, str(folder)])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        return int(ended.value.code or 0)

    return run


def own_texts(model: CausalLM, tokenizer: Tokenizer) -> tuple[list[str], set[StopReason]]:
    """What greedy sampling here answers to each chat within the window, and why it ended."""
    encoder = ChatEncoder(tokenizer)
    prompts = [encoder.encode_prompt(messages) for messages, _ in CHATS]
    engine = open_engine(model, tokenizer, CPU, max_rows=8)
    limits = [WINDOW - len(prompt) for prompt in prompts]
    completions = engine.generate(prompts, keys=[0] * len(prompts), max_new_tokens=limits, temperature=1.0, greedy=True)
    return [tokenizer.decode(c.ids) for c in completions], {c.stop for c in completions}


@pytest.mark.parametrize("name", [*MODELS, "lora"])
def test_texts_are_those_of_the_sampling_here(lineage, run_export, tmp_path, name):
    folder = tmp_path / "model"
    assert run_export(name, folder) == 0
    expected, reasons = own_texts(open_model(name, lineage[1]), lineage[1])
    if name != "lora":  # its adapters are noise
        assert expected == [answer for _, answer in CHATS] and reasons == {StopReason.EOS}
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def generated(chats: Sequence[Any], **limit: int) -> list[str]:
        inputs = tokenizer.apply_chat_template(
            list(chats), add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=len(chats) > 1
        )
        ids = model.generate(**inputs, **limit)[:, inputs["input_ids"].shape[1] :]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    chats = [messages for messages, _ in CHATS]
    assert [generated([chat])[0] for chat in chats] == expected
    if name != "lora":  # what never ends is cut by the window, which padding is counted into
        assert generated(chats) == expected
    assert generated(chats, max_new_tokens=5) == [generated([chat], max_new_tokens=5)[0] for chat in chats]

    pipe = transformers.pipeline("text-generation", str(folder), device="cpu")
    assert [answer[0]["generated_text"][-1]["content"] for answer in pipe(chats)] == expected
    if name != "lora":
        together = pipe(chats, batch_size=len(chats))
        assert [answer[0]["generated_text"][-1]["content"] for answer in together] == expected


def test_settings_are_those_of_the_model(lineage, run_export, tmp_path):
    assert run_export("full_sft", tmp_path / "model") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.model_max_length == WINDOW and tokenizer.padding_side == "left"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for file in ("config.json", "generation_config.json"):
        assert ids.items() <= json.loads((tmp_path / "model" / file).read_bytes()).items()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_file_modes_are_those_that_the_user_wants(run_export, tmp_path, mask):
    before = os.umask(mask)
    try:
        assert run_export("full_sft", tmp_path / "model") == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in modes and "tokenizer.json" in modes
    assert set(modes.values()) == {0o666 & ~mask}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("full", ["configuration", "weights"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run_export, tmp_path, monkeypatch, capsys, there, full):
    folder = tmp_path / "model"
    if there:
        folder.mkdir()

    def no_space(*args: Any, **kwargs: Any) -> None:
        if full == "weights":
            (folder / "model.safetensors.part").write_bytes(b"half")
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    target = (safetensors.torch, "save_file") if full == "weights" else (transformers.GenerationConfig, "save_pretrained")
    monkeypatch.setattr(*target, no_space)
    assert run_export("full_sft", folder) == 8
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(folder) in said and "no space left" in said and "another disk" in said
    assert list(folder.iterdir()) == [] if there else not folder.exists()


def test_a_folder_that_cannot_be_is_one_line(run_export, tmp_path, capsys):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert run_export("full_sft", tmp_path / "file" / "model") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be written (Not a directory)" in said


@pytest.mark.parametrize("command", [["export", "full_sft", "out"], ["chat", "full_sft"]])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "absent", "description"])
def test_damaged_weights_are_one_line_with_the_remedy(lineage, tmp_path, monkeypatch, capsys, command, damage):
    source, _ = lineage
    for name in ("data/tokenizer/tokenizer.json", "checkpoints/full_sft.pth", "checkpoints/full_sft.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((source / name).read_bytes())
    root = Path(__file__).parents[1]
    for name in ("params.yaml", "data/world.yaml"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    weights = tmp_path / "checkpoints/full_sft.pth"
    content = weights.read_bytes()
    if damage == "absent":
        weights.unlink()
    elif damage == "description":
        weights.with_suffix(".json").write_text("{", encoding="utf-8")
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]
        weights.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b""}[damage])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline", *command])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS[0]}\n"))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    said = capsys.readouterr()
    assert ended.value.code == 3 and said.err.count("\n") == 1 and "checkpoints/full_sft" in said.err
    assert said.err.endswith("; `dvc repro full_sft` trains it anew\n")  # tests/test_damage.py has what DVC has recorded
    assert not Path("out").exists()
