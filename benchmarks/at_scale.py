"""What 8, 100 and 1,000 engines cost: constants that are measured, a model, and a simulation with them.

    python benchmarks/at_scale.py measure
    python benchmarks/at_scale.py check [--requests N] [--markdown FILE] [--json FILE]
    python benchmarks/at_scale.py simulate [--engines 8,100,1000] [--rate R] [--plot FILE] [--markdown FILE]
        [--json FILE]

``measure`` runs kvplug's own code in processes of their own, over TCP on loopback, for some minutes, and
writes the constants into ``scale/constants.json``. ``check`` runs eight engines (the kit's fakes) in a full
mesh, and compares the events, links, threads and loads that they count with those that the model predicts for
the same requests. ``simulate`` runs conversations on simulated engines, and adds up what they cost, from the
constants; it needs some minutes for 1,000 engines. The same seed gives the same figures.
docs/explanation/at-scale.md describes the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import harness
from scale import report
from scale.constants import FILE, Constants
from scale.simulate import Workload


def check(known: Constants, given: argparse.Namespace) -> int:
    from scale import eight

    count, engines = given.requests, given.engines
    requests = eight.trace(count, engines)
    began = time.monotonic()
    alone = eight.counted([], 1)[0][1]
    counted = eight.counted(requests, engines)
    took = time.monotonic() - began
    predicted = eight.predicted(requests, engines)
    rows, is_same = [], True
    for number, ((seen, held), model) in enumerate(zip(counted, predicted, strict=True)):
        is_same = is_same and seen == model
        held_by_model = eight.expected(known, seen, alone)
        rows.append(
            (
                str(number),
                *(
                    f"{getattr(seen, what)} / {getattr(model, what)}"
                    for what in ("events", "followed", "served", "dialled", "own", "peer", "computed")
                ),
                f"{held.threads:.0f} / {held_by_model.threads:.0f}",
                f"{held.descriptors:.0f} / {held_by_model.descriptors:.0f}",
            )
        )
    head = (
        "engine",
        "events received",
        "stores followed",
        "links served",
        "peers dialled",
        "units: own store",
        "from peers",
        "computed",
        "threads",
        "descriptors",
    )
    title = f"{engines} engines, {count} requests, {took:.0f} s: counted / predicted"
    verdict = "events, links and loads are as predicted" if is_same else "NOT as predicted"
    harness.write(given, title, harness.table(head, rows), verdict)
    return 0 if is_same else 1


def simulate(known: Constants, given: argparse.Namespace) -> int:
    load = Workload(requests=given.rate)
    rows = []
    for engines in map(int, given.engines.split(",")):
        for topology in report.TOPOLOGIES:
            if topology.group != 1 and topology.group != float("inf") and topology.group >= engines:
                continue
            began = time.monotonic()
            rows.append(report.row(known, engines, topology, load, warm_s=given.warm, seconds=given.seconds))
            print(f"{engines} {topology.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    parts = [
        f"{load!r}",
        f"Constants of {known.where}:",
        report.constants_table(known),
        "What a full mesh uses up:",
        report.bends_table(known, load),
        "Where pages come from:",
        report.hits_table(rows),
        "What an engine pays for it:",
        report.costs_table(rows),
        "Membership:",
        report.membership_table(known, [int(each) for each in given.engines.split(",")]),
    ]
    harness.write(given, *parts)
    if given.plot:
        report.plot(given.plot, known, load, rows)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--constants", type=Path, default=FILE, help="where the constants are kept")
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("measure", help="measure the constants")
    checking = parts.add_parser("check", help="compare eight real engines with the model")
    checking.add_argument("--requests", type=int, default=80)
    checking.add_argument("--engines", type=int, default=8)
    simulating = parts.add_parser("simulate", help="simulate, and print tables")
    simulating.add_argument("--engines", default="8,100,1000")
    simulating.add_argument("--rate", type=float, default=1.0, help="requests a second of each engine")
    simulating.add_argument(
        "--warm", type=float, default=200.0, help="simulated seconds that are not counted"
    )
    simulating.add_argument("--seconds", type=float, default=200.0, help="simulated seconds that are")
    simulating.add_argument("--plot", type=Path, help="draw a picture (needs matplotlib)")
    for each in (checking, simulating):
        harness.add_outputs(each)
    given = parser.parse_args()
    if given.part == "measure":
        from scale.measure import measured

        known = measured(lambda text: print(text, file=sys.stderr))
        known.save(given.constants)
        print(report.constants_table(known))
        return 0
    known = Constants.load(given.constants)
    if given.part == "check":
        return check(known, given)
    return simulate(known, given)


if __name__ == "__main__":
    sys.exit(main())
