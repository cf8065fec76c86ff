"""The chat format: messages become text and token ids here.

One renderer writes a conversation as pieces, control tokens and text between them. Joined they are the text that
chat_template.jinja gives; encoded one by one they are the token ids. So the two cannot differ, and what is a control token is
decided by who wrote it: the template, or in assistant turns the four think and tool-call tags; never a user or a tool.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.text.tokenizer import CONTROL_TOKENS, Tokenizer
from pipeline.text.turns import split_thinking

Message = Mapping[str, Any]
"""role, content, and for assistants optionally reasoning_content and tool_calls (a list of {name, arguments})."""

_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_HEADER = "<|im_start|>assistant\n"
_EMPTY_THINK = "<think>\n\n</think>\n\n"

_TEMPLATE_TOKENS = re.compile("(" + "|".join(re.escape(text) for text, _ in CONTROL_TOKENS) + ")")
_ASSISTANT_TOKENS = re.compile("(</?think>|</?tool_call>)")


class _Piece(NamedTuple):
    text: str
    control: bool
    trained: bool


class _Writer:
    """Collects pieces; neighbouring text is one piece, because that is how a tokenizer sees it."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []

    def text(self, text: str, *, trained: bool = False) -> None:
        """Text of people and tools, in which no control token counts."""
        if not text:
            return
        if self.pieces and not self.pieces[-1].control:
            text = self.pieces.pop().text + text
        self.pieces.append(_Piece(text, False, trained))

    def template(self, text: str, *, trained: bool = False) -> None:
        """Text of the template, in which every control token counts."""
        self._mixed(text, _TEMPLATE_TOKENS, trained)

    def assistant(self, text: str) -> None:
        """What an assistant turn says, in which think and tool-call tags count."""
        self._mixed(text, _ASSISTANT_TOKENS, True)

    def _mixed(self, text: str, control: re.Pattern[str], trained: bool) -> None:
        for index, part in enumerate(control.split(text)):
            if index % 2:
                self.pieces.append(_Piece(part, True, trained))
            else:
                self.text(part, trained=trained)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _assistant_turn(message: Message, *, keep_empty_think: bool) -> str:
    content, reasoning = _string(message.get("content")), _string(message.get("reasoning_content")).strip("\n")
    try:
        reasoning, content = split_thinking(content, reasoning)
    except ValueError:  # the data sets refuse it; nothing of it is lost here
        pass
    think = f"<think>\n{reasoning}\n</think>\n\n" if reasoning or keep_empty_think else ""
    calls = [_tool_call(entry.get("function") or entry) for entry in message.get("tool_calls") or []]
    # content that the next line strips to nothing still counts as present here, as in MiniMind's template
    separator = "\n" if content and calls else ""
    return think + content.lstrip("\n") + separator + "\n".join(calls)


def _tool_call(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _write_turns(out: _Writer, messages: Sequence[Message], *, keep_empty_think: bool = True) -> None:
    roles = [message["role"] for message in messages]
    for message, previous, role, following in zip(messages, [None, *roles], roles, [*roles[1:], None], strict=False):
        if role in ("system", "user"):
            out.template(f"<|im_start|>{role}\n")
            out.text(_string(message.get("content")))
            out.template("<|im_end|>\n")
        elif role == "assistant":
            out.template(_HEADER)
            out.assistant(_assistant_turn(message, keep_empty_think=keep_empty_think))
            out.template("<|im_end|>\n", trained=True)
        elif role == "tool":  # neighbouring tool messages share one user turn
            if previous != "tool":
                out.template("<|im_start|>user")
            out.template("\n<tool_response>\n")
            out.text(_string(message.get("content")))
            out.template("\n</tool_response>")
            if following != "tool":
                out.template("<|im_end|>\n")


def _write_generation_prompt(out: _Writer, open_thinking: bool) -> None:
    # only True itself opens the block, as in MiniMind's template
    out.template(_HEADER + ("<think>\n" if open_thinking is True else _EMPTY_THINK))


def _write_chat(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, keep_empty_think: bool = True
) -> _Writer:
    if not messages:
        raise ValueError("messages is empty: a conversation has at least one")
    out = _Writer()
    if tools:
        out.template("<|im_start|>system\n")
        if messages[0]["role"] == "system":
            out.text(_string(messages[0].get("content")) + "\n\n")
            messages = messages[1:]
        out.template(_BEFORE_TOOLS)
        for tool in tools:
            out.text("\n" + json.dumps(tool, ensure_ascii=False))
        out.template(_AFTER_TOOLS + "<|im_end|>\n")
    _write_turns(out, messages, keep_empty_think=keep_empty_think)
    return out


def render_chat(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    open_thinking: bool = False,
) -> str:
    """Text of a conversation, byte for byte what chat_template.jinja gives.

    Content that is not a string counts as empty, messages of unknown roles are left out, and think tags in an assistant's content
    that cannot be taken apart are written as they stand; the data sets refuse all three.

    Args:
        messages: At least one message.
        tools: OpenAI function objects; an empty list counts as none.
        add_generation_prompt: Whether to end with the opening of an assistant turn.
        open_thinking: Whether that opening leaves the think block open (True) or holds an empty one.

    Raises:
        ValueError: No message.
    """
    out = _write_chat(messages, tools)
    if add_generation_prompt:
        _write_generation_prompt(out, open_thinking)
    return "".join(piece.text for piece in out.pieces)


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as token ids.

    Attributes:
        ids: T token ids.
        trained: T flags, True for what assistants wrote: everything after `<|im_start|>assistant` and its newline, up to and
            including `<|im_end|>` and the newline after it.
        empty_thinks: Spans [start, end) of the empty think blocks that open an assistant turn. Without these spans `ids` are
            exactly the ids of the text without these blocks.
    """

    ids: list[int]
    trained: list[bool]
    empty_thinks: list[tuple[int, int]]


class ChatEncoder:
    """Conversations to token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        out = _Writer()
        out.template(_HEADER)
        self._header = self._encode(out)[0]
        out.template(_EMPTY_THINK)
        self._opening = self._encode(out)[0]
        thinking = _Writer()
        _write_generation_prompt(thinking, open_thinking=True)
        self._open_thinking = self._encode(thinking)[0]
        self._blank_thinking = tokenizer.encode_text("\n\n")

    def encode(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> EncodedChat:
        """A whole conversation, without generation prompt.

        With an adopted tokenizer that joins newlines to other text, a block may not be removable exactly (an answer that begins
        with white space). This is checked, and such a conversation has no `empty_thinks`.
        """
        return self.encode_all([(messages, tools)])[0]

    def encode_all(self, chats: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]]) -> list[EncodedChat]:
        """`encode` of each (messages, tools), faster: texts that many of them share are tokenised once."""
        encoded = []
        written = self._encode_all([_write_chat(messages, tools) for messages, tools in chats])
        for (messages, tools), (ids, trained) in zip(chats, written, strict=True):
            spans = self._empty_thinks(ids)
            if spans and not self._tokenizer.isolates_newlines:
                kept = [i for index, i in enumerate(ids) if not any(start <= index < end for start, end in spans)]
                if kept != self._encode(_write_chat(messages, tools, keep_empty_think=False))[0]:
                    spans = []
            encoded.append(EncodedChat(ids, trained, spans))
        return encoded

    def judged(self, ids: Sequence[int], trained: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """A conversation as reward models are trained on it and asked: every think block as empty as a generation prompt's.

        So the score is of what is answered: thinking has a reward of its own, and pairs may have none. Exact with any tokenizer,
        because tags part the text around them.
        """
        opening, closing = self._tokenizer.control_id("<think>"), self._tokenizer.control_id("</think>")
        kept: list[int] = []
        flags: list[bool] = []
        inside = False
        for i, flag in zip(ids, trained, strict=True):
            inside = inside and i not in (closing, self._tokenizer.eos_id)
            if not inside:
                inside = i == opening
                added = [i, *self._blank_thinking] if inside else [i]
                kept += added
                flags += [flag] * len(added)
        return kept, flags

    def written(self, chat: EncodedChat) -> list[bool]:
        """Which trained ids a model must really write, T flags: those that no context gives it.

        Given are what a generation prompt holds behind the header, an empty think block or the opening of one, and the newline
        behind `<|im_end|>`, where sampling has ended.
        """
        written = [
            flag and before != self._tokenizer.eos_id for before, flag in zip([None, *chat.ids], chat.trained, strict=False)
        ]
        for start in self._headers(chat.ids):
            given = next((prompt for prompt in (self._opening, self._open_thinking) if _starts(chat.ids, start, prompt)), [])
            written[start : start + len(given)] = [False] * len(given)
        return written

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, open_thinking: bool = False
    ) -> list[int]:
        """Ids of a conversation that ends with the generation prompt."""
        out = _write_chat(messages, tools)
        _write_generation_prompt(out, open_thinking)
        return self._encode(out)[0]

    def encode_system(self, content: str) -> list[int]:
        """Ids of a whole system message; put before an encoded chat without tools, they give the chat that begins with it."""
        out = _Writer()
        _write_turns(out, [{"role": "system", "content": content}])
        return self._encode(out)[0]

    def encode_tool_results(self, results: Sequence[str], *, open_thinking: bool = False) -> list[int]:
        """Ids that continue a context after a sampled `<|im_end|>`.

        A newline, one user turn with all the tool results in order, and the generation prompt of the next assistant turn.
        """
        out = _Writer()
        out.template("\n")
        _write_turns(out, [{"role": "tool", "content": result} for result in results])
        _write_generation_prompt(out, open_thinking)
        return self._encode(out)[0]

    def _encode(self, out: _Writer) -> tuple[list[int], list[bool]]:
        return self._encode_all([out])[0]

    def _encode_all(self, outs: Sequence[_Writer]) -> list[tuple[list[int], list[bool]]]:
        texts = list(dict.fromkeys(piece.text for out in outs for piece in out.pieces if not piece.control))
        runs = dict(zip(texts, self._tokenizer.encode_texts(texts), strict=True))
        encoded = []
        for out in outs:
            ids: list[int] = []
            trained: list[bool] = []
            for piece in out.pieces:
                ids += [self._tokenizer.control_id(piece.text)] if piece.control else runs[piece.text]
                trained += [piece.trained] * (len(ids) - len(trained))
            encoded.append((ids, trained))
        return encoded

    def _headers(self, ids: Sequence[int]) -> Iterator[int]:
        return (place for place, i in enumerate(ids) if i == self._header[0] and _starts(ids, place, self._header))

    def _empty_thinks(self, ids: list[int]) -> list[tuple[int, int]]:
        header, opening = len(self._header), len(self._opening)
        return [(start + header, start + opening) for start in self._headers(ids) if _starts(ids, start, self._opening)]


def _starts(ids: Sequence[int], place: int, prefix: list[int]) -> bool:
    return list(ids[place : place + len(prefix)]) == prefix
