"""A child process for work that a client's or a file's bytes can make long: it has limits, and can be killed."""
