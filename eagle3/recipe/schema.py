"""A recipe's sections and keys: the single source of every default, check and help text (`data` in a file beside)."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from eagle3.draft.config import MOST_AUX_LAYERS
from eagle3.draft.rope_parameters import check_rope_keys
from eagle3.recipe.data import Count, Data, Fraction, LocalPath, LocalText, Named, Positive, Precision, Section

MOST_KEYS = 10**9  # upper limit of a window: longer than any context


class Demo(Section):
    """The small target that the quickstart trains on this machine's Python standard library (model.target: demo)."""

    text: Literal["conversations", "files"] = Field(
        "conversations",
        description="what it trains on: conversations about the library's code, or its whole source files",
    )
    # At least 256 bytes and three special tokens.
    vocab_size: Annotated[int, Field(ge=259)] = Field(1024, description="size of its byte-level BPE vocabulary")
    hidden_size: Count = 192
    intermediate_size: Count = 512
    layers: Annotated[int, Field(ge=4)] = 4
    heads: Count = 6
    key_value_heads: Count = 6
    context: Count = Field(512, description="longest training text in tokens; longer files are cut into pieces of it")
    rope_parameters: dict[str, Any] | None = Field(None, description="in transformers' format; default: plain rope")
    short_context: Count | None = Field(None, description="tokens of the texts in the first short_steps")
    short_steps: Annotated[int, Field(ge=0)] = Field(0, description="steps on short texts before the whole ones")
    batch_tokens: Count = Field(2048, description="tokens per optimiser step, padding included")
    steps: Count = 600
    learning_rate: Positive = Field(0.02, description="learning rate of Muon, for the weight matrices")
    adam_learning_rate: Positive = Field(0.004, description="learning rate of AdamW, for embedding, head and norms")
    seed: int = 0
    answers: Count = Field(3000, description="number of questions that it answers, for the draft to learn from")
    answer_tokens: Count = Field(112, description="most tokens in such an answer")

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> "Demo":
        if self.hidden_size % (2 * self.heads) or self.heads % self.key_value_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size}, heads {self.heads}, key_value_heads {self.key_value_heads} do not "
                "fit; make hidden_size an even multiple of heads, and heads a multiple of key_value_heads"
            )
        if self.batch_tokens < self.context:
            raise ValueError(f"batch_tokens {self.batch_tokens} is less than one text of context {self.context}")
        if self.short_steps and (self.short_context is None or self.short_steps >= self.steps):
            raise ValueError(
                f"short_steps {self.short_steps}, short_context {self.short_context}, steps {self.steps} do not fit; "
                "give short_context, and more steps than short_steps"
            )
        return self


class Draft(Section):
    """The draft's shape. Keys that are not set are derived from the target's config."""

    config: LocalPath | None = Field(None, description="config.json of a draft whose shape to use")
    init_from: LocalPath | None = Field(None, description="folder of an exported draft to start from (warm start)")
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    max_position_embeddings: Count | None = None
    rope_parameters: Annotated[dict[str, Any], AfterValidator(check_rope_keys)] | None = Field(
        None, description="rope_type (default, linear, llama3, yarn), rope_theta and that type's own keys"
    )
    rms_norm_eps: Positive | None = None
    window: Annotated[int, Field(ge=1, le=MOST_KEYS)] | None = Field(
        None,
        description="keys that a query attends to, its own included, in training and in serving; default: that of "
        "model.draft.config, else all. At least training.ttt_steps and evaluation.draft_tokens (docs/windows.md)",
    )
    vocab_size: Count | None = Field(
        None,
        description="size of the draft vocabulary, filled with the most frequent supervised tokens; default: 32,000, "
        "or all of a smaller target vocabulary",
    )
    vocabulary: LocalPath | None = Field(None, description="safetensors file with d2t and t2d to reuse")
    lm_head: Literal["target", "random"] = Field(
        "target", description="initial lm_head: the target's rows of the draft vocabulary, or random numbers"
    )
    fc_norm: bool = Field(False, description="EAGLE3.1: an RMSNorm on each third of the auxiliary hidden states")
    norm_output: bool = Field(False, description="EAGLE3.1: feed the normed hidden state to the next step")


class Model(Section):
    target: Named = Field(description="hub id or folder of the target, or `demo` for the quickstart's own")
    revision: str | None = None
    trust_remote_code: Literal[False, True, "tokenizer"] = Field(
        False,
        description="run the Python code in the target's checkpoint; tokenizer: here only that of its tokenizer, "
        "but all of it in SGLang, which has one switch",
    )
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    aux_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MOST_AUX_LAYERS)] | None = (
        Field(
            None,
            description="0-based target layers whose outputs the draft reads, low to high; default 1, n//2-1, n-4",
        )
    )
    draft: Draft = Draft()
    demo: Demo = Demo()

    @property
    def trust_model_code(self) -> bool:
        """Whether the checkpoint's own config and model classes may run."""
        return self.trust_remote_code is True

    @model_validator(mode="after")
    def _aux_layers_ascend(self) -> "Model":
        if self.aux_layers and sorted(set(self.aux_layers)) != self.aux_layers:
            raise ValueError(f"aux_layers is {self.aux_layers}: name different layers, low to high")
        return self


class HiddenStates(Section):
    mode: Literal["live", "stored"] = Field("live", description="run the target while training, or read a store")
    path: Named | None = Field(None, description="store folder that capture.py writes; for reading, any fsspec URL")
    dtype: Precision = Field("bfloat16", description="number format of hidden states in the store and in the spool")
    codec: Literal["none", "lossless", "fp8"] = Field(
        "none",
        description="none: as they are; lossless: compressed to about 70% (needs blosc2); fp8: 8 bits with scales",
    )
    prefill_tokens: Count = Field(
        8192,
        description="tokens in one target prefill batch, padding included; capture.py splits longer samples into "
        "chunks of this",
    )
    shard_tokens: Count = Field(65536, description="tokens in one store file; a longer sample gets a file of its own")
    ulysses: Count = Field(
        1, description="capture.py: Ulysses degree of a long sample's prefill (ranks that exchange heads for tokens)"
    )
    ring: Count = Field(
        1, description="capture.py: ring degree of a long sample's prefill (ranks that pass keys and values around)"
    )

    @model_validator(mode="after")
    def _stored_needs_path(self) -> "HiddenStates":
        if self.mode == "stored" and self.path is None:
            raise ValueError("mode is 'stored' but path is not set: name the folder that capture.py writes")
        return self


def _root(url: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+/?", url):
        raise ValueError("is not a server's root: write http://host:port")
    _ = urlsplit(url).port  # raises ValueError if it is out of range
    return url.rstrip("/")


class Target(Section):
    """Settings for running the target that `model.target` names, and for what the draft learns from it."""

    backend: Literal["transformers", "sglang"] = Field(
        "transformers", description="run it inside these processes, or in SGLang servers beside them"
    )
    teacher: Literal["hidden", "logits"] = Field(
        "hidden",
        description="keep the target's last hidden states and apply its lm_head in training, or keep its logits "
        "over the draft vocabulary (for heads that training cannot load: quantised, biased, changed in code)",
    )
    servers: list[Annotated[str, AfterValidator(_root)]] = Field(
        [],
        description="URLs of running SGLang servers that share the work; if empty, capture.py starts its own engine",
    )
    tensor: Count = Field(1, description="GPUs of capture.py's own engine")
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.8, description="share of a GPU's memory for the engine's weights and KV cache"
    )
    kv_tokens: Count | None = Field(None, description="tokens of its KV cache; default: what memory_fraction leaves")
    attention: str | None = Field(None, description="SGLang's attention backend; default: its own choice")
    allow_untested: bool = Field(
        False, description="try an SGLang newer than the tested ones, if it computes what transformers does"
    )
    spool: LocalText = Field(
        default_factory=lambda: f"/dev/shm/eagle3-spool-{os.getuid()}",  # nobody else can take the name by accident
        description="folder where SGLang leaves rows for these processes, which all must see it; for one user only",
    )
    spool_gib: Positive = Field(8.0, description="most GiB of one job's rows waiting in the spool")
    in_flight: Count = Field(32, description="samples requested from a server at a time")

    @model_validator(mode="after")
    def _servers_are_sglangs(self) -> "Target":
        if self.servers and self.backend != "sglang":
            raise ValueError(
                f"servers are named but backend is {self.backend!r}, which uses no servers; set "
                "target.backend=sglang, or leave servers out"
            )
        return self


class Parallelism(Section):
    """Divides one draft and one stream among ranks; the ranks left over are data-parallel."""

    tensor: Count = Field(1, description="ranks that share the draft's weights; divides its heads, MLP and vocabulary")
    ulysses: Count = Field(1, description="ranks that exchange heads for tokens, within a node; divides the heads")
    ring: Count = Field(1, description="ranks that exchange keys and values, also across nodes; any number")
    ring_mode: Literal["gather", "p2p"] = Field(
        "gather", description="gather: exchange keys and values once and keep them; p2p: pass them around in every step"
    )
    # For tests: other settings give the same gradients.
    layout: Literal["contiguous", "zigzag"] = "zigzag"  # how keys are dealt along the ring
    query_selection: Literal["supervised", "all"] = "supervised"  # which positions are unrolled


class Memory(Section):
    """Choices about what a training step keeps in memory. They do not affect gradients; plan.py shows their cost."""

    recompute: Literal["none", "attention_kept", "full"] = Field(
        "full", description="what the backward pass computes again: nothing, all but attention, or whole TTT steps"
    )
    inputs: Literal["device", "host"] = Field(
        "device", description="where hidden states are held: on the GPU, or on the host until a chunk needs them"
    )
    block_mib: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="most MiB for one block of the loss, or one chunk of tokens; default: 1024, on a CPU 64"
    )

    @model_validator(mode="after")
    def _waiting_wants_chunks(self) -> "Memory":
        if self.inputs == "host" and self.recompute == "none":
            raise ValueError(
                "inputs is 'host' but recompute is 'none', which keeps all of them on the GPU; set recompute to "
                "attention_kept or full"
            )
        return self


class Profile(Section):
    start: Count = Field(description="first profiled step, counting from 1")
    steps: Count = 3


class Training(Section):
    ttt_steps: Count = Field(7, description="K, the number of TTT (training-time-test) steps in the unroll")
    rows: Literal["served", "reference"] = Field(
        "served",
        description="the rows of an answer that count: those that an engine uses, or those of EAGLE3's own code "
        "(docs/exactness.md)",
    )
    step_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="step k has the weight step_decay**k")
    loss: Literal["kl", "lk_alpha", "lk_lambda"] = Field(
        "kl",
        description="loss of a TTT step, from its KL to the teacher and its acceptance rate a: kl; lk_alpha: -log a; "
        "lk_lambda: a mix of both, with more kl the lower a is",
    )
    kl_scale: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="lk_lambda: weight of kl at acceptance 0")
    kl_decay: Annotated[float, Field(ge=0)] = Field(3.0, description="lk_lambda: how fast that weight decreases")
    normalization: Literal["counted", "tokens", "samples"] = Field(
        "counted",
        description="divide each TTT step's loss by its counted positions, or by all tokens of the global batch; "
        "samples: the mean over samples, each of which counts alike, however long its answers are",
    )
    dtype: Precision = Field("float32", description="dtype of the draft; bfloat16 keeps fp32 masters in the optimiser")
    kernels: Literal["auto", "flash4", "flash", "efficient", "plain"] = Field(
        "auto", description="on CUDA, the kernel of attention (plain: of all else, too); auto: the fastest right one"
    )
    global_batch_size: Count = Field(16, description="samples per optimiser step")
    accumulation: Count = Field(1, description="packed streams (micro-batches) per rank in one optimiser step")
    max_steps: Count | None = Field(None, description="optimiser steps; default: epochs times the data")
    epochs: Count = 1
    learning_rate: Positive = 1e-4
    warmup_fraction: Fraction = Field(0.015, description="share of the steps in which the learning rate rises from 0")
    final_learning_rate_fraction: Fraction = Field(0.0, description="where the cosine ends, in units of learning_rate")
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    gradient_clipping: Annotated[float, Field(ge=0)] = Field(0.5, description="largest gradient norm; 0 for none")
    skip_above_norm: Positive = Field(
        1e4, description="skip an optimiser step if its gradient norm is above this, or not finite"
    )
    most_skipped: Count = Field(10, description="stop the run after this many skipped steps in a row")
    hang_minutes: Positive | None = Field(
        15.0, description="end a job that makes no progress for this long, naming the rank that the others wait for"
    )
    seed: int = 0
    checkpoint_every: Count = Field(200, description="optimiser steps between checkpoints")
    keep_checkpoints: Count = Field(2, description="how many of the latest to keep, in addition to the best")
    profile: Profile | None = Field(None, description="{start, steps}: trace these steps with torch.profiler")


class Evaluation(Section):
    every: Count = Field(200, description="optimiser steps between held-out evaluations")
    held_out_samples: Count = Field(64, description="samples in a held-out evaluation")
    conversations: Annotated[int, Field(ge=0)] = Field(
        16, description="held-out conversations decoded speculatively after training; 0 for none"
    )
    draft_tokens: Count = Field(4, description="tokens that the draft proposes before each verification")
    new_tokens: Annotated[int, Field(ge=2)] = Field(64, description="tokens decoded in each conversation")


class Tracking(Section):
    tensorboard: bool = Field(True, description="write TensorBoard events if it is installed")
    wandb_project: str | None = Field(
        None,
        description="log to this Weights & Biases project if wandb is installed; WANDB_MODE=offline keeps the logs "
        "local",
    )


class Output(Section):
    dir: LocalPath = Field(description="the run folder; default: runs/ plus the last part of model.target")
    export_dtype: Precision = "bfloat16"
    export_embedding: bool = Field(False, description="include the target's embedding in the exported draft")
    check_export: bool = Field(True, description="load the exported draft in SGLang's own class, if it is installed")


class Recipe(Section):
    model: Model
    data: Data = Data()
    hidden_states: HiddenStates = HiddenStates()
    target: Target = Target()
    parallelism: Parallelism = Parallelism()
    memory: Memory = Memory()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()
    output: Output

    @model_validator(mode="before")
    @classmethod
    def _with_a_run_folder(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        match {"output": None} | values:
            case {"model": {"target": str(target)}, "output": dict() | None as output}:
                values["output"] = {"dir": f"runs/{Path(target).name.lower()}", **(output or {})}
        return values
