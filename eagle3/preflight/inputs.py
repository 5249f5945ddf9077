"""What a recipe reads, looked for before anything is imported that takes seconds."""

from pathlib import Path

from eagle3.data.conversations import require_source
from eagle3.errors import SharedUserError
from eagle3.recipe import Recipe


def inputs_of(recipe: Recipe) -> dict[str, str]:
    """What the recipe reads and may name as a local path, by key."""
    draft, data = recipe.model.draft, recipe.data
    named = {
        "model.target": recipe.model.target,
        "model.draft.config": draft.config,
        "model.draft.init_from": draft.init_from,
        "model.draft.vocabulary": draft.vocabulary,
        "data.chat_template": data.chat_template,
    }
    for key, sources in (("data.train", data.train), ("data.held_out", data.held_out or [])):
        named |= {f"{key}[{number}]": source for number, source in enumerate(sources)}
    store = recipe.hidden_states
    if store.mode == "stored" and "://" not in store.path:  # else it comes from the network
        named["hidden_states.path"] = store.path
    return {key: str(path) for key, path in named.items() if path is not None}


def require_inputs(recipe: Recipe) -> None:
    """Raises UserError for data and files that the recipe names and that are not there. What may come from the hub, and
    whether a target or store is sound, is said by who reads it."""
    for key, name in inputs_of(recipe).items():
        if key.startswith("data.") and key != "data.chat_template":
            if not name.startswith("demo_answers"):
                require_source(name)
        elif key in ("model.draft.config", "model.draft.vocabulary", "data.chat_template"):
            if not Path(name).is_file():
                raise SharedUserError(f"{key}: {name}: no such file; fix the path")
        elif key == "model.draft.init_from" and not Path(name).is_dir():
            raise SharedUserError(f"{key}: {name}: no such folder; name the export of a run")
