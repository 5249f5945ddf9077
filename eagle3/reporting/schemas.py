"""What a run's files hold, as far as page, card and comparison read it. A person, or another program, may have written them.

Records are read as they stand: these models say what a file may hold, and with which key something is wrong.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]  # of acceptance, in tokens
Numbers = list[float | None]


def _object(name: str, base: type[BaseModel] | None = None, **kinds: Any) -> Any:
    """A model of an object with the keys of `base` and these: each of a kind, or (kind, default) where it may be missing."""
    fields = {key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in kinds.items()}
    return create_model(name, __base__=base, **fields)


def _optional(kind: Any) -> tuple[Any, None]:
    """Of a key that may be missing, or null."""
    return kind | None, None


def _fitting(histogram: BaseModel) -> BaseModel:
    edges, counts = histogram.edges, histogram.counts
    if not counts or len(edges) != len(counts) + 1 or edges != sorted(edges):
        raise ValueError("Edges should ascend and be one more than counts")
    return histogram


def _whole(memory: BaseModel) -> BaseModel:
    if memory.estimate_gib is not None and None in (memory.parts_gib, memory.stream, memory.measured):
        raise ValueError("An estimate should have parts_gib, stream and measured")
    return memory


Judged = _object(
    "Judged",
    conversations=Count,
    verifications=Count,
    acceptance_length=_optional(Length),
    position_acceptance=_optional(list[Share]),
    mismatches=_optional(Count),
    ties=_optional(Count),
)
Verified = _object("Verified", accepted=list[str], rejected=list[str], own=str | None)
Example = _object("Example", prompt=str, first=_optional(str), verifications=list[Verified])
Evaluation = _object(  # evaluation.json
    "Evaluation",
    Judged,
    new_tokens=Count,
    draft_tokens=Count,
    temperature=_optional(Amount),
    topk=(Count, 1),
    untrained=_optional(_object("Untrained", acceptance_length=Length)),
    speed=_optional(  # tokens a second
        _object("Speed", speculative=Amount, plain=Annotated[float, Field(gt=0, allow_inf_nan=False)])
    ),
    examples=_optional(list[Example]),
)
OfContext = _object(
    "OfContext",
    Judged,
    context=Annotated[int, Field(ge=1)],
    interval=_optional(Annotated[list[Amount | None], Field(min_length=2, max_length=2)]),
)
ByContext = _object("ByContext", contexts=list[OfContext], temperature=_optional(Amount))  # by_context.json
DraftFile = _object(  # config.json of an export
    "DraftFile",
    vocab_size=Count,
    draft_vocab_size=Count,
    max_position_embeddings=Count,
    rope_parameters=_optional(_object("RopeParameters", rope_type=(str, "default"), factor=_optional(Amount))),
    eagle_config=_optional(dict[str, Any]),
)
DataPart = _object(
    "DataPart",
    samples=Count,
    tokens=Count,
    supervised=Count,
    longest=Count,
    lengths=_optional(
        Annotated[_object("Histogram", edges=list[Amount], counts=list[Count]), AfterValidator(_fitting)]
    ),
    prepared=_optional(
        _object(
            "Prepared",
            rows=Count,
            truncated=Count,
            dropped=dict[str, Count],
            kinds=(dict[str, str], {}),  # of each reason; older runs have none
            empty_answers=_optional(Count),  # not counted by older runs
        )
    ),
)
Memory = _object(  # of the planner; null, and a reason why, where it made no estimate
    "Memory",
    before_gib=Amount,
    estimate_gib=Amount | None,
    why=_optional(str),
    parts_gib=_optional(dict[str, Amount]),
    stream=_optional(_object("LargestStream", tokens=Count, documents=Count, supervised=Share, spans=(Count, 1))),
    measured=_optional(str),
)
Started = _object(  # run.json
    "Started",
    started=str,
    continues=bool,
    steps=Count,
    layout=dict[str, Count],
    machine=_object(
        "Machine",
        system=str,
        processor=str,
        cores=Count,
        memory_gib=Amount,
        gpu=str | None,
        processes=Count,
    ),
    versions=dict[str, str],
    target=_object(
        "Target",
        hub_id=str | None,
        architecture=str,
        layers=Count,
        hidden_size=Count,
        context=Count,
    ),
    draft=_object("Draft", parameters=Count, context=Count),
    vocabulary=_object("Vocabulary", size=Count, target_size=Count, coverage=Share),
    data=_object("Data", datasets=list[str], train=DataPart, held_out=DataPart),
    memory=Annotated[Memory, AfterValidator(_whole)],
)
RecipeFile = _object(  # recipe.yaml, as far as more is done with a value than to show it
    "RecipeFile",
    model=_optional(_object("RecipeModel", target=_optional(str))),
    data=_optional(_object("RecipeData", train=_optional(list[str]), max_length=_optional(Count))),
    training=_optional(
        _object(
            "RecipeTraining",
            global_batch_size=_optional(Count),
            ttt_steps=_optional(Count),
            step_decay=_optional(Amount),
            gradient_clipping=_optional(Amount),
            skip_above_norm=_optional(Amount),
        )
    ),
    evaluation=_optional(_object("RecipeEvaluation", draft_tokens=_optional(Count))),
)
Metrics = _object(  # a line of metrics.jsonl
    "Metrics",
    step=Count,
    kind=str,
    **dict.fromkeys(("loss", "learning_rate", "gradient_norm", "simulated_acceptance_length"), _optional(float)),
    **dict.fromkeys(("tokens", "supervised", "tokens_per_second", "memory_gib"), _optional(float)),
    **dict.fromkeys(("step_losses", "accuracy", "acceptance_rate"), _optional(Numbers)),
    **dict.fromkeys(("contexts", "acceptance_by_context", "supervised_by_context"), _optional(Numbers)),
)


def first_problem(error: ValueError) -> str:
    """`key: what should be, not what is`; of what is no JSON what the parser says."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place, value = ".".join(map(str, first["loc"])), first["input"]
    what = first["msg"] if first["type"] == "missing" else f"{first['msg']}, not {value!r:.60}"
    return f"{place}: {what}" if place else what
