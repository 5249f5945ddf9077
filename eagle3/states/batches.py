"""Which documents are prefilled in one forward pass, and which sequences a rank gets."""

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


def deal_streams(lengths: Sequence[int], streams: int) -> list[list[int]]:
    """Deal samples to `streams` packed streams of about equal length: longest first, each to the shortest stream.

    With at least as many samples as streams none stays empty. Within a stream the samples keep their order.
    """
    totals, dealt = [0] * streams, [[] for _ in range(streams)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        shortest = min(range(streams), key=lambda stream: (totals[stream], stream))
        totals[shortest] += lengths[index]
        dealt[shortest].append(index)
    return [sorted(members) for members in dealt]
