"""Codecs for rows of hidden states. They work chunk by chunk, so that a ranged read decodes only what it needs."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import UserError, extra_command

CodecName = Literal["none", "lossless", "fp8"]
StoreDtype = Literal["float32", "bfloat16"]
# Upper limit for the raw bytes of a chunk, which has at least one row. Larger chunks compress no better and make every
# ranged read wider (benchmarks/store.py); smaller ones pay the codec's start-up cost too often.
CHUNK_BYTES = 65536
# Upper limit for the channels that share one fp8 scale.
SCALE_BLOCK = 128
LARGEST_FP8 = 448.0  # the largest float8_e4m3fn number
EXPONENT_BIAS = 127
# Smallest exponent of a scale. No run of finite float32 numbers needs a scale above 2 ** 120.
LOWEST_EXPONENT = -126


class Raw:
    """Codec `none`: stores the numbers as they are in memory. Like those of all codecs, both methods may run in several
    threads at once."""

    def encode(self, rows: Tensor, chunk_rows: int) -> list[memoryview]:
        """Encode rows. Returns the bytes of each chunk.

        rows: [n, width] with n > 0, contiguous, on the CPU, in the store's dtype
        chunk_rows: rows in each chunk but the last
        """
        return _chunks(_bytes_of(rows), len(rows), chunk_rows)

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        """Decode chunks into `out`.

        data: consecutive encoded chunks
        sizes: bytes of each chunk
        out: [n, width], contiguous, in the dtype of the encoded rows

        Raises ValueError if the chunks do not encode n rows.
        """
        target = _bytes_of(out)
        if len(data) != target.size:
            raise ValueError(f"{len(data)} bytes instead of {target.size}")
        np.copyto(target, np.frombuffer(data, np.uint8))


class Lossless:
    """Codec `lossless`: zstd level 1 on bytes grouped by significance (exponents repeat, mantissas do not)."""

    def __init__(self, itemsize: int) -> None:
        try:
            import blosc2
        except ImportError as error:
            raise UserError(
                f"hidden_states.codec: 'lossless' needs the package blosc2; {extra_command('compress')}, or set it to "
                "none"
            ) from error
        blosc2.set_releasegil(True)  # otherwise threads would wait for each other
        self.blosc2 = blosc2
        self.compression = {  # plain arguments: making blosc2's parameter objects takes longer than decoding a chunk
            "typesize": itemsize,
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "filters": [blosc2.Filter.SHUFFLE],
            "filters_meta": [0],
            "nthreads": 1,
        }

    def encode(self, rows: Tensor, chunk_rows: int) -> list[bytes]:
        return [self.blosc2.compress2(_bytes_of(chunk), **self.compression) for chunk in rows.split(chunk_rows)]

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        target, source_offset, target_offset = _bytes_of(out), 0, 0
        for size in sizes:
            piece = data[source_offset : source_offset + size]
            raw_size, compressed_size, _ = self.blosc2.get_cbuffer_sizes(piece)
            if compressed_size != size or target_offset + raw_size > target.size:
                raise ValueError(f"a block of {compressed_size} bytes that holds {raw_size}, in place of {size} bytes")
            self.blosc2.decompress2(piece, dst=target[target_offset : target_offset + raw_size], nthreads=1)
            source_offset, target_offset = source_offset + size, target_offset + raw_size
        if target_offset != target.size:
            raise ValueError(f"{target_offset} bytes instead of {target.size}")


class Fp8:
    """Codec `fp8`: float8_e4m3fn, with a power-of-two scale for each run of `block` channels in a row.

    Scales are MX's E8M0, one byte each, and follow the row's numbers. A scale is chosen so that the run's largest
    number fits (OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1). A value x in a run with scale s is
    restored to within max(|x| / 16, s / 1024), and s is at most 1/224 of the largest magnitude in the run.
    """

    def __init__(self, width: int, dtype: torch.dtype, hidden_size: int) -> None:
        self.width = width
        self.block = max(divisor for divisor in range(1, SCALE_BLOCK + 1) if hidden_size % divisor == 0)
        self.row_bytes = width + width // self.block
        self.numbers = _bits_of(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype))

    def encode(self, rows: Tensor, chunk_rows: int) -> list[memoryview]:
        runs = rows.view(len(rows), -1, self.block)
        largest = torch.maximum(runs.amax(-1), -runs.amin(-1)).float()  # one pass fewer than abs()
        mantissas, exponents = torch.frexp(largest / LARGEST_FP8)
        # frexp's mantissa is at least 0.5; if it is exactly 0.5, the next lower exponent suffices.
        exponents = (exponents - (mantissas == 0.5).int()).clamp(LOWEST_EXPONENT, -LOWEST_EXPONENT)
        numbers = (runs.float() * _powers_of_two(-exponents)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (exponents + EXPONENT_BIAS).to(torch.uint8)
        return _chunks(torch.cat((numbers.flatten(1), scales), 1).numpy(), len(rows), chunk_rows)

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        if len(data) != len(out) * self.row_bytes:
            raise ValueError(f"{len(data)} bytes instead of {len(out) * self.row_bytes}")
        encoded = np.frombuffer(data, np.uint8).reshape(len(out), self.row_bytes)
        # On CPUs, a table lookup is several times as fast as torch's conversion. Scaling is exact, even in bfloat16.
        np.take(self.numbers, encoded[:, : self.width], out=_bits_of(out), mode="clip")
        scales = torch.from_numpy(encoded[:, self.width :].astype(np.int32)) - EXPONENT_BIAS
        out.view(len(out), -1, self.block).mul_(_powers_of_two(scales)[..., None].to(out.dtype))


Codec = Raw | Lossless | Fp8


def _powers_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents as fp32, assembled from bits. exponents: int32, within the range of normal numbers."""
    return ((exponents + EXPONENT_BIAS) << 23).to(torch.int32).view(torch.float32)


def _chunks(encoded: np.ndarray, rows: int, chunk_rows: int) -> list[memoryview]:
    """Split an encoding into chunks. Every row takes the same number of bytes."""
    data = memoryview(encoded).cast("B")
    size = len(data) // rows * chunk_rows
    return [data[start : start + size] for start in range(0, len(data), size)]


def _bits_of(tensor: Tensor) -> np.ndarray:
    """The tensor's numbers as integers of the same width, without a copy."""
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as uint8 [bytes], without a copy."""
    return tensor.view(torch.uint8).numpy().reshape(-1)
