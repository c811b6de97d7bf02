"""The entry point of kvplug-lab: imports nothing heavy."""

from __future__ import annotations

from kvplug.transport import TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports() -> list[TransportSpec]:
    around = [
        TransportSpec(
            kind=kind,
            name="around",
            factory="kvplug_lab.around:around",
            options="kvplug_lab.around:AroundOptions",
            summary="For tests: wraps another one, and changes nothing",
            for_tests=True,
            wraps=True,
        )
        for kind in ("pipe", "queue")
    ]
    faulty = TransportSpec(
        kind="pipe",
        name="faulty",
        factory="kvplug_lab.faults:faulty",
        options="kvplug_lab.faults:FaultyOptions",
        summary="For tests: wraps another pipe, and injects faults",
        for_tests=True,
        wraps=True,
    )
    return [*around, faulty]
