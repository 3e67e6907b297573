"""Models by name: the Hugging Face hub, its cache on this machine, and files of other programs."""
