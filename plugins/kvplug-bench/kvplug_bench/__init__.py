"""``kvplug bench``: the speed of transports on this host, beside other ways to move tensors there.

A :class:`~kvplug_bench.candidate.Candidate` is one thing that is measured. Its ends are
:mod:`~kvplug_bench.links` in fresh processes, where :mod:`~kvplug_bench.worker` times them;
:mod:`~kvplug_bench.rounds` starts these processes and lets all candidates take turns, and
:mod:`~kvplug_bench.rows` makes the results. The scripts in ``benchmarks/`` measure more candidates in the
same way.
"""
