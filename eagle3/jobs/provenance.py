"""Digests of everything that a job's samples and hidden states depend on, for comparison with runs and stores."""

import datetime
import hashlib

from eagle3.draft.config import draft_digest
from eagle3.durable import file_digest
from eagle3.jobs.derived import stored_settings
from eagle3.jobs.job import Inputs, Job, KnownTarget
from eagle3.packages import ABSENT, versions
from eagle3.preflight.inputs import files_of
from eagle3.recipe.schema import Recipe
from eagle3.states.store.folder import Provenance
from eagle3.text.encode import tokenizer_identity
from eagle3.text.samples import Spans


def target_provenance(known: KnownTarget) -> Provenance:
    """Everything that the target's hidden states of a conversation depend on."""
    template = str(known.chat_template or known.tokenizer.chat_template or "")
    return {
        "target": known.fingerprint,
        "target_dtype": known.recipe.model.target_dtype,
        "aux_layers": list(known.aux_layers),
        "tokenizer": hashlib.sha256(tokenizer_identity(known.tokenizer).encode()).hexdigest()[:32],
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32],
    }


def input_digests(inputs: Inputs) -> dict[str, str]:
    """Digests of a run's inputs, by recipe key: of every file (or exported draft) that the recipe names by a path, of
    the target, and of the samples, whatever they were made from. They must be the same when the run is resumed."""
    digests = target_provenance(inputs.known)
    return {
        **{
            key: draft_digest(path) if path.is_dir() else file_digest(path)[:32]
            for key, path in files_of(inputs.known.recipe).items()
        },
        "model.target": digests["target"],
        "model.target's tokenizer": digests["tokenizer"],
        "data.chat_template": digests["chat_template"],
        "data.train": inputs.train.checksum,
        "data.held_out": inputs.held_out.checksum,
    }


def provenance(job: Job) -> Provenance:
    """Everything that the rows for training depend on. A store with a different provenance is refused."""
    record = target_provenance(job.known)
    if job.recipe.target.teacher == "logits":
        record |= {"teacher": "logits", "teacher_vocabulary": job.vocabulary.digest}
    return record


def store_provenance(job: Job) -> Provenance:
    """The settings with which a store must have been captured to serve this job."""
    return {**provenance(job), **stored_settings(job.recipe)}


def spans_of(recipe: Recipe) -> Spans | None:
    """The spans of each sample that training supervises; None for its whole loss mask."""
    spans = recipe.data.spans
    return None if spans is None else Spans(spans.length, spans.per_document, recipe.data.seed)


def capture_record(job: Job) -> Provenance:
    """Facts about a capture that are useful to know but do not affect hidden states."""
    recipe, spans = job.recipe, spans_of(job.recipe)
    packages = versions(("eagle3-recipes", "torch", "transformers", "tokenizers", "blosc2", "sglang"))
    return {
        "target": job.known.target,
        "revision": recipe.model.revision,
        "backend": recipe.target.backend,
        "draft_vocabulary": job.vocabulary.digest,
        "spans": None if spans is None else str(spans),
        "captured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: number for name, number in packages.items() if number != ABSENT},  # blosc2 and sglang are optional
    }
