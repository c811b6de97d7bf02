from kvplug_testing import SinkContract


class TestPrint(SinkContract):
    sink = "print"
