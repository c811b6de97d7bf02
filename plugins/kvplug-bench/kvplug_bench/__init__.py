"""``kvplug bench``: the speed of transports on this host, compared with other ways to move tensors.

A :class:`~kvplug_bench.candidate.Candidate` is a transport or library to measure. Its ends are
:mod:`~kvplug_bench.links` in fresh processes, where :mod:`~kvplug_bench.worker` times them.
:mod:`~kvplug_bench.rounds` starts these processes and measures the candidates in turn, and
:mod:`~kvplug_bench.rows` computes the results. The scripts in ``benchmarks/`` measure more candidates in the
same way.
"""
