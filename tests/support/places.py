"""Paths in the repository that tests and their workers read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, LAUNCHERS, RECIPES = ROOT / "tests", ROOT / "launchers", ROOT / "recipes"
SUPPORT, GOLDEN, FAMILIES, CHAT_TEMPLATES = (
    TESTS / name for name in ("support", "golden", "families", "chat_templates")
)
ZERO2 = ROOT / "ds_configs" / "zero2.json"
