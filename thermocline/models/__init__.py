"""Model architectures: what is read from the file's metadata, and how a layer is wired.

Knows no stage and no schedule: stages call a model, a model calls kernels.
"""
