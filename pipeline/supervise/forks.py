"""What a child of this process must not share with it, if it is forked without starting another program.

A user's tool may fork, and such a child may outlive the trainer. A program that a child starts shares none of it anyway: Python
closes files on exec, and the kernel forgets handlers.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_undos: list[Callable[[], None]] = []


@contextmanager
def undone_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Has `undo` called in every child that is forked within the block."""
    _undos.append(undo)
    try:
        yield
    finally:
        _undos.remove(undo)


def _undo_all() -> None:
    while _undos:
        _undos.pop()()


os.register_at_fork(after_in_child=_undo_all)
