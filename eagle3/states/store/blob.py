"""One tensor of a shard while it is written."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from eagle3.errors import UserError
from eagle3.states.store.shard import SAFETENSORS_NAMES, Encoding

# Number of chunks that a thread encodes at a time, and most raw bytes per tensor that may wait to be encoded.
JOB_CHUNKS = 8
MOST_IN_WORK = 32 << 20


class Blob:
    """One growing tensor of a shard. Rows are cut into chunks, encoded by `threads`, and written in order."""

    def __init__(self, file: BinaryIO, encoding: Encoding, name: str, threads: Executor) -> None:
        self.file, self.name, self.threads, self.encoding = file, name, threads, encoding
        self.start = file.tell()
        self.codec, self.chunk_rows = encoding.make_codec(name), encoding.chunk_rows(name)
        self.waiting: list[Tensor] = []  # rows of an incomplete chunk
        # Pieces that are being encoded, with the number of their raw bytes.
        self.jobs: deque[tuple[Future[Sequence[memoryview | bytes]], int]] = deque()
        self.rows = self.chunks = 0
        self.edges = [0]  # of the chunks, in bytes
        self.sums: list[int] = []

    @property
    def form(self) -> tuple[str, list[int]]:
        """The tensor's dtype, as safetensors calls it, and its shape."""
        if self.encoding.codec_of(self.name) == "none":
            return SAFETENSORS_NAMES[self.encoding.dtype], [self.rows, self.encoding.width(self.name)]
        return "U8", [self.edges[-1]]

    def append(self, rows: Tensor, sample_id: str) -> None:
        rows = rows.to(self.encoding.number_format)
        if rows.numel() and not all(edge.isfinite() for edge in torch.aminmax(rows)):  # one pass; isfinite needs many
            raise UserError(
                f"sample {sample_id}: its {self.name} hidden states are not finite in {self.encoding.dtype}; set "
                "model.target_dtype and hidden_states.dtype to bfloat16 or float32"
            )
        rows = rows.cpu()
        if self.waiting:
            rows = torch.cat([*self.waiting, rows])
        full = len(rows) - len(rows) % self.chunk_rows
        self._encode(rows[:full])
        self.waiting = [rows[full:].clone()] if full < len(rows) else []

    def end_sample(self) -> None:
        """Complete the last chunk, because the next sample begins with a new one."""
        if self.waiting:
            self._encode(torch.cat(self.waiting))
        self.waiting = []

    def cut(self, counts: Sequence[int]) -> bool:
        """Keep the rows of whole samples, which have `counts` rows each, and drop later ones. Returns False if an
        exception came in the middle of `write` or `_encode`, so that the file and the counts here may differ. Raises
        OSError."""
        self.waiting = []
        self.write()
        if not len(self.edges) - 1 == len(self.sums) == self.chunks:
            return False
        self.rows, self.chunks = sum(counts), sum(-(-rows // self.chunk_rows) for rows in counts)
        del self.edges[self.chunks + 1 :], self.sums[self.chunks :]
        self.file.seek(self.start + self.edges[-1])
        self.file.truncate()
        return True

    def _encode(self, rows: Tensor) -> None:
        chunks = -(-len(rows) // self.chunk_rows)
        self.rows, self.chunks = self.rows + len(rows), self.chunks + chunks
        for piece in rows.split(JOB_CHUNKS * self.chunk_rows) if chunks else ():
            self.jobs.append((self.threads.submit(self.codec.encode, piece, self.chunk_rows), piece.nbytes))
        self.write(MOST_IN_WORK)

    def write(self, max_in_work: int = 0) -> None:
        """Write encoded chunks until at most this many raw bytes are still being encoded. Raises OSError."""
        while sum(raw_bytes for _, raw_bytes in self.jobs) > max_in_work:
            encoded, _ = self.jobs.popleft()
            for chunk in encoded.result():
                self.file.write(chunk)
                self.edges.append(self.edges[-1] + len(chunk))
                self.sums.append(xxhash.xxh3_64_intdigest(chunk))
