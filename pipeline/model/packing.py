"""Rows of ids as one sequence without padding, in which rows that go on from the same prompt share it.

A group of G completions costs the work of one prompt and G completions: every layer but attention sees real tokens only.
Attention runs in blocks of rows of similar length, over each row's prompt and the row itself.

Dimensions: N tokens, R prompts, P positions of the longest prompt, B rows, L ids of the longest row, H heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 16
"""Rows whose attention is padded to one length: more would pad more, fewer would leave a kernel too little to do."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Neighbouring rows that attend together; l is the longest of them and p their longest prompt.

    Attributes:
        prompts: [rows] the prompt that each row goes on from.
        slots: [tokens] where each token stands in the padded [rows * l].
        mask: [rows, 1, l, p + l] bool, True where a token sees a position of its prompt or its row.
    """

    prompts: Tensor
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The distinct prompts one after another, then the rows; `pack` makes it.

    Attributes:
        input_ids: [1, N].
        positions: [1, N], each token's position behind the start of its prompt.
        states: [B, L + 1] which of the N tokens ends row b's first j ids, the prompt's last one for j = 0; 0 where a row has
            fewer than j ids.
        longest: most positions of a prompt and a row together.
    """

    input_ids: Tensor
    positions: Tensor
    states: Tensor
    longest: int
    _prompt_slots: Tensor
    _prompts_shape: tuple[int, int]
    _blocks: tuple[_Block, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention of every token to its own row and its prompt; queries, keys, values and result are [1, N, H, D]."""
        sizes = [len(self._prompt_slots), *(len(block.slots) for block in self._blocks)]
        (own_q, *rows_q), (own_k, *rows_k), (own_v, *rows_v) = (tensor[0].split(sizes) for tensor in (q, k, v))
        prompt_q, prompt_k, prompt_v = (_pad(own, self._prompt_slots, self._prompts_shape) for own in (own_q, own_k, own_v))
        mixed = [_attention(prompt_q, prompt_k, prompt_v, None, dropout).index_select(0, self._prompt_slots)]
        for block, row_q, row_k, row_v in zip(self._blocks, rows_q, rows_k, rows_v, strict=True):
            rows, _, length, seen = block.mask.shape
            padded_q, padded_k, padded_v = (_pad(own, block.slots, (rows, length)) for own in (row_q, row_k, row_v))
            all_k, all_v = (
                torch.cat((prompt[:, : seen - length].index_select(0, block.prompts), own), dim=1)
                for prompt, own in ((prompt_k, padded_k), (prompt_v, padded_v))
            )
            mixed.append(_attention(padded_q, all_k, all_v, block.mask, dropout).index_select(0, block.slots))
        return torch.cat(mixed)[None]


def pack(prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], device: torch.device) -> Packing:
    """Packs the ids `prompts[b] + rows[b]` of B rows.

    Args:
        prompts: one per row, none empty; equal ones are read once.
        rows: the ids behind each prompt, possibly none.
        device: where the tensors are to be.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompt_of = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    distinct = list(numbers)
    prompt_lengths = torch.tensor([len(prompt) for prompt in distinct])
    ends = prompt_lengths.cumsum(0)
    lengths = torch.tensor([len(row) for row in rows])
    states = torch.zeros(len(rows), int(lengths.max()) + 1, dtype=torch.int64)
    states[:, 0] = ends[torch.tensor(prompt_of)] - 1
    ids = [torch.tensor(prompt) for prompt in distinct]
    positions = [torch.arange(len(prompt)) for prompt in distinct]
    blocks = []
    end = int(ends[-1])
    order = [row for row in lengths.argsort(stable=True).tolist() if lengths[row]]
    for start in range(0, len(order), BLOCK_ROWS):
        members = order[start : start + BLOCK_ROWS]
        for row in members:
            length = len(rows[row])
            ids.append(torch.tensor(rows[row]))
            positions.append(len(prompts[row]) + torch.arange(length))
            states[row, 1 : length + 1] = end + torch.arange(length)
            end += length
        own = torch.tensor([prompt_of[row] for row in members])
        blocks.append(_block(own, prompt_lengths[own], lengths[members], device))
    return Packing(
        torch.cat(ids)[None].to(device),
        torch.cat(positions)[None].to(device),
        states.to(device),
        1 + max(int(part.max()) for part in positions),
        _slots(prompt_lengths).to(device),
        (len(distinct), int(prompt_lengths.max())),
        tuple(blocks),
    )


def _block(prompts: Tensor, prompt_lengths: Tensor, lengths: Tensor, device: torch.device) -> _Block:
    longest_prompt, longest = int(prompt_lengths.max()), int(lengths.max())
    of_prompt = (torch.arange(longest_prompt) < prompt_lengths[:, None])[:, None].expand(-1, longest, -1)
    of_row = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(lengths), -1, -1)
    mask = torch.cat((of_prompt, of_row), dim=2)[:, None]
    return _Block(prompts.to(device), _slots(lengths).to(device), mask.to(device))


def _slots(lengths: Tensor) -> Tensor:
    """Where the tokens of sequences of these lengths stand when each is right-padded to the longest and all are flattened."""
    return (torch.arange(int(lengths.max())) < lengths[:, None]).flatten().nonzero()[:, 0]


def _pad(tokens: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    """[tokens, H, D] at their `slots` of a zero tensor [*shape, H, D]."""
    padded = tokens.new_zeros(shape[0] * shape[1], *tokens.shape[1:])
    return padded.index_copy(0, slots, tokens).view(*shape, *tokens.shape[1:])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention of padded [rows, positions, H, D], causal where there is no mask; the result [rows * positions, H, D]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=mask is None)
    return mixed.transpose(1, 2).flatten(0, 1)
