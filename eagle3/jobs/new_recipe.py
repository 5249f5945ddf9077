"""Write a recipe for a target: keys chosen by the target's config, and the planner's findings as comments."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from eagle3.console import Say, data_size
from eagle3.draft.config import DRAFTED_TOKENS, DraftConfig
from eagle3.errors import UserError
from eagle3.jobs.derived import shape_draft, store_encoding
from eagle3.jobs.gate import Gate
from eagle3.jobs.plan import planned_step, seen_share
from eagle3.planning.fitting import RESERVED, Fitted, PlannedStream, best_layout, longest_of_any_layout
from eagle3.planning.step import Planned, step_seconds
from eagle3.recipe.loading import apply_override, checked_recipe
from eagle3.recipe.schema import Recipe
from eagle3.states.capture import token_bytes
from eagle3.targets.facts import TargetFacts, is_stateful
from eagle3.targets.sglang.version import EAGLE3_TARGETS

CONTEXTS = (8192, 32768, 131072)
# Number of supervised tokens after a long prompt, and a window in keys. The findings say what the window would save
# there.
ANSWER, WINDOW = 5000, 512
# The memory of an H100, and the numbers of GPUs in one node and in four.
GPU_BYTES = 80e9
USABLE = GPU_BYTES * (1 - RESERVED)
NODE = 8
GPUS = (NODE, 4 * NODE)
ENGINE_BYTES = GPU_BYTES * 0.8  # of a GPU for an inference engine, as in target.memory_fraction
# Serving engines build a rope table for all of a draft's positions. For a target with more positions than this, the
# recipe starts with a quarter of it.
MOST_POSITIONS = 2**20
WIDTH = 116  # line width in a recipe
BEGIN = (
    "# --- what follows from these keys and the target's config; launchers/new_recipe.py --refresh writes it again ---"
)
END = "# --- end of what is written again ---"
MORE_NODES = (
    "The target does not fit the GPUs of one node: start SGLang servers over more and name them in target.servers "
    "(docs/sglang.md)."
)


# A new recipe --------------------------------------------------------------------------------------------------------


def new_recipe_text(
    target: str,
    facts: TargetFacts,
    deepspeed_file: Path,
    warn: Say,
    overrides: Sequence[str] = (),
    engine: bool = True,
) -> str:
    """A complete recipe for `target` (hub id or folder), ready for editing, laid out for one node with 8 GPUs of 80 GB.

    overrides: `section.key=value`; parallelism.ulysses or ring keeps the layout from being chosen
    engine: use SGLang if it can serve the target. If False, transformers runs the target during training, unless it
        needs several GPUs or its head is quantised.

    warn: gets a line for what works, but is seldom meant

    Raises UserError if no draft can be derived, naming the override that would help, or if the overrides do not fit
    together.
    """
    name, gpus = Path(target).name.lower(), facts.engine_gpus(ENGINE_BYTES)
    positions = {"max_position_embeddings": MOST_POSITIONS // 4} if (facts.context or 0) > MOST_POSITIONS else {}
    # With a quantised head, the draft's head has nothing to start from, and training cannot compute logits.
    lm_head, teacher = ({"lm_head": "random"}, {"teacher": "logits"}) if facts.quantised_head else ({}, {})
    servable = facts.architecture in EAGLE3_TARGETS
    engine = servable and (engine or gpus > 1 or facts.quantised_head)
    store = {"mode": "stored", "path": f"states/{name}", "codec": "lossless"}
    values: dict[str, dict] = {
        "model": {
            "target": target,
            "draft": {"vocab_size": min(DRAFTED_TOKENS, facts.config.vocab_size), **positions, **lm_head},
        },
        "data": {"train": ["preset:ultrachat", "preset:longalign"], "too_long": "truncate", "unusable": "drop"},
        "hidden_states": store if engine or gpus > 1 else {"mode": "live"},
        "target": ({"backend": "sglang", "tensor": min(gpus, NODE)} if engine else {"backend": "transformers"})
        | teacher,
        "parallelism": {},
        "memory": {},
        "training": {"dtype": "bfloat16", "global_batch_size": 32, "epochs": 2},
        # Judging after training would load the whole target on one GPU, and cannot roll back a layer's state.
        "evaluation": {"conversations": 0} if gpus > 1 or is_stateful(facts.config) else {},
        "output": {"dir": f"runs/{name}"},
    }
    for override in overrides:
        apply_override(values, override)
    context = facts.context or planned(_recipe(values), facts, NODE, deepspeed_file).draft.max_position_embeddings
    values["data"].setdefault("max_length", min(CONTEXTS[1], context))
    _lay_out(values, facts, deepspeed_file)
    recipe = _recipe(values)
    draft = shape_draft(recipe, facts.config)
    # refuse what train.py would
    Gate(recipe, warn, training=True).know(config=facts.config, draft=draft)
    planned_step(recipe, draft, NODE, deepspeed_file, packed=True)
    head = (
        f"An EAGLE3 draft for {target} ({model_size(facts.parameters)}). Edit it, and run plan.py, prepare.py, "
        "capture.py, train.py with it; docs/new-model.md goes through every part. Drafts learn best from the target's "
        "own answers: docs/regenerating-data.md." + (f" {MORE_NODES}" if servable and gpus > NODE else "")
    )
    sections = (yaml.safe_dump({name: keys}, sort_keys=False, width=WIDTH) for name, keys in values.items() if keys)
    commented = "".join(f"# {line}\n" for line in textwrap.wrap(head, WIDTH))
    return f"{commented}{''.join(sections)}\n{findings(recipe, facts, deepspeed_file)}\n"


def _lay_out(values: dict[str, dict], facts: TargetFacts, deepspeed_file: Path) -> None:
    """Add to a recipe's values the layout that the user chose or, if one fits, the best one for a node, with the
    accumulation that it needs for one sample per stream. Raises UserError for a chosen one that is impossible."""
    recipe = _recipe(values)
    if values["parallelism"].keys() & {"ulysses", "ring"}:
        sizes = planned_step(recipe, shape_draft(recipe, facts.config), NODE, deepspeed_file, packed=False).sizes
    elif layout := _fitting(recipe, facts, NODE, PlannedStream(recipe.data.max_length, 1, 1.0), deepspeed_file):
        sizes, memory = layout.planned.sizes, layout.planned.memory
        values["parallelism"] |= {"ulysses": sizes.ulysses, "ring": sizes.ring}
        if sizes.ring > 1:
            values["parallelism"].setdefault("ring_mode", layout.planned.ring_mode)
        values["memory"] = {"recompute": memory.recompute, "inputs": layout.planned.residence} | values["memory"]
    else:
        return
    values["training"].setdefault("accumulation", max(values["training"]["global_batch_size"] // sizes.data, 1))


def model_size(parameters: int) -> str:
    """For example `8B parameters` or `1.7M parameters`."""
    return f"{parameters / 1e9:,.0f}B parameters" if parameters >= 1e9 else f"{parameters / 1e6:,.1f}M parameters"


def _whole_gb(size: float) -> str:
    """The size in whole GB, because fractions of an estimate mean nothing."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e9 else data_size(size)


def _recipe(values: dict[str, dict]) -> Recipe:
    return checked_recipe({section: keys for section, keys in values.items() if keys}, "new recipe")


def refreshed(text: str, recipe: Recipe, facts: TargetFacts, deepspeed_file: Path, origin: str) -> str:
    """The recipe's text with new findings. Raises UserError, naming `origin`, if the text has no place for them."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise UserError(
            f"{origin}: has no lines {BEGIN!r} and {END!r} to write between; add them, or make a new recipe"
        )
    return text[:begin] + findings(recipe, facts, deepspeed_file) + text[end + len(END) :]


# What the planner says ----------------------------------------------------------------------------------------------


def findings(recipe: Recipe, facts: TargetFacts, deepspeed_file: Path) -> str:
    """Draft, disk and layouts, as comment lines from BEGIN to END, for each of CONTEXTS, or for the target's context if
    that is shorter than all of them. Contexts beyond the target's are marked: they need a longer rope."""
    draft, engine = shape_draft(recipe, facts.config), facts.engine_gpus(ENGINE_BYTES)
    encoding = store_encoding(recipe, draft)
    context = facts.context or draft.max_position_embeddings
    contexts = CONTEXTS if context >= min(CONTEXTS) else (context,)
    disk = ", ".join(
        f"{tokens:,} tokens {_whole_gb(1000 * tokens * token_bytes(encoding, 1.0))}" for tokens in contexts
    )
    lines = [
        f"draft: hidden {draft.hidden_size:,}, MLP {draft.intermediate_size:,}, {draft.num_attention_heads} heads "
        f"({draft.num_key_value_heads} of keys) of {draft.head_dim}, {draft.draft_vocab_size:,} of "
        f"{draft.vocab_size:,} tokens; aux layers {', '.join(map(str, draft.aux_layers))} of "
        f"{facts.config.num_hidden_layers}; rope {rope_in_words(draft)}; context {draft.max_position_embeddings:,}",
        f"target: {model_size(facts.parameters)}, {_whole_gb(facts.bytes)} as stored: "
        f"{engine} GPU{'s' * (engine > 1)} of 80 GB",
        f"hidden states of 1,000 samples on disk (codec {recipe.hidden_states.codec}, all supervised): {disk}",
        f"layouts for GPUs of 80 GB, one sample a stream, all supervised, {recipe.training.ttt_steps} TTT steps, "
        f"{deepspeed_file.name}; plan.py has the rest:",
    ]
    note = f" (beyond the target's context, {context:,})"
    comments = [line for line in lines for line in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    for gpus in GPUS:
        for tokens in contexts:
            layout = _layout(_fitting(recipe, facts, gpus, PlannedStream(tokens, 1, 1.0), deepspeed_file))
            comments.append(f"  {gpus:3d} GPUs {tokens:>9,} tokens: {layout}{note * (tokens > context)}")
        if contexts == CONTEXTS:
            largest = longest_of_any_layout(planned(recipe, facts, gpus, deepspeed_file), gpus, 1.0, USABLE)
            most = "more than the planner looks for" if largest is None else f"{largest:,} tokens"
            comments.append(f"  {gpus:3d} GPUs at most {most}{note if largest is None or largest > context else ''}")
    if max(contexts) > ANSWER:
        comments += windows(recipe, facts, max(contexts), deepspeed_file)
    return "\n".join([BEGIN, *(f"# {line}" for line in comments), END])


def windows(recipe: Recipe, facts: TargetFacts, tokens: int, deepspeed_file: Path) -> list[str]:
    """Comment lines about what a window saves if a long prompt has a short answer."""
    stream = PlannedStream(tokens, 1, ANSWER / tokens)
    lines = [
        f"of {tokens:,} tokens the last {ANSWER:,} supervised; 1,000 samples on disk, a rank of {NODE} GPUs, its step "
        "(estimated):"
    ]
    for name, window in (("full attention", None), (f"model.draft.window={WINDOW}", WINDOW)):
        draft = recipe.model.draft.model_copy(update={"window": window})
        variant = recipe.model_copy(update={"model": recipe.model.model_copy(update={"draft": draft})})
        encoding = store_encoding(variant, shape_draft(variant, facts.config))
        size = 1000 * tokens * token_bytes(encoding, stream.supervised, seen_share(encoding, stream))
        fitted, step = _fitting(variant, facts, NODE, stream, deepspeed_file), "does not fit"
        if fitted is not None:
            seconds = step_seconds(fitted.planned, stream.share(fitted.planned))
            step = f"{_whole_gb(stream.needs(fitted.planned))}, {seconds:.2g} s"
        lines.append(f"  {name:24s} {_whole_gb(size):>9s}, {step}")
    return lines


def planned(recipe: Recipe, facts: TargetFacts, gpus: int, deepspeed_file: Path) -> Planned:
    """A plan for the recipe's draft on this many GPUs, regardless of the recipe's layout."""
    alone = recipe.model_copy(update={"parallelism": type(recipe.parallelism)(tensor=recipe.parallelism.tensor)})
    return planned_step(alone, shape_draft(alone, facts.config), gpus, deepspeed_file, packed=False)


def rope_in_words(draft: DraftConfig) -> str:
    """The rope, for example `yarn x32 of 4,096, theta 150,000`."""
    rope = draft.rope_parameters
    factor = f" x{rope['factor']:g}" if "factor" in rope else ""
    original = rope.get("original_max_position_embeddings")
    return f"{rope['rope_type']}{factor}{f' of {original:,}' if original else ''}, theta {rope['rope_theta']:,.0f}"


def _fitting(
    recipe: Recipe, facts: TargetFacts, gpus: int, stream: PlannedStream, deepspeed_file: Path
) -> Fitted | None:
    return best_layout(planned(recipe, facts, gpus, deepspeed_file), gpus, lambda _sizes: stream, USABLE)


def _layout(fitted: Fitted | None) -> str:
    if fitted is None:
        return "does not fit"
    sizes, memory = fitted.planned.sizes, fitted.planned.memory
    mode = f" ({fitted.planned.ring_mode})" if sizes.ring > 1 else ""
    return (
        f"ulysses {sizes.ulysses}, ring {sizes.ring}{mode}, data {sizes.data}, recompute {memory.recompute}, inputs "
        f"on the {fitted.planned.residence}: {_whole_gb(fitted.stream.needs(fitted.planned))} a rank"
    )
