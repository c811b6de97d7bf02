"""What differs between releases of vLLM, one module per difference.

The rest of the adapter reads vLLM through these modules and knows no version numbers. Each module decides by
what it finds (a field, a method), not by a number, so that it also fits a release with a backported change.
"""
