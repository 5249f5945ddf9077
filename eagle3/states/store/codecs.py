"""How rows of hidden states become bytes, chunk by chunk, so that a ranged read decodes what it wants and no more."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import UserError, extra_command

CodecName = Literal["none", "lossless", "fp8"]
StoreDtype = Literal["float32", "bfloat16"]
# Raw bytes of a chunk at most (but one row at least). Larger ones compress no better and widen every ranged read
# (benchmarks/store.py); smaller ones pay the codec's start-up too often.
CHUNK_BYTES = 65536
# Largest run of channels that shares one fp8 scale.
SCALE_BLOCK = 128
LARGEST_FP8 = 448.0  # of float8_e4m3fn
EXPONENT_BIAS = 127
# Of a scale; no run of finite float32 numbers needs a larger one than 2 ** 120.
LOWEST_EXPONENT = -126


class Codec(Protocol):
    """Both ways may run in several threads at once. by_row: rows are encoded one by one, into `row_bytes` each, so that
    an encoding of many chunks is the chunks' encodings in a row."""

    by_row: bool

    def encode(self, rows: Tensor) -> memoryview | bytes:
        """rows [n, width], contiguous, on the CPU, in the store's number format; n > 0."""

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        """Fill out [n, width], contiguous, of the encoded rows' number and format. data: consecutive encodings of `sizes`
        bytes. Raises ValueError where they do not encode as many rows."""


class Raw:
    """`none`: the numbers as they lie in memory."""

    by_row = True

    def encode(self, rows: Tensor) -> memoryview:
        return memoryview(_bytes_of(rows)).cast("B")

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        target = _bytes_of(out)
        if len(data) != target.size:
            raise ValueError(f"{len(data)} bytes instead of {target.size}")
        np.copyto(target, np.frombuffer(data, np.uint8))


class Lossless:
    """`lossless`: bytes of equal significance together (exponents repeat, mantissas do not), then zstd at level 1."""

    by_row = False

    def __init__(self, itemsize: int) -> None:
        try:
            import blosc2
        except ImportError as error:
            raise UserError(
                f"hidden_states.codec: 'lossless' needs the package blosc2; {extra_command('compress')}, or set it to none"
            ) from error
        blosc2.set_releasegil(True)  # or threads would wait for one another
        self.blosc2 = blosc2
        self.compression = {  # as plain arguments: blosc2's own parameter objects cost more than a small chunk's decoding
            "typesize": itemsize,
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "filters": [blosc2.Filter.SHUFFLE],
            "filters_meta": [0],
            "nthreads": 1,
        }

    def encode(self, rows: Tensor) -> bytes:
        return self.blosc2.compress2(_bytes_of(rows), **self.compression)

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        target, read, written = _bytes_of(out), 0, 0
        for size in sizes:
            piece = data[read : read + size]
            raw, compressed, _ = self.blosc2.get_cbuffer_sizes(piece)
            if compressed != size or written + raw > target.size:
                raise ValueError(f"a block of {compressed} bytes that holds {raw}, in place of {size} bytes")
            self.blosc2.decompress2(piece, dst=target[written : written + raw], nthreads=1)
            read, written = read + size, written + raw
        if written != target.size:
            raise ValueError(f"{written} bytes instead of {target.size}")


class Fp8:
    """`fp8`: float8_e4m3fn, and a power of two for each run of `block` channels of a row (MX's E8M0 scale, in one byte
    after the row's numbers), chosen so that the run's largest fits. A value x of a run with scale s comes back within
    max(|x| / 16, s / 1024), and s is at most 1/224 of the run's largest. Source of the scales: OCP Microscaling
    Formats (MX) Specification 1.0, section 5.4.1."""

    by_row = True

    def __init__(self, width: int, dtype: torch.dtype, hidden_size: int) -> None:
        self.width = width
        self.block = max(divisor for divisor in range(1, SCALE_BLOCK + 1) if hidden_size % divisor == 0)
        self.row_bytes = width + width // self.block
        self.numbers = _bits_of(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype))

    def encode(self, rows: Tensor) -> memoryview:
        runs = rows.view(len(rows), -1, self.block)
        largest = torch.maximum(runs.amax(-1), -runs.amin(-1)).float()  # a pass less than abs()
        mantissas, exponents = torch.frexp(largest / LARGEST_FP8)
        # frexp's mantissa is at least 0.5; at 0.5 itself the exponent below does.
        exponents = (exponents - (mantissas == 0.5).int()).clamp(LOWEST_EXPONENT, -LOWEST_EXPONENT)
        numbers = (runs.float() * _powers_of_two(-exponents)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (exponents + EXPONENT_BIAS).to(torch.uint8)
        return memoryview(torch.cat((numbers.flatten(1), scales), 1).numpy()).cast("B")

    def decode(self, data: memoryview, sizes: Sequence[int], out: Tensor) -> None:
        if len(data) != len(out) * self.row_bytes:
            raise ValueError(f"{len(data)} bytes instead of {len(out) * self.row_bytes}")
        encoded = np.frombuffer(data, np.uint8).reshape(len(out), self.row_bytes)
        # A table is several times as fast as torch's conversion on CPUs. Scaling is exact in bfloat16 too.
        np.take(self.numbers, encoded[:, : self.width], out=_bits_of(out), mode="clip")
        scales = torch.from_numpy(encoded[:, self.width :].astype(np.int32)) - EXPONENT_BIAS
        out.view(len(out), -1, self.block).mul_(_powers_of_two(scales)[..., None].to(out.dtype))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents (int32, within the normal numbers), fp32: put together from its bits."""
    return ((exponents + EXPONENT_BIAS) << 23).to(torch.int32).view(torch.float32)


def chunk_rows(width: int, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows of a chunk: a power of two, so that chunks keep step with the runs in which rows are dealt to ranks."""
    return 2 ** int(math.log2(max(1, chunk_bytes // (width * dtype.itemsize))))


def _bits_of(tensor: Tensor) -> np.ndarray:
    """Its numbers as integers of their width, not copied."""
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Its memory as uint8 [bytes], not copied."""
    return tensor.view(torch.uint8).numpy().reshape(-1)
