from kvplug.engine import Sink, SinkSpec
from kvplug.transport import hookimpl

KVPLUG_API = (1, 0)


class PrintSink(Sink):
    def __init__(self, options): ...

    def emit(self, snapshot, labels):
        print({op: figures["bytes"] for op, figures in snapshot["ops"].items()})


@hookimpl
def kvplug_sinks():
    return [SinkSpec(name="print", factory="kvplug_print:PrintSink", summary="Prints the bytes")]
