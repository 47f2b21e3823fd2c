"""Several slots in one stage: the rows of each microbatch shared out so that the slowest is as fast as can
be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetjax.devices import Number


def share_rows(
    multiples: Sequence[int], seconds: Sequence[Callable[[int], Number]], rows: int
) -> tuple[int, ...] | None:
    """The rows of each slot that make the slowest one as fast as can be.

    Exact for seconds that do not fall with the rows: for a given time each slot can take any multiple up to
    some most, whether these add up to the rows is a question of sums, and the shortest time is found by
    bisection over the slots' own times.

    Args:
        multiples: Each slot gets a positive multiple of this: its device count.
        seconds: Of each slot, by rows.
        rows: To share out.

    Returns:
        Rows of each slot, or None where the rows cannot be shared so.
    """
    left = rows - sum(multiples)
    if left < 0:
        return None
    own = [
        [float(time(n)) for n in range(step, left + step + 1, step)]
        for step, time in zip(multiples, seconds, strict=True)
    ]
    times = sorted({t for slot in own for t in slot})
    low, high = 0, len(times) - 1
    if _shares(multiples, own, rows, times[high]) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        if _shares(multiples, own, rows, times[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return _shares(multiples, own, rows, times[low])


def _shares(
    multiples: Sequence[int], own: Sequence[Sequence[Number]], rows: int, most_s: Number
) -> tuple[int, ...] | None:
    """Rows of each slot, none of which takes longer than `most_s`."""
    sums = [1]  # bit i: i rows can be handed out to the slots so far
    most = []
    for step, times in zip(multiples, own, strict=True):
        count = 0
        while count < len(times) and times[count] <= most_s:
            count += 1
        reached = 0
        for n in range(1, count + 1):
            reached |= sums[-1] << (n * step)
        most.append(count)
        sums.append(reached & ((1 << (rows + 1)) - 1))
    if not sums[-1] >> rows & 1:
        return None
    shares = []
    done = rows
    for i in range(len(multiples) - 1, -1, -1):
        step = multiples[i]
        # The most that leaves a sum that the slots before can make.
        n = next(n for n in range(most[i], 0, -1) if n * step <= done and sums[i] >> (done - n * step) & 1)
        shares.append(n * step)
        done -= n * step
    return tuple(reversed(shares))
