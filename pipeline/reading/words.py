"""Figures as people read them."""


def duration(seconds: float) -> str:
    """`4 s`, `12 min`, `3.5 h`, `2.1 d`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
