"""The suites of the conformance kit: a room for each ABC, called like it. ``kvplug_testing`` names them."""
