"""The tokenizer: layout of ids, round trips, determinism, files that transformers reads, and refusals."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pipeline.digests import digest
from pipeline.errors import DataError
from pipeline.text.adoption import adopt_tokenizer
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import CONTROL_TOKENS, Tokenizer, load_tokenizer, train_tokenizer

CORPUS = [
    "The weather in Paris is mild today: 18 degrees,\n\n  and it will rain tomorrow. <think>never mind</think>\n",
    "今天北京的天气很好，气温是 23 度。\n\n明天可能会下雨，请带伞。<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 345))\n",
    "The answer is 4096, and the weather is the answer.\n答案是 4096。\n",
] * 20
NO_DEADLINE = settings(deadline=None)  # another process may hold the cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, path, vocab_size=420, split_digits=True)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_ids_are_control_tokens_then_bytes_then_merges(folder: Path, tokenizer: Tokenizer) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [(token["id"], token["content"], token["special"]) for token in definition["added_tokens"]]
    assert [index for index, _, _ in added] == list(range(36))
    assert [special for _, _, special in added] == [True] * 21 + [False] * 15
    # spot checks against the published list
    text_of = {index: text for index, text, _ in added}
    assert [text_of[i] for i in (0, 1, 2, 12, 16, 20)] == [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|audio_pad|>", "<tts_text_bos_single>")
    ]
    assert [text_of[i] for i in range(21, 28)] == [
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|buffer1|>")
    ]
    assert text_of[35] == "<|buffer9|>"
    assert not any(
        token[flag] for token in definition["added_tokens"] for flag in ("lstrip", "rstrip", "single_word", "normalized")
    )
    by_id = sorted(definition["model"]["vocab"].items(), key=lambda item: item[1])
    assert [index for _, index in by_id] == list(range(420)) and tokenizer.vocab_size == 420
    assert by_id[36][0] == "!"
    assert {text for text, _ in by_id[36:292]} == set(pre_tokenizers.ByteLevel.alphabet())
    assert len(definition["model"]["merges"]) == 420 - 36 - 256
    assert definition["normalizer"] is None and definition["post_processor"] is None
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert [tokenizer.control_id(text) for text, _ in CONTROL_TOKENS] == list(range(36))
    with pytest.raises(KeyError):
        tokenizer.control_id("the")


def test_poor_corpus_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    train_tokenizer(["abab"], tmp_path, vocab_size=1000, split_digits=False)
    assert load_tokenizer(tmp_path).vocab_size == 36 + 256 + 2  # ab, abab


def test_digits_are_split_only_when_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train_tokenizer(CORPUS, tmp_path, vocab_size=420, split_digits=False)
    joined = load_tokenizer(tmp_path)
    assert len(tokenizer.encode_text("4096")) == 4
    assert len(joined.encode_text("4096")) < 4
    assert joined.isolates_newlines and tokenizer.isolates_newlines


AWKWARD = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["\n", "\n\n", "  ", "\r\n", "weather", "天气", "4096", "\U0001f642"])),
    max_size=8,
).map("".join)


@NO_DEADLINE
@given(text=AWKWARD)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@NO_DEADLINE
@given(parts=st.lists(st.one_of(AWKWARD, st.sampled_from([text for text, _ in CONTROL_TOKENS])), max_size=6))
def test_text_never_becomes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode_text("".join(parts))
    assert all(i >= 36 for i in ids)
    assert tokenizer.decode(ids) == "".join(parts)


@NO_DEADLINE
@given(before=AWKWARD, after=AWKWARD)
def test_lines_are_encoded_independently(tokenizer: Tokenizer, before: str, after: str) -> None:
    joined = tokenizer.encode_texts([before, "\n", after, f"{before}\n{after}"])
    assert joined[3] == joined[0] + joined[1] + joined[2]
    assert len(joined[1]) == 1


def test_decoding_hides_special_tokens_and_shows_think_and_tool_tags(tokenizer: Tokenizer) -> None:
    ids = [1, 25, *tokenizer.encode_text("天"), 26, 21, 22, 2, 0]
    assert tokenizer.decode(ids) == "<think>天</think><tool_call></tool_call>"
    assert (
        tokenizer.decode(ids, skip_special=False) == "<|im_start|><think>天</think><tool_call></tool_call><|im_end|><|endoftext|>"
    )
    assert tokenizer.decode(tokenizer.encode_text("\U0001f642")[:1]) == "\ufffd"  # four bytes, four tokens


def test_training_depends_on_nothing_but_the_texts(tmp_path: Path) -> None:
    random = Random(0)
    syllables = ["ka", "to", "mi", "re", "su", "天", "地", "7", " ", "\n"]
    texts = ["".join(random.choices(syllables, k=200)) for _ in range(200)]  # many pairs of nearly equal frequency
    script = (
        "import json, sys; from pathlib import Path; from pipeline.text.tokenizer import train_tokenizer\n"
        "train_tokenizer(iter(json.load(sys.stdin)), Path(sys.argv[1]), vocab_size=500, split_digits=True)"
    )
    root = Path(__file__).parents[1]
    for hash_seed, threads, parallel in (("1", "1", "false"), ("2", "4", "true"), ("3", "3", "true")):
        changed = {"PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        command = [sys.executable, "-c", script, str(tmp_path / hash_seed)]
        subprocess.run(command, check=True, cwd=root, env={**os.environ, **changed}, input=json.dumps(texts), text=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert len({(tmp_path / hash_seed / name).read_bytes() for hash_seed in "123"}) == 1
    assert load_tokenizer(tmp_path / "1").vocab_size == 500


def test_transformers_loads_the_folder(folder: Path, tokenizer: Tokenizer) -> None:
    auto = AutoTokenizer.from_pretrained(folder)
    assert (len(auto), auto.pad_token_id, auto.bos_token_id, auto.eos_token_id, auto.unk_token_id) == (420, 0, 1, 2, 0)
    assert set(auto.all_special_ids) == set(range(21))
    assert (auto.padding_side, auto.truncation_side, auto.model_max_length) == ("right", "right", 131072)
    assert auto.chat_template == (folder / "chat_template.jinja").read_text(encoding="utf-8")
    text = "<think>天气 18\n</think><|im_end|>\n"
    ids = auto(text)["input_ids"]
    expected = [25, *tokenizer.encode_text("天气 18\n"), 26, 2, *tokenizer.encode_text("\n")]
    assert ids == expected == auto(text, add_special_tokens=False)["input_ids"]
    assert auto.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids) == "<think>天气 18\n</think>\n"
    assert auto.decode(ids) == text


def test_digest_is_that_of_the_file(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.digest == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def test_adopting_keeps_the_file_and_adds_ours(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "source"
    source.mkdir()
    definition = json.loads((folder / "tokenizer.json").read_bytes())
    definition["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (source / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    adopt_tokenizer(source, tmp_path / "adopted")
    adopted = load_tokenizer(tmp_path / "adopted")
    assert (tmp_path / "adopted" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "adopted" / name).read_bytes() == (folder / name).read_bytes()
    text = "a text of more than four tokens 明天"
    assert adopted.encode_text(text) == tokenizer.encode_text(text)  # a stored truncation does not cut


def test_a_tokenizer_that_was_trained_here_is_pinned_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    """So that `tokenizer.init_from` of a copy trains no model anew."""
    adopt_tokenizer(folder, tmp_path / "adopted")
    assert digest(tmp_path / "adopted") == digest(folder)


def _write(folder: Path, definition: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    return folder


def _spelling_definition() -> dict:
    """A tokenizer without pre-tokenisation whose merges join `<think>` into id 25."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[text for text, _ in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["<think>"] * 9, trainer)
    definition = json.loads(tokenizer.to_str())
    for token, (_, special) in zip(definition["added_tokens"], CONTROL_TOKENS, strict=True):
        token["special"] = special
    return definition


def test_unfit_files_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    good = json.loads((folder / "tokenizer.json").read_bytes())
    shifted = {**good, "added_tokens": [token for token in good["added_tokens"] if token["id"] != 22]}
    flagged = {**good, "added_tokens": [{**token, "special": True} for token in good["added_tokens"]]}
    for definition, reason in (
        ([], "must hold a JSON object, got list"),
        ({"model": 3}, "not a tokenizer that the tokenizers library reads"),
        (shifted, "added token 22 is None"),
        (flagged, "added token 21 is ('<tool_call>', True), must be (text, special) = ('<tool_call>', False)"),
        (_spelling_definition(), "its merges spell <think>"),
        ({**good, "model": {**good["model"], "dropout": 0.1}}, "model.dropout=0.1: must be null"),
        (
            {**good, "added_tokens": [*good["added_tokens"], {**good["added_tokens"][-1], "id": 9999, "content": "<x>"}]},
            "id 9999",
        ),
    ):
        with pytest.raises(DataError) as caught:
            load_tokenizer(_write(tmp_path, definition))
        assert reason in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_bytes(b"{\xff")
    with pytest.raises(DataError, match="not JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        adopt_tokenizer(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")  # a file that opens and gives EIO
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: ") as caught:
        load_tokenizer(tmp_path)
    assert len(caught.value.lines) == 1


def _joining_definition() -> dict[str, Any]:
    """GPT-2's way: two newlines are one token, unless text follows them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[text for text, _ in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["\n\n", "a\n\n"] * 9, trainer)
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    for token, (_, special) in zip(definition["added_tokens"], CONTROL_TOKENS, strict=True):
        token["special"] = special
    return definition


def test_a_tokenizer_with_which_chats_lose_their_spans_is_not_adopted(folder: Path, tmp_path: Path) -> None:
    good = json.loads((folder / "tokenizer.json").read_bytes())
    prefixed = json.loads(json.dumps(good).replace('"add_prefix_space": false', '"add_prefix_space": true'))
    stripping = {**good, "added_tokens": [token | {"rstrip": token["id"] == 2} for token in good["added_tokens"]]}
    for definition, reason in (
        ({**good, "normalizer": {"type": "Lowercase"}}, "do not decode to its text"),
        (prefixed, "do not decode to its text"),
        (stripping, "other ids as a whole than span by span"),
        (_joining_definition(), "joins its first token with the generation prompt"),
    ):
        load_tokenizer(_write(tmp_path, definition))  # ids and control tokens are as they must be
        with pytest.raises(DataError) as caught:
            adopt_tokenizer(tmp_path, tmp_path / "out")
        assert reason in str(caught.value) and len(caught.value.lines) == 1 and not (tmp_path / "out").exists()
    adopt_tokenizer(_write(tmp_path, good), tmp_path / "out")


def test_ten_system_prompts() -> None:
    chinese = [prompt for prompt in SYSTEM_PROMPTS if any("\u4e00" <= char <= "\u9fff" for char in prompt)]
    english = [prompt for prompt in SYSTEM_PROMPTS if prompt.isascii()]
    assert len(set(SYSTEM_PROMPTS)) == 10 and len(chinese) == len(english) == 5
    assert all(prompt == prompt.strip() and "\n" not in prompt for prompt in SYSTEM_PROMPTS)
    assert [sum("MiniMind" in prompt for prompt in group) for group in (chinese, english)] == [2, 2]
