"""The sink."""

from kvplug.engine import Sink


class Lines(Sink):
    def __init__(self, path):
        self.path = path

    def emit(self, snapshot, labels):
        done = {op: figures["count"] for op, figures in snapshot["ops"].items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{labels.get('connector', '')} {done}\n")


def make(options):
    return Lines(options.path)
