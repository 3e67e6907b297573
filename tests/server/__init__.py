"""Tests of the HTTP server, on our own runner and real sockets."""
