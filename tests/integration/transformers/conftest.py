from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parent))  # tiny_models
sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))  # behaviours
