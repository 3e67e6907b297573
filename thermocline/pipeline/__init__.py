"""Scheduling and flow: which tokens form the next chunk, and how chunks walk through the stages.

Only the engine imports this package. It knows stages by their contract alone.
"""
