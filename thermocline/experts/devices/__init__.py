"""Devices that hold experts and compute with them: simulated ones and GPUs, how they are opened, tried and measured.

The contract with store and stages is `experts/device.py`.
"""
