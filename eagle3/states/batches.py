"""Which documents are prefilled in one forward pass."""

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of indices, longest documents first, such that documents x longest <= budget tokens; a longer document
    gets a batch of its own. The documents of one batch, in its order, are again one batch in that order."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
