"""What a pipe claims decides which tests it gets, and for which device its ends are made."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug_testing import PipeContract


class Claims(PipeContract):
    """The pipe "memory" with other capabilities."""

    transport = "memory"
    claims: Any = {}  # noqa: RUF012

    @property
    def spec(self) -> Any:
        spec: Any = super().spec
        return attrs.evolve(spec, capabilities=attrs.evolve(spec.capabilities, **self.claims))


@pytest.mark.parametrize(
    ("devices", "given", "device"),
    [
        ({"cpu"}, "", "cpu"),
        ({"cuda", "cpu"}, "", "cpu"),
        ({"xpu", "cuda"}, "", "cuda"),
        ({"cuda", "cpu"}, "cuda", "cuda"),
    ],
)
def test_ends_are_made_for_a_device_that_is_claimed(devices: set[str], given: str, device: str) -> None:
    claims = {"claims": {"devices": devices}, "device": given}
    mine: Any = type("Mine", (Claims,), {**claims, "make_endpoint": lambda self, context: context})()
    assert mine.endpoint().device == device


def test_a_device_that_torch_has_not_is_skipped() -> None:
    pytest.importorskip("torch")
    mine: Any = type("Mine", (Claims,), {"claims": {"devices": {"abacus"}}})()
    with pytest.raises(pytest.skip.Exception, match="torch has no device abacus here"):
        mine.test_a_tensor_of_each_claimed_device_arrives_with_its_bits()


class ImportsMore(Claims):
    def import_all(self) -> None:
        super().import_all()


def test_a_class_that_imports_more_has_a_fork_server_of_its_own() -> None:
    assert Claims().server_key == type("Another", (Claims,), {})().server_key
    assert Claims().server_key != ImportsMore().server_key
