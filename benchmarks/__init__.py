"""Paired benchmarks of CPU compute, each its own question: run one with `python -m benchmarks.<name>`.

Not part of the package that is installed. docs/benchmarks.md says how to run and read each.
"""
