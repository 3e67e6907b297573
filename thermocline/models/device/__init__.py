"""A model's non-expert weights on a device: what fits, what a step is given, and computing it there."""
