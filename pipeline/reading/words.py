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


def figure(value: float) -> str:
    """Four digits that count, whole numbers whole: `0.0123`, `1.573`, `12`."""
    return f"{value:z.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def count(number: float) -> str:
    """`812`, `45 k`, `3.1 M`, `2.2 G`."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= size:
            scaled = number / (1e3 if unit == " k" else size)
            return f"{scaled:.3g}{unit}"
    return f"{number:.0f}"
