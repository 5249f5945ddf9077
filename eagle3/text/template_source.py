"""What the source of a chat template tells before it is run, without transformers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from eagle3.errors import UserError

GENERATION = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
# As transformers has it, which adds the tags of GENERATION.
PARSER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])


def read_template(path: Path) -> str:
    """Jinja source. Raises UserError for a file that holds no template, or one that cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or no path
        raise UserError(f"{path}: cannot be read ({error}); fix data.chat_template") from error
    if not text.strip():
        raise UserError(
            f"{path}: holds no chat template; fix data.chat_template, or leave it out for the tokenizer's own"
        )
    tags = {"generation": "if true", "endgeneration": "endif"}
    plain = GENERATION.sub(lambda found: f"{{%{found[1]} {tags[found[2]]} {found[3]}%}}", text)
    try:
        PARSER.parse(plain)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.message:.200}; fix the chat template there") from error
    return text


def check_variables(template: str, variables: Mapping[str, Any]) -> None:
    """Raises UserError for a variable that the template does not mention, and which would change nothing."""
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"data.template_variables: {name!r} occurs nowhere in the chat template, so it would change nothing; mend the "
                "name or leave it out"
            )
