"""The quick start that tests of the command line simulate."""

from __future__ import annotations

from tests.habits.source import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
