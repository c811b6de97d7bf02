"""What is said of a model so that two ends can compare it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplug.engine import ModelInfo

LLAMA = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}


def said(**attributes: Any) -> str:
    return ModelInfo.positions_of(SimpleNamespace(**attributes))


def test_the_same_positions_are_the_same_text_whatever_else_differs() -> None:
    other = {"rope_type": "default", "rope_theta": 5e5}
    assert said(**LLAMA) == said(model_type="another", rope_parameters=other, hidden_size=3)


@pytest.mark.parametrize(
    "differing",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6},
        {"partial_rotary_factor": 0.5},
        {"rotary_pct": 0.25},
        {"rope_parameters": None},
    ],
    ids=lambda differing: str(*differing),
)
def test_positions_that_change_keys_are_another_text(differing: dict[str, Any]) -> None:
    assert said(**{**LLAMA, **differing}) != said(**LLAMA)


def test_a_model_without_rope_says_which_it_is() -> None:
    assert said(model_type="gpt2") == said(model_type="gpt2", rope_scaling=None) == "no rope (gpt2)"
