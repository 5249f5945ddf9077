"""An SGLang server in its own process: command line, start, stop."""

import ctypes
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.console import waiting
from eagle3.errors import UserError
from eagle3.targets.sglang.asking import ModelInfo, ask

START_SECONDS = 1800.0
STOP_SECONDS = 5.0
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)
SPARE_TOKENS = 16  # more than version.CONTEXT_RESERVE plus the one token that every request decodes
# What SGLang's messages tell users to change, and the recipe's keys for it.
OUR_KEYS = {
    "--mem-fraction-static": "target.memory_fraction",
    "--max-total-tokens": "target.kv_tokens",
    "--chunked-prefill-size": "hidden_states.prefill_tokens",
}
PORT_TAKEN = "address already in use"
CPU_FLAGS = (
    "--device",
    "cpu",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-overlap-schedule",
)


@dataclass(frozen=True)
class EngineOptions:
    """Options for starting any server, whatever it is used for."""

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    tensor: int = 1  # GPUs
    memory_fraction: float = 0.8
    kv_tokens: int | None = None  # None for as many as memory_fraction allows
    attention: str | None = None  # None for SGLang's own choice
    chunk_tokens: int = 8192  # tokens per prefill forward; longer prompts are split
    longest: int | None = None  # length of the longest prompt in tokens; None for the model's whole context

    def flags(self) -> list[str]:
        options = {
            "--model-path": self.model,
            "--revision": self.revision,
            "--dtype": self.dtype,
            "--tp-size": self.tensor,
            "--mem-fraction-static": self.memory_fraction,
            "--max-total-tokens": self.kv_tokens,
            "--prefill-attention-backend": self.attention,  # on a CPU, --attention-backend would be silently ignored
            "--decode-attention-backend": self.attention,
            "--chunked-prefill-size": self.chunk_tokens,
            "--context-length": None if self.longest is None else self.longest + SPARE_TOKENS,
        }
        flags = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        if self.trust_remote_code:
            flags.append("--trust-remote-code")
        return flags if torch.cuda.is_available() else [*flags, *CPU_FLAGS]

    def variables(self) -> dict[str, str]:
        """Environment variables of the server."""
        variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if self.dtype != "auto":
            # Between chunks, linear attention keeps the inputs of its convolution in bfloat16 unless told otherwise.
            variables["SGLANG_MAMBA_CONV_DTYPE"] = self.dtype
        return variables


def server_command(options: EngineOptions, flags: Sequence[str], port: int, host: str = "127.0.0.1") -> list[str]:
    """The words of the command line. Unless `host` says otherwise, the server is reachable only from this machine."""
    # Its own first request would wait behind ours, and a server that gets no answer in ten minutes ends.
    network_flags = ["--host", host, "--port", str(port), "--log-level", "warning", "--skip-server-warmup"]
    return [sys.executable, "-m", "sglang.launch_server", *options.flags(), *flags, *network_flags]


def as_typed(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command line, after the variables of its environment, as a person would type it."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join([*settings, *("python" if word == sys.executable else word for word in command)])


class SGLangServer(AbstractContextManager):
    """A running server. It stops at the end of the `with` block or, in a killed job, with the thread that started it.

    url: the server's address
    devices: CUDA_VISIBLE_DEVICES for the server; None to use this process's
    report: called with progress lines while the server starts

    Raises UserError if the server does not start.
    """

    def __init__(
        self,
        options: EngineOptions,
        flags: Sequence[str] = (),
        devices: str | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        device_variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        prctl = ctypes.CDLL(None).prctl  # looked up before the fork, since another thread may hold the loader's lock
        with tempfile.NamedTemporaryFile(prefix="sglang-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                server_command(options, flags, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=without_launcher(os.environ) | options.variables() | device_variables,
                start_new_session=True,
                preexec_fn=lambda: prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL),
            )
        try:
            with waiting(report, "waiting for SGLang"):
                self._await_start()
        except BaseException:
            self.stop(keep_log=True)
            raise

    def _await_start(self) -> None:
        start = time.monotonic()
        while time.monotonic() - start < START_SECONDS:
            if self.process.poll() is not None:
                raise UserError(
                    f"sglang: the server ended while starting (exit code {self.process.returncode}): "
                    f"{self.last_words()}; the whole log is {self.log}"
                )
            if PORT_TAKEN in self.log.read_text(errors="replace"):  # the server would keep running without answering
                raise UserError(f"sglang: port {self.url.rpartition(':')[2]} was taken in the meantime; start again")
            try:
                ask(self.url, "/model_info", ModelInfo, timeout=5)
                return
            except OSError:
                time.sleep(0.2)
        raise UserError(f"sglang: the server does not answer after {START_SECONDS:.0f} s; its log is {self.log}")

    def last_words(self) -> str:
        """The last error in the log, or its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        error_lines = [line for line in lines if "Error" in line and not line.startswith("File ")]
        words = (error_lines or lines or ["it said nothing"])[-1][:300]
        for flag, key in OUR_KEYS.items():
            words = words.replace(flag, key)
        return words

    def ended(self) -> bool:
        """Whether the server has ended by itself. Waits a few seconds in case it is about to."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return self.process.poll() is not None

    def stop(self, keep_log: bool = False) -> None:
        """Stop the server and all its processes. They are killed, as SGLang itself does after SIGTERM, when it has
        waited for requests for some seconds; nobody waits for these."""
        self.process.kill()  # its processes die with it, but for one that then removes what they shared
        self.process.wait()
        with suppress(ProcessLookupError):  # none is left
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        if not keep_log:
            self.log.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(keep_log=kind is not None and self.process.poll() is not None)  # the log says why it died


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that torchrun and deepspeed set, since SGLang is not one of their ranks."""
    prefixes = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "CROSS_", "TORCHELASTIC_")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


def _free_port() -> int:
    """A free port below the range for outgoing connections, one of which could otherwise take it before the server
    does."""
    for port in random.sample(range(20000, 30000), 10000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError("sglang: none of the ports 20000..29999 is free on this machine; end what holds them")
