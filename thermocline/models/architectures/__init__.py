"""One file per architecture: what differs from the others. Found by name in `models/registry.py`; they do not know each other."""
