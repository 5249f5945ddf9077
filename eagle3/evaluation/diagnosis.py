"""Why a draft accepts so little: tries one change at a time on the same texts, and names those that raise acceptance.

Each change undoes one mistake that is known from the field: other layers than in training, rows or positions off by
one, another rope, a misread draft vocabulary, a norm that is on or off, another embedding, a missing window. Acceptance
is teacher-forced (`teacher_forced`), over all places of texts that the target wrote. A change counts if it raises the
mean number of accepted drafts beyond a 95% interval of the difference, over the texts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from eagle3.draft.interchange import EMBEDDING, ExportedDraft, load_weights
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.by_context import ratio_intervals
from eagle3.evaluation.teacher_forced import WrittenText, accepted_drafts
from eagle3.targets.transformers import TransformersTarget

LEAST_GAIN = 0.05  # accepted drafts; a smaller gain is no explanation, however certain


class Change(NamedTuple):
    """A draft as it would be without one mistake, and the texts as it would see them."""

    name: str
    remedy: str  # what to write where
    exported: ExportedDraft
    texts: Sequence[WrittenText]


class Finding(NamedTuple):
    """What a change did to the mean number of accepted drafts."""

    name: str
    remedy: str
    accepted: float
    gain: float
    interval: tuple[float, float]  # of the gain

    @property
    def explains(self) -> bool:
        return self.gain >= LEAST_GAIN and self.interval[0] > 0


@dataclass(frozen=True)
class Diagnosis:
    accepted: float  # as the draft is
    findings: list[Finding]  # the largest gain first

    @property
    def explanations(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.explains]

    def lines(self) -> list[str]:
        """The diagnosis in words."""
        if not self.explanations:
            best = self.findings[0]
            return [
                f"{self.accepted:.2f} drafts accepted; none of {len(self.findings)} changes raises that by "
                f"{LEAST_GAIN} beyond its interval (the best, {best.name}: {best.gain:+.2f})"
            ]
        return [
            f"{finding.name}: {finding.accepted:.2f} drafts accepted, not {self.accepted:.2f} (gain "
            f"{finding.interval[0]:.2f} to {finding.interval[1]:.2f}); {finding.remedy}"
            for finding in self.explanations
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_drafts": self.accepted,
            "changes": [finding._asdict() | {"explains": finding.explains} for finding in self.findings],
        }


def diagnose(
    exported: ExportedDraft,
    target: TransformersTarget,
    texts: Sequence[WrittenText],
    groups: ProcessGroupCollection,
    draft_tokens: int,
    report: Callable[[str], None],
) -> Diagnosis:
    """Measure the draft as it is, and with each change. texts: with the auxiliary layers that the draft names."""

    def counts(one: ExportedDraft, seen: Sequence[WrittenText]) -> np.ndarray:
        """For each text: accepted drafts, and places [C, 2]."""
        draft = built(one, target, groups)
        accepted = [accepted_drafts(draft, one.d2t.to(target.device), text, draft_tokens) for text in seen]
        return np.array([[int(each.sum()), len(each)] for each in accepted])

    own = counts(exported, texts)
    base, findings = float(own[:, 0].sum() / own[:, 1].sum()), []
    report(f"as it is: {base:.2f} of {draft_tokens} drafts accepted")
    for change in changes(exported, target, texts):
        changed = counts(change.exported, change.texts)
        difference = changed[:, 0] - own[:, 0]
        bounds = ratio_intervals(difference[:, None], own[:, 1], seed=0)
        gain = float(difference.sum() / own[:, 1].sum())
        interval = (-math.inf, math.inf) if bounds is None else tuple(bounds[0].tolist())
        findings.append(Finding(change.name, change.remedy, base + gain, gain, interval))
        report(f"{change.name}: {base + gain:.2f}")
    return Diagnosis(base, sorted(findings, key=lambda finding: -finding.gain))


def built(exported: ExportedDraft, target: TransformersTarget, groups: ProcessGroupCollection) -> Eagle3Draft:
    """The draft's module, with the target's embedding if it has none."""
    head = target.weights()
    draft = Eagle3Draft(exported.config, groups, head.embedding.dtype).eval().requires_grad_(False)
    if EMBEDDING not in exported.weights:
        draft.embedding.weight.copy_(head.embedding)
    load_weights(draft, exported, groups.tp)
    return draft.to(head.embedding.device)


def changes(exported: ExportedDraft, target: TransformersTarget, texts: Sequence[WrittenText]) -> Iterator[Change]:
    """Every change that is possible for this draft."""
    config = exported.config

    def configured(name: str, remedy: str, **values: Any) -> Change:
        return Change(name, remedy, replace(exported, config=replace(config, **values)), texts)

    def weighted(name: str, remedy: str, **weights: Tensor) -> Change:
        return Change(name, remedy, replace(exported, weights=exported.weights | weights), texts)

    def seen(name: str, remedy: str, aux: Callable[[WrittenText], Tensor]) -> Change:
        return Change(name, remedy, exported, [text._replace(aux=aux(text)) for text in texts])

    layers = target.aux_layers
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers)
        if moved[0] >= 0 and moved[-1] < len(target.layers):
            rows = shifted_states(target, moved, texts)
            yield Change(
                f"auxiliary layers {list(moved)}, not {list(layers)}",
                "eagle_config.eagle_aux_hidden_state_layer_ids in config.json counts from 0",
                exported,
                [text._replace(aux=aux) for text, aux in zip(texts, rows, strict=True)],
            )
    yield seen(
        "auxiliary layers in reverse order",
        "the draft's fc reads the highest layer first: reorder its columns",
        lambda text: torch.cat(text.aux.chunk(3, -1)[::-1], -1),
    )
    for rows, where in ((1, "early"), (-1, "late")):
        yield seen(
            f"hidden states one row {where}",
            "the rows and tokens of its training were off by one: train it again",
            lambda text, rows=rows: text.aux.roll(rows, 0),
        )
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        yield configured(
            "a plain rope",
            "rope_parameters in config.json",
            rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        )
    own_rope = getattr(target.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for theta in sorted({10_000.0, float(own_rope.get("rope_theta", 10_000.0)), 500_000.0, 1e6} - {rope["rope_theta"]}):
        yield configured(
            f"rope_theta {theta:,.0f}, not {rope['rope_theta']:,.0f}",
            "rope_theta in config.json",
            rope_parameters={**rope, "rope_theta": theta},
        )
    places = torch.arange(len(exported.d2t))
    for name, d2t in (("ids", exported.d2t - places), ("offsets of offsets", exported.d2t + places)):
        ids = d2t + places
        if int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size and not torch.equal(d2t, exported.d2t):
            yield Change(f"d2t read as {name}", "d2t holds d2t[i] - i", replace(exported, d2t=d2t), texts)
    yield configured("norm_output the other way", "norm_output in config.json", norm_output=not config.norm_output)
    yield configured(
        "norm_before_residual the other way",
        "norm_before_residual in config.json",
        norm_before_residual=not config.norm_before_residual,
    )
    whole, own = target.weights().embedding.cpu(), exported.weights.get(EMBEDDING)
    if own is not None and own.shape == whole.shape and not torch.equal(own.to(whole.dtype), whole):
        yield weighted("the target's embedding", f"leave {EMBEDDING} out of the draft", **{EMBEDDING: whole})
    if config.window is not None:
        yield configured("no window", "leave sliding_window out of config.json", window=None)
        return
    longest = max(len(text.ids) for text in texts)
    for window in (size for size in (512, 2048) if size < longest):
        yield configured(f"a window of {window}", "sliding_window and layer_types in config.json", window=window)


def shifted_states(target: TransformersTarget, layers: tuple[int, ...], texts: Sequence[WrittenText]) -> list[Tensor]:
    """The auxiliary states of other layers."""
    other = TransformersTarget(target.model, aux_layers=layers, prefill_tokens=target.prefill_tokens)
    return [rows.aux for rows in other.prefill([text.ids for text in texts])]
