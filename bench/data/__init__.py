"""Published and measured numbers that the benchmarks start from; see README.md for provenance."""
