"""The steps that a chunk walks through. Each joins deciding, moving and computing for one edge.

Stages do not know each other, nor the pipeline that runs them.
"""
