"""Experts computed in another process or machine: the wire, its transports, the worker and its client.

The trunk, the schedule and the model's architectures are unknown here.
"""
