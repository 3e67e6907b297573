"""Files with the whole header of published models and holes for weights: `table.py` has a row per model.

To add one, add a row there; a new architecture also needs a `Family` in `families.py`.
"""
