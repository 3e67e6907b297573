"""Where experts live and who computes them: catalog, placement, store, dispatch, compute, heat.

Devices are in `devices`, what things cost in `pricing`. Knows no stage; the deciding files are pure.
"""
