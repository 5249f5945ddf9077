"""What has been verified about each single-model recipe (recipes/claims.toml), and the table in docs/models.md.

python tests/support/claims.py     write the table again
"""

import tomllib
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from eagle3.recipe.loading import load_recipe

# All but the last can be verified without the target's weights.
Claim = Literal["config", "chat_template", "training", "serving", "capture", "weights"]
MARKS = ("<!-- recipes: begin -->", "<!-- recipes: end -->")


class Claims(BaseModel):
    """What is known about one recipe's target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    context: int = Field(ge=1)
    rope: str
    verified: list[Claim] = []
    unverified: dict[Claim, str] = {}  # claim -> the reason why not

    @model_validator(mode="after")
    def _every_claim_once(self) -> "Claims":
        for claim in get_args(Claim):
            if self.verified.count(claim) + (claim in self.unverified) != 1:
                raise ValueError(f"{claim} must stand once, in verified or, with the reason, in unverified")
        return self


def read_claims(path: Path) -> dict[str, Claims]:
    """Read the claims, by recipe name."""
    return TypeAdapter(dict[str, Claims]).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))


def recipes_table(folder: Path) -> str:
    """A Markdown table with a row for each recipe in the claims file of `folder`: target, rope, context and, for each
    claim, "yes" or the number of the reason why not."""
    names, reasons = get_args(Claim), []
    head = ["Recipe", "Target", "Draft's rope; target's context", *(name.replace("_", " ") for name in names)]
    rows = []
    for name, claims in read_claims(folder / "claims.toml").items():
        reasons = list(dict.fromkeys([*reasons, *filter(None, map(claims.unverified.get, names))]))
        marks = (
            f"no ({reasons.index(claims.unverified[each]) + 1})" if each in claims.unverified else "yes"
            for each in names
        )
        target = load_recipe(folder / f"{name}.yaml").model.target
        rows.append([f"[`{name}.yaml`](../recipes/{name}.yaml)", target, f"{claims.rope}; {claims.context:,}", *marks])
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines += ["", "Why not:", "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def write_table(root: Path) -> None:
    """Writes the table of the recipes in `root` into its docs/models.md again, between the marks."""
    page = root / "docs" / "models.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    table = recipes_table(root / "recipes")
    page.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(__file__).parents[2])
