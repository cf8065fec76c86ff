"""Talking to a model and taking it elsewhere, on tiny models."""

import io
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import CPU, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import __main__ as command_line
from pipeline.checkpoint.files import model_meta, save_model
from pipeline.checkpoint.lora import lora_meta
from pipeline.commands.chat import Conversation, chosen_tools, converse
from pipeline.commands.models import open_model
from pipeline.errors import DataError
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.registry import TOOL_NAMES, Tool, tool_schema
from pipeline.tools.toolbox import Toolbox


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A folder with a tokenizer, a chat model, one with experts and adapters, as the lineage leaves them."""
    tokenizer = make_tokenizer(tmp_path / "data" / "tokenizer")
    model = make_model(tokenizer, sharpness=4.0, max_position_embeddings=512)
    save_model(tmp_path / "checkpoints/full_sft.pth", model.state_dict(), model_meta("causal_lm", model.config, tokenizer.digest))
    experts = make_model(tokenizer, sharpness=4.0, use_moe=True, max_position_embeddings=512)
    save_model(tmp_path / "checkpoints/grpo.pth", experts.state_dict(), model_meta("causal_lm", experts.config, tokenizer.digest))
    add_lora(model, rank=2, alpha=4.0, targets=["q_proj"], seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.add_(0.1)
    meta = lora_meta(model.config, tokenizer.digest, rank=2, alpha=4.0, targets=["q_proj"])
    save_model(tmp_path / "checkpoints/lora.pth", lora_state_dict(model), meta)
    monkeypatch.chdir(tmp_path)
    return tokenizer


@pytest.mark.parametrize("name", ["full_sft", "grpo", "lora"])
def test_an_exported_model_gives_the_same_logits(repository: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "export", name, "out/model"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert not ended.value.code
    ids = torch.tensor([[1, 50, 60, 70, 80]])
    with torch.no_grad():
        ours = open_model(name, repository)(ids)
        theirs = AutoModelForCausalLM.from_pretrained("out/model")(ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    text = "red blue user"
    assert AutoTokenizer.from_pretrained("out/model")(text)["input_ids"] == list(repository.encode_text(text))


def test_a_folder_that_holds_something_is_left_alone(
    repository: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    (Path("out") / "mine").write_text("x", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["pipeline", "export", "full_sft", "out"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2 and "exists already" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["mine"]


def test_unknown_models_are_named(repository: Tokenizer) -> None:
    with pytest.raises(DataError, match="known are pretrain, full_sft"):
        open_model("reward", repository)
    with pytest.raises(DataError, match="no such file"):
        open_model("dpo", repository)


def test_a_conversation_remembers_what_fits(repository: Tokenizer) -> None:
    conversation = Conversation(open_model("full_sft", repository), repository, CPU, temperature=1.0, greedy=True)
    conversation.messages = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    lines = list(converse(conversation, ["red house\n", "\n"]))
    said = [(message["role"], message["content"]) for message in conversation.messages]
    assert said == [("user", "red"), ("assistant", "blue"), ("user", "red house"), ("assistant", lines[-1])]
    alone = Conversation(open_model("full_sft", repository), repository, CPU, temperature=1.0, greedy=True)
    assert list(alone.ask("red house")) != lines  # the answer is to the whole conversation

    long = "red " * 400
    conversation.messages = [{"role": "user", "content": long}, {"role": "assistant", "content": "blue"}]
    list(conversation.ask("red house"))
    assert [message["content"] for message in conversation.messages][0] == "red house"  # the oldest exchange is forgotten
    (line,) = conversation.ask("red " * 4000)
    assert "longer than the model's window" in line and conversation.messages == []


def test_chat_reads_lines(repository: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[1]
    for name in ("params.yaml", "data/world.yaml"):
        Path(name).write_bytes((root / name).read_bytes())
    monkeypatch.setattr(sys, "argv", ["pipeline", "chat", "full_sft", "--tools", "--thinking", "--top-p", "0.9"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\nred\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    said = capsys.readouterr().out.splitlines()
    assert not ended.value.code and said[0].startswith("(line 1 was not asked: it is not utf-8 text") and len(said) > 1


def test_chat_names_a_line_that_is_no_text_and_goes_on(repository: Tokenizer) -> None:
    conversation = Conversation(open_model("full_sft", repository), repository, CPU, temperature=1.0, greedy=True)
    stdin = io.TextIOWrapper(io.BytesIO(b"r\xe9d\nred\n"), encoding="utf-8", errors="surrogateescape")
    lines = list(converse(conversation, stdin))
    assert lines[0].startswith("(line 1 was not asked") and "'r\\udce9d'" in lines[0] and len(lines) > 1
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == ["red"]


def test_chat_offers_the_tools_that_are_named(repository: Tokenizer) -> None:
    schema = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    toolbox = Toolbox(own={"look_up": Tool(schema, lambda arguments: "found")})
    assert chosen_tools(toolbox, [], every=True) == [*TOOL_NAMES, "look_up"]
    assert chosen_tools(toolbox, ["look_up", "look_up"], every=False) == ["look_up"]
    with pytest.raises(DataError, match="--tool look: no such tool; known are calculate_math, .*look_up"):
        chosen_tools(toolbox, ["look"], every=False)

    chat = Conversation(
        open_model("full_sft", repository), repository, CPU, 1.0, offered=["look_up", "unit_converter"], toolbox=toolbox
    )
    assert chat.schemas("Convert 5 km") == [schema, tool_schema("unit_converter", "en")]
    assert chat.schemas("换算5公里") == [schema, tool_schema("unit_converter", "zh")]
    chat.messages = [{"role": "user", "content": "换算5公里"}, {"role": "assistant", "content": "8"}]
    assert chat.schemas("and 5 km?") == [schema, tool_schema("unit_converter", "zh")]  # one block for the whole conversation


def test_check_says_what_dvc_would_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[1]
    text = (root / "profiles" / "micro.yaml").read_text(encoding="utf-8")
    for content, code in ((text, 0), (text.replace("  rank: 16", "  ranks: 16"), 2)):
        (tmp_path / "params.yaml").write_text(content, encoding="utf-8")
        for name in ("data/world.yaml",):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes((root / name).read_bytes())
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["pipeline", "check"])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert (ended.value.code or 0) == code
    said = capsys.readouterr()
    assert "params.yaml is valid" in said.out and "did you mean `rank`?" in said.err
