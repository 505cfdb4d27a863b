from __future__ import annotations

import re
from pathlib import Path

from lib_merge.errors import MergeError, Problem
from lib_merge.ui import cards
from lib_merge.ui.spoken import spoken
from tests.ui.test_cards import text

LIBRARY = Path(__file__).resolve().parents[2] / "lib_merge"


def test_options_are_called_by_the_labels_of_the_form():
    hint = "choose another name, or --overwrite, or --number"
    assert spoken(hint) == "choose another name, or “Saving: overwrite it”, or “Saving: add a number”"
    assert spoken("with --save-dtype fp32") == "with “Precision of the result” fp32"
    assert spoken("A--B and x --1") == "A--B and x --1"
    assert spoken(None) is None
    for said in (
        cards.problem_list([Problem("error", "--rank is odd", hint=hint)]),
        cards.error_card(MergeError("x", hint=hint)),
        cards.field_note(MergeError("x", hint=hint)),
    ):
        assert "--" not in text(said)


def test_no_option_that_the_library_names_reaches_the_tab():
    rooms = [path for path in LIBRARY.rglob("*.py") if path.relative_to(LIBRARY).parts[0] not in ("cli", "ui")]
    options = {option for path in rooms for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text("utf-8"))}
    assert "--overwrite" in options
    assert not [option for option in options if "--" in (spoken(f"use {option} here") or "")]
