"""Log lines with stable fields: what the code emits is what the table says, and JSON is one object a line."""

from __future__ import annotations

import ast
import datetime
import json
import logging
import sys
from pathlib import Path

import pytest

import kvplug
from kvplug.cli.log import JsonFormatter
from kvplug.net.log import FIELDS, LogEvent

NOT_FIELDS = {"level", "exc_info"}


def emitted() -> list[tuple[str, set[str]]]:
    """The event and the fields of each call of ``LogEvent.<EVENT>.log``."""
    found = []
    for path in sorted(Path(kvplug.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Attribute(value=ast.Name(id="LogEvent"), attr=event), attr="log"
                    )
                ):
                    found.append((event, {str(each.arg) for each in node.keywords} - NOT_FIELDS))
    return found


def test_the_code_emits_each_event_with_the_fields_of_its_row() -> None:
    assert {event for event, _ in emitted()} == {event.name for event in LogEvent}
    assert not [(event, fields) for event, fields in emitted() if fields != {*LogEvent[event].fields}]
    assert {field for event in LogEvent for field in event.fields} == FIELDS.keys()


def line_of(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert text.isascii() and "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_record_is_one_object_with_the_time_its_fields_and_no_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("kvplug.test")
    with caplog.at_level("INFO"):
        LogEvent.PEER_LEFT.log(log, "a\x1b[31m\x07 has left: 100%", peer="p\n\x1b[2J" + "x" * 5000, store="ü")
        log.warning("of another library", extra={"where": Path("/x"), "count": 3})
    first, second = map(line_of, caplog.records)
    time = datetime.datetime.fromisoformat(str(first.pop("time")))
    assert time.utcoffset() == datetime.timedelta(0)
    assert abs(time.timestamp() - caplog.records[0].created) < 0.002
    peer = str(first.pop("peer"))
    assert peer.isprintable() and len(peer) <= 1000
    assert first == {
        "level": "INFO",
        "logger": "kvplug.test",
        "message": "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER} has left: 100%",
        "event": "peer_left",
        "store": "ü",
    }
    assert (second["where"], second["count"], second["level"]) == ("/x", 3, "WARNING")
    try:
        raise ValueError("of a peer: \x1b")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    shown = str(line_of(record)["exception"])
    assert shown.startswith("Traceback") and "ValueError: of a peer: \N{REPLACEMENT CHARACTER}" in shown


def test_the_level_of_an_event_can_be_lowered_and_its_origin_is_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("kvplug.test")
    with caplog.at_level("DEBUG"):
        LogEvent.STORE_FAILED.log(log, "again", level=logging.DEBUG, store="fs", error="")
    assert caplog.records[0].levelno == logging.DEBUG
    assert caplog.records[0].filename == Path(__file__).name
