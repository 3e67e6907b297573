"""Compute: products, attention and expert networks over the bytes of a model file.

`contract` says what every implementation must do, `reference` is the slow twin, `cpu` the native one.
Nothing here knows a request, a stage or an architecture.
"""
