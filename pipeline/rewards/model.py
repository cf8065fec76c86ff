"""Scores of a reward model: the one trained here, or an external one from Hugging Face with MiniMind's calling convention."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pipeline.checkpoint.files import refuse_broken
from pipeline.errors import DataError
from pipeline.model.heads import RewardModel
from pipeline.text.chat import ChatEncoder

Messages = Sequence[Mapping[str, Any]]


class Reply(NamedTuple):
    """What is scored: an answer, without its thinking, to the messages before it, in which `tools` were offered."""

    messages: Messages
    answer: str
    tools: Sequence[Mapping[str, Any]] | None = None


class RewardScorer(Protocol):
    """Scores answers to conversations, higher is better. The scale is the model's own; rewards clamp it to +- `model_clip`."""

    def score(self, items: Sequence[Reply]) -> list[float]:
        """One score per reply."""
        ...


class TrainedRewardModel:
    """The Bradley-Terry model of stage `reward`, standardised: (raw score - offset) / scale."""

    def __init__(
        self, model: RewardModel, encoder: ChatEncoder, *, pad_id: int, offset: float, scale: float, batch_size: int, max_len: int
    ) -> None:
        """Takes the model as it is, on its device.

        Args:
            pad_id: token id that fills rows on the right.
            offset: raw score of an average answer.
            scale: standard deviation of raw scores, > 0.
            batch_size: conversations per forward pass.
            max_len: tokens per conversation; longer ones lose their beginning.
        """
        self.model = model.eval()
        self.encoder = encoder
        self.pad_id, self.offset, self.scale = pad_id, offset, scale
        self.batch_size, self.max_len = batch_size, max_len

    @torch.no_grad()
    def score(self, items: Sequence[Reply]) -> list[float]:
        """Scores of the ids that a pair with this answer has, read where they are in training; rows of like length share a batch.

        Equal conversations are scored once: their scores are equal bit for bit.
        """
        rows = self._encode(items)
        order = sorted(dict.fromkeys(rows), key=len)
        scores = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for row, raw in zip(batch, self._raw_scores(batch), strict=True):
                scores[row] = (raw - self.offset) / self.scale
        return [scores[row] for row in rows]

    def _encode(self, items: Sequence[Reply]) -> list[tuple[int, ...]]:
        rows = []
        for chat in self.encoder.encode_all(
            [([*item.messages, {"role": "assistant", "content": item.answer}], item.tools) for item in items]
        ):
            ids, trained = self.encoder.judged(chat.ids, chat.trained)
            # Labels are inputs shifted by one: the last trained label stands at the position before its own token.
            end = max(position for position, flag in enumerate(trained) if flag)
            rows.append(tuple(ids[:end][-self.max_len :]))
        return rows

    def _raw_scores(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        device = next(self.model.parameters()).device
        input_ids = torch.full((len(rows), max(map(len, rows))), self.pad_id)
        for place, row in enumerate(rows):
            input_ids[place, : len(row)] = torch.tensor(row)
        last_positions = torch.tensor([len(row) - 1 for row in rows])
        scores: list[float] = self.model(input_ids.to(device), last_positions.to(device)).float().tolist()
        return scores


class ExternalRewardModel:
    """A Hugging Face reward model with `get_score(tokenizer, messages)`, such as InternLM2-Reward, called as MiniMind does.

    Its folder holds Python code that is executed: only point `reward.external` at a model you trust.
    """

    def __init__(self, path: Path, *, device: torch.device) -> None:
        """Loads from a local folder, never from the network.

        Raises:
            DataError: the folder is missing or cannot be loaded, its model has no `get_score`, or weights that are not finite.
        """
        from transformers import AutoModel, AutoTokenizer  # the one user here, and slow to import

        if not (path / "config.json").is_file():
            raise DataError(
                f"reward.external={str(path)!r}: must be a folder with a Hugging Face reward model (no config.json there)"
            )
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        self._path = path
        with self._boundary("cannot be loaded"):
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True, local_files_only=True)
            model = AutoModel.from_pretrained(path, trust_remote_code=True, local_files_only=True, dtype=dtype)
        if not hasattr(model, "get_score"):
            raise DataError(f"reward.external={str(path)!r}: {type(model).__name__} has no get_score(tokenizer, messages)")
        refuse_broken(dict(model.named_parameters()), path)
        self.model = model.to(device).eval()

    @torch.no_grad()
    def score(self, items: Sequence[Reply]) -> list[float]:
        """One call per answer; the model's own scale.

        Raises:
            DataError: the model's code fails, or what it gives is no number.
        """
        scores = []
        for item in items:
            question = {"role": "user", "content": flat_question(item.messages)}
            with self._boundary("get_score must return a number"):
                scores.append(
                    float(self.model.get_score(self.tokenizer, [question, {"role": "assistant", "content": item.answer}]))
                )
        return scores

    @contextmanager
    def _boundary(self, fault: str) -> Iterator[None]:
        """To code that comes with the model: what it raises is one line; that memory ran out is ours to tell."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise DataError(f"reward.external={str(self._path)!r}: {fault} ({said})") from error


def flat_question(messages: Messages) -> str:
    """A conversation as one user text, in MiniMind's words: the history as `role: content` lines, then the last message."""
    history = "\n".join(f"{message['role']}: {message['content']}" for message in messages[:-1])
    question = str(messages[-1]["content"])
    return f"{history}\n以上是对话历史。我的新问题是：\n{question}" if history else question
