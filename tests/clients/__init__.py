"""Clients that many people use, against a server in a process of its own; they run by `make clients`."""
