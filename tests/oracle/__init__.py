"""Comparisons with large outside programs; they run only where those are installed."""
