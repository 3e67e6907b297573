"""Gets expert bytes on their way before compute reads them. Never delays compute."""
