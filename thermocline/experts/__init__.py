"""Where experts live and who computes them: catalog, placement, dispatch, compute, heat.

Knows no stage; the deciding files are pure.
"""
