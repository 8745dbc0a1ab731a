"""Formats of published research data, for `agentloop traces import` and the benchmarks."""
