"""Rows in slots of equal capacity, decoded by the same operations at the same addresses at every step.

Dimensions: N slots, S capacity, K key/value heads, D head width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import CacheForward, KVCache, Span
from pipeline.rollout.rows import Row
from pipeline.rollout.sampling import draw_flagged, uniforms


class StaticBatch:
    """All that a decoding step reads and writes, allocated once; on a GPU the step is a CUDA graph.

    A slot that nobody is in decodes on for nothing: it goes to position S, which nothing attends to, and stays there.

    Attributes:
        model: what computes.
    """

    def __init__(self, model: InferenceModel, slots: int, capacity: int) -> None:
        """Empty slots.

        Args:
            model: its weights may change, their addresses may not.
            slots: N.
            capacity: S, the most positions of a row, its last id included.
        """
        device = model.device
        self.model = model
        self._block = KVBlock.allocate(model, slots, capacity)
        self._numbers = torch.arange(slots, device=device)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=device)  # of the last id, which is read next
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        # By position: the ids that were drawn, their logprobs, and the random number that draws the id behind a position.
        self._ids = torch.zeros((slots, capacity + 2), dtype=torch.int64, device=device)
        self._logprobs = torch.zeros((slots, capacity + 2), device=device)
        self._noise = torch.zeros((slots, capacity + 1), dtype=torch.float64, device=device)
        self._temperature = torch.ones((), device=device)
        self._repeat = _repeater(device)

    @property
    def slots(self) -> int:
        """N, the most rows."""
        return self._block.slots

    @property
    def capacity(self) -> int:
        """S, the most positions of a row."""
        return self._block.capacity

    def begin(self, temperature: float) -> None:
        """Sets what divides the logits, and forgets keys and values: a NaN among them would reach whoever masks it."""
        self._temperature.fill_(temperature)
        self._block.states.zero_()

    def join(self, rows: Sequence[Row], slots: Sequence[int], sources: Sequence[int], block: KVBlock, logits: Tensor) -> None:
        """Puts rows into slots and draws their first ids.

        Args:
            rows: B rows.
            slots: where each goes.
            sources: which row of `block` has read its prompt.
            block: keys and values of prompts.
            logits: [rows of `block`, V] after them.
        """
        device = self._positions.device
        places, shared, lengths = torch.tensor([slots, sources, [len(row.prompt) for row in rows]], device=device)
        self._block.states[:, :, places, :, : block.max_length] = block.states[:, :, shared, :, : block.max_length]
        noise = uniforms([row.key for row in rows], max(row.limit for row in rows)).to(device)
        drawn_behind = lengths[:, None] - 1 + torch.arange(noise.shape[1], device=device)
        self._noise[places[:, None], drawn_behind.clamp(max=self.capacity)] = noise
        self._greedy[places] = torch.tensor([row.greedy for row in rows], device=device)
        self._positions[places] = lengths
        drawn = draw_flagged(logits[shared], self._temperature, noise[:, 0], self._greedy[places])
        self._ids[places, lengths], self._logprobs[places, lengths] = drawn

    def burst(self, width: int, visible: int, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Draws `steps` ids for each of the first `width` slots without waiting for any of them.

        Args:
            width: how many slots take part.
            visible: attention reads so many positions, S at most; a row that counts is at none beyond.
            steps: >= 1.

        Returns:
            ids: [width, 1 + steps], the last id of each slot before, and those drawn.
            logprobs: [width, 1 + steps], theirs.
        """
        columns = self._positions[:width, None] + torch.arange(1 + steps, device=self._positions.device)
        columns = columns.clamp(max=self.capacity + 1)
        self._repeat(self._step, (width, visible), steps)
        ids, logprobs = self._ids[:width].gather(1, columns), self._logprobs[:width].gather(1, columns)
        copied = torch.stack((ids.double(), logprobs.double())).cpu()  # one copy, and fp64 holds both
        return copied[0].long().tolist(), copied[1].tolist()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes the content of some slots that of others."""
        source, target = torch.tensor([sources, targets], device=self._positions.device)
        self._block.states[:, :, target] = self._block.states[:, :, source]
        for tensor in self._by_slot:
            tensor[target] = tensor[source]

    def lengthened(self, capacity: int) -> "StaticBatch":
        """A batch with longer slots and the same rows in them."""
        longer = StaticBatch(self.model, self.slots, capacity)
        longer.begin(float(self._temperature))
        longer._block.states[..., : self.capacity, :] = self._block.states[..., :-1, :]
        for own, new in zip(self._by_slot, longer._by_slot, strict=True):
            new[tuple(map(slice, own.shape))] = own
        return longer

    @property
    def _by_slot(self) -> tuple[Tensor, ...]:
        """What a slot holds beside keys and values."""
        return self._positions, self._greedy, self._ids, self._logprobs, self._noise

    def read(self, slot: int, length: int) -> Tensor:
        """Keys and values of a row's first positions, as `KVBlock.read` gives them; a view."""
        return self._block.states[:, :, slot, :, :length]

    def _step(self, width: int, visible: int) -> None:
        """Reads the last ids of the first slots and draws the next ones; nothing in here may depend on what a tensor holds."""
        rows, positions = self._numbers[:width], self._positions[:width]
        forward = _StaticForward(self._block.states[:, :, :width], rows, positions, visible)
        hidden = self.model.hidden(self._ids[rows, positions][:, None], _StaticCache(forward))
        logits = self.model.head(hidden[:, 0])
        ids, logprobs = draw_flagged(logits, self._temperature, self._noise[rows, positions], self._greedy[:width])
        positions += 1
        self._ids[rows, positions] = ids
        self._logprobs[rows, positions] = logprobs
        positions.clamp_(max=self.capacity)


class _StaticForward(CacheForward):
    """A forward of one new position per row that only the device knows.

    Args:
        states: [layers, 2, rows, K, S + 1, D], see `KVBlock`.
        rows: [rows] int64, 0, 1, 2, ...
        positions: [rows] int64, where the new position of each row is.
        visible: attention reads so many positions.
    """

    def __init__(self, states: Tensor, rows: Tensor, positions: Tensor, visible: int) -> None:
        self.positions = positions[:, None]
        self._states = states
        self._rows = rows[:, None]
        self._visible = visible
        hidden = torch.arange(visible, device=states.device) > positions[:, None, None, None]
        self._mask = torch.zeros(hidden.shape, dtype=states.dtype, device=states.device).masked_fill_(hidden, -torch.inf)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[Span]:
        own = self._states[layer]
        for mine, new in zip(own.unbind(), (keys, values), strict=True):
            mine[self._rows, :, self.positions] = new
        used_keys, used_values = own[..., : self._visible, :].unbind()
        yield Span(slice(None), used_keys, used_values, self._mask)


class _StaticCache(KVCache):
    """What `InferenceModel.hidden` opens a `_StaticForward` with."""

    def __init__(self, forward: _StaticForward) -> None:
        super().__init__()
        self._forward = forward

    def open(self, num_new: int) -> CacheForward:
        return self._forward


Step = Callable[[int, int], None]
"""A step of given width and visible positions."""


def _repeater(device: torch.device) -> Callable[[Step, tuple[int, int], int], None]:
    """What takes a step of one shape so many times."""
    return _Graphs(device) if device.type == "cuda" else _repeat


def _repeat(step: Step, shape: tuple[int, int], times: int) -> None:
    for _ in range(times):
        step(*shape)


class _Graphs:
    """Steps as CUDA graphs, one per shape, captured when a shape first occurs.

    They share one memory pool, for they run one after the other and none reads there what another has left.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Step, shape: tuple[int, int], times: int) -> None:
        if graph := self._graphs.get(shape):
            for _ in range(times):
                graph.replay()
            return
        # The first steps of a shape are taken without a graph, on the stream of the capture: what is set up at a first use
        # (handles, workspaces, plans) may not be set up within one.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _repeat(step, shape, times)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step(*shape)  # recorded, not taken
        self._graphs[shape] = graph
