"""An engine for tests that say what a policy writes."""

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.rollout.records import Completion, Continuation


class TurnByTurn:
    """A `RolloutEngine` none of whose rows goes on before all of a turn have ended; `turn` says what they write."""

    def turn(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
        """One completion per prompt; the options are those of `RolloutEngine.generate`, without `finished`."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: Sequence[int],
        greedy: bool | Sequence[bool] = False,
        finished: Callable[[int, Completion], Continuation | None] = lambda number, completion: None,
        **options: Any,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        last = self.turn(prompts, keys=keys, max_new_tokens=max_new_tokens, greedy=greedy, **options)
        flags = [greedy] * len(prompts) if isinstance(greedy, bool) else greedy
        following = [finished(number, completion) for number, completion in enumerate(last)]
        while any(following):
            turns = {number: turn for number, go_on in enumerate(following) if go_on and (turn := go_on())}
            if not turns:
                break
            done = self.turn(
                [turn.prompt for turn in turns.values()],
                keys=[turn.key for turn in turns.values()],
                max_new_tokens=[turn.max_new_tokens for turn in turns.values()],
                greedy=greedy if isinstance(greedy, bool) else [flags[number] for number in turns],
                **options,
            )
            following = [None] * len(prompts)
            for number, completion in zip(turns, done, strict=True):
                last[number], following[number] = completion, finished(number, completion)
        return last
