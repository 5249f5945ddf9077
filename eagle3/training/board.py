"""Writes TensorBoard's curves. Imports TensorBoard, which is optional."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Board:
    """Writes events to a file in `folder`, a new file each time a run starts or resumes. Does not use TensorBoard's own
    writer, a thread that prints a traceback if the disk is full. After a failed write, calls `warn` with a line and
    writes nothing more."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn, self.ended = folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}", warn, False
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        if self.ended:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            self.ended = True  # part of the record may be there, and nothing after it could be read
            self.warn(
                f"{self.path}: cannot be written ({error.strerror}): TensorBoard's curves end here, those of the "
                "report continue; free space, or set tracking.tensorboard=false"
            )
