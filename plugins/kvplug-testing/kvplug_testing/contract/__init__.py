"""The suites of the conformance kit: one package per ABC, with its name. ``kvplug_testing`` exports them."""
