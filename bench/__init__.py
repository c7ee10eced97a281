"""Benchmarks: measure with `bench.run`, tune with `bench.tune`, read with `bench.report`."""
