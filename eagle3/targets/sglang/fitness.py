"""Whether a running server captures what a job needs, by what the server says of itself."""

from collections.abc import Sequence

from eagle3.errors import SharedUserError
from eagle3.targets.sglang.asking import START, ModelInfo, ServerInfo, reported
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.installed import require_supported
from eagle3.targets.sglang.version import CONTEXT_RESERVE, REQUIRED_SETTINGS, other_numbers, reported_settings

VOCABULARY = ("draft_vocabulary", "vocabulary_digest", "vocabulary_size")  # of HookSettings, for a teacher of logits


class ServerDiffers(SharedUserError):
    """Raised if a server computes something else than this job needs, or is set up to do so."""


def require_capture(
    url: str,
    settings: HookSettings,
    aux_layers: Sequence[int],
    *,
    dtype: str,
    revision: str | None = None,
    longest: int | None = None,
    allow_untested: bool = False,
) -> None:
    """Raises ServerDiffers unless the server at `url` captures what this job needs; it names all that is different.
    Raises UserError if it does not answer.

    dtype, revision: with which the server should load the target
    longest: length of the longest sample in tokens
    allow_untested: whether its SGLang may be newer than those that were tested
    """
    info = reported(url, ServerInfo)
    require_supported(info.version, url, allow_untested)
    hook, context = reported_settings(info), info.context_length
    if hook is None:
        raise ServerDiffers(f"target.servers: {url} was started without this project's hook; {START}")
    if longest and context and longest + CONTEXT_RESERVE > context:
        raise SharedUserError(
            f"target.servers: {url} was started with --context-length {context}, too short for a sample of "
            f"{longest:,} tokens; {START}; or lower data.max_length"
        )
    layers, there = info.return_aux_hidden_state_layer_ids or [], dict(info)
    needed = settings._asdict()
    teacher, choice = ("hidden" if each.get("draft_vocabulary") is None else "logits" for each in (hook, needed))
    if teacher != choice:  # which says it: the vocabulary's file, digest and size differ, too
        hook, needed = ({**each, **dict.fromkeys(VOCABULARY)} for each in (hook, needed))
    loaded = {"dtype of the target": there.get("dtype"), "revision": there.get("revision"), "aux layers": layers}
    actual = {**{name: there.get(name) for name in REQUIRED_SETTINGS}, **hook, "teacher": teacher, **loaded}
    required = {
        **REQUIRED_SETTINGS,
        **needed,
        "teacher": choice,
        "dtype of the target": dtype,
        "revision": revision,
        "aux layers": list(aux_layers),
    }
    different = {name: (actual.get(name), value) for name, value in required.items() if actual.get(name) != value}
    different |= other_numbers(info, reported(url, ModelInfo))
    if different:
        differences = ", ".join(f"{name} {value!r} (here: {here!r})" for name, (value, here) in different.items())
        raise ServerDiffers(
            f"target.servers: {url} was started with other settings than this recipe's: {differences}; {START}"
        )
