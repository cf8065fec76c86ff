"""Taking over a tokenizer that was made elsewhere, if chats keep their spans with it."""

from pathlib import Path

from pipeline.errors import DataError
from pipeline.text.chat import ChatEncoder, Message, render_chat
from pipeline.text.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, write_files

_CALL = {"name": "f", "arguments": {"x": 1}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
_CHAT: list[Message] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello,\n\nwho is it?"},
    {"role": "assistant", "content": "It is me.\n\n1. Yes\n"},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "", "reasoning_content": "I call f.", "tool_calls": [_CALL, _CALL]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "{}"},
    {"role": "assistant", "content": "好的。", "reasoning_content": "It is 1."},
]
"""Every span that the template has: turns with thinking and without, calls, results."""


def adopt_tokenizer(source: Path, folder: Path) -> None:
    """Takes over `source`/tokenizer.json unchanged, with this project's configuration and chat template beside it.

    Raises:
        DataError: `source` holds no usable tokenizer.json, or chats cannot be put together from its ids as from their text.
    """
    path = source / TOKENIZER_FILE
    tokenizer = load_tokenizer(source)
    if fault := _template_fault(tokenizer):
        raise DataError(f"{path}: {fault}; take another tokenizer, or train one (tokenizer.init_from: null)")
    write_files(folder, path.read_bytes())


def _template_fault(tokenizer: Tokenizer) -> str | None:
    """Which of the chat format's spans cannot be had from ids alone; None where all can."""
    encoder = ChatEncoder(tokenizer)
    text, ids = render_chat(_CHAT, _TOOLS), encoder.encode(_CHAT, _TOOLS).ids
    if tokenizer.decode_all(ids) != text:
        return "a chat's ids do not decode to its text (a normaliser, a prefix space)"
    if tokenizer.encode_rendered(text) != ids:
        return "a chat's text has other ids as a whole than span by span (added tokens that strip or need whole words)"
    for place, message in enumerate(_CHAT):
        if message["role"] == "assistant":
            prompt = encoder.encode_prompt(_CHAT[:place], _TOOLS, open_thinking="reasoning_content" in message)
            if ids[: len(prompt)] != prompt:
                return "an answer joins its first token with the generation prompt, so that no prompt is what was trained on"
    return None
