"""What ``kvplug bench`` does: how fast transports are on this host, beside what else moves tensors there.

A :class:`~kvplug_bench.candidate.Candidate` is one thing that is measured. Its ends are
:mod:`~kvplug_bench.links` in fresh processes, where :mod:`~kvplug_bench.worker` times them;
:mod:`~kvplug_bench.rounds` starts those and lets all candidates take turns, and :mod:`~kvplug_bench.rows`
says what came out. The scripts in ``benchmarks/`` measure more candidates in the same way.
"""
