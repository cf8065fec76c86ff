"""Byte-level BPE with 36 control tokens at ids 0-35, and the Hugging Face files that hold it.

Text that people or tools wrote is encoded by a second tokenizer, made from the same file without its added tokens: a literal
`<|im_end|>` in a message stays the characters it consists of. (`split_special_tokens` would hide only the 21 special ones.)
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipeline.errors import DataError

_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <|audio_start|> <|audio_end|> "
    "<|audio_pad|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>"
).split()
_VISIBLE = [
    *"<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>".split(),
    *(f"<|buffer{number}|>" for number in range(1, 10)),
]
CONTROL_TOKENS: tuple[tuple[str, bool], ...] = tuple([(t, True) for t in _SPECIAL] + [(t, False) for t in _VISIBLE])
"""(text, special) in id order. Decoding leaves special ones out; the others stay visible."""

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE = Path(__file__).with_name(TEMPLATE_FILE).read_bytes()

_NEWLINE_SPLIT = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
_HUGGING_FACE_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "model_max_length": 131072,
    "clean_up_tokenization_spaces": False,
    "spaces_between_special_tokens": False,
    "legacy": True,
    "additional_special_tokens": _SPECIAL[1:],
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: Number of ids, control tokens included.
        digest: SHA-256 of tokenizer.json, in hex.
        isolates_newlines: True when every newline is a token of its own, so that lines are encoded independently.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2

    def __init__(self, path: Path) -> None:
        """Reads a tokenizer.json; raises DataError when it is unusable, draws at random, or numbers its tokens unlike ours."""
        definition = _read(path)
        self._full = _build(definition, path)
        self._plain = _build({**definition, "added_tokens": []}, path)
        _check_control_tokens(definition, self._plain, path)
        self._control_ids = {text: index for index, (text, _) in enumerate(CONTROL_TOKENS)}
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        _check_ids(definition, self._full, path)
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        splitters = (definition.get("pre_tokenizer") or {}).get("pretokenizers") or [None]
        self.isolates_newlines = definition.get("normalizer") is None and splitters[0] == _NEWLINE_SPLIT

    def control_id(self, token: str) -> int:
        """Id of a control token; KeyError for any other text."""
        return self._control_ids[token]

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that people or tools wrote: never a control token."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each text, in one call."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered text in which control tokens count, as other programs read it; never of what people wrote."""
        ids: list[int] = self._full.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD. Think and tool tags stay visible either way."""
        return self._full.decode(ids, skip_special_tokens=skip_special)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of the ids with every control token visible, for tables that people read."""
        return self.decode(ids, skip_special=False)


def train_tokenizer(texts: Iterable[str], folder: Path, *, vocab_size: int, split_digits: bool) -> None:
    """Trains byte-level BPE on the texts and writes its files to `folder`.

    Ids are 36 control tokens, 256 bytes, then merges. Newlines are always tokens of their own: a text is encoded line by line,
    so encoded chats can be spliced at line ends. The result depends on the texts alone, not on threads or hash seeds.

    Args:
        texts: The corpus.
        folder: Made when absent; receives tokenizer.json, tokenizer_config.json and chat_template.jinja.
        vocab_size: Number of ids, at least 292. A corpus with fewer merges gives a smaller vocabulary.
        split_digits: True makes each digit a token of its own.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    splitters: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split("\n", "isolated")]
    if split_digits:
        splitters.append(pre_tokenizers.Digits(individual_digits=True))
    splitters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[text for text, _ in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    definition = json.loads(tokenizer.to_str())
    for token, (_, special) in zip(definition["added_tokens"], CONTROL_TOKENS, strict=True):
        token["special"] = special  # the trainer marks all of them
    write_files(folder, _to_json(definition))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that `train_tokenizer` or `adoption.adopt_tokenizer` wrote; DataError when it does not fit."""
    return Tokenizer(folder / TOKENIZER_FILE)


def write_files(folder: Path, serialized: bytes) -> None:
    """A tokenizer's JSON, with this project's configuration and chat template beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_bytes(serialized)
    (folder / CONFIG_FILE).write_bytes(_to_json(_HUGGING_FACE_CONFIG))
    (folder / TEMPLATE_FILE).write_bytes(CHAT_TEMPLATE)


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; `dvc repro tokenizer` makes data/tokenizer, tokenizer.init_from names another")
    try:
        definition = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(definition, dict):
        raise DataError(f"{path}: must hold a JSON object, got {type(definition).__name__}")
    return definition


def _build(definition: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_control_tokens(definition: dict[str, Any], plain: tokenizers.Tokenizer, path: Path) -> None:
    present = {token["id"]: (token["content"], token["special"]) for token in definition.get("added_tokens", [])}
    for index, expected in enumerate(CONTROL_TOKENS):
        if present.get(index) != expected:
            raise DataError(
                f"{path}: added token {index} is {present.get(index)}, must be (text, special) = {expected}; "
                "take a tokenizer with MiniMind's 36 added tokens, or train one (tokenizer.init_from: null)"
            )
        if any(i < len(CONTROL_TOKENS) for i in plain.encode(expected[0], add_special_tokens=False).ids):
            raise DataError(f"{path}: its merges spell {expected[0]}, so text could not be told from that control token")


def _check_ids(definition: dict[str, Any], full: tokenizers.Tokenizer, path: Path) -> None:
    """The same text must always have the same ids, and each of them a row of the embedding."""
    if definition["model"].get("dropout"):
        raise DataError(f"{path}: model.dropout={definition['model']['dropout']:g}: must be null, ids would be drawn at random")
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]} | full.get_vocab(with_added_tokens=True)
    stated = max((token["id"], token["content"]) for token in definition["added_tokens"])
    largest, token = max(stated, max((number, text) for text, number in ids.items()))
    if largest >= len(ids):
        raise DataError(f"{path}: token {token!r} has id {largest}; its {len(ids)} tokens must have the ids 0 to {len(ids) - 1}")
